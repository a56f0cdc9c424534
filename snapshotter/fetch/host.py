"""Whose bytes come first on the way to one registry host.

Every host has its own threads, so that a dead host holds up nobody else's layers. Three lanes: a reader waits for
DEMAND; HOT will be read soon; BACKGROUND perhaps some day. Whatever is not DEMAND asks before each request
(`give_way`), and its requests are short; one that is on the wire is finished, since what is left of it costs less than
the connection that would have to be closed: a new one starts slow (110 ms more for the next span at 100 Mbit/s and 20
ms). HOT waits while a reader does. BACKGROUND also waits for a pause, since a starting program reads again within
milliseconds, and for the end of all prefetches of the host's images, which is bounded by their own time-outs, and some
seconds more.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

__all__ = ["Host", "Lane"]

_log = logging.getLogger(__name__)

_QUIET_S = 0.3
_PATIENCE_S = 5.0  # a node whose readers never pause still completes its layers
_AFTER_HOT_S = 5.0  # containers are created, and their programs come up, within that time of the pull
_HOT_PATIENCE_S = 1.0  # a reader of a dead layer does not keep an image's hot blocks away


class Lane(IntEnum):
    """Classes of traffic, the most urgent first."""

    DEMAND = 0
    HOT = 1
    BACKGROUND = 2


class Host:
    """Threads and traffic of one host. Thread-safe."""

    def __init__(self, name: str, demand_threads: int, hot_threads: int, background_threads: int) -> None:
        self.name = name
        self._limits = {Lane.DEMAND: demand_threads, Lane.HOT: hot_threads, Lane.BACKGROUND: background_threads}
        self._running = dict.fromkeys(Lane, 0)
        self._queues: dict[Lane, list[tuple[float, int, Callable[[], None]]]] = {lane: [] for lane in Lane}
        self._serial = itertools.count()
        self._changed = threading.Condition()
        self._urgent = 0
        self._pulls = 0  # of these: work that no reader waits for, but a pull
        self._prefetches = 0
        self._pause_until = 0.0  # monotonic seconds
        self._last_urgent = -_QUIET_S
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
                self._start_thread(lane)
            self._changed.notify_all()

    def widen(self, lane: Lane, threads: int) -> None:
        """From now on the lane has this many threads, if they are more than before."""
        with self._changed:
            self._limits[lane] = max(self._limits[lane], threads)

    def tend(self) -> None:
        """Try again to start the threads that the system refused; to be called now and then."""
        with self._changed:
            for lane, queue in self._queues.items():
                if queue and not self._running[lane] and not self._closed:
                    self._start_thread(lane)

    def _start_thread(self, lane: Lane) -> None:
        """One more thread for the lane. Never raises: when the system has none, the job waits in the queue."""
        thread = threading.Thread(target=self._work, args=(lane,), name=f"{lane.name.lower()}-{self.name}")
        self._running[lane] += 1
        try:
            thread.start()
        except RuntimeError as error:
            self._running[lane] -= 1
            _log.error("fetch.no_thread host=%s lane=%s error=%r", self.name, lane.name, str(error))

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
            self._last_urgent = time.monotonic()
            self._changed.notify_all()

    @contextmanager
    def hurry(self) -> Iterator[None]:
        """The block is work that a pull waits for."""
        self._pulls_wait(+1)
        try:
            yield
        finally:
            self._pulls_wait(-1)

    def _pulls_wait(self, change: int) -> None:
        with self._changed:
            self._pulls += change
        self.urge(change)

    def prefetch(self, change: int, served: bool = False) -> None:
        """`change` more (or fewer) images whose hot blocks are on their way. After one whose blocks have come
        (`served`) the background stands back for `_AFTER_HOT_S` more: the start has what it needs, so let it have wire
        and cores."""
        with self._changed:
            self._prefetches += change
            if served:
                self._pause_until = time.monotonic() + _AFTER_HOT_S
            self._changed.notify_all()

    def give_way(self, lane: Lane, beside_pulls: bool = False) -> None:
        """Return when nothing more urgent than `lane` goes on; readers are waited for with patience only. What goes on
        `beside_pulls` waits for readers alone."""
        patience_s = _PATIENCE_S if lane is Lane.BACKGROUND else _HOT_PATIENCE_S
        quiet_s = _QUIET_S if lane is Lane.BACKGROUND else 0.0
        give_up = time.monotonic() + patience_s
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if lane is Lane.BACKGROUND and (self._prefetches or now < self._pause_until):
                    self._changed.wait(None if self._prefetches else self._pause_until - now)
                    continue
                urgent = self._urgent - (self._pulls if beside_pulls else 0)
                until = give_up if urgent else min(self._last_urgent + quiet_s, give_up)
                if until <= now:
                    return
                self._changed.wait(until - now)
