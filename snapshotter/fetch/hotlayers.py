"""The layers of one image as its prefetch sees them: which are in the store, which the hot set fits, what is missing.

A layer that is met in the store gets the prefetch's *promise*, by which it asks about its missing blocks from then on.
One that is broken, or has another layout than the set speaks of, is *unfit*: it is passed over.

Locking: all that is changed is changed under the prefetch's lock, which the layers' own locks come before. `use` and
`let_go` are called with it held.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from threading import Condition

from blockindex.errors import BlockIndexError
from snapshotter.blockstore import ABSENT
from snapshotter.errors import SnapshotterError
from snapshotter.model import Digest

from .hottable import HotTable
from .layer import LayerFetch

__all__ = ["HotLayers"]

_log = logging.getLogger(__name__)


class _Promise:
    """What a layer asks about its missing blocks."""

    def __init__(self, keeps: Callable[[int, int], bool], layer: int) -> None:
        self._keeps = keeps
        self._layer = layer

    def keeps(self, block: int) -> bool:
        """Whether the block is on its way; it comes sooner for having been asked for."""
        return self._keeps(self._layer, block)


class HotLayers:
    """See the module. Layers are named by their position in the image, from the bottom up, each once."""

    def __init__(
        self,
        key: str,
        layers: Sequence[Digest],
        layer_of: Callable[[Digest], LayerFetch | None],
        keeps: Callable[[int, int], bool],
        is_over: Callable[[], bool],
        lock: Condition,
    ) -> None:
        """`layer_of` gives a layer that is in the store, None for one that is not (yet); `keeps(position, block)` is
        what promises answer; once `is_over()` no layer is kept."""
        self.table: HotTable | None = None
        self._key = key
        self._digests = list(dict.fromkeys(layers))
        self._layer_of = layer_of
        self._keeps = keeps
        self._is_over = is_over
        self._lock = lock
        self._there: dict[int, LayerFetch] = {}
        self._unfit: set[int] = set()
        self._promises: dict[int, _Promise] = {}

    def __repr__(self) -> str:
        return f"<HotLayers {len(self._there)} of {len(self._digests)} there, {len(self._unfit)} unfit>"

    def use(self, table: HotTable) -> None:
        """Go by this set from now on."""
        self.table = table
        self._unfit = {position for position, layer in self._there.items() if not self._fits(position, layer)}

    def let_go(self) -> list[tuple[LayerFetch, _Promise]]:
        """Forget layers and set; the promises that the caller has to take back from the layers."""
        promises = [(self._there[position], promise) for position, promise in self._promises.items()]
        self._there, self._promises, self.table = {}, {}, None
        return promises

    def meet(self) -> None:
        """Look for all layers that were not in the store when they were looked for last."""
        for position in range(len(self._digests)):
            self.find(position)

    def find(self, position: int) -> LayerFetch | None:
        """The layer, which has the promise from now on; None when it is not in the store, or is broken."""
        if self.is_known(position):
            return self._there.get(position)
        try:
            layer = self._layer_of(self._digests[position])
        except (SnapshotterError, BlockIndexError, OSError) as error:
            _log.warning("prefetch.broken_layer layer=%s error=%r", self._digests[position], str(error))
            self._unfit.add(position)
            return None
        if layer is None:
            return None
        promise = _Promise(self._keeps, position)
        with self._lock:
            if self.is_known(position) or self._is_over():
                return self._there.get(position)
            if not self._fits(position, layer):
                self._unfit.add(position)
            self._there[position] = layer
            self._promises[position] = promise
        layer.add_promise(promise)
        if self._is_over():  # it ended meanwhile, and did not find the promise there
            layer.drop_promise(promise)
        return layer

    def known(self, position: int) -> LayerFetch | None:
        """The layer if it has been found."""
        return self._there.get(position)

    def is_known(self, position: int) -> bool:
        """Whether it is decided already what becomes of the layer's blocks."""
        return position in self._there or position in self._unfit

    def is_unfit(self, position: int) -> bool:
        """Whether the layer is passed over."""
        return position in self._unfit

    def all(self) -> list[LayerFetch]:
        """Those that have been found."""
        with self._lock:
            return list(self._there.values())

    def lack(self, rows: Iterable[int]) -> bool:
        """Whether a block of these extents (rows of the set) is missing. One that is in doubt after a power cut is
        not: it is checked when it is read."""
        table, there = self.table, self._there
        extents = table.hotset.extents if table is not None else ()  # over
        for extent in (extents[row] for row in rows if extents):
            layer = there.get(extent.layer)
            if extent.layer in self._unfit:
                continue
            if layer is None or ABSENT in layer.files.present[extent.start : extent.end]:
                return True
        return False

    def _fits(self, position: int, layer: LayerFetch) -> bool:
        """Whether the set, if one is known, speaks of the blocks that the layer has."""
        record = layer.files.record
        if self.table is None or self.table.fits(position, record):
            return True
        _log.warning(
            "prefetch.other_layout layer=%s image_key=%s its hot set was made with another layout of the layer",
            record.digest,
            self._key,
        )
        return False
