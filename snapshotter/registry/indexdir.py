"""A directory of ready-made layer indexes, on a web server, a file system or any storage.

A layer's index is `<directory>/sha256/<hex>.bsi`. The directory only ever helps: whatever goes wrong, `get` answers
None within a bounded time, and the layer goes without; a person who asks is told by `read`. Knows nothing of what an
index holds; the caller validates it.
"""

import time
from collections.abc import Callable

from blockindex.codec import index_name
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.model import Digest
from snapshotter.registry.answers import status_error
from snapshotter.registry.lookups import Lookups
from snapshotter.registry.storage import Storage, open_storage, shown
from snapshotter.registry.transport import Transport

__all__ = ["MAX_INDEX_BYTES", "IndexDirectory"]

MAX_INDEX_BYTES = 512 << 20
"""A larger index is refused: 512 MiB would be the windows of a 60 GB layer at one every 4 MiB, uncompressed."""

_FIRST_BYTES = 2 << 20
"""What the first request at a URL of fsspec's asks for, whole as a rule: an index is 0.5 % of its layer's blob."""

_MIN_BYTES_PER_S = 1_000_000
"""A body that comes at least this fast is waited for: an index is a hundredth of the layer that it saves reading."""


class IndexDirectory:
    """One directory of layer indexes: an http(s) URL, a file URL, another one that fsspec knows, or a path.
    Thread-safe."""

    def __init__(
        self, location: str, timeout_s: float, connections: int = 8, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = location.rstrip("/")
        self.location = shown(self._url)
        self._timeout_s = timeout_s
        self._clock = clock
        self._storage = open_storage(location, timeout_s)
        self._transport = Transport(connections=connections, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        self._lookups = Lookups(self.location, "indexdir.failed", clock)

    def __repr__(self) -> str:
        return f"<IndexDirectory {self._lookups!r}>"

    @property
    def is_authentic(self) -> bool:
        """Whether what comes is the operator's: by plain HTTP or FTP it can be anybody's on the way."""
        hops = self._url.lower().split("::")  # fsspec chains storages: simplecache::http://
        return not any(hop.startswith(("http://", "ftp://")) for hop in hops)

    def close(self) -> None:
        """Close the idle connections."""
        self._transport.close()
        if self._storage is not None:
            self._storage.close()

    def get(self, digest: Digest) -> bytes | None:
        """The index file of the layer `digest`, or None; never raises for what the directory does.

        Takes at most `timeout_s` and a second for each MB that came, and as long again for a last piece that stalls.
        Trouble is logged as WARNING once, until the directory has worked again; a missing index is no trouble.
        """
        if self._lookups.pointless(digest):
            return None
        try:
            found = self.read(digest)
        except NotFound:
            self._lookups.missed(digest)
            return None
        except SnapshotterError as exc:
            self._lookups.failed(digest, exc)
            return None
        self._lookups.worked()
        return found

    def read(self, digest: Digest) -> bytes:
        """The same, but raises NotFound where there is no such file, and another SnapshotterError for trouble; logs and
        remembers neither."""
        return self._fetch(digest) if self._storage is None else _read(self._storage, digest)

    def _fetch(self, digest: Digest) -> bytes:
        deadline = self._clock() + self._timeout_s
        url = f"{self._url}/{index_name(digest)}"
        with self._transport.open("GET", url, {}, f"index of layer {digest}") as reply:
            if reply.status != 200:
                raise status_error(reply.status, reply.headers, reply.what)
            if reply.headers.get("Content-Type", "").startswith("text/html"):
                raise InvalidArgument(f"{reply.what}: a web page came instead of an index")
            chunks: list[bytes] = []
            size = 0
            while chunk := reply.read1():
                chunks.append(chunk)
                size += len(chunk)
                if size > MAX_INDEX_BYTES:
                    raise InvalidArgument(f"{reply.what}: longer than {MAX_INDEX_BYTES} bytes")
                if self._clock() > deadline + size / _MIN_BYTES_PER_S:
                    raise Transient(f"{reply.what}: only {size} bytes within {self._timeout_s} s")
            return b"".join(chunks)


def _read(storage: Storage, digest: Digest) -> bytes:
    name = index_name(digest)
    first = storage.first(name, _FIRST_BYTES)
    if len(first) < _FIRST_BYTES:
        return first
    size = storage.size(name)
    if size > MAX_INDEX_BYTES:
        raise InvalidArgument(f"{storage.locate(name)}: longer than {MAX_INDEX_BYTES} bytes")
    return b"".join((first, *storage.chunks(name, len(first), size)))
