"""One blob at its registry: its size, and its bytes as a stream of chunks.

Registries often redirect blobs to another host with a signed, expiring URL: that URL is kept and asked directly, and
found anew once when it is refused (401, 403, 404, 410), after any failure, or after `_LOCATION_S`. Ranges are single;
a server that ignores them is used by skipping. Retries are the caller's business.

Shared state: `RegistryBlob._lock` guards location and size; `BlobStream._lock` its reply and whether it was closed.
Neither is held over the network.
"""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from snapshotter.errors import InvalidArgument, SnapshotterError, Transient
from snapshotter.model import Digest
from snapshotter.registry.answers import plan_body, status_error, total_size
from snapshotter.registry.body import read_body
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.reference import ImageRef
from snapshotter.registry.transport import Reply

if TYPE_CHECKING:
    from snapshotter.registry.client import Registry

__all__ = ["BlobStream", "RegistryBlob"]

_LOCATION_S = 300.0  # signed URLs live 10 minutes and more at the large registries
_MOVED = (401, 403, 404, 410)


class RegistryBlob:
    """A BlobSource at a registry. Thread-safe. `ranges_ignored` turns true once the server answered a range with the
    whole blob: from then on one whole stream is cheaper than several ranges."""

    def __init__(self, registry: "Registry", image: ImageRef, digest: Digest) -> None:
        self.digest = digest
        self.ranges_ignored = False
        self._registry = registry
        self._image = image
        self._lock = threading.Lock()
        self._location: tuple[str, float, Endpoint] | None = None
        self._size: int | None = None
        self._answered: Endpoint | None = None  # who gave the latest range, or the location of it

    def __repr__(self) -> str:
        where = f"{self._image.host}/{self._image.repository}"
        moved = " redirected" if self._location else ""
        return f"<RegistryBlob {self.digest[:19]} of {where}, {self._size} bytes{moved}>"

    def size(self) -> int:
        """Bytes of the blob: known from an earlier answer, else by HEAD, else by a range of one byte."""
        with self._lock:
            if self._size is not None:
                return self._size
        total = self._head_size()
        if total is None:
            what = self._what(0, 1)
            with self.open_range(0, 1, what)[0] as reply:
                if reply.status not in (200, 206):
                    raise status_error(reply.status, reply.headers, reply.what)
                total = total_size(reply.status, reply.headers)
        if total is None:
            raise InvalidArgument(f"layer {self.digest}: {self._image.host} does not tell the blob's size")
        self.learn(total)
        return total

    def stream(self, start: int, end: int | None) -> "BlobStream":
        """The blob's bytes `[start, end)`, see BlobSource. The request goes out with the first `next`; `close` may be
        called by any thread and wakes a reader that is blocked, which then gets Transient."""
        if start < 0 or (end is not None and end < start):
            raise InvalidArgument(f"layer {self.digest}: [{start}, {end}) is not a range")
        return BlobStream(self, start, end)

    def round_trip_s(self) -> float:
        """The round trip to the host that has the bytes, in seconds, 0.0 while it is not known: of a blob that was not
        asked for yet, to the registry's own host."""
        with self._lock:
            location = self._location
        if location is not None:
            return self._registry.transport.round_trip_s(location[0])
        return self._registry.round_trip_s(self._image)

    def learn(self, total: int) -> None:
        """Keep the size that an answer told."""
        with self._lock:
            self._size = total

    def open_range(self, start: int, end: int | None, what: str) -> tuple[Reply, Endpoint]:
        """The answer to one GET of `[start, end)`, at the known location or else by way of the registry; and who gave
        it, or the location."""
        headers: dict[str, str] = {}
        if start > 0 or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        with self._lock:
            location = self._location
        if location is not None and location[1] > time.monotonic():
            try:
                reply = self._registry.transport.open("GET", location[0], headers, what, line=location[2].line)
            except SnapshotterError:
                self.forget_location(location)
                raise
            if reply.status not in _MOVED:
                if reply.status >= 500:
                    self.forget_location(location)
                self._answered = location[2]
                return reply, location[2]
            reply.finish()
            self.forget_location(location)
        reply, endpoint = self._registry.open("GET", self._image, f"blobs/{self.digest}", headers, what)
        if reply.redirected and reply.status in (200, 206):
            with self._lock:
                self._location = (reply.url, time.monotonic() + _LOCATION_S, endpoint)
        self._answered = endpoint
        return reply, endpoint

    def broke_off(self, endpoint: Endpoint, error: Transient) -> None:
        """An answer of `endpoint`, or of where it had sent us, was not good to its end."""
        self.forget_location()
        self._registry.blame(endpoint, self._image, error)

    def refuted(self, reason: str) -> None:
        """See RemoteBlob: a mirror with other bytes is asked last for a while, and a location is found anew. Of answers
        at the same time the latest is blamed: the next wrong bytes find the right one."""
        if self._answered is not None:
            self.broke_off(self._answered, Transient(f"layer {self.digest}: {reason}"))

    def forget_location(self, location: tuple[str, float, Endpoint] | None = None) -> None:
        """Ask the registry next time (only if the location is still `location`, when given)."""
        with self._lock:
            if location is None or self._location == location:
                self._location = None

    def _head_size(self) -> int | None:
        """The size by HEAD; None where HEAD is refused, as signed URLs do, or tells nothing."""
        what = f"size of layer {self.digest} of {self._image.host}/{self._image.repository}"
        try:
            with self._registry.open("HEAD", self._image, f"blobs/{self.digest}", {}, what)[0] as reply:
                if reply.status in (429, 500, 502, 503, 504):
                    raise status_error(reply.status, reply.headers, reply.what)
                return total_size(reply.status, reply.headers)
        except Transient:
            raise
        except SnapshotterError:
            return None

    def _what(self, start: int, end: int | None) -> str:
        bounds = f"bytes [{start}, {'end' if end is None else end})"
        return f"layer {self.digest} of {self._image.host}/{self._image.repository}, {bounds}"


