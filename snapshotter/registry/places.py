"""The places of one pool for connections: idle ones, busy ones, and those that are being opened ahead of need.

urllib3 keeps idle connections in a stack that has as many entries as there may be connections: None is a place without
one; what is busy is not in it. Here a place can also be reserved for a connection that a thread opens before anybody
asks for it. Who needs a connection while such ones are on their way, and finds no idle one, waits for one of those: it
is there sooner than a new one would be. No more wait than are on their way.

Knows no sockets. Thread-safe; all under the stack's own lock.
"""

import queue
import time
from typing import Any

__all__ = ["Places"]


class Places(queue.LifoQueue[Any]):
    """See the module. The order of entries is as urllib3 makes it: those without a connection lie below all others."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__(maxsize)
        self._opening = 0
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<Places {self.qsize()} of {self.maxsize} not busy, {self._opening} being opened>"

    def reserve(self, most: int) -> int:
        """Take so many places that `most` of all have a connection, or will have. Each that is taken is given back by
        `opened`."""
        with self.mutex:
            empty = self.queue.count(None)
            count = max(min(most - (self.maxsize - empty), empty), 0)
            for _ in range(count):
                self.queue.remove(None)
            self._opening += count
            return count

    def opened(self, connection: Any) -> None:
        """Give a reserved place back: with its connection, or None where there was none to be had."""
        with self.mutex:
            self._opening -= 1
            if connection is None:
                self.queue.insert(0, None)
            else:
                self.queue.append(connection)
            self.not_empty.notify_all()

    def wait(self, most_s: float) -> None:
        """Return when a connection is idle, or none is on its way for the caller, or `most_s` are over."""
        give_up = time.monotonic() + most_s
        with self.mutex:
            while not self._is_one_idle() and self._waiting < self._opening:
                left_s = give_up - time.monotonic()
                if left_s <= 0:
                    return
                self._waiting += 1
                try:
                    self.not_empty.wait(left_s)
                finally:
                    self._waiting -= 1

    def _is_one_idle(self) -> bool:
        return bool(self.queue) and self.queue[-1] is not None
