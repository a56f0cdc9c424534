"""Images without a hot set get that of an earlier image of their repository, as soon as that can be done.

That is when the look-up of an image's hot set has ended without one and all of its layers are in the store. The work is
done by a program beside this process (`snapshotter.carryover`), niced and killed after `_MOST_S`: readers get the
interpreter and the cores first. What it has made is in the node's own directory then, and the image is prefetched anew.

Each image is tried once. Nothing here waits in a caller's thread, and nothing that goes wrong here is more than a line
in the log.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from blockindex.hotset import image_key
from snapshotter.blockstore import BlockStore
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore
from snapshotter.log import fields
from snapshotter.model import Digest

__all__ = ["Carrying"]

_log = logging.getLogger(__name__)

_MOST_S = 20.0
_WANTED_S = 120.0  # a pull that has not brought its layers in by then is not waited for
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class _Wanted:
    image: str
    layers: tuple[Digest, ...]
    until_s: float


class Carrying:
    """See the module. Thread-safe."""

    def __init__(
        self,
        root: Path,
        lacks: Callable[[Sequence[Digest]], bool],
        begin_anew: Callable[[str, Sequence[Digest]], None],
    ) -> None:
        """`lacks` says whether the search for a hot set of these layers has ended without one; `begin_anew` has the
        image's prefetch look again."""
        self._root = root
        self._store = BlockStore(root)
        self._hotsets = HotStore(root)
        self._lacks = lacks
        self._begin_anew = begin_anew
        self._lock = threading.Lock()
        self._wanted: dict[str, _Wanted] = {}
        self._tried: dict[str, None] = {}
        self._one_at_a_time = threading.Lock()

    def __repr__(self) -> str:
        return f"<Carrying {len(self._wanted)} images wait, {len(self._tried)} tried>"

    def consider(self, image: str, layers: Sequence[Digest]) -> None:
        """A layer of the image, whose layers these are from the bottom up, has come in."""
        if layers:
            key = image_key(layers)
            with self._lock:
                if key not in self._tried:
                    self._wanted[key] = _Wanted(image, tuple(layers), time.monotonic() + _WANTED_S)
        self.tend()

    def tend(self) -> None:
        """To be called now and then: begins with what can be done now. Raises nothing: a pull calls it."""
        with self._lock:
            waiting = list(self._wanted.items())
        for key, wanted in waiting:
            if wanted.until_s < time.monotonic():
                self._take(key)
            elif self._lacks(wanted.layers) and self._is_here(wanted.layers) and self._take(key):
                try:
                    threading.Thread(target=self._carry, args=(key, wanted), name="carry", daemon=True).start()
                except RuntimeError as error:  # the system has no more threads: the pull goes on without
                    self._failed(key, wanted, error)

    def _take(self, key: str) -> bool:
        """Have the image wait no longer; whether it did."""
        with self._lock:
            if self._wanted.pop(key, None) is None:
                return False
            self._tried[key] = None
            for old in list(self._tried)[:-_REMEMBERED]:
                del self._tried[old]
            return True

    def _is_here(self, layers: Sequence[Digest]) -> bool:
        try:
            return all(self._store.find(digest) is not None for digest in layers)
        except (SnapshotterError, OSError):  # a layer that another one's name keeps out, or that is broken
            return False

    def _carry(self, key: str, wanted: _Wanted) -> None:
        """The border of a thread: raises nothing."""
        if next(self._hotsets.entries(), None) is None:
            return
        started = time.monotonic()
        try:
            with self._one_at_a_time:
                made = self._run(wanted)
        except (OSError, ValueError, SnapshotterError) as error:
            self._failed(key, wanted, error)
            return
        for row in made:
            seconds = round(time.monotonic() - started, 3)
            _log.info("hotset.carried %s", fields(image=wanted.image, **row, seconds=seconds))
        if made:
            self._begin_anew(wanted.image, wanted.layers)

    @staticmethod
    def _failed(key: str, wanted: _Wanted, error: Exception) -> None:
        _log.warning("hotset.not_carried %s", fields(image=wanted.image, image_key=key, reason=str(error)))

    def _run(self, wanted: _Wanted) -> list[dict[str, object]]:
        """What the program made. OSError, ValueError, SnapshotterError when it did not work."""
        argv = [sys.executable, "-P", "-m", "snapshotter.carryover", str(self._root), wanted.image, *wanted.layers]
        try:
            done = subprocess.run(
                argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_MOST_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise SnapshotterError(f"not done after {_MOST_S:.0f} s") from error
        if done.returncode:
            last = done.stderr.strip().rpartition("\n")[2]
            raise SnapshotterError(last or f"exit code {done.returncode}")
        made: list[dict[str, object]] = json.loads(done.stdout)
        return made
