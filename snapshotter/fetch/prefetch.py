"""The prefetch of one image's hot blocks: found, streamed, put into the store before anything reads them.

Its course: LOOKING for a hot set, on the node and elsewhere (`hotsets`); then STREAMING its pack (`packrequests`), or
bringing the spans that own its extents (`spanorders`) where the set has no bytes, or none that may be used, or is most
of the image; then OVER. The pack is asked for as soon as its head is known, by several requests side by side: in a
directory the look-up is the first request for the file, in a registry it brings the head with it. A set whose bytes may
not be used does not take the place of what the node has recorded itself; any does of what was carried over from another
image.

What readers get from it is a *promise*: that a missing block is on its way, so that nobody fetches it twice. Promises
are made while a hot set is looked for (`_LOOK_S` at most), and for blocks of frames that are not given up. Whatever
goes wrong takes promises back and has the layers look at their readers again; a reader whom a promise kept waiting for
too long is helped by `LayerFetch.insist`. So nothing that a prefetch does can fail a reader. One that makes no progress
for `_STALL_S` is over: until then the background of its host waits. One that stands back for another of the same image
(`hotsets`) asks for nothing but what readers wait for.

A frame's digest is checked before it is decoded; one that is wrong, or whose blocks the layer refutes (`latecheck`),
ends the prefetch, and nothing more of that pack is used. Extents in layers that the node has not, or has in another
layout, are passed over. Frames of layers that are still on their way in are held in memory, up to `_HELD_MOST`.

Locking: `_lock` guards state and tables, those of `hotlayers` and `spanorders` too. It is taken under a layer's lock
(`_keeps`), never the other way round.
"""

import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import closing
from enum import Enum
from itertools import chain
from threading import Condition
from typing import Any, Protocol

from blockindex.errors import BlockIndexError, Corrupt
from blockindex.hotpack import MAX_HEAD, PROLOGUE_SIZE, Codec, HeadReader, HotPack, decode_frame
from blockindex.hotset import DEFAULT_WORKLOAD, HotExtent, HotSet, image_key
from snapshotter.errors import SnapshotterError
from snapshotter.model import Digest
from snapshotter.registry.hotfile import HotFile, HotStream
from snapshotter.unproven import Pack

from .host import Host, Lane
from .hotlayers import HotLayers
from .hottable import HotTable
from .layer import LayerFetch
from .packplan import PackPlan
from .packrequests import PackRequests
from .spanorders import SpanOrders
from .underway import Segment

__all__ = ["HotFinder", "Prefetch", "State"]

_log = logging.getLogger(__name__)

