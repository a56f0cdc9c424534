"""Has the kernel read what hot packs have brought before programs ask for it.

A program that starts reads its files in pieces of 16 KiB or less, one after the other, and each is a way through EROFS,
loop device and FUSE and back: 100 µs and more, thousands of times. What a hot pack has brought will be read, so the
kernel is asked for it (`POSIX_FADV_WILLNEED`) as soon as its layer is mounted: few large reads, while containerd still
makes the container, at the exact blocks and no others. The fetch process says what has landed (`fetch.landed`).

What it says is in doubt is dropped from the page cache, of private mounts too, as far as no program has it mapped. That
comes some milliseconds after the doubt, and once more a second later: pages on their way in cannot be dropped.

Runs in the service process, which may wait for reads; on a thread of its own, since such a wait cannot be broken off.
It is a hint: whatever goes wrong is passed over, and the program reads for itself. Files are opened by names out of
metadata that may not have been judged yet: never through a symbolic link, never out of the layer. Layers of very many
files are left alone: to find the places of theirs would take longer than it brings.
"""

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from blockindex.erofs import FilePlaces
from blockindex.errors import BlockIndexError

from .attach import Attacher
from .errors import SnapshotterError
from .kernel.openbeneath import open_beneath
from .rpc import call

__all__ = ["HotPages"]

_log = logging.getLogger(__name__)

_WAIT_S = 30.0
_POLL_S = 0.02  # while something waits for the mount of its layer
_PENDING_S = 60.0  # a layer that is not mounted by then has no start to be helped
_RETRY_S = 0.05
_AGAIN_S = 1.0  # a read that the kernel has begun is over by then
_ANSWER_S = 10.0
_MOST_METADATA = 4 << 20  # bytes: some 40,000 names, 80 ms
_MOST_BYTES = 256 << 20  # of a layer: what a start reads in small pieces is less, and memory is others' too
_KEPT = 8  # layers whose places are remembered, 1 MB each, until nothing comes for `_WAIT_S`

Run = tuple[int, int]


class HotPages:
    """See the module. `start` begins it; it ends with the process."""

    def __init__(self, layers: Path, fetch_socket: Path, attacher: Attacher) -> None:
        """`layers`: the block store's."""
        self._layers = layers
        self._fetch = fetch_socket
        self._attacher = attacher
        self._pending: dict[str, tuple[float, list[Run]]] = {}  # by node name: until when, and what
        self._again: list[tuple[float, str, list[Run]]] = []  # what to drop a second time, and when
        self._places: OrderedDict[str, FilePlaces | None] = OrderedDict()
        self._left: dict[str, int] = {}  # bytes that may still be read of a layer

    def __repr__(self) -> str:
        return f"<HotPages {len(self._pending)} layers wait for their mounts>"

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._run, name="hot-pages", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self.step(_POLL_S if self._pending or self._again else _WAIT_S)
            except SnapshotterError:  # the fetch process is being started again
                time.sleep(_RETRY_S)
            except Exception:  # a hint must not end for one layer that is odd
                _log.exception("hotpages.failed")
                time.sleep(_RETRY_S)

    def step(self, wait_s: float) -> None:
        """Wait for what lands, `wait_s` at most, and hand on what belongs to layers that are mounted. Raises what the
        call of the fetch process does."""
        batch = call(self._fetch, "landed", wait_s + _ANSWER_S, wait_s=wait_s)
        if not (self._pending or self._again or batch["landed"] or batch["doubted"]):
            self._places.clear()
            self._left.clear()
        now = time.monotonic()
        for name, runs in batch["landed"].items():
            until, before = self._pending.get(name, (now + _PENDING_S, []))
            self._pending[name] = until, before + [(start, end) for start, end in runs]
        mounted = self._attacher.mounted() if self._pending else {}
        for name, (until, runs) in list(self._pending.items()):
            if name in mounted:
                del self._pending[name]
                self._advise(name, [Path(mounted[name])], runs, os.POSIX_FADV_WILLNEED)
            elif until < now:
                del self._pending[name]
        due = [(name, runs) for at, name, runs in self._again if at <= now]
        self._again = [entry for entry in self._again if entry[0] > now]
        self._again += [(now + _AGAIN_S, name, runs) for name, runs in batch["doubted"].items()]
        for name, runs in (*batch["doubted"].items(), *due):
            self._advise(name, self._attacher.mounts_of(name), runs, os.POSIX_FADV_DONTNEED)

    def _advise(self, name: str, mounts: Iterable[Path], runs: Iterable[Run], advice: int) -> None:
        places = self._places_of(name)
        if places is None:
            return
        parts = list(places.parts(runs))
        if advice == os.POSIX_FADV_WILLNEED:
            left = self._left.get(name, _MOST_BYTES) - sum(part.size for part in parts)
            if left < 0:
                return
            self._left[name] = left
        for mount in mounts:
            try:
                root = os.open(mount, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:  # it has been unmounted
                continue
            try:
                for path, of_file in groupby(parts, key=lambda part: part.path):
                    self._advise_file(root, path, ((part.offset, part.size) for part in of_file), advice)
            finally:
                os.close(root)

    @staticmethod
    def _advise_file(root: int, path: bytes, ranges: Iterable[tuple[int, int]], advice: int) -> None:
        try:
            file = open_beneath(root, path)
            try:
                for offset, size in ranges:
                    os.posix_fadvise(file, offset, size, advice)
            finally:
                os.close(file)
        except OSError as error:
            _log.debug("hotpages.passed_over path=%r error=%r", path, str(error))

    def _places_of(self, name: str) -> FilePlaces | None:
        """None for a layer that is left alone."""
        if name not in self._places:
            self._places[name] = self._read_places(name)
            while len(self._places) > _KEPT:
                dropped, _ = self._places.popitem(last=False)
                self._left.pop(dropped, None)
        self._places.move_to_end(name)
        return self._places[name]

    def _read_places(self, name: str) -> FilePlaces | None:
        path = self._layers / name / "meta"
        try:
            return FilePlaces(path.read_bytes()) if path.stat().st_size <= _MOST_METADATA else None
        except (BlockIndexError, OSError) as error:
            _log.debug("hotpages.passed_over name=%s error=%r", name, str(error))
            return None