class BlobStream(Iterator[bytes]):
    """The chunks of one range as they arrive. One thread iterates; any thread may `close`."""

    def __init__(self, blob: RegistryBlob, start: int, end: int | None) -> None:
        self._blob = blob
        self._start, self._end = start, end
        self._what = blob._what(start, end)
        self._lock = threading.Lock()
        self._reply: Reply | None = None
        self._closed = False
        self._given = 0
        self._chunks = self._run()

    def __repr__(self) -> str:
        state = " closed" if self._closed else ""
        return f"<BlobStream {self._what}, {self._given} bytes given{state}>"

    def __iter__(self) -> "BlobStream":
        return self

    def __next__(self) -> bytes:
        return next(self._chunks)

    def close(self) -> None:
        """Cancel; drops the connection unless the range was read whole. Idempotent."""
        with self._lock:
            self._closed = True
            reply = self._reply
        if reply is not None:
            reply.cancel()
        with suppress(ValueError):  # another thread is inside: it wakes up, sees `_closed`, closes the reply itself
            self._chunks.close()

    def _run(self) -> Generator[bytes]:
        if self._start == self._end:
            return
        self._check_open()
        reply, endpoint = self._blob.open_range(self._start, self._end, self._what)
        try:
            with self._lock:
                self._reply = reply
            self._check_open()
            yield from self._body(reply)
        except Transient as error:
            if not self._closed:  # else it is our own doing
                self._blob.broke_off(endpoint, error)
            raise
        finally:
            with self._lock:
                self._reply = None
            reply.close()

    def _body(self, reply: Reply) -> Iterator[bytes]:
        plan = plan_body(reply.status, reply.headers, self._start, self._end, reply.what)
        if plan.total is not None:
            self._blob.learn(plan.total)
        if not plan.ranges:
            self._blob.ranges_ignored = True
        for chunk in read_body(reply, plan):
            self._check_open()
            self._given += len(chunk)
            yield chunk
        self._check_open()  # a body that stops short because it was cancelled is no fault of the server's

    def _check_open(self) -> None:
        if self._closed:
            raise Transient(f"{self._what}: cancelled")
