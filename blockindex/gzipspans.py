"""gzip blobs: the source that finds restart points while building, and the run that decodes from one.

Both follow gzip members one after the other as gunzip does: another `1f 8b` after a member's trailer is another member,
anything else there (padding, garbage) is ignored.

Knows gzip; must not know tar contents, blocks or layers.

Invariant: a window holds every byte that decoding from its point refers to; all other bytes of it are zero, so that
windows compress well (see `trim_window`).
"""

import sys
from array import array
from collections.abc import Generator, Iterator
from functools import cache
from itertools import compress

from isal import isal_zlib

from blockindex.deflate import WINDOW_SIZE, Inflater, restart_prefix
from blockindex.errors import Corrupt
from blockindex.model import Span
from blockindex.source import Boundary, Event, Point, Spacing, Window

__all__ = ["GzipRun", "GzipSource", "header_end", "trim_window"]

_ISAL_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # its stub declares an instance

_MAGIC = b"\x1f\x8b"
_HEADER_SIZE = 10  # without the optional fields
_FHCRC, _FEXTRA, _FNAME, _FCOMMENT = 2, 4, 8, 16  # its flags
_MAX_HEADER = 1 << 20
_TRAILER_SIZE = 8
_OUT_SIZE = 1 << 20  # below this the per-buffer cost shows, above it only memory grows
_IN_SIZE = 1 << 30  # zlib counts input in 32 bits
_MAX_CAPTURE = 4 * WINDOW_SIZE  # 32 KiB of tar that take more blob than this are full of empty blocks: do not trim
_LOOKAHEAD = 1024  # tar bytes beyond those of interest, so that isal need not stop short of them for want of input
_RUN_IN = 1 << 16
_RUN_OUT = 1 << 20  # output of one decode step: bounds the memory that a 1000:1 stream takes


class _Capture:
    """A raw point whose window waits for the blob bytes after the point, which tell what of it is needed."""

    def __init__(self, point: Point, window: bytes, first: bytes) -> None:
        self.bit = point.bit
        self.tar_start = point.tar_start
        self.window = window
        self.blob = bytearray(first)


