"""The requests for one hot pack: how many at once, beside what, and what becomes of those that break off.

`streams` requests are under way at once. Where the host that has the bytes is far (`registry.distance`) they are
`far_streams`: there every connection begins slow, and the wire has room. Half of these do not wait for the image's
indexes, which come at the same time over connections of their own; the other half takes these over when they are free.
Elsewhere one goes on beside the indexes, so that the wire is never empty. All but the first, and those that a reader
waits for, give way to readers. At the end, who has nothing left to ask for relieves stragglers (`underway`).

A request that breaks off is made again from where it stopped, some times; then its frames are given up. Which bytes
come next is `PackPlan`'s. What is done with a frame is the owner's.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Protocol

from blockindex.hotpack import HotPack
from snapshotter.errors import SnapshotterError, Transient
from snapshotter.registry.distance import is_far
from snapshotter.registry.hotfile import HotFile

from .host import Host, Lane
from .packplan import PackPlan
from .underway import Segment, UnderWay

__all__ = ["PackRequests"]

_log = logging.getLogger(__name__)

_FLOW_S = 1.5  # without a byte for so long, the file's frames are not promised until some come again
_ATTEMPTS = 4
_BACKOFF_S = 0.2
_LATEST_S = 30.0  # whoever wants a request put off for longer gets none any more: the prefetch would be over


class _Owner(Protocol):
    """What `Prefetch` does."""

    key: str

    @property
    def is_streaming(self) -> bool:
        """Whether frames are still wanted."""

    def guarded(self, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, whose failure is the owner's."""

    def has_come(self, plan: PackPlan, number: int, data: bytearray) -> None:
        """A frame is whole."""

    def await_room(self) -> None:
        """Return when more may come."""

    def taken_back(self) -> None:
        """Some frames will not come."""


