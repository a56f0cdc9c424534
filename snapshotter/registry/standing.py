"""Which of a registry's endpoints is asked first: in the configured order, those that have just failed at the end.

So the endpoint that served an image last is asked first for its next blobs, over connections that are warm, and a dead
mirror costs its time-out once, not with each request. After a while a failed one gets its turn again. No I/O.
"""

import threading
import time
from collections.abc import Callable, Sequence

from snapshotter.errors import SnapshotterError, Transient
from snapshotter.registry.endpoint import Endpoint

__all__ = ["Standing"]

_DOWN_S = 60.0  # an endpoint that does not answer, or with 5xx or 429
_LACKING_S = 300.0  # an endpoint that has not got this repository's contents, or does not give them to us


class Standing:
    """What is remembered of failures. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._until: dict[tuple[str, str], float] = {}  # (URL, repository, or "" for all) -> when it is forgotten

    def __repr__(self) -> str:
        return f"<Standing {len(self._until)} failures remembered>"

    def order(self, endpoints: Sequence[Endpoint], repository: str) -> list[Endpoint]:
        """The endpoints as they are to be asked."""
        now = self._clock()
        with self._lock:
            return sorted(
                endpoints,
                key=lambda one: any(self._until.get((one.url, name), now) > now for name in ("", repository)),
            )

    def failed(self, endpoint: Endpoint, repository: str, error: SnapshotterError) -> None:
        """The endpoint could not serve the repository."""
        now = self._clock()
        down = isinstance(error, Transient)
        pause_s = (error.retry_after_s or _DOWN_S) if isinstance(error, Transient) else _LACKING_S
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            self._until[endpoint.url, "" if down else repository] = now + pause_s
