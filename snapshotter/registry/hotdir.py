"""A directory of hot sets, on a web server or a file system: `<directory>/hot/<image key>/<workload>.bsh`.

The look-up is the first request for the file's bytes: what is found begins to stream at once. Like the directory of
indexes it only ever helps; whatever goes wrong while looking, there is no hot set. Knows nothing of what a file holds.
"""

import os
import stat
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from blockindex.hotset import hotset_name
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.registry.answers import plan_body, status_error
from snapshotter.registry.body import read_body
from snapshotter.registry.lookups import Lookups, local_path
from snapshotter.registry.transport import Reply, Transport

__all__ = ["FIRST_BYTES", "HotDirectory", "HotFile", "HotStream"]

FIRST_BYTES = 256 << 10
"""What the look-up asks for: the head and the first frames, 21 ms at 100 Mbit/s."""

_CHUNK = 1 << 20


class HotStream(Iterator[bytes]):
    """The bytes `[start, end)` of a hot set's file as they arrive. Close it."""

    def __init__(self, start: int, end: int, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
        self.start = start
        self.end = end
        self._chunks = chunks
        self._close = close

    def __repr__(self) -> str:
        return f"<HotStream [{self.start}, {self.end})>"

    def __next__(self) -> bytes:
        return next(self._chunks)

    def close(self) -> None:
        """End the request. Its connection stays warm only if all was read."""
        self._close()


class HotFile:
    """A hot set's file that was found. `first` is the stream that the look-up began (take it once); `stream` asks for
    more. `signed_by`: the name of the trusted key that signed it, empty where nobody had to. Thread-safe but for
    `first`."""

    def __init__(
        self, where: str, size: int, first: HotStream, ask: Callable[[int, int], HotStream], signed_by: str = ""
    ) -> None:
        self.where = where
        self.signed_by = signed_by
        self.size = size
        self.first = first
        self._ask = ask

    def __repr__(self) -> str:
        return f"<HotFile {self.where}, {self.size} bytes>"

    def stream(self, start: int, end: int) -> HotStream:
        """The bytes `[start, end)`, by one request. Raises SnapshotterError."""
        return self._ask(start, end)


class HotDirectory:
    """One directory of hot sets: an http(s) URL, a file URL or a path. Thread-safe."""

    def __init__(
        self, location: str, timeout_s: float, connections: int = 16, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s` bounds connecting, and each wait for a byte. `connections`: streams of some images, and one for
        each reader that hurries a frame."""
        self._location = location.rstrip("/")
        self._path = local_path(location)
        self._transport = Transport(connections=connections, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        self._lookups = Lookups(self._location, "hotdir.failed", clock)

    def __repr__(self) -> str:
        return f"<HotDirectory {self._lookups!r}>"

    def close(self) -> None:
        """Close the idle connections."""
        self._transport.close()

    def find(self, image_key: str, workload: str) -> HotFile | None:
        """The hot set of this image and workload, or None; never raises for what the directory does."""
        name = hotset_name(image_key, workload)
        if self._lookups.pointless(name):
            return None
        try:
            found = self._open_local(name) if self._path is not None else self._open_remote(name)
        except NotFound:
            self._lookups.missed(name)
            return None
        except SnapshotterError as exc:
            self._lookups.failed(name, exc)
            return None
        self._lookups.worked()
        return found

    def _open_remote(self, name: str) -> HotFile:
        url = f"{self._location}/{name}"
        first, size = self._request(url, 0, FIRST_BYTES)
        return HotFile(url, size, first, lambda start, end: self._request(url, start, end)[0])

    def _request(self, url: str, start: int, end: int) -> tuple[HotStream, int]:
        """One GET: its stream, which ends at the file's end at the latest, and the file's size."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        reply = self._transport.open("GET", url, headers, f"hot set, bytes [{start}, {end})")
        try:
            return _stream_of(reply, start, end)
        except BaseException:
            reply.finish()
            raise

    def _open_local(self, name: str) -> HotFile:
        assert self._path is not None
        path = self._path / name
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise InvalidArgument(f"{path}: is not a file")
            size = status.st_size
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise NotFound(f"{path}: no such hot set") from exc
        except OSError as exc:
            raise Transient(f"{path}: {exc.strerror}") from exc
        os.close(descriptor)

        def ask(start: int, end: int) -> HotStream:
            chunks = _read_file(str(path), start, min(end, size))
            return HotStream(start, min(end, size), chunks, chunks.close)

        return HotFile(str(path), size, ask(0, size), ask)


def _stream_of(reply: Reply, start: int, end: int) -> tuple[HotStream, int]:
    if reply.status not in (200, 206):
        raise status_error(reply.status, reply.headers, reply.what)
    if reply.headers.get("Content-Type", "").startswith("text/html"):
        raise InvalidArgument(f"{reply.what}: a web page came instead of a hot set")
    plan = plan_body(reply.status, reply.headers, start, end, reply.what)
    if plan.total is None:
        raise InvalidArgument(f"{reply.what}: the server does not tell the file's size")
    if start == 0 and not plan.ranges:  # no ranges here: then all of it comes in one stream
        end = plan.total
    end = min(end, plan.total)
    chunks = _closing(reply, read_body(reply, replace(plan, length=end - start)))
    return HotStream(start, end, chunks, reply.close), plan.total


def _closing(reply: Reply, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """`chunks`, and the connection is given back as soon as they have ended."""
    yield from chunks
    reply.close()


def _read_file(path: str, start: int, end: int) -> Generator[bytes]:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            while start < end:
                chunk = file.read(min(_CHUNK, end - start))
                if not chunk:
                    raise Transient(f"{path}: ends at {start}, not at {end}")
                start += len(chunk)
                yield chunk
    except OSError as exc:
        raise Transient(f"{path}: {exc.strerror}") from exc
