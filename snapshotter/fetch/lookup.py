"""Looking for an image's artifacts in registries: in the image's own repository first, then in the configured places.

All places are asked at once, and their answers are given in the order of preference; a place is waited for only while
nothing before it has been taken. What is found is judged by the trust policy. What is not trusted is refused: said once
in the log, and listed by `bootseer status`. Who asks decides what a refused artifact is still good for.

Knows no layers, no store and no prefetch. Never raises for what a registry does; each wait is bounded by `timeout_s`.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any, Protocol

from snapshotter.artifacts.finder import Found
from snapshotter.artifacts.model import Artifact, Kind
from snapshotter.config import LookupConfig
from snapshotter.errors import InvalidArgument
from snapshotter.log import fields
from snapshotter.model import Digest
from snapshotter.registry.reference import ImageRef, parse_reference, parse_repository
from snapshotter.trust.policy import Verdict

__all__ = ["Judged", "Lookup", "Refusals", "places_of"]

_log = logging.getLogger(__name__)

_THREADS = 32  # they only wait: a look-up that is under way has a thread of its own
_REFUSALS = 64


class ArtifactFinder(Protocol):
    """What `artifacts.finder.Finder` does."""

    def find(
        self, repository: ImageRef, image_key: str, kind: Kind, workload: str = "", subject: Digest | None = None
    ) -> Found | None:
        """The artifact, or None. Bounded in time; never raises."""

    def list(self, repository: ImageRef, image_key: str, subject: Digest | None = None) -> list[Found]:
        """All artifacts of the image. Bounded in time; never raises."""


@dataclass(frozen=True, slots=True)
class Judged:
    """An artifact that was found, and whether it is trusted."""

    found: Found
    verdict: Verdict

    @property
    def where(self) -> str:
        """The one name of the artifact and of its place."""
        return f"{self.found.repository}@{self.found.digest}"


def places_of(config: LookupConfig, image: str) -> list[ImageRef]:
    """Where artifacts of the image are looked for, the preferred place first. InvalidArgument for what is no image."""
    ref = parse_reference(image)
    own = [ImageRef(ref.host, ref.repository, None, None)] if config.registry else []
    return list(dict.fromkeys((*own, *map(parse_repository, config.places))))


class Refusals:
    """Which artifacts were refused, and why: the last `_REFUSALS`. Each is logged once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[tuple[str, str], dict[str, Any]] = {}

    def __repr__(self) -> str:
        return f"<Refusals {len(self._rows)}>"

    def add(self, judged: Judged, reason: str) -> None:
        """Note that this artifact, or a part of it, is not used."""
        artifact = judged.found.artifact
        row = {
            "artifact": artifact.kind.name.lower().replace("_", "-"),
            "workload": artifact.workload,
            "image_key": artifact.image_key,
            "from": judged.where,
            "reason": reason,
        }
        with self._lock:
            known = self._rows.pop((judged.where, reason), None)
            self._rows[judged.where, reason] = {**row, "times": known["times"] + 1 if known else 1}
            while len(self._rows) > _REFUSALS:
                del self._rows[next(iter(self._rows))]
        if known is None:
            _log.warning("artifact.refused %s", fields(**row))

    def rows(self) -> list[dict[str, Any]]:
        """What `bootseer status` shows: the latest last."""
        with self._lock:
            return list(self._rows.values())


class Lookup:
    """See the module. Thread-safe."""

    def __init__(
        self,
        finder: ArtifactFinder,
        judge: Callable[[Artifact], Verdict],
        config: LookupConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`judge`: see `trust.policy.Policy.judge`."""
        self.refusals = Refusals()
        self._finder = finder
        self._judge = judge
        self._config = config
        self._clock = clock
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="lookup")

    def __repr__(self) -> str:
        return f"<Lookup {self._finder!r} {self.refusals!r}>"

    def close(self) -> None:
        """Ask nobody any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def ask(self, image: str, key: str, kind: Kind, workload: str, subject: Digest | None) -> Iterator[Judged]:
        """Begin to look for the artifact now; the answers come as they are taken, the preferred place's first. `image`
        is the reference whose repository is asked, `subject` its manifest's digest where that is known."""
        try:
            places = places_of(self._config, image)
        except InvalidArgument:  # named by an index or a hot set's key only: there is nobody to ask
            places = []
        give_up = self._clock() + self._config.timeout_s
        try:
            asked = [self._threads.submit(self._finder.find, place, key, kind, workload, subject) for place in places]
        except RuntimeError as error:  # no thread to be had: the start goes without
            _log.error("lookup.no_thread error=%r", str(error))
            asked = []
        return self._in_order(asked, give_up)

    def survey(self, image: str, key: str, manifest: Digest) -> list[tuple[str, list[Judged]]]:
        """All artifacts of the image in each place, judged; nothing is noted as refused, for nothing was to be used."""
        places = places_of(self._config, image)
        listed = self._threads.map(lambda place: self._finder.list(place, key, manifest), places)
        return [
            (str(place), [Judged(found, self._judge(found.artifact)) for found in founds])
            for place, founds in zip(places, listed, strict=True)
        ]

    def _in_order(self, asked: Sequence[Future[Found | None]], give_up: float) -> Iterator[Judged]:
        for future in asked:
            try:
                found = future.result(max(give_up - self._clock(), 0.0))
            except FutureTimeout:
                continue
            if found is not None:
                judged = Judged(found, self._judge(found.artifact))
                if not judged.verdict.trusted:
                    self.refusals.add(judged, judged.verdict.reason)
                yield judged
