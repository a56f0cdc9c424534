"""The push half of the registry protocol: blobs and manifests written to a repository, and manifests deleted.

A blob is one POST for an upload, and one PUT with all its bytes to where the answer says. A failure that may pass (a
reset, 429, 5xx, an upload that the registry has forgotten) begins the blob anew with another POST, a few times, as late
as the registry asks; so its bytes come from a callable. A manifest's PUT is simply repeated. What is read here, is read
where it is written: a mirror may not know it yet.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar
from urllib.parse import quote, urlencode, urljoin, urlsplit

from snapshotter.errors import Denied, InvalidArgument, NotFound, Transient
from snapshotter.log import fields
from snapshotter.model import Digest
from snapshotter.registry.answers import next_page, status_error
from snapshotter.registry.auth import DELETE
from snapshotter.registry.client import Registry
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.reference import ImageRef
from snapshotter.registry.transport import PIECE_BYTES, Reply, Upload

__all__ = ["Pusher"]

_ATTEMPTS = 5
_PAUSE_S = 0.5  # before the second attempt; doubled before each further one
_LONGEST_PAUSE_S = 60.0  # whoever asks for more is not waited for
_ANSWER_BYTES = 4 << 20

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Pusher:
    """Writes to repositories with the connections and tokens of `registry`. Thread-safe. The repository is that of the
    given reference; its tag and digest do not matter."""

    def __init__(self, registry: Registry, sleep: Callable[[float], None] = time.sleep) -> None:
        self._registry = registry
        self._sleep = sleep

    def __repr__(self) -> str:
        return f"<Pusher {self._registry!r}>"

    def has_blob(self, ref: ImageRef, digest: Digest) -> bool:
        """Whether the repository has the blob already; False also where it does not say."""
        what = f"blob {digest} of {_name(ref)}"

        def ask() -> bool:
            with self._registry.write("HEAD", ref, f"blobs/{digest}", {}, what)[0] as reply:
                error = status_error(reply.status, reply.headers, reply.what)
                if reply.status != 200 and isinstance(error, Transient):
                    raise error
                return reply.status == 200

        return self._again(ask)

    def put_blob(self, ref: ImageRef, digest: Digest, size: int, open_: Callable[[], Iterator[bytes]]) -> None:
        """Upload the blob; `open_` gives its `size` bytes, anew for each attempt."""
        what = f"upload of blob {digest} to {_name(ref)}"
        body = Upload(size, open_, what) if size else b""

        def upload() -> None:
            location = self._begin(ref, "blobs/uploads/", what)
            if location is None:
                raise InvalidArgument(f"{what}: the registry made a blob of nothing")
            url = f"{location}{'&' if urlsplit(location).query else '?'}{urlencode({'digest': digest})}"
            headers = {"Content-Type": "application/octet-stream"}
            with self._registry.write("PUT", ref, url, headers, what, body)[0] as reply:
                if reply.status in (404, 410):
                    raise Transient(f"{reply.what}: HTTP status {reply.status}: the registry has forgotten the upload")
                _expect(reply, 201, 204)

        self._again(upload)

    def mount_blob(self, ref: ImageRef, digest: Digest, source: str) -> bool:
        """Have the registry take the blob over from its repository `source`. False where it does not: then it has to be
        uploaded."""
        what = f"mount of blob {digest} into {_name(ref)}"
        path = f"blobs/uploads/?{urlencode({'mount': digest, 'from': source})}"
        return self._again(lambda: self._begin(ref, path, what) is None)

    def get(self, ref: ImageRef, path: str, accept: str, what: str) -> tuple[bytes, str | None] | None:
        """The answer's body, and the path of the page after it, if it is a page; None for whatever answer is no 200:
        what is asked for is then not there."""

        def ask() -> tuple[bytes, str | None] | None:
            reply, endpoint = self._registry.write("GET", ref, path, {"Accept": accept}, what)
            with reply:
                error = status_error(reply.status, reply.headers, reply.what)
                if reply.status != 200 and isinstance(error, Transient):
                    raise error
                following = next_page(f"{endpoint.url}/{ref.repository}/", reply.url, reply.headers)
                return (reply.read_all(_ANSWER_BYTES), following) if reply.status == 200 else None

        return self._again(ask)

    def put_manifest(self, ref: ImageRef, target: str, data: bytes, media_type: str) -> Mapping[str, str]:
        """Write a manifest under a tag or its digest; gives the headers of the answer."""
        what = f"push of manifest {target} to {_name(ref)}"

        body = data if len(data) <= PIECE_BYTES else Upload(len(data), lambda: iter((data,)), what)

        def put() -> Mapping[str, str]:
            path = f"manifests/{quote(target, safe=':')}"
            with self._registry.write("PUT", ref, path, {"Content-Type": media_type}, what, body)[0] as reply:
                _expect(reply, 201, 200, 202, 204)
                return reply.headers

        return self._again(put)

    def delete_manifest(self, ref: ImageRef, digest: Digest) -> bool:
        """Delete a manifest with its tags, if the registry allows it. True when it is not there afterwards."""
        what = f"deletion of manifest {digest} of {_name(ref)}"

        def delete() -> bool:
            with self._registry.write("DELETE", ref, f"manifests/{digest}", {}, what, actions=DELETE)[0] as reply:
                error = status_error(reply.status, reply.headers, reply.what)
                if reply.status >= 500:
                    raise error
                return reply.status < 300 or isinstance(error, NotFound)

        try:
            return self._again(delete)
        except Denied as exc:
            log.info("push.undeletable %s", fields(repository=_name(ref), digest=digest, reason=str(exc)))
            return False

    def _begin(self, ref: ImageRef, path: str, what: str) -> str | None:
        """Where the blob's bytes are to be sent; None when the registry has it without them."""
        reply, endpoint = self._registry.write("POST", ref, path, {}, what)
        with reply:
            _expect(reply, 202, 201)
            return None if reply.status == 201 else _location(reply, endpoint)

    def _again(self, work: Callable[[], _T]) -> _T:
        """What `work` gives; a failure that may pass is tried again, each time later."""
        pause_s = _PAUSE_S
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return work()
            except Transient as exc:
                wait_s = max(pause_s, exc.retry_after_s or 0.0)
                if attempt == _ATTEMPTS or wait_s > _LONGEST_PAUSE_S:
                    raise
                level = logging.INFO if attempt < _ATTEMPTS - 1 else logging.WARNING
                log.log(level, "push.again %s", fields(attempt=attempt, wait_s=round(wait_s, 1), error=str(exc)))
            self._sleep(wait_s)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")


def _location(reply: Reply, endpoint: Endpoint) -> str:
    """The URL of an upload. Registries behind a TLS proxy often name themselves without TLS: that is not followed."""
    try:
        url = urljoin(reply.url, reply.headers["Location"])
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except (KeyError, ValueError):
        usable = False
    if not usable:
        raise InvalidArgument(f"{reply.what}: the answer names no URL for the upload")
    if parts.scheme == "http" and parts.netloc == endpoint.host:
        return parts._replace(scheme=urlsplit(endpoint.url).scheme).geturl()
    return url


def _expect(reply: Reply, *statuses: int) -> None:
    if reply.status not in statuses:
        raise status_error(reply.status, reply.headers, reply.what)


def _name(ref: ImageRef) -> str:
    return f"{ref.host}/{ref.repository}"
