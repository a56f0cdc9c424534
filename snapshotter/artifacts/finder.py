"""Finding the artifacts of an image in a repository. It only ever helps: whatever goes wrong means "none".

First the tag that follows from the image key: one request, and where the manifest holds a hot set's head, nothing else
stands before its bytes. Then, where the image's manifest is known, what the registry lists as referring to it: by the
referrers API page by page, or in the fallback tag. Whether a host has that API is remembered. What an entry of a list
says of itself is a hint; the manifest decides, and its bytes have to have the digest that was asked for. A header that
names a digest is not believed.

404, a web page, a redirect to a login, any 4xx: none. All but 404 are said once for each repository, until it answers
as it should again. A host that does not answer, or says that it cannot, is left alone for a while. Only whoever copies
or publishes wants to know that (`strict`): there, none would be wrong.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlencode

from snapshotter.artifacts.answers import Answers
from snapshotter.artifacts.manifest import MANIFEST_BYTES, MANIFEST_TYPE, decode, digest_of, tag_prefix, tags
from snapshotter.artifacts.model import Artifact, Kind
from snapshotter.artifacts.referrers import (
    REFERRERS_TYPE,
    Referrer,
    fallback_tag,
    parse_referrers,
    parse_tags,
)
from snapshotter.errors import InvalidArgument, NotFound, Precondition, SnapshotterError, Transient
from snapshotter.log import fields
from snapshotter.model import Digest
from snapshotter.registry.answers import next_page, status_error
from snapshotter.registry.client import Registry
from snapshotter.registry.reference import ImageRef

__all__ = ["Finder", "Found"]

_NO_API_S = 3600.0  # how long a host without the referrers API is not asked for it again
_DOWN_S = 10.0  # how long a host in trouble is left alone, unless it says itself
_PAGES = 16
_MOST_JUDGED = 8  # entries of a list whose manifests are looked at for one artifact
_MOST_LISTED = 64  # artifacts of one image
_TAGS_AT_ONCE = 100

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Found:
    """An artifact, and where it is: `repository` has neither tag nor digest, `digest` is that of the manifest."""

    artifact: Artifact
    repository: ImageRef
    digest: Digest

    @property
    def identity(self) -> tuple[Kind, str, str]:
        """What there is one of at most at a time: kind, image key, workload."""
        return self.artifact.kind, self.artifact.image_key, self.artifact.workload


class Finder:
    """Look-ups in all registries. Thread-safe. Unless `strict`, a call takes `timeout_s` at most and never raises."""

    def __init__(
        self,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        *,
        timeout_s: float = 5.0,
        absent_s: float = 60.0,
        strict: bool = False,
    ) -> None:
        """`absent_s`: how long an answer, found or not, is not asked for again. `strict`: each call takes as long as it
        takes, remembers nothing, and raises Transient or Precondition where the registry cannot be asked."""
        self._registry = registry
        self._clock = clock
        self._strict = strict
        self._found: Answers[tuple[Found, ...]] = Answers(timeout_s, absent_s, clock)
        self._lists: Answers[tuple[Referrer, ...]] = Answers(timeout_s, absent_s, clock)
        self._lock = threading.Lock()
        self._no_api: dict[str, float] = {}  # host -> until when it is not asked for the referrers API
        self._down: dict[str, float] = {}  # host -> until when it is left alone
        self._said: set[str] = set()  # repositories whose trouble was said

    def __repr__(self) -> str:
        return f"<Finder {self._found!r}, {len(self._no_api)} hosts without the referrers API>"

    def find(
        self, repository: ImageRef, image_key: str, kind: Kind, workload: str = "", subject: Digest | None = None
    ) -> Found | None:
        """The artifact of this kind and workload of the image with this key, or None. `subject`: the image's manifest
        on this platform, where it is known: finds what was published without the key's tag."""
        place = _place(repository)
        question = (place.repository, image_key, kind, workload, subject)
        found = self._ask(self._found, place, question, lambda: self._find(place, image_key, kind, workload, subject))
        return found[0] if found else None

    def list(self, repository: ImageRef, image_key: str, subject: Digest | None = None) -> list[Found]:
        """All artifacts of the image, in the order of kinds and workloads; where several are of one kind and workload,
        first the one at the key's tag."""
        place = _place(repository)
        question = (place.repository, image_key, subject)
        found = self._ask(self._found, place, question, lambda: self._list(place, image_key, subject))
        return list(found or ())

    def _find(
        self, place: ImageRef, image_key: str, kind: Kind, workload: str, subject: Digest | None
    ) -> tuple[Found, ...]:
        wanted = (kind, image_key, workload)
        found = self._read(place, tags(kind, image_key.removeprefix("sha256:"), workload))
        if found is not None and found.identity == wanted:
            return (found,)
        listed = self._referrers(place, subject, kind) if subject is not None else ()
        newest = sorted((one.created, one.digest) for one in listed if one.may_be(*wanted))
        for _, digest in newest[: -_MOST_JUDGED - 1 : -1]:
            found = self._read(place, digest)
            if found is not None and found.identity == wanted:
                return (found,)
        return ()

    def _list(self, place: ImageRef, image_key: str, subject: Digest | None) -> tuple[Found, ...]:
        hex_digits = image_key.removeprefix("sha256:")
        targets = [*self._tags(place, tag_prefix(hex_digits))]
        if subject is not None:
            listed = [one for kind in Kind for one in self._referrers(place, subject, kind)]
            targets += [one.digest for one in listed if one.image_key in (None, image_key)]
        found: dict[str, Found] = {}
        for target in targets[:_MOST_LISTED]:
            one = self._read(place, target) if target not in found else None
            if one is not None and one.artifact.image_key == image_key:
                found.setdefault(one.digest, one)
        order = list(Kind)
        return tuple(sorted(found.values(), key=lambda one: (order.index(one.artifact.kind), one.artifact.workload)))

    def _read(self, place: ImageRef, target: str) -> Found | None:
        """The artifact under a tag or digest; None where there is none that makes sense."""

        def read() -> Found:
            what = f"artifact {target} of {place}"
            body = self._get(place, f"manifests/{target}", MANIFEST_TYPE, what)[0]
            digest = digest_of(body)
            if target.startswith("sha256:") and target != digest:
                raise InvalidArgument(f"{what}: what came has the digest {digest}")
            try:
                return Found(decode(body), place, digest)
            except InvalidArgument as exc:
                raise InvalidArgument(f"{what}: {exc}") from exc

        return self._tried(place, read)

    def _tags(self, place: ImageRef, prefix: str) -> Sequence[str]:
        """The tags of the repository that begin with `prefix`: those that come after it, as registries sort them."""
        found: set[str] = set()

        def read() -> None:
            path: str | None = f"tags/list?{urlencode({'n': _TAGS_AT_ONCE, 'last': prefix})}"
            for _ in range(_PAGES):
                body, path = self._get(place, path or "", "application/json", f"tags of {place}")
                names = parse_tags(body)
                found.update(name for name in names if name.startswith(prefix))
                if path is None or any(name > prefix and not name.startswith(prefix) for name in names):
                    return

        self._tried(place, read)
        return sorted(found)

    def _referrers(self, place: ImageRef, subject: Digest, kind: Kind) -> tuple[Referrer, ...]:
        """The entries of this kind that the registry lists for `subject`."""

        def read() -> Sequence[Referrer]:
            with self._lock:
                without = self._no_api.get(place.host, 0.0) > self._clock()
            listed = None if without else self._by_api(place, subject, kind)
            if listed is not None:
                return listed
            path = f"manifests/{fallback_tag(subject)}"
            return parse_referrers(self._get(place, path, REFERRERS_TYPE, f"referrers of {subject} in {place}")[0])

        def look() -> tuple[Referrer, ...]:
            return tuple(one for one in self._tried(place, read) or () if one.kind is kind)

        return self._ask(self._lists, place, (place.repository, subject, kind), look) or ()

    def _by_api(self, place: ImageRef, subject: Digest, kind: Kind) -> Sequence[Referrer] | None:
        """What the referrers API lists, all pages; None where the host has no such API."""
        found: tuple[Referrer, ...] = ()
        path: str | None = f"referrers/{subject}?{urlencode({'artifactType': kind.value})}"
        for page in range(_PAGES):
            try:
                body, path = self._get(place, path or "", REFERRERS_TYPE, f"referrers of {subject} in {place}")
                found += tuple(parse_referrers(body))
            except (InvalidArgument, NotFound) as exc:
                if page > 0 or isinstance(exc, _NoRepository):
                    raise
                with self._lock:
                    self._no_api[place.host] = self._clock() + _NO_API_S
                log.info("lookup.no_referrers %s", fields(host=place.host, answer=str(exc)))
                return None
            if path is None:
                break
        return found

    def _get(self, place: ImageRef, path: str, accept: str, what: str) -> tuple[bytes, str | None]:
        """The body, and the path of the page that follows it, if it is a page. Raises SnapshotterError."""
        reply, endpoint = self._registry.open("GET", place, path, {"Accept": accept}, what, optional=True)
        with reply:
            if reply.status != 200:
                error = status_error(reply.status, reply.headers, reply.what)
                unknown = isinstance(error, NotFound) and b"NAME_UNKNOWN" in reply.read_all(MANIFEST_BYTES)
                raise _NoRepository(str(error)) if unknown else error
            if reply.headers.get("Content-Type", "").startswith("text/html"):
                raise InvalidArgument(f"{reply.what}: a web page came")
            root = f"{endpoint.url}/{place.repository}/"
            return reply.read_all(MANIFEST_BYTES), next_page(root, reply.url, reply.headers)

    def _ask(
        self, answers: Answers[_T], place: ImageRef, question: tuple[object, ...], look: Callable[[], _T]
    ) -> _T | None:
        return look() if self._strict else answers.ask(place.host, question, look)

    def _tried(self, place: ImageRef, work: Callable[[], _T]) -> _T | None:
        """What `work` gives, or None. Trouble is said once, until the repository has answered as it should."""
        with self._lock:
            if not self._strict and self._down.get(place.host, 0.0) > self._clock():
                return None
        try:
            result = work()
        except NotFound:
            result = None
        except SnapshotterError as exc:
            if self._strict and isinstance(exc, (Transient, Precondition)):
                raise
            with self._lock:
                if isinstance(exc, Transient):
                    self._down[place.host] = self._clock() + (exc.retry_after_s or _DOWN_S)
                said = str(place) in self._said
                self._said.add(str(place))
            if not said:
                log.warning("lookup.refused %s", fields(repository=place, error=str(exc)))
            return None
        with self._lock:
            self._said.discard(str(place))
        return result


class _NoRepository(NotFound):
    """The host has no such repository, which says nothing about what else it has."""


def _place(repository: ImageRef) -> ImageRef:
    return ImageRef(repository.host, repository.repository, None, None)
