"""The requests that are under way for one file, how fast their bytes come, and which of them is a *straggler*.

At the end of a transfer each connection has its last request. One that has lost packets may bring a tenth of what the
others did, and is alone with it when they are done: the wire is empty, and a container waits. So what a straggler has
not brought is handed to connections that are idle and warm. It keeps what it will bring meanwhile, and is broken off
there; what it had in flight beyond, little because it is slow, comes in vain.

A request is a straggler only while the wire has room: while all requests together bring less than `_ROOM` of what they
brought in their best moment. Else it shares a full wire, and another request would bring nothing sooner. What was
handed on once is not again, so that a network which is slow altogether costs no more than twice the bytes.

Not thread-safe: its owner has a lock.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Segment", "UnderWay"]

_LEAST_WINDOW_S = 0.1  # in less, a busy machine looks like a slow network
_WINDOW_TRIPS = 1.25  # TCP sends in bursts of a round trip: a window holds a whole one
_ROOM = 0.6
_SLOW_S, _SLOW_TRIPS = 0.2, 1.5  # handing on costs a round trip, and a connection that begins slow again
_LEAST_BYTES = 32 << 10


@dataclass(slots=True, eq=False)
class Segment:
    """Bytes `[start, end)` of the file; `attempts` counts the requests for them that broke off; one that is `hurried`
    was brought forward for a reader; one that is `handed_on` was a straggler's."""

    start: int
    end: int
    attempts: int = 0
    hurried: bool = False
    handed_on: bool = False

    @property
    def left(self) -> int:
        """Bytes that have not come."""
        return self.end - self.start


class _Pace:
    """How fast something comes, by the latest one to two windows."""

    def __init__(self, window_s: float, now: float) -> None:
        self.best = 0.0
        """Bytes a second in the best window."""
        self.began_at = now
        self._window_s = window_s
        self._count = 0
        self._older = self._newer = (now, 0)

    def came(self, size: int, now: float) -> None:
        """More has come."""
        self._count += size
        self._turn(now)

    def rate(self, now: float) -> float:
        """Bytes a second."""
        self._turn(now)
        at, count = self._older
        return (self._count - count) / max(now - at, 1e-6)

    def _turn(self, now: float) -> None:
        at, count = self._newer
        if now - at >= self._window_s:
            self.best = max(self.best, (self._count - count) / (now - at))
            self._older, self._newer = self._newer, (now, self._count)


class UnderWay:
    """See the module. `round_trip_s` is that to the host, 0.0 where it is not known."""

    def __init__(self, round_trip_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.window_s = max(_WINDOW_TRIPS * round_trip_s, _LEAST_WINDOW_S)
        """A straggler shows itself in that time."""
        self._slow_s = _SLOW_S + _SLOW_TRIPS * round_trip_s
        self._trip_s = round_trip_s
        self._clock = clock
        self._all = _Pace(self.window_s, clock())
        self._paces: dict[Segment, _Pace] = {}

    def __repr__(self) -> str:
        return f"<UnderWay {len(self._paces)} requests>"

    def __len__(self) -> int:
        return len(self._paces)

    def add(self, segment: Segment) -> None:
        """It is asked for."""
        self._paces[segment] = _Pace(self.window_s, self._clock())

    def remove(self, segment: Segment) -> None:
        """It has come, or broke off."""
        self._paces.pop(segment, None)

    def clear(self) -> None:
        """Nothing is wanted any more."""
        self._paces.clear()

    def came(self, segment: Segment, size: int) -> None:
        """`size` bytes of it have come."""
        now = self._clock()
        self._all.came(size, now)
        pace = self._paces.get(segment)
        if pace is not None:
            pace.came(size, now)

    def relieve(self, idle: int) -> Segment | None:
        """The end of what the slowest request has not brought, cut off from it, when it is a straggler; `idle` others
        could share what is cut off."""
        now = self._clock()
        if self._all.rate(now) >= _ROOM * self._all.best:
            return None
        waits = {
            segment: segment.left / max(pace.rate(now), 1.0)
            for segment, pace in self._paces.items()
            if not segment.handed_on and now - pace.began_at >= self.window_s + self._trip_s
        }
        slowest = max(waits, key=waits.__getitem__, default=None)
        if slowest is None or waits[slowest] < self._slow_s:
            return None
        keeps = min(int(self._paces[slowest].rate(now) * 2 * self._trip_s), slowest.left // 2)
        rest = slowest.left - keeps
        size = rest if rest < 2 * _LEAST_BYTES else max(rest // max(idle, 1), _LEAST_BYTES)
        segment = Segment(slowest.end - size, slowest.end, handed_on=True)
        slowest.end = segment.start
        return segment
