"""A small blob in parts side by side: each connection to a far host begins slow, and several are sooner done than one.

Parts are ranges that together are the blob, so each byte is asked for once. A server that ignores ranges would send the
whole for each of them: as soon as one does so, all are broken off, and the caller asks for the whole instead. The
digest is the caller's to check.
"""

import threading
from collections.abc import Callable
from contextlib import closing

from snapshotter.errors import SnapshotterError
from snapshotter.model import ByteStream
from snapshotter.registry.blob import RegistryBlob

__all__ = ["fetch_parts", "parts_of"]

_LEAST = 96 << 10  # one connection brings 102 kB in its first three round trips: less would not save another one
_AT_ONCE = 4  # of all indexes of an image: the hot blocks come beside them


def parts_of(size: int, together: int) -> int:
    """In how many parts a blob of `size` bytes is to come, if `together` bytes come at the same time as it."""
    return max(size // max(_LEAST, together // _AT_ONCE), 1)


def fetch_parts(source: RegistryBlob, size: int, parts: int, came: Callable[[int], None]) -> bytes | None:
    """The blob's `size` bytes; None where the server ignores ranges. `came(bytes)` is told of progress, by any thread,
    and may raise SnapshotterError to end it. Raises SnapshotterError; nothing is under way any more then."""
    return _Parts(source, size, parts, came).run()


class _Parts:
    """The state of one `fetch_parts`. The lock guards all that threads share but the bytes: no two write the same."""

    def __init__(self, source: RegistryBlob, size: int, parts: int, came: Callable[[int], None]) -> None:
        self._source = source
        self._told = came
        self._data = memoryview(bytearray(size))
        self._lock = threading.Lock()
        self._came = 0
        self._error: SnapshotterError | None = None
        step = -(-size // parts)
        ranges = [(start, min(start + step, size)) for start in range(0, size, step)]
        self._streams = [(start, source.stream(start, end)) for start, end in ranges]

    def run(self) -> bytes | None:
        """See `fetch_parts`."""
        threads = [threading.Thread(target=self._bring, args=part, name="part") for part in self._streams[1:]]
        started = []
        try:
            for thread in threads:
                thread.start()
                started.append(thread)
            self._bring(*self._streams[0])
        except RuntimeError as error:
            self._end(SnapshotterError(f"no thread for a part of blob {self._source.digest}: {error}"))
        finally:
            for thread in started:
                thread.join()
        if self._source.ranges_ignored:
            return None
        if self._error is not None:
            raise self._error
        return bytes(self._data)

    def _bring(self, position: int, stream: ByteStream) -> None:
        try:
            with closing(stream):
                for chunk in stream:
                    self._data[position : position + len(chunk)] = chunk
                    position += len(chunk)
                    with self._lock:
                        self._came += len(chunk)
                        came = self._came
                    self._told(came)
                    if self._source.ranges_ignored:
                        raise SnapshotterError(f"blob {self._source.digest}: ranges are ignored")
        except SnapshotterError as error:
            self._end(error)

    def _end(self, error: SnapshotterError) -> None:
        """The first error ends the other parts."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        for _, stream in self._streams:
            stream.close()
