"""Looking for files in a directory that need not be there: what is known to be absent, and whether the directory works.

A directory of helpful files only ever helps, so it must not be asked again and again for what it lacks, nor at all for
a while after it has timed out: 30 layers would wait one after another. Thread-safe; nothing waits here.
"""

import logging
import threading
import time
from collections.abc import Callable

from snapshotter.errors import SnapshotterError, Transient
from snapshotter.log import fields

__all__ = ["Lookups"]

_ABSENT_S = 60.0  # how long a missing file is not asked for again
_DOWN_S = 10.0  # how long a directory that timed out is left alone


class Lookups:
    """How looking into the directory at `location` went so far; `event` is the name of its log lines."""

    def __init__(self, location: str, event: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._location = location
        self._event = event
        self._log = logging.getLogger(__name__)
        self._clock = clock
        self._lock = threading.Lock()
        self._absent: dict[str, float] = {}
        self._down_until = 0.0
        self._warned = False

    def __repr__(self) -> str:
        state = "down" if self._down_until > self._clock() else "up"
        return f"{self._location} {state}, {len(self._absent)} known absent"

    def pointless(self, name: str) -> bool:
        """Whether looking for the file `name` now would only take time."""
        now = self._clock()
        with self._lock:
            return self._down_until > now or self._absent.get(name, 0.0) > now

    def worked(self) -> None:
        """The directory has answered as it should."""
        with self._lock:
            self._warned = False

    def missed(self, name: str) -> None:
        """The directory works, and has no such file."""
        with self._lock:
            self._warned = False
            self._keep_absent(name)

    def failed(self, name: str, trouble: SnapshotterError) -> None:
        """The look-up went wrong. Logged as WARNING once, until the directory has worked again."""
        with self._lock:
            warn = not self._warned
            self._warned = True
            if isinstance(trouble, Transient):
                self._down_until = self._clock() + _DOWN_S
            else:
                self._keep_absent(name)
        if warn:
            self._log.warning("%s %s", self._event, fields(location=self._location, error=str(trouble)))

    def _keep_absent(self, name: str) -> None:
        now = self._clock()
        self._absent = {known: until for known, until in self._absent.items() if until > now}
        self._absent[name] = now + _ABSENT_S