class PackRequests:
    """See the module. Thread-safe. `requests` and `bytes` count, `relieved` those requests that took over from a
    straggler; `plan` is None before the pack's head has come and after the end."""

    def __init__(self, owner: _Owner, host: Host, streams: int, far_streams: int) -> None:
        self.plan: PackPlan | None = None
        self.requests = self.relieved = 0
        self.bytes = 0
        self._owner = owner
        self._held = False
        self._host = host
        self._width = streams
        self._far_streams = far_streams
        self._is_far = False
        self._file: HotFile | None = None
        self._moved_at = time.monotonic()  # when bytes of the file last came

    def __repr__(self) -> str:
        return f"<PackRequests {self.requests} of {self._width} at once, {self.plan or ''}>"

    # -- course ------------------------------------------------------------------------------------------------------

    def plan_for(self, file: HotFile, pack: HotPack, wanted: set[int], streaming_to: int) -> PackPlan:
        """A plan for these frames of the file, as far as its host is; `open` takes it up."""
        round_trip_s = file.round_trip_s()
        self._is_far = self._far_streams > self._width and is_far(round_trip_s)
        if self._is_far:
            self._width = self._far_streams
            self._host.widen(Lane.HOT, self._width)
        return PackPlan(pack, wanted, streaming_to, self._is_far, UnderWay(round_trip_s))

    def open(self, file: HotFile, plan: PackPlan) -> None:
        """Go by this plan from now on."""
        self._file, self.plan = file, plan

    def close(self) -> None:
        """Ask for nothing more, and keep nothing; what is under way is broken off by its readers."""
        self._file = self.plan = None

    def begin(self) -> None:
        """Have further requests made, beside the one that the caller has."""
        for number in range(1, self._width if self.plan is not None else 0):
            self._submit(beside_pulls=self._is_far and number < self._width // 2)

    def first(self) -> None:
        """Bring the first segment, on this thread and giving way to nobody: the container's first blocks."""
        plan = self.plan
        segment = plan.take() if plan is not None and not self._held else None
        self.begin()
        if plan is not None and segment is not None:
            self._fetch(plan, segment)
            self._submit(beside_pulls=True)

    def go_on(self) -> None:
        """Have one more request made, if something is left."""
        self._submit(beside_pulls=self._is_far)

    def resume(self) -> None:
        """Go on after having been held, with as many requests as may be."""
        for _ in range(self._width):
            self.go_on()

    def urgent(self) -> None:
        """A reader waits for what is first in the queue."""
        self._host.submit(Lane.DEMAND, self._owner.guarded(self._fetch_urgent))

    def hold(self, wait: bool) -> None:
        """Ask for nothing new but what readers wait for, or go on. Nothing comes meanwhile, so what readers have been
        promised is not late."""
        self._held = wait
        self._moved_at = time.monotonic()

    def is_stuck(self) -> bool:
        """Whether nothing comes of the file any more: a connection may be dead long before it times out."""
        return time.monotonic() - self._moved_at > _FLOW_S

    # -- one request -------------------------------------------------------------------------------------------------

    def _submit(self, beside_pulls: bool, delay_s: float = 0.0) -> None:
        self._host.submit(Lane.HOT, self._owner.guarded(partial(self._work, beside_pulls)), delay_s)

    def _work(self, beside_pulls: bool) -> None:
        """Ask for one segment, and come back for the next one: look-ups for other images wait in the same lane."""
        self._host.give_way(Lane.HOT, beside_pulls)
        plan = None if self._held else self.plan
        if plan is None:
            return
        segment = plan.take() or plan.relieve(self._width)
        if segment is not None:
            self._fetch(plan, segment)
            self._submit(beside_pulls or self._is_far)
        elif (delay_s := plan.look_again_s()) is not None:
            self._submit(beside_pulls, delay_s)

    def _fetch_urgent(self) -> None:
        plan = self.plan
        segment = plan.take() if plan is not None else None
        if plan is not None and segment is not None:
            self._host.urge(+1)
            try:
                self._fetch(plan, segment, urgent=True)
            finally:
                self._host.urge(-1)

    def _fetch(self, plan: PackPlan, segment: Segment, urgent: bool = False) -> None:
        file = self._file
        if file is None:  # over
            return
        self.requests += 1
        self.relieved += segment.handed_on and not segment.attempts
        try:
            stream = file.stream(segment.start, segment.end)
        except SnapshotterError as error:
            self._broke_off(plan, segment, error)
            return
        with closing(stream):
            self.pour(plan, segment, self.counted(stream), urgent)

    def counted(self, stream: Iterable[bytes]) -> Iterator[bytes]:
        """The stream's chunks, each counted when it comes."""
        for chunk in stream:
            self.count(chunk)
            yield chunk

    def count(self, chunk: bytes) -> None:
        """Bytes of the file have come."""
        self.bytes += len(chunk)
        self._moved_at = time.monotonic()

    def pour(self, plan: PackPlan, segment: Segment, chunks: Iterator[bytes], urgent: bool = False) -> None:
        """Take what comes of a segment to its end, and see to it that the rest comes if it breaks off."""
        asked_to = segment.end
        while self._owner.is_streaming:
            try:
                chunk = next(chunks, None)
                if chunk is None and segment.left:
                    raise Transient(f"the stream ends at byte {segment.start}, not at {segment.end}")
            except SnapshotterError as error:
                if segment.left:  # else it is another one's, and nothing is missing
                    self._broke_off(plan, segment, error)
                return
            if chunk is None:
                return
            for number, data in plan.feed(segment, chunk):
                self._owner.has_come(plan, number, data)
            if not segment.left and segment.end < asked_to:  # the rest is another one's
                return
            if not urgent:  # a reader waits, and its frame belongs to a layer that is there
                self._owner.await_room()

    def _broke_off(self, plan: PackPlan, segment: Segment, error: SnapshotterError) -> None:
        """Some more attempts, if they promise anything; then its frames are given up."""
        delay_s, again = 0.0, False
        if isinstance(error, Transient):
            delay_s = max(_BACKOFF_S * 2**segment.attempts, error.retry_after_s or 0.0)
            again = segment.attempts + 1 < _ATTEMPTS and delay_s < _LATEST_S
        _log.warning(
            "prefetch.broke_off image_key=%s bytes=%d-%d attempt=%d error=%r",
            self._owner.key,
            segment.start,
            segment.end,
            segment.attempts + 1,
            str(error),
        )

        def try_again() -> None:
            plan.put_back(segment)
            self._work(self._is_far)

        if again:
            self._host.submit(Lane.HOT, self._owner.guarded(try_again), delay_s)
        else:
            plan.drop(segment)
            self._owner.taken_back()
