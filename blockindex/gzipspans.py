"""gzip blobs: the source that finds restart points while building, and the run that decodes from one.

Both follow gzip members one after the other as gunzip does: another `1f 8b` after a member's trailer is another member,
anything else there (padding, garbage) is ignored.

Knows gzip; must not know tar contents, blocks or layers.

Invariant: what the source has handed out of a member that ended has that member's CRC and size.
"""

from collections.abc import Generator, Iterator
from enum import Enum

from isal import isal_zlib

from blockindex.deflate import WINDOW_SIZE, Inflater, restart_prefix
from blockindex.errors import Corrupt
from blockindex.gzipframe import MAGIC, TRAILER_SIZE, check_trailer, header_end
from blockindex.model import Span
from blockindex.source import Boundary, Event, Point, Spacing, Window
from blockindex.windows import trim_window

__all__ = ["GzipRun", "GzipSource"]

_ISAL_ERROR: type[Exception] = isal_zlib.IsalError  # type: ignore[assignment]  # its stub declares an instance

_OUT_SIZE = 1 << 20  # below this the per-buffer cost shows, above it only memory grows
_IN_SIZE = 1 << 30  # zlib counts input in 32 bits
_MAX_CAPTURE = 4 * WINDOW_SIZE  # 32 KiB of tar that take more blob than this are full of empty blocks: do not trim
_HEADER_STEP = 512  # bytes of a header that are looked at first
_RUN_IN = 1 << 16
_RUN_OUT = 1 << 20  # output of one decode step: bounds the memory that a 1000:1 stream takes


class _Part(Enum):
    """Of which part of a member the next byte is."""

    HEADER = "header"
    DATA = "data"
    TRAILER = "trailer"
    NONE = "none"  # something else follows the last member


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
        self._part = _Part.HEADER
        self._pending = b""  # what has come of the header or trailer
        self._end = 0  # where the last member ended
        self._crc = 0  # of what this member's bytes handed out
        self._member_tar = 0  # where this member began in the tar
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
            while position < len(data) and self._part is not _Part.NONE:
                if self._part is _Part.DATA:
                    position = yield from self._inflate(data, position)
                elif self._part is _Part.HEADER:
                    position = yield from self._enter_member(data, position)
                else:
                    position = self._leave_member(data, position)
            yield from self._hand_out()
            self._last = data[-1:]

    def finish(self) -> int:
        """See Source."""
        if self._part is _Part.NONE or (self._part is _Part.HEADER and len(self._pending) < len(MAGIC)):
            return self._end
        raise Corrupt("blob", "ends inside a gzip member: it is cut short", self._blob)

    def _hand_out(self) -> Iterator[memoryview]:
        """The tar bytes inflated since the last call, which are of one member."""
        if self._filled > self._handed:
            view = memoryview(self._buffer)[self._handed : self._filled]
            self._crc = isal_zlib.crc32(view, self._crc)
            self._handed = self._filled
            yield view

    def _enter_member(self, data: bytes, position: int) -> Generator[Event, None, int]:
        """Take bytes of a header, or find that none follows; the new position in `data`."""
        before = len(self._pending)
        head = self._pending + data[position : position + max(_HEADER_STEP, before)]
        if not MAGIC.startswith(head[: len(MAGIC)]):
            self._part = _Part.NONE
            return position
        end = header_end(head)
        taken = (len(head) if end is None else end) - before
        self._blob += taken
        if end is None:
            self._pending = head
            return position + taken
        start = self._blob - end
        if self._spacing.due(start, self._tar, free=True):
            self._spacing.mark(start, self._tar)
            yield Point(start, 0, False, self._tar)
        self._inflater.reset()
        self._part = _Part.DATA
        self._pending = b""
        self._crc = 0
        self._member_tar = self._tar
        return position + taken

    def _leave_member(self, data: bytes, position: int) -> int:
        """Take bytes of a trailer; the new position in `data`."""
        taken = data[position : position + TRAILER_SIZE - len(self._pending)]
        self._blob += len(taken)
        self._pending += taken
        if len(self._pending) == TRAILER_SIZE:
            check_trailer(self._pending, self._crc, self._tar - self._member_tar)
            self._part = _Part.HEADER
            self._pending = b""
            self._end = self._blob
        return position + len(taken)

    def _inflate(self, data: bytes, position: int) -> Generator[Event, None, int]:
        """Inflate `data[position:]` up to its end or that of the member's data; the new position in `data`."""
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
            if ended:
                yield from self._hand_out()
                self._part = _Part.TRAILER
                return position
            if inflater.at_boundary:
                yield from self._boundary(data[position - 1 : position] or self._last)
            if not inflater.room:
                yield from self._hand_out()
                self._new_buffer()
            elif not progress:
                return position

    def _boundary(self, last: bytes) -> Iterator[Event]:
        """Report the boundary or the point at the inflater's place, if one is due; `last` is the byte before it."""
        if self._spacing.boundary(self._tar):
            yield from self._hand_out()
            yield Boundary(self._blob, self._tar)
        if self._inflater.after_last_block or not self._spacing.due(self._blob, self._tar, free=False):
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
            tail = min(self._tar - first.tar_start, WINDOW_SIZE)
            if tail < WINDOW_SIZE and not ended and len(first.blob) <= _MAX_CAPTURE:
                return
            trimmable = first.window and tail and (ended or tail == WINDOW_SIZE)
            window = trim_window(first.window, first.bit, bytes(first.blob), tail) if trimmable else first.window
            self._spacing.spent(window)
            yield Window(window)
            del self._captures[0]


class GzipRun:
    """Decodes a gzip blob from a span's restart point on, for as long as it is fed.

    Gives isal raw deflate only (see `gzipframe`). Trailers are skipped; who checks the output has better digests.
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
        if not MAGIC.startswith(head[: len(MAGIC)]):
            self._ended = True
            return b""
        end = header_end(head)
        if end is None:
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
                self._skip = TRAILER_SIZE
                return member.unused_data
            if not data and len(out) < _RUN_OUT:
                return b""
