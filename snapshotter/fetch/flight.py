"""A flight: requests that bring the spans `[first, last)` of a layer, decoded and landed as they stream in.

A flight that a reader waits for is urgent: the background of its host asks for nothing meanwhile. It loses the rank at
the next chunk after its readers are served, and runs on to its end, which keeps its connection warm. `last` may shrink
under way (`LayerFetch` cuts off a tail that a reader wants sooner). A failed flight only reports back: the layer starts
another.
"""

import logging
from contextlib import closing
from threading import Lock
from typing import TYPE_CHECKING

from blockindex.decoder import SpanDecoder
from blockindex.errors import BlockIndexError
from snapshotter.errors import SnapshotterError

from .host import Lane

if TYPE_CHECKING:
    from .layer import HotOrder, LayerFetch

__all__ = ["Flight"]

_log = logging.getLogger(__name__)


class Flight:
    """Runs once, on a thread of the layer's host."""

    def __init__(self, layer: "LayerFetch", first: int, last: int, lane: Lane) -> None:
        self.layer = layer
        self.first = first
        self.last = last
        self.lane = lane
        self.order: HotOrder | None = None  # that it serves, in lane HOT
        self.failed = False
        self.refused = False  # it ended early: the disk takes no bytes, and no reader waits for them
        self._came = 0
        self._position = first  # the span whose bytes come next
        self._begun = False
        self._rank = Lock()  # guards the next two: readers urge, the flight's own thread calms
        self._urgent = False
        self._over = False

    def __repr__(self) -> str:
        return f"<Flight {self.lane.name} spans {self.first}..{self._position}..{self.last}>"

    def brings_soon(self, span: int) -> bool:
        """Whether the span is among the next bytes of this flight: then waiting beats asking again."""
        if not self._begun:
            return self.lane is Lane.DEMAND
        return self._position <= span <= self._position + 1

    def urge(self) -> None:
        """A reader waits for this flight. Nothing once it is over: then `LayerFetch.landed` sees to the reader."""
        with self._rank:
            if not self._urgent and not self._over:
                self._urgent = True
                self.layer.host.urge(+1)

    def _calm(self, over: bool = False) -> None:
        with self._rank:
            self._over = over
            if self._urgent:
                self._urgent = False
                self.layer.host.urge(-1)

    def run(self) -> None:
        """Fetch, decode, land; whatever happens ends in `LayerFetch.landed`."""
        try:
            if self.lane is not Lane.DEMAND:
                self.layer.host.give_way(self.lane)
            with self.layer.lock:  # a reader that saw this flight wait has cut it by then
                self._begun = True
            while self._position < self.last and not self._dropped() and not self.refused:
                self.layer.recheck(self._position)
                if self.layer.lacks(self._position):
                    self._stream()
                else:
                    self._position += 1
        except (SnapshotterError, BlockIndexError, OSError) as error:  # OSError: the disk is full or broken
            self.failed = True
            if isinstance(error, BlockIndexError):
                self.layer.sources[0].refuted(str(error))
            self.layer.failure(self, error)
        except Exception as error:  # a bug: retried no faster than the rest; the host's thread logs where it is
            self.failed = True
            self.layer.failure(self, error)
            raise
        finally:
            self._calm(over=True)
            self.layer.journal.came(self.layer.files.name, self.lane, self._came)
            self.layer.landed(self)

    def _dropped(self) -> bool:
        return self.lane is Lane.BACKGROUND and not self.layer.background and not self._urgent

    def _stream(self) -> None:
        """One request, from the current span to the last."""
        block_ends = self.layer.index.spans.block_ends
        decoder = SpanDecoder(self.layer.index, self._position, self.last)
        self.layer.tally.fetched(self.lane)
        with closing(self.layer.sources[0].stream(decoder.blob_start, decoder.blob_end)) as chunks:
            for chunk in chunks:
                self.layer.tally.count(self.lane, len(chunk))
                self._came += len(chunk)
                for piece in decoder.feed(chunk):
                    while piece.block_start >= block_ends[self._position]:
                        self._position += 1
                    if self._position >= self.last:
                        return
                    if self.layer.land(piece, self.lane) and self.lane is not Lane.DEMAND and not self._urgent:
                        self.refused = True
                        return
                self._urgent_or_calm()
        self._position = self.last

    def _urgent_or_calm(self) -> None:
        if self.layer.wanted(self._position, self.last):
            self.urge()
        else:
            self._calm()
