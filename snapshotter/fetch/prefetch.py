"""The prefetch of one image's hot blocks: found, streamed, put into the store before anything reads them.

Its course: LOOKING for a hot set, on the node and elsewhere (`hotsets`); then STREAMING its pack, or bringing the spans
that own its extents where the set has no bytes, or none that may be used, or is most of the image; then OVER. The pack
is asked for as soon as its head is known, by several requests side by side: in a directory the look-up is the first
request for the file, in a registry it brings the head with it. A set whose bytes may not be used does not take the
place of what the node has recorded itself; any does of what was carried over from another image.

What readers get from it is a *promise*: that a missing block is on its way, so that nobody fetches it twice. Promises
are made while a hot set is looked for (`_LOOK_S` at most), and for blocks of frames that are not given up. Whatever
goes wrong takes promises back and has the layers look at their readers again; a reader whom a promise kept waiting for
too long is helped by `LayerFetch.insist`. So nothing that a prefetch does can fail a reader. One that makes no progress
for `_STALL_S` is over: until then the background of its host waits. One that stands back for another of the same image
(`hotsets`) asks for nothing but what readers wait for.

A frame's digest is checked before it is decoded; one that is wrong, or whose blocks the layer refutes (`latecheck`),
ends the prefetch, and nothing more of that pack is used. Extents in layers that the node has not, or has in another
layout, are passed over. Frames of layers that are still on their way in are held in memory, up to `_HELD_MOST`.

Locking: `_lock` guards state and tables. It is taken under a layer's lock (`Promise.keeps`), never the other way round.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from enum import Enum
from functools import partial
from itertools import chain
from threading import Condition
from typing import Any, Protocol

from blockindex.errors import BlockIndexError, Corrupt
from blockindex.hotpack import MAX_HEAD, PROLOGUE_SIZE, Codec, HeadReader, HotPack, decode_frame
from blockindex.hotset import DEFAULT_WORKLOAD, HotExtent, HotSet, image_key
from snapshotter.blockstore import ABSENT
from snapshotter.errors import SnapshotterError, Transient
from snapshotter.model import Digest
from snapshotter.registry.hotfile import HotFile, HotStream
from snapshotter.unproven import Pack

from .host import Host, Lane
from .hottable import HotTable
from .layer import HotOrder, LayerFetch
from .packplan import PackPlan, Segment

__all__ = ["HotFinder", "Prefetch", "State"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5  # readers wait that long for the answer whether there is a hot set
_HELD_MOST = 32 << 20
_HEAD_BYTES = 1 << 20  # asked for at a time of a head that the look-up's request did not bring whole
_STALL_S = 30.0
_FLOW_S = 1.5  # without a byte for so long, the file's frames are not promised until some come again
_ATTEMPTS = 4
_BACKOFF_S = 0.2


class State(Enum):
    """See the module; NONE and OVER are final, NONE says that there is no hot set."""

    LOOKING = "looking"
    STREAMING = "streaming"
    NONE = "none"
    OVER = "over"


class HotFinder(Protocol):
    """Where hot sets can be found. Neither raises; both are bounded in time."""

    def recorded(self, key: str, workload: str) -> HotSet | None:
        """The set that this node has recorded itself."""

    def find(self, image: str, key: str, workload: str) -> HotFile | None:
        """The file that others have published for the image with this key, pulled by the reference `image`."""


class _Promise:
    """What a layer asks about its missing blocks."""

    def __init__(self, prefetch: "Prefetch", layer: int) -> None:
        self._prefetch = prefetch
        self._layer = layer

    def keeps(self, block: int) -> bool:
        """Whether the block is on its way; it comes sooner for having been asked for."""
        return self._prefetch.keeps(self._layer, block)


class Prefetch:
    """One image's. `start` begins it; everything else happens on the host's threads."""

    def __init__(
        self,
        image: str,
        layers: Sequence[Digest],
        host: Host,
        finder: HotFinder,
        layer_of: Callable[[Digest], LayerFetch | None],
        streams: int,
        workload: str = DEFAULT_WORKLOAD,
        changed: Callable[[str], None] = lambda key: None,
        covered: Callable[[HotSet], bool] = lambda hotset: False,
        far_streams: int = 0,
    ) -> None:
        """`image`: the reference by which it is pulled. `layer_of` gives a layer that is in the store, None for one
        that is not (yet); `streams` bounds requests at once, `far_streams` those for a pack at a far host, if that is
        more; `changed(key)` is called when a set has been found, and at
        the end; `covered(hotset)` tells whether another prefetch brings all of a set that was found."""
        self.key = image_key(layers)
        self.workload = workload
        self._image = image
        self.state = State.LOOKING
        self.ended_at = 0.0  # monotonic seconds
        self._digests = list(dict.fromkeys(layers))
        self._host = host
        self._finder = finder
        self._layer_of = layer_of
        self._streams = streams
        self._width = streams  # requests for frames at once
        self._is_far = False  # the host that has the frames
        self._far_streams = far_streams
        self._lock = Condition()
        self._began_at = time.monotonic()
        self._layers: dict[int, LayerFetch] = {}  # that are in the store, by position in `_digests`
        self._unfit: set[int] = set()  # those that have another layout than the set speaks of
        self._promises: dict[int, _Promise] = {}
        self._table: HotTable | None = None
        self._workload, self._hot_blocks = "", 0
        self.is_carried = False  # the set is a guess, from an earlier image's: the image is to be recorded all the same
        self._file: HotFile | None = None
        self._plan: PackPlan | None = None
        self._origin = Pack("", "", "", self.key)
        self._where, self._doubt = "", ""  # of the set that is used: see HotFile
        self._held: list[tuple[int, list[tuple[HotExtent, memoryview]]]] = []
        self._held_bytes = 0
        self._runs_left: set[int] = set()  # positions of layers whose spans are still to be asked for
        self._orders: list[tuple[LayerFetch, HotOrder]] = []  # those that have been asked for
        self._flights = 0
        self._changed = changed
        self._covered = covered
        self._stands_back = False
        self.requests = 0
        self.bytes = 0
        self.blocks = 0
        self._moved_at = self._began_at  # when bytes of the file last came
        self._progress = (0, self._began_at)  # a sum that grows with everything that comes in, and when it last did

    def __repr__(self) -> str:
        return f"<Prefetch {self.key[:19]} {self.state.value} {self._plan or ''}>"

    def status(self) -> dict[str, Any]:
        """What `bootseer status` shows of it."""
        return {
            "image_key": self.key,
            "workload": self._workload or self.workload,
            "state": self.state.value,
            "from": self._where,
            "bytes_refused": self._doubt,
            "hot_blocks": self._hot_blocks,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "requests": self.requests,
        }

    # -- course ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for the hot set."""
        self._host.prefetch(+1)
        lane = Lane.HOT if self.workload == DEFAULT_WORKLOAD else Lane.DEMAND  # a container is being started
        self._host.submit(lane, self._guarded(self._look_up))
        self._host.submit(Lane.DEMAND, self._end_of_patience, delay_s=_LOOK_S)

    def tend(self) -> None:
        """To be called now and then: sees layers that have come in, ends a prefetch that stands still."""
        self.flush()
        if self._is_over():
            return
        progress = self.requests + self.bytes + self.blocks
        progress += sum(layer.tally.hot_bytes for layer in self._known_layers())
        now = time.monotonic()
        if progress != self._progress[0] or self._stands_back:
            self._progress = (progress, now)
        elif now - self._progress[1] > _STALL_S:
            self._give_up(f"nothing has come for {_STALL_S:.0f} s")
        if self.state is State.STREAMING and self._plan is not None and self._is_stuck():
            self._reconsider()

    def _guarded(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, after whose failure the prefetch is over."""

        def run() -> None:
            try:
                step()
            except (SnapshotterError, BlockIndexError, OSError) as error:  # OSError: the disk is full or broken
                self._give_up(str(error))
            except Exception:  # a bug must not keep the readers' promises for ever
                _log.exception("prefetch.failed image_key=%s", self.key)
                self._give_up("unexpected error")

        return run

    def _look_up(self) -> None:
        self._flush()  # layers that the node has already: their readers wait for the answer, too
        recorded = self._finder.recorded(self.key, self.workload)
        is_own = recorded is not None and not recorded.carried_from
        is_here = recorded is not None and self._take_set(recorded) and not self._absent(range(len(recorded.extents)))
        if is_own and is_here:
            self._end(State.OVER)
            return
        file = self._finder.find(self._image, self.key, self.workload)
        if file is None or (file.doubt and is_own):
            if recorded is None:
                self._end(State.NONE)
            else:
                self._bring_spans()
        elif file.first is not None:
            self.requests += 1
            self._stream_first(file, file.first)
        elif file.head is not None:
            plan = self._begin(file, file.head, file.head.head_size)
            segment = plan.take() if plan is not None and not self._stands_back else None
            self._begin_work()
            if plan is not None and segment is not None:  # gives way to nobody: the container's first blocks
                self._fetch(plan, segment)
                self._go_on()

    def _end_of_patience(self) -> None:
        if self.state is State.LOOKING:
            self._reconsider()

    def _stream_first(self, file: HotFile, stream: HotStream) -> None:
        """The stream that the look-up began: the head, then frames."""
        reader, position = HeadReader(), 0
        while True:  # a head that is longer than what the look-up asked for takes more requests
            with closing(stream):
                for chunk in stream:
                    self._count(chunk)
                    position += len(chunk)
                    pack = reader.feed(chunk)
                    if pack is not None:
                        plan = self._begin(file, pack, stream.end)
                        self._begin_work()
                        if plan is not None:
                            segment = Segment(pack.head_size, stream.end)
                            self._pour(plan, segment, chain([reader.rest], self._counted(stream)))
                            self._go_on()
                        return
            if position != stream.end or position >= min(file.size, MAX_HEAD + PROLOGUE_SIZE):
                raise Corrupt("head", "the file ends before its head does")
            self.requests += 1
            stream = file.stream(position, min(position + _HEAD_BYTES, file.size))

    def _begin(self, file: HotFile, pack: HotPack, streaming_to: int) -> PackPlan | None:
        """The head has come: decide how its blocks are to come. None when not by frames."""
        if pack.size != file.size:
            raise Corrupt("frames", f"{file.where} has {file.size} bytes, its head speaks of {pack.size}")
        if pack.hotset.image_key != self.key:
            raise Corrupt("image_key", f"{file.where} is of another image")
        self._where, self._doubt = file.where, file.doubt
        if not self._take_set(pack.hotset) or self._covered(pack.hotset):
            self._end(State.OVER)
            return None
        if file.doubt or pack.codec is Codec.NONE or (self._table is not None and self._table.is_whole):
            self._bring_spans()
            return None
        self._flush()
        if any(layer.late.is_refuted(pack.digest) for layer in self._known_layers()):
            self._doubt = "is in quarantine: it has brought wrong bytes"
            self._bring_spans()
            return None
        wanted = {number for number, frame in enumerate(pack.frames) if self._absent(range(frame.first, frame.last))}
        self._is_far = self._far_streams > self._streams and file.is_far()
        if self._is_far:
            self._width = self._far_streams
            self._host.widen(Lane.HOT, self._width)
        plan = PackPlan(pack, wanted, streaming_to, self._is_far)
        with self._lock:
            if self._is_over():
                return None
            self._file, self._plan = file, plan
            self._origin = Pack(pack.digest, file.where, file.signed_by, self.key)
            self.state = State.STREAMING
        self._changed(self.key)
        _log.info(
            "prefetch.begun image_key=%s workload=%s blocks=%d frames=%d bytes=%d after_s=%.3f",
            self.key,
            pack.hotset.workload,
            pack.hotset.block_count,
            len(wanted),
            sum(pack.frames[number].size for number in wanted),
            time.monotonic() - self._began_at,
        )
        self._reconsider()
        self._check_over()
        return plan

    def _begin_work(self) -> None:
        """Further requests, beside the one that the caller has. Of a far host's half begin at once: while all
        connections begin slow the wire has room beside the indexes, whose connections the other half takes over."""
        for number in range(1, self._width if self._plan is not None else 0):
            self._host.submit(Lane.HOT, self._guarded(partial(self._work, self._is_far and number < self._width // 2)))

    def _take_set(self, hotset: HotSet) -> bool:
        """Use this set from now on; whether there is anything to it."""
        table = HotTable(hotset)
        with self._lock:
            if self._is_over():
                return False
            self._table = table
            self._workload, self._hot_blocks = hotset.workload, hotset.block_count
            self.is_carried = bool(hotset.carried_from)
            self._unfit = {position for position, layer in self._layers.items() if not self._fits(position, layer)}
        return bool(hotset.extents)

    def _fits(self, position: int, layer: LayerFetch) -> bool:
        """Whether the set, if one is known, speaks of the blocks that the layer has."""
        record = layer.files.record
        if self._table is None or self._table.fits(position, record):
            return True
        _log.warning(
            "prefetch.other_layout layer=%s image_key=%s its hot set was made with another layout of the layer",
            record.digest,
            self.key,
        )
        return False

    def _absent(self, rows: Iterable[int]) -> bool:
        """Whether a block of these extents (rows of the set) is missing. One that is in doubt after a power cut is
        not: it is checked when it is read."""
        table, layers = self._table, self._layers
        extents = table.hotset.extents if table is not None else ()  # over
        for extent in (extents[row] for row in rows if extents):
            layer = layers.get(extent.layer)
            if extent.layer in self._unfit:
                continue
            if layer is None or ABSENT in layer.files.present[extent.start : extent.end]:
                return True
        return False

    # -- by frames ---------------------------------------------------------------------------------------------------

    def _work(self, beside_pulls: bool) -> None:
        """Ask for one segment, and come back for the next one: look-ups for other images wait in the same lane."""
        self._host.give_way(Lane.HOT, beside_pulls)
        plan = None if self._stands_back else self._plan
        segment = plan.take() if plan is not None else None
        if plan is not None and segment is not None:
            self._fetch(plan, segment)
            self._go_on()

    def _go_on(self) -> None:
        """One more request after those that are under way, if something is left."""
        self._host.submit(Lane.HOT, self._guarded(partial(self._work, self._is_far)))

    def _fetch(self, plan: PackPlan, segment: Segment, urgent: bool = False) -> None:
        file = self._file
        if file is None:  # over
            return
        self.requests += 1
        try:
            stream = file.stream(segment.start, segment.end)
        except SnapshotterError as error:
            self._broke_off(plan, segment, error)
            return
        with closing(stream):
            self._pour(plan, segment, self._counted(stream), urgent)

    def _counted(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        for chunk in stream:
            self._count(chunk)
            yield chunk

    def _count(self, chunk: bytes) -> None:
        self.bytes += len(chunk)
        self._moved_at = time.monotonic()

    def _pour(self, plan: PackPlan, segment: Segment, chunks: Iterator[bytes], urgent: bool = False) -> None:
        """Take what comes of a segment to its end, and see to it that the rest comes if it breaks off."""
        while self.state is State.STREAMING:
            try:
                chunk = next(chunks, None)
                if chunk is None and segment.start < segment.end:
                    raise Transient(f"the stream ends at byte {segment.start}, not at {segment.end}")
            except SnapshotterError as error:
                self._broke_off(plan, segment, error)
                return
            if chunk is None:
                return
            self._arrived(plan, segment.start, chunk)
            segment.start += len(chunk)
            if not urgent:  # a reader waits, and its frame belongs to a layer that is there
                self._await_room()

    def _broke_off(self, plan: PackPlan, segment: Segment, error: SnapshotterError) -> None:
        """Some more attempts, if they promise anything; then its frames are given up."""
        delay_s, again = 0.0, False
        if isinstance(error, Transient):
            delay_s = max(_BACKOFF_S * 2**segment.attempts, error.retry_after_s or 0.0)
            again = segment.attempts + 1 < _ATTEMPTS and delay_s < _STALL_S
        _log.warning(
            "prefetch.broke_off image_key=%s bytes=%d-%d attempt=%d error=%r",
            self.key,
            segment.start,
            segment.end,
            segment.attempts + 1,
            str(error),
        )

        def try_again() -> None:
            plan.put_back(segment)
            self._work(self._is_far)

        if again:
            self._host.submit(Lane.HOT, self._guarded(try_again), delay_s)
        else:
            plan.drop(segment)
            self._reconsider()
            self._check_over()

    def _arrived(self, plan: PackPlan, offset: int, chunk: bytes) -> None:
        for number, data in plan.feed(offset, chunk):
            self._keep(plan, number, decode_frame(plan.pack, plan.pack.frames[number], data))
            self._check_over()

    def _keep(self, plan: PackPlan, number: int, extents: list[tuple[HotExtent, memoryview]]) -> None:
        """Store a frame's blocks; what belongs to a layer that is not there yet is held."""
        while left := self._store(extents):
            with self._lock:  # between `_store` and here a layer may have come in, and `flush` have gone by
                if self.state is not State.STREAMING:
                    return
                if not any(self._is_known(extent.layer) for extent, _ in left):
                    self._held.append((number, left))
                    self._held_bytes += plan.pack.frames[number].raw_size  # of which `left` are views
                    return
            extents = left
        plan.landed(number)

    def _await_room(self) -> None:
        """Return when no more is held in memory than may be."""
        with self._lock:
            self._lock.wait_for(lambda: self._held_bytes <= _HELD_MOST or self.state is not State.STREAMING)

    def _store(self, extents: list[tuple[HotExtent, memoryview]]) -> list[tuple[HotExtent, memoryview]]:
        """Store what can be; returns the rest."""
        left = []
        for extent, data in extents:
            layer = self._attached(extent.layer)
            if extent.layer in self._unfit:
                continue
            if layer is None:
                left.append((extent, data))
            else:
                layer.land_hot(extent.start, extent.end, data, self._origin)
                self.blocks += extent.end - extent.start
        return left

    def _is_known(self, position: int) -> bool:
        return position in self._layers or position in self._unfit

    def _attached(self, position: int) -> LayerFetch | None:
        """The layer, which has our promise from now on; None when it is not in the store, or cannot be used."""
        if self._is_known(position):
            return self._layers.get(position)
        try:
            layer = self._layer_of(self._digests[position])
        except (SnapshotterError, BlockIndexError, OSError) as error:
            _log.warning("prefetch.broken_layer layer=%s error=%r", self._digests[position], str(error))
            self._unfit.add(position)
            return None
        if layer is None:
            return None
        promise = _Promise(self, position)
        with self._lock:
            if self._is_known(position) or self._is_over():
                return self._layers.get(position)
            if not self._fits(position, layer):
                self._unfit.add(position)
            self._layers[position] = layer
            self._promises[position] = promise
        layer.add_promise(promise)
        if self._is_over():  # it ended meanwhile, and did not find the promise there
            layer.drop_promise(promise)
        return layer

    def _is_over(self) -> bool:
        return self.state in (State.NONE, State.OVER)

    def flush(self) -> None:
        """Layers may have come in: make promises to them, and store what was held for them. Never raises."""
        self._guarded(self._flush)()

    def _flush(self) -> None:
        if self._is_over():
            return
        for position in range(len(self._digests)):
            self._attached(position)
        with self._lock:
            held, self._held, self._held_bytes = self._held, [], 0
            self._lock.notify_all()
        plan = self._plan
        if plan is not None:
            for number, extents in held:
                self._keep(plan, number, extents)
        if self._runs_left:
            self._ask_for_spans()
        if held:
            self._check_over()

    # -- by spans ----------------------------------------------------------------------------------------------------

    def _bring_spans(self) -> None:
        """Have the layers themselves fetch the spans of the extents, in their order, or all there is."""
        with self._lock:
            if self._is_over():
                return
            self._runs_left = self._table.layers if self._table is not None else set()
            self.state = State.STREAMING
        self._changed(self.key)
        self._flush()
        self._reconsider()
        self._check_over()

    def _ask_for_spans(self) -> None:
        table = self._table
        if table is None:  # over
            return
        for position in sorted(self._runs_left):
            with self._lock:
                layer = self._layers.get(position)
                if position not in self._runs_left or not self._is_known(position):
                    continue
                self._runs_left.discard(position)
                if layer is None or position in self._unfit:
                    continue
                self._flights += 1
            blocks = [(0, layer.files.record.blocks)] if table.is_whole else table.blocks_of(position)
            order = layer.fetch_hot(blocks, self._streams, self._spans_came, self._stands_back)
            with self._lock:
                if not self._is_over():  # what has ended keeps no layer
                    self._orders.append((layer, order))
            if order.held is not self._stands_back:  # it has changed meanwhile
                layer.hold_hot(order, self._stands_back, self._streams)

    def _spans_came(self) -> None:
        with self._lock:
            self._flights -= 1
        self._check_over()

    # -- turns -------------------------------------------------------------------------------------------------------

    def stand_back(self, wait: bool) -> None:
        """Let another prefetch of the image go first, or go on. What is under way comes, and what readers wait for."""
        with self._lock:
            if self._stands_back is wait or self._is_over():
                return
            self._stands_back = wait
            self._moved_at = time.monotonic()
            orders = tuple(self._orders)
        for layer, order in orders:
            layer.hold_hot(order, wait, self._streams)
        plan = self._plan
        if wait or plan is None:
            return
        frames = enumerate(plan.pack.frames)  # the other has brought some of what this one was to bring
        plan.skip([number for number, frame in frames if not self._absent(range(frame.first, frame.last))])
        for _ in range(self._width):
            self._go_on()
        self._check_over()

    def brings(self, hotset: HotSet) -> bool:
        """Whether every block of this set of the image is there or on its way by this prefetch: it comes first then."""
        plan, table = self._plan, self._table
        if self.state is not State.STREAMING or plan is None or table is None or table.hotset.layers != hotset.layers:
            return False
        rows = table.rows_with(hotset.extents)
        return rows is not None and plan.bring_first({self._frame_of(plan.pack, row) for row in rows})

    # -- promises ----------------------------------------------------------------------------------------------------

    def keeps(self, position: int, block: int) -> bool:
        """See `_Promise.keeps`. Called under the layer's lock."""
        if self.state is State.LOOKING:
            return time.monotonic() < self._began_at + _LOOK_S
        plan, table = self._plan, self._table
        if self.state is not State.STREAMING or plan is None or table is None or position in self._unfit:
            return False
        row = table.row_of(position, block)
        if row is None or self._is_stuck():
            return False
        coming, brought_forward = plan.hurry(self._frame_of(plan.pack, row))
        if brought_forward:
            self._host.submit(Lane.DEMAND, self._guarded(self._fetch_urgent))
        return coming

    def _is_stuck(self) -> bool:
        """Whether nothing comes of the file any more: a connection may be dead long before it times out."""
        return time.monotonic() - self._moved_at > _FLOW_S

    @staticmethod
    def _frame_of(pack: HotPack, row: int) -> int:
        """The frame that holds an extent; frames hold rows in order."""
        return bisect_right(pack.frames, row, key=lambda frame: frame.first) - 1

    def _fetch_urgent(self) -> None:
        """A reader waits for what is first in the queue."""
        plan = self._plan
        segment = plan.take() if plan is not None else None
        if plan is not None and segment is not None:
            self._host.urge(+1)
            try:
                self._fetch(plan, segment, urgent=True)
            finally:
                self._host.urge(-1)

    def _reconsider(self) -> None:
        """Promises may have been taken back: whoever relied on them is seen to."""
        for layer in self._known_layers():
            layer.reconsider()

    def _known_layers(self) -> list[LayerFetch]:
        with self._lock:
            return list(self._layers.values())

    # -- end ---------------------------------------------------------------------------------------------------------

    def _check_over(self) -> None:
        with self._lock:
            plan = self._plan
            done = not self._runs_left and not self._flights and (plan is None or not plan.left)
            done = done and self.state is State.STREAMING
        if done:
            self._end(State.OVER)

    def _give_up(self, reason: str) -> None:
        if self._is_over():
            return
        _log.warning("prefetch.given_up image_key=%s reason=%r", self.key, reason)
        plan = self._plan
        if plan is not None:
            plan.drop_all()
        self._end(State.OVER, served=False)

    def _end(self, state: State, served: bool = True) -> None:
        with self._lock:
            if self._is_over():
                return
            self.state = state
            self.ended_at = time.monotonic()
            promises = [(self._layers[position], promise) for position, promise in self._promises.items()]
            # What ended prefetches keep is remembered for long: nothing large, and no layer that may be removed.
            self._layers, self._promises = {}, {}
            self._table = self._plan = self._file = None
            self._held, self._held_bytes = [], 0
            self._runs_left, self._orders = set(), []
            self._lock.notify_all()
        try:
            for layer, promise in promises:
                layer.drop_promise(promise)
        finally:  # the background waits for it
            self._host.prefetch(-1, served and state is State.OVER)
            self._changed(self.key)
        if state is State.OVER:
            _log.info(
                "prefetch.over image_key=%s blocks=%d bytes=%d requests=%d seconds=%.3f",
                self.key,
                self.blocks,
                self.bytes,
                self.requests,
                self.ended_at - self._began_at,
            )
