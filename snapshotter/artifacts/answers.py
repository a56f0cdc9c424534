"""Answers to look-ups: one request for all who ask the same, a bounded wait, and a memory for what was answered.

An asker waits until the look-up has been under way for `timeout_s`, then gets None; the look-up goes on, and what it
finds is there for the next. While one goes on like that, nobody waits for its host, whatever the question. So 30 layers
that ask, one after another, wait once. Bad answers are remembered like good ones, for `keep_s`. Each look-up has a
thread of its own, for HTTP has time-outs per byte only.

Shared state: `_lock` guards the tables and is never held while anybody waits.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Generic, TypeVar

from snapshotter.log import fields

__all__ = ["Answers"]

_MOST = 1024  # answers kept; the oldest go first

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Answers(Generic[_T]):
    """Thread-safe. `clock`: seconds that never go back."""

    def __init__(self, timeout_s: float, keep_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[tuple[object, ...], tuple[float, _T | None]] = {}
        self._under_way: dict[tuple[object, ...], tuple[float, Future[_T | None]]] = {}
        self._late: dict[str, Future[_T | None]] = {}  # host -> a look-up that was not waited for to its end

    def __repr__(self) -> str:
        return f"<Answers {len(self._known)} kept, {len(self._under_way)} under way>"

    def ask(self, host: str, question: tuple[object, ...], look: Callable[[], _T | None]) -> _T | None:
        """What `look` finds at `host`, or found a while ago; None also when it takes too long or fails."""
        question = (host, *question)
        with self._lock:
            now = self._clock()
            until, answer = self._known.get(question, (now, None))
            if until > now:
                return answer
            late = self._late.get(host)
            if late is not None and not late.done():
                return None
            begun, future = self._under_way.get(question, (now, None))
            if future is None:
                future = Future()
                thread = threading.Thread(target=self._run, args=(question, look, future), name="lookup", daemon=True)
                try:
                    thread.start()
                except RuntimeError as exc:  # no thread to be had: the start goes without
                    log.error("lookup.no_thread %s", fields(error=str(exc)))
                    return None
                self._under_way[question] = (now, future)
        try:
            return future.result(max(0.0, begun + self._timeout_s - self._clock()))
        except FutureTimeout:
            with self._lock:
                self._late[host] = future
            log.info("lookup.late %s", fields(host=host, timeout_s=self._timeout_s))
            return None

    def _run(self, question: tuple[object, ...], look: Callable[[], _T | None], future: "Future[_T | None]") -> None:
        answer: _T | None = None
        try:
            answer = look()
        except Exception:  # nobody above us in this thread; whoever asked goes without
            log.exception("lookup.failed %s", fields(question=question))
        with self._lock:
            self._known.pop(question, None)
            self._known[question] = (self._clock() + self._keep_s, answer)
            while len(self._known) > _MOST:
                del self._known[next(iter(self._known))]
            del self._under_way[question]
        future.set_result(answer)
