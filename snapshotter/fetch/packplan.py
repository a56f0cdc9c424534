"""Which bytes of a hot pack are asked for next, and which frames are whole: the bookkeeping of a prefetch, without I/O.

Frames go QUEUED -> ASKED -> LANDED, or are DROPPED when they are given up, or are never wanted. Queued frames lie in
*segments*, byte ranges that one request brings, short ones first: the first frames should not wait for a long answer,
and later ones should not cost a round trip each. At a far host many connections share the segments, and each brings
what TCP lets it: there the last ones are short again, so that none is left alone with a long one. A reader that waits
for a queued frame has it brought forward: its segment is cut before the frame, and the later part goes to the front.
When nothing is queued any more, the end of a straggler (`underway`) is cut off for an idle connection.

Invariants: every wanted byte is in exactly one segment that is queued or under way, or has come; what comes beyond a
segment's end is passed over; a request that breaks off is resumed where it stopped. So nothing is fetched twice but
what a straggler had in flight. Thread-safe; one lock, held for moments.
"""

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterable

from blockindex.hotpack import HotPack

from .underway import Segment, UnderWay

__all__ = ["PackPlan"]

_FIRST = 256 << 10
_GROWING = 3  # as many are twice as long as the one before
_MOST = 2 << 20
_FAR_FIRST = (128 << 10, 256 << 10, 512 << 10, 512 << 10)  # are asked for at once, and come side by side
_FAR_SHARE = 8  # then this part of what is left
_FAR_LEAST, _FAR_MOST = 256 << 10, 1 << 20

_UNWANTED, _QUEUED, _ASKED, _LANDED, _DROPPED = range(5)


