"""The pulls that pass through, and what becomes of their credentials.

Credentials are handed to the fetch process before containerd begins, for it asks us for layers in the middle of the
pull. They are kept for as long as a lazy layer on this node comes from their repository, because blocks are fetched
long after the pull; those of a failed pull are forgotten, and so are those that no layer needs after an image was
removed. The table is also in `supervise.memory`, where the successor of this process or of the fetch process finds it.

Shared state: `_lock` guards the table of pulls under way; `_handing` is held while the table of credentials is handed
over, so that an older one never replaces a newer one.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotter.cri.requests import PullRequest
from snapshotter.errors import InvalidArgument, SnapshotterError
from snapshotter.registry.passed import PassedCredentials
from snapshotter.registry.reference import ImageRef, parse_reference
from snapshotter.rpc import Unanswered, call
from snapshotter.supervise.memory import PassedMemory

__all__ = ["Pulls"]

_log = logging.getLogger(__name__)

_ANSWER_S = 2.0
_RESPAWN_S = 3.0  # a fetch process that was killed is back within milliseconds
_RETRY_S = 0.05


class Pulls:
    """Thread-safe."""

    def __init__(
        self, passed: PassedCredentials, memory: PassedMemory, fetch: Path, used: Callable[[], Iterable[str]]
    ) -> None:
        """`memory`: where `passed` is kept, too. `fetch`: the fetch process's socket. `used()`: references of the
        images that lazy layers came from."""
        self._passed = passed
        self._memory = memory
        self._fetch = fetch
        self._used = used
        self._lock = threading.Lock()
        self._handing = threading.Lock()
        self._under_way: Counter[PullRequest] = Counter()

    def __repr__(self) -> str:
        return f"<Pulls {len(self._under_way)} under way, {self._passed!r}>"

    def under_way(self) -> list[str]:
        """The images that are being pulled now, as they were asked for."""
        with self._lock:
            return [request.text for request in self._under_way]

    @contextmanager
    def pulling(self, request: PullRequest) -> Iterator[None]:
        """One pull: its credentials are there within the block, and after it unless it raises."""
        with self._lock:
            self._under_way[request] += 1
        is_new = request.passed is not None and self._passed.put(request.image, request.passed)
        try:
            if request.passed is not None:
                self._hand_over()
            yield
        except BaseException:
            if is_new:
                self._forget(request)
            raise
        finally:
            with self._lock:
                self._under_way[request] -= 1
                self._under_way += Counter()  # drops those at zero

    def forget_unused(self) -> None:
        """After an image was removed: forget the credentials of repositories that no lazy layer comes from."""
        try:
            used = list(self._used())
        except SnapshotterError as error:
            _log.warning("credentials.kept reason=%r", str(error))
            return
        wanted = {(image.host, image.repository) for image in _parsed([*used, *self.under_way()])}
        if self._passed.keep_only(wanted):
            self._hand_over()

    def _forget(self, request: PullRequest) -> None:
        """Forget a failed pull's credentials, unless another pull with the same is still under way."""
        with self._lock:
            others = sum(
                count
                for other, count in self._under_way.items()
                if (other.image.host, other.image.repository, other.passed)
                == (request.image.host, request.image.repository, request.passed)
            )
        if request.passed is not None and others <= 1:
            self._passed.forget(request.image, request.passed)
            self._hand_over()

    def _hand_over(self) -> None:
        """Have the fetch process know the same. Where it does not answer in time the pull goes on all the same: it
        looks at the memory when it starts."""
        give_up = time.monotonic() + _RESPAWN_S
        with self._handing:
            rows = self._passed.rows()
            self._memory.write(rows)
            while True:
                try:
                    call(self._fetch, "set-credentials", _ANSWER_S, rows=rows)
                    return
                except SnapshotterError as error:
                    if not isinstance(error, Unanswered) or time.monotonic() > give_up:
                        _log.error("credentials.not_handed_over error=%r", str(error))
                        return
                time.sleep(_RETRY_S)


def _parsed(references: Iterable[str]) -> Iterator[ImageRef]:
    for reference in references:
        try:
            yield parse_reference(reference)
        except InvalidArgument:
            continue
