"""A hot set's file that was found, wherever it lies: its bytes as streams, and what is known of it already.

In a directory the look-up is the first request for the bytes, so a stream is under way, and the head is in it. In a
registry the look-up brings the head, and no bytes yet. Knows nothing of where that is.
"""

from collections.abc import Callable, Iterator

from blockindex.hotpack import HotPack
from snapshotter.errors import NotFound

__all__ = ["HotFile", "HotStream"]


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


def _no_bytes(start: int, end: int) -> HotStream:
    raise NotFound(f"there are no bytes [{start}, {end}): the hot set has none")


class HotFile:
    """One file, found at `where`. Either `first` is the stream that the look-up began (take it once), or `head` is what
    the file's head says.

    `doubt` says why the bytes of its frames must not be used, empty where they may: then it is a set without bytes.
    `signed_by`: the name of the trusted key that signed it, empty where nobody had to. `round_trip_s()` is
    that to the host that has the bytes (`distance`), 0.0 where it is not known. Thread-safe but for `first`.
    """

    def __init__(
        self,
        where: str,
        size: int,
        first: HotStream | None,
        ask: Callable[[int, int], HotStream] = _no_bytes,
        signed_by: str = "",
        head: HotPack | None = None,
        doubt: str = "",
        round_trip_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        assert (first is None) != (head is None)
        self.where = where
        self.size = size
        self.first = first
        self.head = head
        self.signed_by = signed_by
        self.doubt = doubt
        self.round_trip_s = round_trip_s
        self._ask = ask

    def __repr__(self) -> str:
        return f"<HotFile {self.where}, {self.size} bytes{', not to be used' if self.doubt else ''}>"

    def stream(self, start: int, end: int) -> HotStream:
        """The bytes `[start, end)`, by one request. Raises SnapshotterError."""
        return self._ask(start, end)
