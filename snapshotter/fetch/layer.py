"""One layer in the fetch process: what is missing, which flights bring it, and who waits for it.

A missing block that a prefetch has promised is not fetched again; when the promise falls, or is kept too late, its
readers get a flight of their own (`reconsider`, `insist`). Bytes that the disk refuses go to readers through memory
(`overflow`); the background and what is hot wait until it takes bytes again.

Locking: `lock` guards waiters, flights and sources. Nothing blocks under it; replies to the kernel are sent after it is
released (a waiter is taken off the list first, so exactly one thread answers it). Files are written without it, by the
late check only: each span has at most one flight, and a flight that is just being cut writes the same verified bytes as
its successor.
"""

import errno
import itertools
import logging
import math
import random
import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK, Piece
from snapshotter.alarms import Alarms
from snapshotter.blockstore import UNVERIFIED, LayerFiles
from snapshotter.errors import Transient
from snapshotter.killpoints import reach
from snapshotter.model import RemoteBlob
from snapshotter.unproven import Pack

from .flight import Flight
from .host import Host, Lane
from .journal import Journal
from .landed import Landed
from .latecheck import LateCheck
from .overflow import Overflow

__all__ = ["HotOrder", "LayerFetch", "Promise", "Tally", "Waiter"]

_log = logging.getLogger(__name__)

_BACKOFF_S = 0.2  # doubled with each failure in a row, with jitter so that a fleet does not march in step
_ASKED_MAX_S = 60.0  # a Retry-After beyond this is not believed
_LOUD = 4
_SOURCES = 8  # registries of a layer that are remembered
_BACKGROUND_RUN = 1 << 20  # bytes: what a reader may find in front of it on the wire, 84 ms at 100 Mbit/s
_NO_ROOM_S = 5.0  # a full disk is left alone by all that no reader waits for
_BACKGROUND_WIDTH = 2  # requests at once for one layer: one answer is inflated while the next one comes

_owners = itertools.count()


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """A read of image bytes `[offset, offset + size)` that waits for the blocks `[start, end)` since `since` (monotonic
    seconds); `answer` replies to it: with bytes of the store for error 0, else with that error number. `held` are
    those of its blocks that came while the disk refused them: the store has not their bytes, see `overlay`."""

    offset: int
    size: int
    start: int
    end: int
    since: float
    answer: Callable[["Waiter", int], None]
    held: dict[int, bytes] = field(default_factory=dict)

    def overlay(self, buffer: bytearray, meta_size: int) -> None:
        """Put what is held over `buffer`, which is the read's answer out of the store."""
        for block, data in self.held.items():
            at = meta_size + block * BLOCK - self.offset
            first, end = max(at, 0), min(at + BLOCK, len(buffer))
            buffer[first:end] = data[first - at : end - at]


@dataclass(slots=True)
class Tally:
    """What fetching this layer has cost so far, in this process's life."""

    demand_fetches: int = 0
    demand_bytes: int = 0
    hot_fetches: int = 0
    hot_bytes: int = 0
    hot_blocks: int = 0  # that came in the frames of a hot pack
    background_fetches: int = 0
    background_bytes: int = 0
    failures: int = 0
    waits: int = 0

    def fetched(self, lane: Lane) -> None:
        """One more request for spans."""
        if lane is Lane.DEMAND:
            self.demand_fetches += 1
        elif lane is Lane.HOT:
            self.hot_fetches += 1
        else:
            self.background_fetches += 1

    def count(self, lane: Lane, size: int) -> None:
        """`size` more bytes of the blob came in."""
        if lane is Lane.DEMAND:
            self.demand_bytes += size
        elif lane is Lane.HOT:
            self.hot_bytes += size
        else:
            self.background_bytes += size


class Promise(Protocol):
    """Somebody else brings blocks of the layer."""

    def keeps(self, block: int) -> bool:
        """Whether the missing block is on its way; it comes sooner for having been asked for. Called under the
        layer's lock."""


@dataclass(slots=True)
class HotOrder:
    """Spans that are to come in a certain order: runs `[first, last)`; `flights` are under way. None more begin while
    it is `held`."""

    runs: deque[tuple[int, int]]
    done: Callable[[], None]
    held: bool = False
    flights: int = 0