class PackPlan:
    """Brings the frames `wanted` (numbers) of `pack`, of which the bytes before `streaming_to` are on their way. `far`:
    from a far host (`registry.distance`). `under_way` is for the requests of this plan alone."""

    def __init__(
        self,
        pack: HotPack,
        wanted: Container[int],
        streaming_to: int,
        far: bool = False,
        under_way: UnderWay | None = None,
    ) -> None:
        self.pack = pack
        self._far = far
        self._lock = threading.Lock()
        self._offsets = [frame.offset for frame in pack.frames]
        self._states = [_QUEUED if number in wanted else _UNWANTED for number in range(len(pack.frames))]
        self._buffers: dict[int, bytearray] = {}
        self._missing: dict[int, int] = {}  # bytes that frames in `_buffers` lack
        self._queue: deque[Segment] = deque()
        self._under_way = UnderWay() if under_way is None else under_way
        self._left = self._states.count(_QUEUED)
        self._cut(streaming_to)

    def __repr__(self) -> str:
        return f"<PackPlan {self._left} of {len(self._states)} frames to come, {len(self._queue)} requests to make>"

    @property
    def left(self) -> int:
        """Wanted frames that have neither landed nor been dropped."""
        return self._left

    def _cut(self, streaming_to: int) -> None:
        """Queue what the first stream does not bring."""
        left = sum(frame.size for frame, state in zip(self.pack.frames, self._states, strict=True) if state == _QUEUED)
        size = self._size(0, left)
        for number, frame in enumerate(self.pack.frames):
            if self._states[number] != _QUEUED:
                continue
            end = frame.offset + frame.size
            left -= frame.size
            if frame.offset < streaming_to:
                self._states[number] = _ASKED  # the first stream brings its beginning at least
                if end <= streaming_to:
                    continue
            start = max(frame.offset, streaming_to)
            last = self._queue[-1] if self._queue else None
            if last is not None and last.end == start and end - last.start <= size:
                last.end = end
            else:
                size = self._size(len(self._queue), left + frame.size)
                self._queue.append(Segment(start, end))

    def _size(self, number: int, left: int) -> int:
        """Most bytes of the segment with this number, which is cut from the `left` last bytes; it is longer only where
        a single frame is."""
        if not self._far and number < _GROWING:
            return min(_FIRST << number, _MOST)
        if not self._far:
            return -(-left // -(-left // _MOST))  # equal parts
        if number < len(_FAR_FIRST):
            return _FAR_FIRST[number]
        return min(max(left // _FAR_SHARE, _FAR_LEAST), _FAR_MOST)

    def take(self) -> Segment | None:
        """The next bytes to ask for, None when all have been."""
        with self._lock:
            while self._queue:
                segment = self._queue.popleft()
                numbers = [it for it in self._frames_of(segment) if self._states[it] in (_QUEUED, _ASKED)]
                if numbers and segment.start < segment.end:  # else all that it brings has been given up meanwhile
                    for number in numbers:
                        self._states[number] = _ASKED
                    self._under_way.add(segment)
                    return segment
            return None

    def relieve(self, requests: int) -> Segment | None:
        """Bytes to ask for that had been asked for already, but come too slowly; `requests` could be under way at once.
        None while anything is queued."""
        with self._lock:
            if self._queue:
                return None
            segment = self._under_way.relieve(requests - len(self._under_way))
            if segment is not None:
                self._under_way.add(segment)
            return segment

    def look_again_s(self) -> float | None:
        """When to call `relieve` again, in seconds; None when nothing is under way."""
        with self._lock:
            return self._under_way.window_s / 2 if len(self._under_way) else None

    def put_back(self, segment: Segment) -> None:
        """The rest of a request that broke off, or could not be made: the next to be asked for."""
        with self._lock:
            self._under_way.remove(segment)
            segment.attempts += 1
            self._queue.appendleft(segment)

    def drop(self, segment: Segment) -> None:
        """Give up the frames of which bytes lie in the segment."""
        with self._lock:
            self._under_way.remove(segment)
            for number in self._frames_of(segment):
                if self._states[number] in (_QUEUED, _ASKED):
                    self._drop(number)

    def skip(self, numbers: Iterable[int]) -> None:
        """These frames are there by now: those that have not been asked for never will be."""
        with self._lock:
            for number in numbers:
                if self._states[number] == _QUEUED:
                    self._states[number] = _UNWANTED
                    self._left -= 1
            self._queue = deque(part for segment in self._queue for part in self._wanted_of(segment))

    def bring_first(self, numbers: Container[int]) -> bool:
        """Ask for these frames before the others; False, and nothing is changed, when one of them was given up."""
        with self._lock:
            if any(state == _DROPPED and number in numbers for number, state in enumerate(self._states)):
                return False
            self._queue = deque(
                sorted(self._queue, key=lambda segment: not any(it in numbers for it in self._frames_of(segment)))
            )
            return True

    def _wanted_of(self, segment: Segment) -> list[Segment]:
        """What of a queued segment is still wanted."""
        parts: list[Segment] = []
        for number in self._frames_of(segment):
            if self._states[number] not in (_QUEUED, _ASKED):
                continue
            frame = self.pack.frames[number]
            start, end = max(frame.offset, segment.start), min(frame.offset + frame.size, segment.end)
            if parts and parts[-1].end == start:
                parts[-1].end = end
            else:
                parts.append(Segment(start, end, segment.attempts, segment.hurried))
        return parts

    def drop_all(self) -> None:
        """Give up every frame that has not landed."""
        with self._lock:
            self._queue.clear()
            self._under_way.clear()
            for number, state in enumerate(self._states):
                if state in (_QUEUED, _ASKED):
                    self._drop(number)

    def _drop(self, number: int) -> None:
        self._states[number] = _DROPPED
        self._buffers.pop(number, None)
        self._left -= 1

    def feed(self, segment: Segment, chunk: bytes) -> list[tuple[int, bytearray]]:
        """The next bytes of a segment have come: the frames that are whole with them, with their bytes (each once).
        Bytes of frames that nobody wants are passed over, and those beyond the segment's end."""
        whole = []
        with self._lock:
            offset, view = segment.start, memoryview(chunk)[: segment.left]
            segment.start += len(view)
            self._under_way.came(segment, len(view))
            if not segment.left:
                self._under_way.remove(segment)
            number = max(bisect_right(self._offsets, offset) - 1, 0)
            while view and number < len(self._offsets):
                frame = self.pack.frames[number]
                skip = min(max(frame.offset - offset, 0), len(view))
                view, offset = view[skip:], offset + skip
                part = view[: max(frame.offset + frame.size - offset, 0)]
                if part and self._states[number] == _ASKED:
                    if number not in self._buffers:
                        self._buffers[number], self._missing[number] = bytearray(frame.size), frame.size
                    place = offset - frame.offset
                    self._buffers[number][place : place + len(part)] = part
                    self._missing[number] -= len(part)
                    if not self._missing[number]:
                        whole.append((number, self._buffers.pop(number)))
                view, offset, number = view[len(part) :], offset + len(part), number + 1
        return whole

    def landed(self, number: int) -> None:
        """All blocks of the frame are in the store."""
        with self._lock:
            if self._states[number] == _ASKED:
                self._states[number] = _LANDED
                self._left -= 1

    def hurry(self, number: int) -> tuple[bool, bool]:
        """A reader waits for the frame: whether it will come, and whether it was brought forward just now."""
        with self._lock:
            if self._states[number] == _ASKED:
                return True, False
            if self._states[number] != _QUEUED:
                return False, False
            offset = self.pack.frames[number].offset
            for place, segment in enumerate(self._queue):
                if segment.start <= offset < segment.end:
                    if segment.hurried:  # every block of a read asks, and one request is enough
                        return True, False
                    del self._queue[place]
                    if segment.start < offset:
                        self._queue.insert(place, Segment(segment.start, offset))
                    self._queue.appendleft(Segment(offset, segment.end, hurried=True))
                    return True, True
            return False, False

    def _frames_of(self, segment: Segment) -> range:
        first = max(bisect_right(self._offsets, segment.start) - 1, 0)
        last = bisect_right(self._offsets, segment.end - 1)
        return range(first, last)
