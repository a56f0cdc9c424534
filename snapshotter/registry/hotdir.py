"""A directory of hot sets, on a web server, a file system or any storage: `<directory>/hot/<image key>/<workload>.bsh`.

The look-up is the first request for the file's bytes: what is found begins to stream at once. Like the directory of
indexes it only ever helps; whatever goes wrong while looking, there is no hot set. Of what a file holds it knows only
how long its head says that it is.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from blockindex.errors import BlockIndexError
from blockindex.hotpack import HeadReader
from blockindex.hotset import hotset_name
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.registry.answers import plan_body, status_error
from snapshotter.registry.body import read_body
from snapshotter.registry.hotfile import HotFile, HotStream
from snapshotter.registry.lookups import Lookups
from snapshotter.registry.storage import LocalStorage, Storage, open_storage, shown
from snapshotter.registry.transport import Reply, Transport

__all__ = ["FIRST_BYTES", "HotDirectory"]

FIRST_BYTES = 256 << 10
"""What the look-up asks for: the head and the first frames, 21 ms at 100 Mbit/s."""


class HotDirectory:
    """One directory of hot sets: an http(s) URL, a file URL, another one that fsspec knows, or a path.
    Thread-safe."""

    def __init__(
        self, location: str, timeout_s: float, connections: int = 16, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`timeout_s` bounds connecting, and each wait for a byte. `connections`: streams of some images, and one for
        each reader that hurries a frame."""
        self._location = location.rstrip("/")
        self._storage = open_storage(location, timeout_s)
        self._transport = Transport(connections=connections, connect_timeout_s=timeout_s, read_timeout_s=timeout_s)
        self._lookups = Lookups(shown(self._location), "hotdir.failed", clock)

    def __repr__(self) -> str:
        return f"<HotDirectory {self._lookups!r}>"

    def close(self) -> None:
        """Close the idle connections."""
        self._transport.close()
        if self._storage is not None:
            self._storage.close()

    def find(self, image_key: str, workload: str) -> HotFile | None:
        """The hot set of this image and workload, or None; never raises for what the directory does."""
        name = hotset_name(image_key, workload)
        if self._lookups.pointless(name):
            return None
        try:
            found = self.open(image_key, workload)
        except NotFound:
            self._lookups.missed(name)
            return None
        except SnapshotterError as exc:
            self._lookups.failed(name, exc)
            return None
        self._lookups.worked()
        return found

    def open(self, image_key: str, workload: str) -> HotFile:
        """The same, but raises NotFound where there is no such file, and another SnapshotterError for trouble; logs and
        remembers neither."""
        name = hotset_name(image_key, workload)
        if self._storage is None:
            return self._open_remote(name)
        return (
            _open_local(self._storage, name) if isinstance(self._storage, LocalStorage) else _open(self._storage, name)
        )

    def _open_remote(self, name: str) -> HotFile:
        url = f"{self._location}/{name}"
        first, size = self._request(url, 0, FIRST_BYTES)
        return HotFile(shown(url), size, first, lambda start, end: self._request(url, start, end)[0])

    def _request(self, url: str, start: int, end: int) -> tuple[HotStream, int]:
        """One GET: its stream, which ends at the file's end at the latest, and the file's size."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        reply = self._transport.open("GET", url, headers, f"hot set, bytes [{start}, {end})")
        try:
            return _stream_of(reply, start, end)
        except BaseException:
            reply.finish()
            raise


def _open(storage: Storage, name: str) -> HotFile:
    """What is at a URL of fsspec's. A storage does not tell a file's size with its bytes, and asking for it takes as
    long as they do: a file that goes on is as long as its head says. Should it be shorter, its end cannot be had."""
    first = storage.first(name, FIRST_BYTES)
    size = len(first) if len(first) < FIRST_BYTES else _told(first) or storage.size(name)
    return HotFile(
        storage.locate(name), size, HotStream(0, len(first), iter([first]), lambda: None), _asking(storage, name, size)
    )


def _open_local(storage: LocalStorage, name: str) -> HotFile:
    """A disk needs no requests side by side: the first stream is the whole file."""
    size = storage.size(name)
    ask = _asking(storage, name, size)
    return HotFile(storage.locate(name), size, ask(0, size), ask)


def _asking(storage: Storage, name: str, size: int) -> Callable[[int, int], HotStream]:
    def ask(start: int, end: int) -> HotStream:
        chunks = storage.chunks(name, start, min(end, size))
        return HotStream(start, min(end, size), chunks, chunks.close)

    return ask


def _told(first: bytes) -> int | None:
    """The size of the file that begins like this; None where its head is longer, or damaged."""
    with suppress(BlockIndexError):
        pack = HeadReader().feed(first)
        if pack is not None:
            return pack.size
    return None


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