class GzipSource:
    """Inflates a gzip blob with zlib, block by block."""

    def __init__(self, span_size: int) -> None:
        self._spacing = Spacing(span_size)
        self._inflater = Inflater()
        self._blob = 0  # consumed bytes of the blob
        self._tar = 0  # inflated bytes, including those not handed out yet
        self._last = b""  # the last byte of the chunk before
        self._between: bytes | None = b""  # what has come of the next member's magic; None inside a member
        self._end = -1  # where the last member ended, once anything else follows
        self._captures: list[_Capture] = []
        self._new_buffer()

    def _new_buffer(self) -> None:
        self._buffer = bytearray(_OUT_SIZE)
        self._handed = self._filled = 0
        self._inflater.aim(self._buffer)

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """See Source."""
        for start in range(0, len(chunk), _IN_SIZE):
            data = chunk if len(chunk) <= _IN_SIZE else chunk[start : start + _IN_SIZE]
            position = 0
            while position < len(data) and self._end < 0:
                if self._between is None:
                    position = yield from self._inflate(data, position)
                else:
                    position = yield from self._enter_member(data, position)
            yield from self._hand_out()
            self._last = data[-1:]

    def finish(self) -> int:
        """See Source."""
        if self._end >= 0:
            return self._end
        if self._between is None:
            raise Corrupt("blob", "ends inside a gzip member: it is cut short", self._blob)
        return self._blob - len(self._between)

    def _hand_out(self) -> Iterator[memoryview]:
        """The tar bytes inflated since the last call."""
        if self._filled > self._handed:
            yield memoryview(self._buffer)[self._handed : self._filled]
            self._handed = self._filled

    def _enter_member(self, data: bytes, position: int) -> Generator[Event, None, int]:
        """Take up to the two magic bytes; the new position in `data`."""
        assert self._between is not None
        taken = data[position : position + len(_MAGIC) - len(self._between)]
        magic = self._between + taken
        if not _MAGIC.startswith(magic):
            self._end = self._blob - len(self._between)
            return position
        self._blob += len(taken)
        self._between = magic
        if magic == _MAGIC:
            self._between = None
            start = self._blob - len(_MAGIC)
            if self._spacing.due(start, self._tar, free=True):
                yield from self._hand_out()
                self._spacing.mark(start, self._tar)
                yield Point(start, 0, False, self._tar)
            self._inflater.reset()
            self._inflater.give(_MAGIC, 0)
            self._inflater.step()
        return position + len(taken)

    def _inflate(self, data: bytes, position: int) -> Generator[Event, None, int]:
        """Inflate `data[position:]` up to its end or the member's; the new position in `data`."""
        inflater = self._inflater
        inflater.give(data, position)
        while True:
            ended = inflater.step()
            done = len(data) - inflater.unread
            filled = len(self._buffer) - inflater.room
            progress = done > position or filled > self._filled
            self._blob += done - position
            self._tar += filled - self._filled
            self._filled = filled
            if self._captures:
                yield from self._capture(data[position:done], ended)
            position = done
            if ended or inflater.at_boundary:
                yield from self._boundary(data[position - 1 : position] or self._last, ended)
            if ended:
                self._between = b""
                return position
            if not inflater.room:
                yield from self._hand_out()
                self._new_buffer()
            elif not progress:
                return position

    def _boundary(self, last: bytes, ended: bool) -> Iterator[Event]:
        """Report the boundary or the point at the inflater's place, if one is due; `last` is the byte before it."""
        if self._spacing.boundary(self._tar):
            yield from self._hand_out()
            yield Boundary(self._blob, self._tar)
        if ended or self._inflater.after_last_block or not self._spacing.due(self._blob, self._tar, free=False):
            return
        unused = self._inflater.unused_bits
        bit = 8 - unused if unused else 0
        first = last if bit else b""
        point = Point(self._blob - len(first), bit, True, self._tar)
        yield from self._hand_out()
        self._spacing.mark(point.blob_start, self._tar)
        yield point
        self._captures.append(_Capture(point, self._inflater.window(), first))

    def _capture(self, data: bytes, ended: bool) -> Iterator[Window]:
        """Give the consumed `data` to the waiting windows and hand out those that have enough."""
        for capture in self._captures:
            capture.blob += data
        while self._captures:
            first = self._captures[0]
            tail = self._tar - first.tar_start
            if tail < WINDOW_SIZE + _LOOKAHEAD and not ended and len(first.blob) <= _MAX_CAPTURE:
                return
            trimmable = ended or tail >= WINDOW_SIZE
            tail = min(tail, WINDOW_SIZE)
            yield Window(
                trim_window(first.window, first.bit, bytes(first.blob), tail) if trimmable and tail else first.window
            )
            del self._captures[0]


_HIGH = bytes(value & 0x7F for value in range(256))