_LOOK_S = 0.5  # readers wait that long for the answer whether there is a hot set
_HELD_MOST = 32 << 20
_HEAD_BYTES = 1 << 20  # asked for at a time of a head that the look-up's request did not bring whole
_STALL_S = 30.0


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
        that is not (yet); `streams` bounds requests at once, `far_streams` those for a pack at a far host, where that
        is more; `changed(key)` is called when a set has been found, and at the end; `covered(hotset)` tells whether
        another prefetch brings all of a set that was found."""
        self.key = image_key(layers)
        self.workload = workload
        self.state = State.LOOKING
        self.ended_at = 0.0  # monotonic seconds
        self.is_carried = False  # the set is a guess, from an earlier image's: the image is to be recorded all the same
        self.blocks = 0
        self._image = image
        self._host = host
        self._finder = finder
        self._changed = changed
        self._covered = covered
        self._lock = Condition()
        self._began_at = time.monotonic()
        self._layers = HotLayers(self.key, layers, layer_of, self._keeps, self._is_over, self._lock)
        self._asked = PackRequests(self, host, streams, far_streams)
        self._spans = SpanOrders(self._layers, streams, self._lock, self._is_over, self._check_over)
        self._workload, self._hot_blocks = "", 0
        self._origin = Pack("", "", "", self.key)
        self._where, self._doubt = "", ""  # of the set that is used: see HotFile
        self._held: list[tuple[int, list[tuple[HotExtent, memoryview]]]] = []
        self._held_bytes = 0
        self._stands_back = False
        self._progress = (0, self._began_at)  # a sum that grows with everything that comes in, and when it last did

    def __repr__(self) -> str:
        return f"<Prefetch {self.key[:19]} {self.state.value} {self._asked.plan or ''}>"

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
            "bytes": self._asked.bytes,
            "requests": self._asked.requests,
            "relieved": self._asked.relieved,
        }

    # -- course ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for the hot set."""
        self._host.prefetch(+1)
        lane = Lane.HOT if self.workload == DEFAULT_WORKLOAD else Lane.DEMAND  # a container is being started
        self._host.submit(lane, self.guarded(self._look_up))
        self._host.submit(Lane.DEMAND, self._end_of_patience, delay_s=_LOOK_S)

    def tend(self) -> None:
        """To be called now and then: sees layers that have come in, ends a prefetch that stands still."""
        self.flush()
        if self._is_over():
            return
        progress = self._asked.requests + self._asked.bytes + self.blocks
        progress += sum(layer.tally.hot_bytes for layer in self._layers.all())
        now = time.monotonic()
        if progress != self._progress[0] or self._stands_back:
            self._progress = (progress, now)
        elif now - self._progress[1] > _STALL_S:
            self._give_up(f"nothing has come for {_STALL_S:.0f} s")
        if self.state is State.STREAMING and self._asked.plan is not None and self._asked.is_stuck():
            self._reconsider()

    def guarded(self, step: Callable[[], None]) -> Callable[[], None]:
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
        is_here = (
            recorded is not None and self._take_set(recorded) and not self._layers.lack(range(len(recorded.extents)))
        )
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
            self._asked.requests += 1
            self._stream_first(file, file.first)
        elif file.head is not None:
            self._begin(file, file.head, file.head.head_size)
            self._asked.first()

    def _end_of_patience(self) -> None:
        if self.state is State.LOOKING:
            self._reconsider()

    def _stream_first(self, file: HotFile, stream: HotStream) -> None:
        """The stream that the look-up began: the head, then frames."""
        reader, position = HeadReader(), 0
        while True:  # a head that is longer than what the look-up asked for takes more requests
            with closing(stream):
                for chunk in stream:
                    self._asked.count(chunk)
                    position += len(chunk)
                    pack = reader.feed(chunk)
                    if pack is not None:
                        plan = self._begin(file, pack, stream.end)
                        self._asked.begin()
                        if plan is not None:
                            segment = Segment(pack.head_size, stream.end)
                            self._asked.pour(plan, segment, chain([reader.rest], self._asked.counted(stream)))
                            self._asked.go_on()
                        return
            if position != stream.end or position >= min(file.size, MAX_HEAD + PROLOGUE_SIZE):
                raise Corrupt("head", "the file ends before its head does")
            self._asked.requests += 1
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
        if file.doubt or pack.codec is Codec.NONE or self._is_most_of_the_image():
            self._bring_spans()
            return None
        self._flush()
        if any(layer.late.is_refuted(pack.digest) for layer in self._layers.all()):
            self._doubt = "is in quarantine: it has brought wrong bytes"
            self._bring_spans()
            return None
        lacks = self._layers.lack
        wanted = {number for number, frame in enumerate(pack.frames) if lacks(range(frame.first, frame.last))}
        plan = self._asked.plan_for(file, pack, wanted, streaming_to)
        with self._lock:
            if self._is_over():
                return None
            self._asked.open(file, plan)
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

    def _is_most_of_the_image(self) -> bool:
        table = self._layers.table
        return table is not None and table.is_whole

    def _take_set(self, hotset: HotSet) -> bool:
        """Use this set from now on; whether there is anything to it."""
        table = HotTable(hotset)
        with self._lock:
            if self._is_over():
                return False
            self._layers.use(table)
            self._workload, self._hot_blocks = hotset.workload, hotset.block_count
            self.is_carried = bool(hotset.carried_from)
        return bool(hotset.extents)

    # -- by frames ---------------------------------------------------------------------------------------------------

    @property
    def is_streaming(self) -> bool:
        """Whether blocks are still brought."""
        return self.state is State.STREAMING

    def has_come(self, plan: PackPlan, number: int, data: bytearray) -> None:
        """A frame of the pack is whole. Raises Corrupt when it is not what the head says."""
        self._keep(plan, number, decode_frame(plan.pack, plan.pack.frames[number], data))
        self._check_over()

    def _keep(self, plan: PackPlan, number: int, extents: list[tuple[HotExtent, memoryview]]) -> None:
        """Store a frame's blocks; what belongs to a layer that is not there yet is held."""
        while left := self._store(extents):
            with self._lock:  # between `_store` and here a layer may have come in, and `flush` have gone by
                if self.state is not State.STREAMING:
                    return
                if not any(self._layers.is_known(extent.layer) for extent, _ in left):
                    self._held.append((number, left))
                    self._held_bytes += plan.pack.frames[number].raw_size  # of which `left` are views
                    return
            extents = left
        plan.landed(number)

    def await_room(self) -> None:
        """Return when no more is held in memory than may be."""
        with self._lock:
            self._lock.wait_for(lambda: self._held_bytes <= _HELD_MOST or self.state is not State.STREAMING)

    def _store(self, extents: list[tuple[HotExtent, memoryview]]) -> list[tuple[HotExtent, memoryview]]:
        """Store what can be; returns the rest."""
        left = []
        for extent, data in extents:
            layer = self._layers.find(extent.layer)
            if self._layers.is_unfit(extent.layer):
                continue
            if layer is None:
                left.append((extent, data))
            else:
                layer.land_hot(extent.start, extent.end, data, self._origin)
                self.blocks += extent.end - extent.start
        return left

    def _is_over(self) -> bool:
        return self.state in (State.NONE, State.OVER)

    def flush(self) -> None:
        """Layers may have come in: make promises to them, and store what was held for them. Never raises."""
        self.guarded(self._flush)()

    def _flush(self) -> None:
        if self._is_over():
            return
        self._layers.meet()
        with self._lock:
            held, self._held, self._held_bytes = self._held, [], 0
            self._lock.notify_all()
        plan = self._asked.plan
        if plan is not None:
            for number, extents in held:
                self._keep(plan, number, extents)
        self._spans.give()
        if held:
            self._check_over()

    def _bring_spans(self) -> None:
        """Have the layers themselves fetch the spans of the extents, in their order, or all there is."""
        with self._lock:
            if self._is_over():
                return
            self._spans.begin()
            self.state = State.STREAMING
        self._changed(self.key)
        self._flush()
        self._reconsider()
        self._check_over()

    # -- turns -------------------------------------------------------------------------------------------------------

    def stand_back(self, wait: bool) -> None:
        """Let another prefetch of the image go first, or go on. What is under way comes, and what readers wait for."""
        with self._lock:
            if self._stands_back is wait or self._is_over():
                return
            self._stands_back = wait
            self._asked.hold(wait)
        self._spans.hold(wait)
        plan = self._asked.plan
        if wait or plan is None:
            return
        frames = enumerate(plan.pack.frames)  # the other has brought some of what this one was to bring
        plan.skip([number for number, frame in frames if not self._layers.lack(range(frame.first, frame.last))])
        self._asked.resume()
        self._check_over()

    def brings(self, hotset: HotSet) -> bool:
        """Whether every block of this set of the image is there or on its way by this prefetch: it comes first then."""
        plan, table = self._asked.plan, self._layers.table
        if self.state is not State.STREAMING or plan is None or table is None or table.hotset.layers != hotset.layers:
            return False
        rows = table.rows_with(hotset.extents)
        return rows is not None and plan.bring_first({self._frame_of(plan.pack, row) for row in rows})

    # -- promises ----------------------------------------------------------------------------------------------------

    def _keeps(self, position: int, block: int) -> bool:
        """Whether a layer's missing block is on its way; it comes sooner for having been asked for. Called under the
        layer's lock."""
        if self.state is State.LOOKING:
            return time.monotonic() < self._began_at + _LOOK_S
        plan, table = self._asked.plan, self._layers.table
        if self.state is not State.STREAMING or plan is None or table is None or self._layers.is_unfit(position):
            return False
        row = table.row_of(position, block)
        if row is None or self._asked.is_stuck():
            return False
        coming, brought_forward = plan.hurry(self._frame_of(plan.pack, row))
        if brought_forward:
            self._asked.urgent()
        return coming

    @staticmethod
    def _frame_of(pack: HotPack, row: int) -> int:
        """The frame that holds an extent; frames hold rows in order."""
        return bisect_right(pack.frames, row, key=lambda frame: frame.first) - 1

    def taken_back(self) -> None:
        """Some frames will not come: see `_reconsider`."""
        self._reconsider()
        self._check_over()

    def _reconsider(self) -> None:
        """Promises may have been taken back: whoever relied on them is seen to."""
        for layer in self._layers.all():
            layer.reconsider()

    # -- end ---------------------------------------------------------------------------------------------------------

    def _check_over(self) -> None:
        with self._lock:
            plan = self._asked.plan
            done = self._spans.are_done and (plan is None or not plan.left)
            done = done and self.state is State.STREAMING
        if done:
            self._end(State.OVER)

    def _give_up(self, reason: str) -> None:
        if self._is_over():
            return
        _log.warning("prefetch.given_up image_key=%s reason=%r", self.key, reason)
        plan = self._asked.plan
        if plan is not None:
            plan.drop_all()
        self._end(State.OVER, served=False)

    def _end(self, state: State, served: bool = True) -> None:
        with self._lock:
            if self._is_over():
                return
            self.state = state
            self.ended_at = time.monotonic()
            # What ended prefetches keep is remembered for long: nothing large, and no layer that may be removed.
            promises = self._layers.let_go()
            self._asked.close()
            self._held, self._held_bytes = [], 0
            self._spans.close()
            self._lock.notify_all()
        try:
            for layer, promise in promises:
                layer.drop_promise(promise)
        finally:  # the background waits for it
            self._host.prefetch(-1, served and state is State.OVER)
            self._changed(self.key)
        if state is State.OVER:
            _log.info(
                "prefetch.over image_key=%s blocks=%d bytes=%d requests=%d relieved=%d seconds=%.3f",
                self.key,
                self.blocks,
                self._asked.bytes,
                self._asked.requests,
                self._asked.relieved,
                self.ended_at - self._began_at,
            )
