"""A registry's blob for tests of the fetch engine: one that can be held, broken and falsified at any byte.

blob.hold(5000)         a stream that comes to byte 5000 stops there until `release`; `reached` says that it is there
blob.break_off(5000, e) the next stream that comes to byte 5000 raises `e` instead of going on
blob.falsify(5000)      the next stream that serves byte 5000 serves another one
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

PATIENCE_S = 20.0
"""How long anything in a test waits for what must happen."""


@dataclass
class Hold:
    """A place in the blob where streams stop."""

    offset: int
    reached: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)

    def await_stream(self) -> None:
        """Return when a stream stands here."""
        assert self.reached.wait(PATIENCE_S), f"no stream came to byte {self.offset}"

    def release(self) -> None:
        """Let streams pass."""
        self.go.set()


class FakeBlob:
    """A `BlobSource` over bytes. `requests` are the ranges that were asked for, `served` the bytes of each that were
    taken, `open` the streams that nobody has closed, `refutations` what is said to
    have been wrong."""

    def __init__(self, blob: bytes, chunk: int = 8192) -> None:
        self.requests: list[tuple[int, int]] = []
        self.served: list[int] = []
        self.open = 0
        self.refutations: list[str] = []
        self._blob = blob
        self._chunk = chunk
        self._holds: list[Hold] = []
        self._breaks: list[tuple[int, Exception]] = []
        self._lies: set[int] = set()
        self._lock = threading.Lock()

    def size(self) -> int:
        return len(self._blob)

    def hold(self, offset: int) -> Hold:
        """Stop streams at this byte."""
        hold = Hold(offset)
        self._holds.append(hold)
        return hold

    def break_off(self, offset: int, error: Exception) -> None:
        """Have one stream fail at this byte."""
        self._breaks.append((offset, error))

    def falsify(self, offset: int) -> None:
        """Flip a bit of this byte, once."""
        self._lies.add(offset)

    def refuted(self, reason: str) -> None:
        """Noted in `refutations`."""
        self.refutations.append(reason)

    def release_all(self) -> None:
        """Let every stream pass."""
        for hold in self._holds:
            hold.release()

    def stream(self, start: int, end: int | None, background: bool = False) -> "_Stream":
        with self._lock:
            self.requests.append((start, len(self._blob) if end is None else end))
            self.served.append(0)
            self.open += 1
        return _Stream(self, len(self.requests) - 1)

    def chunks(self, number: int) -> Iterator[bytes]:
        """What request `number` gets, piece by piece."""
        position, end = self.requests[number]
        while position < end:
            places = [hold.offset for hold in self._holds] + [offset for offset, _ in self._breaks]
            size = min([self._chunk, end - position, *(place - position for place in places if place > position)])
            self._stop_at(position)
            with self._lock:
                chunk = bytearray(self._blob[position : position + size])
                for lie in {lie for lie in self._lies if position <= lie < position + size}:
                    self._lies.remove(lie)
                    chunk[lie - position] ^= 4
            position += size
            self.served[number] += size
            yield bytes(chunk)

    def _stop_at(self, position: int) -> None:
        for hold in self._holds:
            if hold.offset == position:
                hold.reached.set()
                assert hold.go.wait(PATIENCE_S), f"nobody released the hold at byte {position}"
        for at in [at for at in self._breaks if at[0] == position]:
            self._breaks.remove(at)
            raise at[1]


class _Stream:
    def __init__(self, blob: FakeBlob, number: int) -> None:
        self._blob = blob
        self._chunks = blob.chunks(number)
        self._closed = False

    def __iter__(self) -> "_Stream":
        return self

    def __next__(self) -> bytes:
        assert not self._closed, "read after close"
        return next(self._chunks)

    def close(self) -> None:
        assert not self._closed, "closed twice"
        self._closed = True
        self._blob.open -= 1
