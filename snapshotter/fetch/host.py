"""Whose bytes come first on the way to one registry host.

Every host has its own threads, so that a dead host holds up nobody else's layers. Work is started in the order of its
lane, and work that no reader waits for lets the wire go as soon as a reader waits for any other: it stops reading
between two chunks (`Pace.turn`), and the sender stops once the receive window is full. A parked stream goes on after
`_PARK_S` even so, else connections time out at the far end.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from enum import IntEnum

__all__ = ["Host", "Lane"]

_log = logging.getLogger(__name__)

_PARK_S = 5.0


class Lane(IntEnum):
    """Classes of traffic, the most urgent first."""

    DEMAND = 0
    BACKGROUND = 2


class Host:
    """Threads and traffic of one host. Thread-safe."""

    def __init__(self, name: str, demand_threads: int, background_threads: int) -> None:
        self.name = name
        self._limits = {Lane.DEMAND: demand_threads, Lane.BACKGROUND: background_threads}
        self._running = dict.fromkeys(Lane, 0)
        self._queues: dict[Lane, list[tuple[float, int, Callable[[], None]]]] = {lane: [] for lane in Lane}
        self._serial = itertools.count()
        self._changed = threading.Condition()
        self._urgent = 0
        self._closed = False

    def __repr__(self) -> str:
        queued = sum(len(queue) for queue in self._queues.values())
        return f"<Host {self.name}: {sum(self._running.values())} running, {queued} queued, {self._urgent} urgent>"

    def submit(self, lane: Lane, job: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run `job` on a thread of its lane, not before `delay_s` from now."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._queues[lane], (time.monotonic() + delay_s, next(self._serial), job))
            if self._running[lane] < self._limits[lane]:
                self._running[lane] += 1
                threading.Thread(target=self._work, args=(lane,), name=f"{lane.name.lower()}-{self.name}").start()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is queued and let the threads end."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self, lane: Lane) -> None:
        """Run the lane's jobs until there are none; a thread that finds nothing to do ends."""
        queue = self._queues[lane]
        while True:
            with self._changed:
                while queue and not self._closed and (wait_s := queue[0][0] - time.monotonic()) > 0:
                    self._changed.wait(wait_s)
                if not queue or self._closed:
                    self._running[lane] -= 1
                    return
                job = heapq.heappop(queue)[2]
            try:
                job()
            except Exception:  # the border of the thread: one broken job must not take the lane with it
                _log.exception("fetch.job_failed host=%s lane=%s", self.name, lane.name)

    def urge(self, change: int) -> None:
        """`change` more (or fewer) pieces of work that a reader waits for."""
        with self._changed:
            self._urgent += change
            self._changed.notify_all()

    def turn(self, urgent: Callable[[], bool]) -> None:
        """Wait while readers wait for other work and `urgent()` says that none waits for this one."""
        give_up = time.monotonic() + _PARK_S
        with self._changed:
            while self._urgent and not urgent() and not self._closed:
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    return
                self._changed.wait(left_s)
