"""What lately happened in the fetch process, for `bootseer explain`: who waited for which blocks, and what came in.

Bounded: the newest `_KEPT` events of each kind. A successor of a killed process begins with an empty journal; `since`
tells from when on it is whole. Thread-safe: a deque takes appends from any thread.
"""

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from .host import Lane

__all__ = ["Arrival", "Journal", "Wait"]

_KEPT = 20_000


class Wait(NamedTuple):
    """A read of the layer `name` that missed blocks: from when (seconds since 1970) and how long it waited, and the
    class of what brought the last of them ("checked": they were there, and in doubt after a power cut)."""

    at: float
    seconds: float
    name: str
    start: int
    end: int
    brought_by: str


class Arrival(NamedTuple):
    """A request is over, or a frame has landed: bytes that came of the layer `name`'s blob, or of the pack."""

    at: float
    name: str
    lane: str
    size: int


class Journal:
    """See the module."""

    def __init__(self) -> None:
        self._began = time.time()
        self._waits: deque[Wait] = deque(maxlen=_KEPT)
        self._arrivals: deque[Arrival] = deque(maxlen=_KEPT)

    def __repr__(self) -> str:
        return f"<Journal {len(self._waits)} waits, {len(self._arrivals)} arrivals>"

    def waited(self, name: str, since: float, start: int, end: int, lane: Lane | None) -> None:
        """A read that came at `since` (monotonic seconds) has been answered."""
        seconds = time.monotonic() - since
        brought_by = "checked" if lane is None else lane.name.lower()
        self._waits.append(Wait(time.time() - seconds, seconds, name, start, end, brought_by))

    def came(self, name: str, lane: Lane, size: int) -> None:
        """`size` bytes have come in."""
        self._arrivals.append(Arrival(time.time(), name, lane.name.lower(), size))

    def excerpt(self, names: Iterable[str], since: float, until: float) -> dict[str, Any]:
        """The events of these layers between two times (seconds since 1970), as JSON values; `whole_since` is the time
        from which on none is missing."""
        wanted = set(names)
        waits, arrivals = tuple(self._waits), tuple(self._arrivals)
        oldest = [self._began]
        if len(waits) == _KEPT:
            oldest.append(waits[0].at)
        if len(arrivals) == _KEPT:
            oldest.append(arrivals[0].at)
        return {
            "whole_since": max(oldest),
            "waits": [it._asdict() for it in waits if it.name in wanted and since <= it.at <= until],
            "arrivals": [it._asdict() for it in arrivals if it.name in wanted and since <= it.at <= until],
        }
