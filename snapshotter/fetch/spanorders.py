"""A hot set whose bytes no pack brings: the layers themselves are told to fetch the spans of its extents.

They do so in the set's order, or fetch all there is where most of the image is hot. Each layer is told once, as soon as
it is there.

Locking: as `hotlayers`.
"""

from collections.abc import Callable
from threading import Condition

from .hotlayers import HotLayers
from .layer import HotOrder, LayerFetch

__all__ = ["SpanOrders"]


class SpanOrders:
    """See the module. Thread-safe."""

    def __init__(
        self,
        layers: HotLayers,
        streams: int,
        lock: Condition,
        is_over: Callable[[], bool],
        came: Callable[[], None],
    ) -> None:
        """`streams` bounds flights at once; `came()` is called when a layer has all that it was told to fetch."""
        self._layers = layers
        self._streams = streams
        self._lock = lock
        self._is_over = is_over
        self._came = came
        self._left: set[int] = set()  # positions of layers that are still to be told
        self._orders: list[tuple[LayerFetch, HotOrder]] = []  # what the others have been told
        self._flights = 0
        self._held = False

    def __repr__(self) -> str:
        return f"<SpanOrders {len(self._left)} layers to be told, {self._flights} fetch>"

    @property
    def are_done(self) -> bool:
        """Whether nothing is to be told, nor still to come. Under the lock."""
        return not self._left and not self._flights

    def begin(self) -> None:
        """All layers of the set are to be told. Under the lock."""
        self._left = self._layers.table.layers if self._layers.table is not None else set()

    def close(self) -> None:
        """Tell nobody any more, and keep no layer. Under the lock."""
        self._left, self._orders = set(), []

    def give(self) -> None:
        """Tell those layers that are there by now."""
        table = self._layers.table
        if table is None:  # over
            return
        for position in sorted(self._left):
            with self._lock:
                layer = self._layers.known(position)
                if position not in self._left or not self._layers.is_known(position):
                    continue
                self._left.discard(position)
                if layer is None or self._layers.is_unfit(position):
                    continue
                self._flights += 1
            blocks = [(0, layer.files.record.blocks)] if table.is_whole else table.blocks_of(position)
            order = layer.fetch_hot(blocks, self._streams, self._one_came, self._held)
            with self._lock:
                if not self._is_over():  # what has ended keeps no layer
                    self._orders.append((layer, order))
            if order.held is not self._held:  # it has changed meanwhile
                layer.hold_hot(order, self._held, self._streams)

    def hold(self, wait: bool) -> None:
        """Have nothing new fetched, or go on."""
        with self._lock:
            self._held = wait
            orders = tuple(self._orders)
        for layer, order in orders:
            layer.hold_hot(order, wait, self._streams)

    def _one_came(self) -> None:
        with self._lock:
            self._flights -= 1
        self._came()