@cache
def _probes() -> tuple[bytes, bytes]:
    """Dictionaries that tell where in the window a byte was copied from: the low byte of its place, and the high seven
    bits under a top bit that is not the low byte's. So a byte that is equal in both was not copied from the window."""
    low = bytes(range(256)) * (WINDOW_SIZE // 256)
    high = b"".join(bytes((value | 0x80,)) * 128 + bytes((value,)) * 128 for value in range(WINDOW_SIZE // 256))
    return low, high


def trim_window(window: bytes, bit: int, blob: bytes, tail: int) -> bytes:
    """`window` with all bytes zeroed, and leading ones cut off, that the next `tail` (up to 32 KiB) of tar do not
    refer to; what comes later cannot reach the window.

    `blob` is the raw deflate data from the restart point on that yields those bytes. Found by decoding it with two
    probe dictionaries.
    """
    size = len(window)
    if not size or not blob:
        return window
    data = restart_prefix(bit, blob[0]) + blob[1:]
    try:
        low, high = (
            isal_zlib.decompressobj(wbits=-15, zdict=probe[:size]).decompress(data, tail) for probe in _probes()
        )
    except _ISAL_ERROR:
        return window  # zlib took it, so isal should: keep all rather than guess
    if len(low) != tail:
        return window  # isal wants to see a few bytes more
    copied = (int.from_bytes(low, "little") ^ int.from_bytes(high, "little")).to_bytes(tail, "little")
    pairs = bytearray(2 * tail)
    pairs[0::2] = low
    pairs[1::2] = high.translate(_HIGH)
    places = array("H", bytes(pairs))
    if sys.byteorder == "big":
        places.byteswap()
    used = set(compress(places, copied))
    kept = bytearray(size)
    for place in used:
        kept[place] = window[place]
    return bytes(kept[min(used, default=size) :])


def header_end(head: bytes) -> int | None:
    """Where the gzip header that `head` starts with ends, or None when more bytes are needed to tell."""
    if len(head) < _HEADER_SIZE:
        return None
    flags = head[3]
    end = _HEADER_SIZE
    if flags & _FEXTRA:
        if len(head) < end + 2:
            return None
        end += 2 + int.from_bytes(head[end : end + 2], "little")
    for flag in (_FNAME, _FCOMMENT):
        if flags & flag:
            end = head.find(0, end) + 1
            if not end:
                return None
    if flags & _FHCRC:
        end += 2
    return end if end <= len(head) else None


class GzipRun:
    """Decodes a gzip blob from a span's restart point on, for as long as it is fed.

    Reads the members' headers itself and gives isal raw deflate only: isal 1.9.1 loses its way in a header that is cut
    by the end of a chunk inside its optional fields. Trailers are skipped; who checks the output has better digests.
    """

    def __init__(self, span: Span) -> None:
        self._bit = span.bit
        self._skip = 0  # bytes of the trailer still to come
        self._head = b""  # what has come of the next member's header
        self._ended = False
        self._member: isal_zlib.Decompress | None = None
        if span.raw:
            self._member = isal_zlib.decompressobj(wbits=-15, zdict=span.window)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The tar bytes that `chunk`, the next bytes of the blob, completes. Corrupt when it is not valid gzip."""
        for start in range(0, len(chunk), _RUN_IN):
            data = chunk[start : start + _RUN_IN]
            if self._bit:
                data = restart_prefix(self._bit, data[0]) + data[1:]
                self._bit = 0
            while data and not self._ended:
                if self._skip:
                    taken = min(self._skip, len(data))
                    self._skip -= taken
                    data = data[taken:]
                elif self._member is None:
                    data = self._enter_member(data)
                else:
                    data = yield from self._inflate(self._member, data)

    def _enter_member(self, data: bytes) -> bytes:
        """Take what belongs to the header; the rest of `data`."""
        head = self._head + data
        if not _MAGIC.startswith(head[: len(_MAGIC)]):
            self._ended = True
            return b""
        end = header_end(head)
        if end is None:
            if len(head) > _MAX_HEADER:
                raise Corrupt("blob", f"a gzip header is longer than {_MAX_HEADER} bytes")
            self._head = head
            return b""
        self._head = b""
        self._member = isal_zlib.decompressobj(wbits=-15)
        return head[end:]

    def _inflate(self, member: "isal_zlib.Decompress", data: bytes) -> Generator[bytes, None, bytes]:
        """Decode `data`; what of it follows the member's deflate stream."""
        while True:
            try:
                out = member.decompress(data, _RUN_OUT)
            except _ISAL_ERROR as error:
                raise Corrupt("blob", f"not a valid gzip stream: {error}") from error
            data = member.unconsumed_tail
            if out:
                yield out
            if member.eof:
                self._member = None
                self._skip = _TRAILER_SIZE
                return member.unused_data
            if not data and len(out) < _RUN_OUT:
                return b""
