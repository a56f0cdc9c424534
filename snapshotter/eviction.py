"""Making room without being told: layers that no image uses are removed, those unused for longest first.

Room is made when the store takes more than `max_gib` of [cache], when less than `min_free_percent` of its disk is
free, and, a layer at each look, while the disk refuses bytes although both hold (a quota). Hot packs go last, when no
layer is left to go; small hot sets never do: they cost nothing, and what they hold was learnt from a start.

Never taken: a layer that an image on the node uses; one that somebody turns out to use all the same (`layers.Layers.
remove` refuses then); one that a pull under way will ask for, or did a moment ago. So the bounds are not kept at any
price: what is in use may take more. This module decides; it removes nothing itself but packs.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blockindex.errors import BlockIndexError

from .cache import CachedLayer, disk_bytes
from .config import CacheConfig
from .errors import SnapshotterError
from .hotstore import HotStore, read_head
from .killpoints import reach
from .model import Digest

__all__ = ["Disk", "Evictor", "Expected", "excess"]

_log = logging.getLogger(__name__)

_LOOK_S = 3.0
_SPARED_S = 60.0  # between two Prepares of one pull, and between the end of a container and the start of the next
_SMALL_PACK = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes of the file system that the store is on, and of them those that we may still take."""

    size: int
    free: int

    @staticmethod
    def of(path: Path) -> "Disk":
        """As it is now."""
        status = os.statvfs(path)
        return Disk(status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize)


def excess(config: CacheConfig, taken: int, disk: Disk) -> int:
    """Bytes that have to go when the store takes `taken`; 0 when it may stay as it is."""
    beyond = taken - int(config.max_gib * (1 << 30)) if config.max_gib else 0
    short = int(disk.size * config.min_free_percent / 100) - disk.free
    return max(beyond, short, 0)


class Expected:
    """Layers that pulls under way will ask for: they are in the store before anything stands on them. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._asking: Counter[Digest] = Counter()
        self._asked: dict[Digest, float] = {}

    @contextmanager
    def pull(self, digests: Iterable[Digest]) -> Iterator[None]:
        """A pull asks for the first of these layers for the length of the block, and for the others soon after."""
        digests = tuple(digests)
        with self._lock:
            self._asking.update(digests)
        try:
            yield
        finally:
            with self._lock:
                now = self._clock()
                self._asking.subtract(digests)
                self._asking = +self._asking
                self._asked = {it: at for it, at in self._asked.items() if at + _SPARED_S > now}
                self._asked.update(dict.fromkeys(digests, now))

    def current(self) -> Set[Digest]:
        """These layers now."""
        with self._lock:
            now = self._clock()
            return {*self._asking, *(it for it, at in self._asked.items() if at + _SPARED_S > now)}


class Evictor:
    """Looks every `_LOOK_S` seconds once it is started; `look` is one look."""

    def __init__(
        self,
        config: CacheConfig,
        root: Path,
        inventory: Callable[[], list[CachedLayer]],
        remove: Callable[[str], None],
        expected: Callable[[], Set[Digest]],
        is_refused: Callable[[], bool],
    ) -> None:
        """`inventory` lists the layers of the store below `root`, `remove` removes one by name, or raises; `expected`:
        see `Expected`; `is_refused`: whether the disk refuses bytes."""
        self._config = config
        self._root = root
        self._inventory = inventory
        self._remove = remove
        self._expected = expected
        self._is_refused = is_refused
        self._hotsets = HotStore(root)
        self._disk = Disk.of
        self._now = time.time
        self._said = False
        self._evicted = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="evictor", daemon=True)

    def __repr__(self) -> str:
        return f"<Evictor {self._config}, {self._evicted} evicted>"

    def start(self) -> None:
        """Begin to look now and then."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def status(self) -> dict[str, int]:
        """What `bootseer status` shows."""
        disk = self._disk(self._root)
        return {
            "taken_bytes": self._taken(),
            "max_bytes": int(self._config.max_gib * (1 << 30)),
            "disk_bytes": disk.size,
            "free_bytes": disk.free,
            "evicted": self._evicted,
        }

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_S):
            try:
                self.look()
            except Exception:  # the border of the thread: there is another look
                _log.exception("evictor.failed")

    def look(self) -> None:
        """Make room where there is too little."""
        taken = self._taken() if self._config.max_gib else 0
        wanted = excess(self._config, taken, self._disk(self._root))
        if not wanted and self._is_refused():
            wanted = 1
        if not wanted:
            self._said = False
            return
        left = self._evict_layers(wanted)
        if left > 0:
            left = self._evict_packs(left)
        if left > 0 and not self._said:
            self._said = True
            _log.warning("cache.no_room missing_bytes=%d everything that is left is in use, or was just now", left)

    def _taken(self) -> int:
        return disk_bytes(self._root / "layers") + disk_bytes(self._root / "hot")

    def _evict_layers(self, wanted: int) -> int:
        """Remove layers until `wanted` bytes have gone; returns how many have not."""
        expected = self._expected()
        for layer in self._inventory():
            if wanted <= 0:
                break
            idle_s = self._now() - layer.last_used_s
            if layer.used or layer.digest in expected or idle_s < _SPARED_S:
                continue
            reach("service.evicting")
            try:
                self._remove(layer.name)
            except (SnapshotterError, OSError) as error:
                _log.info("cache.kept name=%s reason=%r", layer.name, str(error))
                continue
            wanted -= layer.disk_bytes
            self._evicted += 1
            _log.info(
                "cache.evicted layer=%s bytes=%d unused_s=%.0f", layer.digest or layer.name, layer.disk_bytes, idle_s
            )
        return wanted

    def _evict_packs(self, wanted: int) -> int:
        """The same for hot packs of images that are not on the node."""
        used = {layer.digest for layer in self._inventory() if layer.used}
        packs = sorted((path.stat().st_mtime, key, workload, path) for key, workload, path in self._hotsets.entries())
        for _, key, workload, path in packs:
            size = path.stat().st_blocks * 512
            if wanted <= 0:
                break
            if size < _SMALL_PACK or used.issuperset(_layers_of(path)):
                continue
            if self._hotsets.remove(key, workload):
                wanted -= size
                _log.info("cache.evicted_pack image_key=%s workload=%s bytes=%d", key, workload, size)
        return wanted


def _layers_of(path: Path) -> list[str]:
    """Digests of the layers that a hot set speaks of; that of no layer for a file that cannot be read."""
    try:
        return [layer.digest for layer in read_head(path).hotset.layers]
    except (BlockIndexError, OSError):
        return [""]
