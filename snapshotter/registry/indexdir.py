"""A directory of ready-made layer indexes, on a web server or a file system.

A layer's index is `<directory>/sha256/<hex>.bsi`. The directory only ever helps: whatever goes wrong, `get` answers
None within a bounded time, and the layer goes without. Knows nothing of what an index holds; the caller validates it.

Shared state: `_lock` guards the table of absent digests and the health of the directory; never held over the network.
"""

import errno
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from blockindex.codec import index_name
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.log import fields
from snapshotter.model import Digest
from snapshotter.registry.answers import status_error
from snapshotter.registry.transport import Transport

__all__ = ["MAX_INDEX_BYTES", "IndexDirectory"]

MAX_INDEX_BYTES = 512 << 20
"""A larger index is refused: 512 MiB would be the windows of a 60 GB layer at one every 4 MiB, uncompressed."""

_ABSENT_S = 60.0  # how long a missing index is not asked for again
_DOWN_S = 10.0  # how long a directory that timed out is left alone, so that 30 layers do not wait one after another

_MIN_BYTES_PER_S = 1_000_000
"""A body that comes at least this fast is waited for: an index is a hundredth of the layer that it saves reading."""

log = logging.getLogger(__name__)


class IndexDirectory:
    """One directory of layer indexes: an http(s) URL, a file URL or a path. Thread-safe."""

    def __init__(
        self, location: str, timeout_s: float, connections: int = 8, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._location = location.rstrip("/")
        self._timeout_s = timeout_s
        self._clock = clock
        self._path = _local_path(location)
        self._transport = Transport(connections=connections, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        self._lock = threading.Lock()
        self._absent: dict[Digest, float] = {}
        self._down_until = 0.0
        self._warned = False

    def __repr__(self) -> str:
        state = "down" if self._down_until > self._clock() else "up"
        return f"<IndexDirectory {self._location} {state}, {len(self._absent)} known absent>"

    def close(self) -> None:
        """Close the idle connections."""
        self._transport.close()

    def get(self, digest: Digest) -> bytes | None:
        """The index file of the layer `digest`, or None; never raises for what the directory does.

        Takes at most `timeout_s` and a second for each MB that came, and as long again for a last piece that stalls.
        Trouble is logged as WARNING once, until the directory has worked again; a missing index is no trouble.
        """
        now = self._clock()
        with self._lock:
            if self._down_until > now or self._absent.get(digest, 0.0) > now:
                return None
        try:
            found = self._read(digest) if self._path is not None else self._fetch(digest, now + self._timeout_s)
        except NotFound:
            self._note(digest, None)
            return None
        except SnapshotterError as exc:
            self._note(None if isinstance(exc, Transient) else digest, exc)
            return None
        self._note(None, None)
        return found

    def _fetch(self, digest: Digest, deadline: float) -> bytes:
        url = f"{self._location}/{index_name(digest)}"
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

    def _read(self, digest: Digest) -> bytes:
        assert self._path is not None
        path = self._path / index_name(digest)
        try:
            if path.stat().st_size > MAX_INDEX_BYTES:
                raise InvalidArgument(f"{path}: longer than {MAX_INDEX_BYTES} bytes")
            return path.read_bytes()
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.ENOTDIR):
                raise NotFound(f"{path}: no such index") from exc
            raise Transient(f"{path}: {exc.strerror}") from exc

    def _note(self, absent: Digest | None, trouble: SnapshotterError | None) -> None:
        """Remember how a look-up went; says so once when the directory turns bad."""
        now = self._clock()
        with self._lock:
            warn = trouble is not None and not self._warned
            self._warned = trouble is not None
            if absent is not None:
                self._absent = {d: until for d, until in self._absent.items() if until > now}
                self._absent[absent] = now + _ABSENT_S
            if isinstance(trouble, Transient):
                self._down_until = now + _DOWN_S
        if warn:
            log.warning("indexdir.failed %s", fields(location=self._location, error=str(trouble)))


def _local_path(location: str) -> Path | None:
    """The directory's path if it is local, None if it is on a web server; InvalidArgument for any other URL."""
    if "://" not in location:
        return Path(location)
    parts = urlsplit(location)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return Path(unquote(parts.path))
    if parts.scheme in ("http", "https") and parts.netloc:
        return None
    raise InvalidArgument(f"index directory {location!r}: expected an http, https or file URL, or a path")