class LayerFetch:
    """Fetches one layer's missing blocks for readers, and the rest behind them."""

    def __init__(
        self,
        files: LayerFiles,
        index: LayerIndex,
        sources: Sequence[RemoteBlob],
        host: Host,
        growth: int,
        patience_s: float,
        journal: Journal | None = None,
        overflow: Overflow | None = None,
        alarms: Alarms | None = None,
        landed: Landed | None = None,
    ) -> None:
        """`sources`: the blob at each registry that is known to have it, in the order in which to try them. `growth`
        bounds how many bytes one request asks for (readers that read on and on, background), `patience_s` how long the
        layer is left alone after failures in a row. What happens is noted in `journal`; `overflow` has what the disk
        refuses; `alarms` hears of packs that the layer refutes (default: the store's); `landed` of what packs
        bring."""
        self.files = files
        self.index = index
        self.sources = list(sources)
        self.host = host
        self.tally = Tally()
        self.journal = journal or Journal()
        self.overflow = overflow or Overflow()
        self._owner = next(_owners)  # of what is in `overflow`: a layer that comes again is another one
        self.completed = threading.Event()
        self.lock = threading.Lock()
        self.background = False
        self._is_filling = False  # until it is told to stop; `background` is over sooner, when all is on its way
        self._was_refused = False  # the disk has refused bytes of this layer, and they may not be there yet
        span_size = max(index.blob_size // max(len(index.spans), 1), 1)
        self._span_run = max(growth // span_size, 1)
        self._background_run = max(_BACKGROUND_RUN // span_size, 1)
        self._waiters: list[Waiter] = []
        self._flights: dict[int, Flight] = {}
        self._promises: tuple[Promise, ...] = ()
        self._hot_orders: list[HotOrder] = []
        self._next_run = (-1, 1)  # the span after the last demand, and how many spans to ask for if it is next
        self._missing_from = 0
        self._streams = 0  # flights of the background
        self._patience_s = patience_s
        self._failures = 0  # in a row; flights that fail together count once
        self._retry_at = 0.0  # monotonic seconds
        self._last_failure = ""
        self._trust_holes()
        self._landed = landed or Landed()
        self.late = LateCheck(files, index, alarms or Alarms(files.directory.parents[1]), self._landed)
        self._check_complete()

    def __repr__(self) -> str:
        return f"<LayerFetch {self.files!r}, {len(self._waiters)} readers wait, {len(self._flights)} spans in flight>"

    def _trust_holes(self) -> None:
        """No span brings their blocks: they are zeros from the start, also after a power cut."""
        for hole in self.index.hole_blocks():
            if not self.files.has(hole.start, hole.stop):
                try:
                    self.files.trust(hole.start, hole.stop)
                except OSError as error:
                    self.overflow.refused(error)
                    self._was_refused = True  # their readers wait for room: `tend`
                    return
                self._arrived(hole.start, hole.stop, None)

    # -- readers -----------------------------------------------------------------------------------------------------

    def wait_for(self, waiter: Waiter) -> None:
        """Take on a read; it is answered from whatever thread completes it."""
        with self.lock:
            self._hold(waiter)
            ready = self._has_all(waiter)
            if not ready:
                starts = [self._demand(span) for span in self._unpromised_spans(waiter)]
                self._waiters.append(waiter)  # last: whoever calls answers a read that could not be taken on
                self.tally.waits += 1
        if ready:
            waiter.answer(waiter, 0)
            return
        for flight in starts:
            if flight is not None:
                self.host.submit(Lane.DEMAND, flight.run)

    def _hold(self, waiter: Waiter) -> None:
        """Give it those of its blocks that the disk has refused before."""
        for block in self._missing(waiter) if self.overflow.size else ():
            data = self.overflow.find(self._owner, block)
            if data is not None:
                waiter.held[block] = data

    def _has_all(self, waiter: Waiter) -> bool:
        return self.files.has(waiter.start, waiter.end) or not any(True for _ in self._missing(waiter))

    def _missing(self, waiter: Waiter) -> Iterator[int]:
        """The blocks that it still waits for."""
        blocks = range(waiter.start, waiter.end)
        return (block for block in blocks if not (self.files.has(block, block + 1) or block in waiter.held))

    def _unpromised_spans(self, waiter: Waiter) -> list[int]:
        """The spans of missing blocks that nobody has promised."""
        missing = self._missing(waiter)
        return self._spans_of(block for block in missing if not any(it.keeps(block) for it in self._promises))

    def _missing_spans(self, waiter: Waiter) -> list[int]:
        return self._spans_of(self._missing(waiter))

    def _spans_of(self, blocks: Iterable[int]) -> list[int]:
        """The spans that own the blocks, which ascend; each once."""
        spans: list[int] = []
        for block in blocks:
            span = self.index.span_of_block(block)
            if span is not None and (not spans or spans[-1] != span):
                spans.append(span)
        return spans

    def _demand(self, span: int) -> Flight | None:
        """Have a flight bring the span soon: one that is about to, or a new one. The caller submits what it gets."""
        flight = self._flights.get(span)
        if flight is not None:
            if flight.brings_soon(span):
                flight.urge()
                return self._follow_up(flight)
            self._cut(flight, span)
        follows, run = self._next_run
        run = min(run * 2, self._span_run) if span == follows else 1
        flight = self._launch(span, self._run_end(span, run), Lane.DEMAND)
        self._next_run = (flight.last, run)
        flight.urge()
        return flight

    def _follow_up(self, flight: Flight) -> Flight | None:
        """The run after the one that a reader waits for, where it has read on for so long that it will want that, too:
        two requests at once keep wire and cores busy."""
        follows, run = self._next_run
        if flight.last != follows or run < self._span_run or follows >= len(self.index.spans):
            return None
        if not self._fetchable(follows):
            return None
        after = self._launch(follows, self._run_end(follows, run), Lane.DEMAND)
        self._next_run = (after.last, run)
        return after

    def _run_end(self, span: int, run: int) -> int:
        """Where a run of at most `run` spans that are to be fetched ends; it begins at `span`."""
        last = span + 1
        while last < min(span + run, len(self.index.spans)) and self._fetchable(last):
            last += 1
        return last

    def _fetchable(self, span: int) -> bool:
        return span not in self._flights and self.lacks(span)

    def _launch(self, first: int, last: int, lane: Lane) -> Flight:
        flight = Flight(self, first, last, lane)
        for span in range(first, last):
            self._flights[span] = flight
        return flight

    def _cut(self, flight: Flight, span: int) -> None:
        """Let a flight end before `span`: a reader is in more of a hurry than it."""
        for later in range(span, flight.last):
            del self._flights[later]
        flight.last = span

    def wanted(self, first: int, last: int) -> bool:
        """Whether a reader waits for a block that the spans `[first, last)` own (racy by design: a hint)."""
        if first >= last:
            return False
        start, end = self.index.spans.block_starts[first], self.index.spans.block_ends[last - 1]
        return any(waiter.start < end and start < waiter.end for waiter in tuple(self._waiters))

    def reconsider(self) -> None:
        """A promise may have fallen: readers that relied on it get flights."""
        self._help(math.inf, self._unpromised_spans)

    def insist(self, before: float) -> None:
        """Readers that have waited since `before` or longer get flights, whatever was promised."""
        self._help(before, self._missing_spans)

    def _help(self, before: float, spans_of: Callable[[Waiter], list[int]]) -> None:
        with self.lock:  # a reader that has just relied on the promise is on the list by then
            starts = [
                self._demand(span)
                for waiter in self._waiters
                if waiter.since <= before
                for span in spans_of(waiter)
                if not self._is_demanded(span)
            ]
        for flight in starts:
            if flight is not None:
                self.host.submit(Lane.DEMAND, flight.run)

    def _is_demanded(self, span: int) -> bool:
        """Whether a flight brings it for a reader. One of the background may be waiting for the very prefetch that
        has not kept its promise."""
        flight = self._flights.get(span)
        return flight is not None and flight.lane is Lane.DEMAND

    def expire(self, before: float) -> None:
        """Answer with EIO whoever has waited since `before` or longer, and say why."""
        with self.lock:
            late = [waiter for waiter in self._waiters if waiter.since <= before]
            self._waiters = [waiter for waiter in self._waiters if waiter.since > before]
        for waiter in late:
            _log.error(
                "read.timed_out layer=%s offset=%d size=%d attempts=%d last_failure=%r answered=EIO",
                self.files.record.digest,
                waiter.offset,
                waiter.size,
                self._failures,
                self._last_failure,
            )
            waiter.answer(waiter, errno.EIO)

    def waiting(self) -> int:
        """Number of readers that wait."""
        return len(self._waiters)

    # -- flights -----------------------------------------------------------------------------------------------------

    def lacks(self, span: int) -> bool:
        """Whether a block that the span owns is missing."""
        return not self.files.has(*self._blocks_of(span))

    def _blocks_of(self, span: int) -> tuple[int, int]:
        return self.index.spans.block_starts[span], self.index.spans.block_ends[span]

    def land(self, piece: Piece, lane: Lane = Lane.DEMAND) -> bool:
        """Verified bytes have come: store them and answer whoever has all it waited for. True when the disk refused
        them: readers are answered all the same."""
        refused = b""
        try:
            self.late.store(piece.block_start, piece.block_end, piece.data)
        except OSError as error:
            refused = piece.data
            self.overflow.keep(self._owner, piece.block_start, refused)
            self.overflow.refused(error)
            self._was_refused = True  # last: `tend` finds what is kept
        self._failures = 0
        reach("fetch.present")
        self._arrived(piece.block_start, piece.block_end, lane, refused)
        return bool(refused)

    def _arrived(self, start: int, end: int, lane: Lane | None, refused: bytes = b"") -> None:
        """The bytes of the blocks are in the store, or the disk has `refused` them."""
        with self.lock:  # also where nobody seems to wait: a reader may have looked just before and be on its way in
            touched = [waiter for waiter in self._waiters if waiter.start < end and start < waiter.end]
            for waiter in touched if refused else ():
                for block in range(max(start, waiter.start), min(end, waiter.end)):
                    waiter.held[block] = refused[(block - start) * BLOCK : (block - start + 1) * BLOCK]
            done = [waiter for waiter in touched if self._has_all(waiter)]
            for waiter in done:
                self._waiters.remove(waiter)
        for waiter in done:
            waiter.answer(waiter, 0)
            self.journal.waited(self.files.name, waiter.since, waiter.start, waiter.end, lane)

    def add_source(self, source: RemoteBlob) -> None:
        """The layer has been pulled through one more image: its registry is known to live, so it comes first."""
        with self.lock:
            if source not in self.sources:
                self.sources = [source, *self.sources][:_SOURCES]

    def failure(self, flight: Flight, error: Exception) -> None:
        """A flight could not go on; the next one waits longer and asks another registry if one is known, and the log
        gets louder."""
        self.tally.failures += 1
        self._last_failure = str(error)
        now = time.monotonic()
        if now >= self._retry_at:
            self._failures += 1
            wait_s = min(self._patience_s, _BACKOFF_S * 2.0 ** min(self._failures - 1, 16)) * random.uniform(0.7, 1.3)
            asked_s = error.retry_after_s if isinstance(error, Transient) and error.retry_after_s else 0.0
            self._retry_at = now + max(wait_s, min(asked_s, _ASKED_MAX_S))
            with self.lock:
                self.sources = [*self.sources[1:], self.sources[0]]
        level = logging.WARNING if self._failures < _LOUD else logging.ERROR
        _log.log(
            level,
            "fetch.failed layer=%s spans=%d-%d bytes=%d-%d lane=%s attempt=%d error=%r",
            self.files.record.digest,
            flight.first,
            flight.last,
            *self._bytes_of(flight),
            flight.lane.name.lower(),
            self._failures,
            str(error),
        )

    def _bytes_of(self, flight: Flight) -> tuple[int, int]:
        """The range of the blob that its spans need."""
        columns, last = self.index.spans.columns, max(flight.last, flight.first + 1)
        return columns.blob_starts[flight.first], max(columns.blob_ends[flight.first : last])

    def landed(self, flight: Flight) -> None:
        """The flight is over, whether it brought all or not; readers that it leaves behind get a new one."""
        backoff_s = max(self._retry_at - time.monotonic(), 0.0) if flight.failed else 0.0
        room_s = _NO_ROOM_S if flight.refused else 0.0
        with self.lock:
            for span in range(flight.first, flight.last):
                if self._flights.get(span) is flight:
                    del self._flights[span]
            left = [
                self._demand(span)
                for waiter in self._waiters
                for span in self._unpromised_spans(waiter)
                if span not in self._flights
            ]
        for again in left:
            if again is not None:
                self.host.submit(Lane.DEMAND, again.run, delay_s=backoff_s)
        if flight.lane is Lane.BACKGROUND:
            with self.lock:
                self._streams -= 1
            self._continue_background(max(backoff_s, room_s))
        elif flight.lane is Lane.HOT:
            self._hot_landed(flight)
        self._check_complete()

    def recheck(self, span: int) -> None:
        """Trust again what a power cut left in doubt, piece by piece, where the bytes match their digest."""
        start, end = self._blocks_of(span)
        if UNVERIFIED not in self.files.present[start:end]:
            return
        for piece in self.index.pieces(span):
            start, end = piece.block_start, piece.block_end
            if UNVERIFIED in self.files.present[start:end] and self.late.recheck(piece):
                self._arrived(start, end, None)

    def doubt(self, runs: Iterable[tuple[int, int]]) -> None:
        """Have the blocks of these runs checked before they are read again, and fetched anew if they are wrong."""
        self.late.distrust(runs)
        with self.lock:
            self._missing_from = 0
            self.completed.clear()

    def doubt_pack(self, digest: str) -> bool:
        """Another layer has refuted this pack: serve nothing more of it that this one has not proven. Whether the layer
        was complete, and is not any more."""
        self.late.doubt(digest)
        with self.lock:
            self._missing_from = 0
            reopened = self.completed.is_set() and not self.files.complete()
            if reopened:
                self.completed.clear()
        return reopened

    def tend(self) -> None:
        """To be called now and then: writes what the disk has refused before, if it takes it now. Then the background
        goes on, which may have ended meanwhile: what others were bringing has not come into the store."""
        if not self._was_refused:
            return
        self._was_refused = False  # before the look: what is refused from now on says so again
        self._trust_holes()
        for block, data in self.overflow.of(self._owner):
            try:
                self.late.store(block, block + 1, data)
            except OSError as error:
                self.overflow.refused(error)
                break
            self.overflow.drop(self._owner, block)
            self.overflow.taken()
            self._arrived(block, block + 1, None)
        if self.overflow.refusing:
            self._was_refused = True
            return
        self._check_complete()
        if self._is_filling:
            self.fill_in_background(0.0)

    # -- hot blocks --------------------------------------------------------------------------------------------------

    def add_promise(self, promise: Promise) -> None:
        """Missing blocks that `promise` keeps are not fetched for readers."""
        with self.lock:
            self._promises = (*self._promises, promise)

    def drop_promise(self, promise: Promise) -> None:
        """Rely on the promise no more."""
        with self.lock:
            self._promises = tuple(it for it in self._promises if it is not promise)
        self.reconsider()
        self._check_complete()

    def land_hot(self, start: int, end: int, data: memoryview, pack: Pack) -> None:
        """Bytes of the blocks `[start, end)` have come in a hot pack. Corrupt when the layer refutes them."""
        if not self.files.has(start, end):
            self.late.store_hot(start, end, data, pack)
            if self.files.has(start, end):
                self._landed.add(self.files.name, start, end)
        self.tally.hot_blocks += end - start
        self._arrived(start, end, Lane.HOT)

    def fetch_hot(
        self, blocks: Iterable[tuple[int, int]], width: int, done: Callable[[], None], held: bool = False
    ) -> HotOrder:
        """Fetch the spans of these runs of blocks in their order, `width` requests at once; `done` is called when all
        have been tried. What cannot be had now is left to readers and the background."""
        order = HotOrder(deque(self._hot_runs(blocks)), done, held)
        with self.lock:
            self._hot_orders.append(order)
        for _ in range(width):
            self._continue_hot(order)
        return order

    def hold_hot(self, order: HotOrder, held: bool, width: int) -> None:
        """Have an order wait, or go on."""
        with self.lock:
            order.held = held
        for _ in range(0 if held else width):
            self._continue_hot(order)

    def _hot_runs(self, blocks: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Runs of spans, in the order of `blocks`, each span once and no run longer than a request should be."""
        seen: set[int] = set()
        first = last = -1
        for start, end in blocks:
            for span in self._lacking_spans(start, end):
                if span in seen:
                    continue
                seen.add(span)
                if span == last and last - first < self._background_run:
                    last += 1
                    continue
                if first >= 0:
                    yield first, last
                first, last = span, span + 1
        if first >= 0:
            yield first, last

    def _lacking_spans(self, start: int, end: int) -> Iterator[int]:
        """The spans that own a missing block of `[start, end)`."""
        if self.files.has(start, end):  # of a set whose blocks another one has brought, nearly all
            return
        starts, ends = self.index.spans.block_starts, self.index.spans.block_ends
        for span in range(max(bisect_right(starts, start) - 1, 0), len(starts)):
            if starts[span] >= end:
                return
            first, last = max(starts[span], start), min(ends[span], end)
            if first < last and not self.files.has(first, last):  # no span owns the blocks of a hole
                yield span

    def _continue_hot(self, order: HotOrder) -> None:
        flight = None
        with self.lock:
            while order.runs and not order.held and flight is None:
                first, last = order.runs.popleft()
                while first < last and not self._claimable(first):
                    first += 1
                if first < last:
                    self._claim(first, last)
                    flight = self._launch(first, min(self._run_end(first, last - first), last), Lane.HOT)
                    if flight.last < last:
                        order.runs.appendleft((flight.last, last))
                    flight.order = order
                    order.flights += 1
            over = not order.runs and not order.flights and order in self._hot_orders
            if over:
                self._hot_orders.remove(order)
        if flight is not None:
            self.host.submit(Lane.HOT, flight.run)
        if over:
            order.done()

    def _claimable(self, span: int) -> bool:
        return self._fetchable(span) or (self._is_postponed(span) and self.lacks(span))

    def _is_postponed(self, span: int) -> bool:
        """Whether a flight of the background is to bring it some day."""
        flight = self._flights.get(span)
        return flight is not None and flight.lane is Lane.BACKGROUND and not flight.brings_soon(span)

    def _claim(self, first: int, last: int) -> None:
        """Take spans away from the background, which waits until what is hot has come."""
        for span in range(first, last):
            if self._is_postponed(span):
                self._cut(self._flights[span], span)

    def _hot_landed(self, flight: Flight) -> None:
        order = flight.order
        assert order is not None
        with self.lock:
            order.flights -= 1
            if flight.refused:  # what nobody waits for is left to readers, and to the background some day
                order.runs.clear()
        self._continue_hot(order)

    # -- the rest of the layer ---------------------------------------------------------------------------------------

    def fill_in_background(self, delay_s: float) -> None:
        """Fetch what is missing behind everything else; a no-op when that is already going on."""
        with self.lock:
            self._is_filling = True
            if self.background or self.completed.is_set():
                return
            self.background = True
        for _ in range(_BACKGROUND_WIDTH):
            self._continue_background(delay_s)

    def stop_background(self) -> None:
        """Fetch no more than readers ask for."""
        self.background = self._is_filling = False
        for block, _ in self.overflow.of(self._owner):
            self.overflow.drop(self._owner, block)
        with self.lock:
            orders = tuple(self._hot_orders)
            for order in orders:
                order.runs.clear()
        for order in orders:
            self._continue_hot(order)

    def _continue_background(self, delay_s: float) -> None:
        with self.lock:
            more = self.background and self._streams < _BACKGROUND_WIDTH
            flight = self._next_background() if more else None
            if flight is not None:
                self._streams += 1
            elif not self._streams:
                self.background = False
        if flight is not None:
            self.host.submit(Lane.BACKGROUND, flight.run, delay_s)

    def _next_background(self) -> Flight | None:
        count = len(self.index.spans)
        first = self._missing_from
        while first < count and not self._fetchable(first):
            if first == self._missing_from and first not in self._flights:
                self._missing_from += 1
            first += 1
        last = first
        while last < min(first + self._background_run, count) and self._fetchable(last):
            last += 1
        return self._launch(first, last, Lane.BACKGROUND) if first < last else None

    def _check_complete(self) -> None:
        if not self.completed.is_set() and self.files.complete():
            self.completed.set()
            _log.info("layer.complete layer=%s bytes=%d", self.files.record.digest, self.files.record.data_size)

    def close(self) -> None:
        """Close the files; no flight may be under way."""
        self.late.close()
        self.files.close()
