"""Decoding of consecutive spans: blob bytes in, verified pieces out as soon as each is complete.

Knows the index and the decompressors' runs; must not know where blob bytes come from or where pieces go.

Invariant: no piece leaves whose sha256 is not the index's, whatever the blob bytes were.
"""

from collections.abc import Iterator
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

import zstandard

from blockindex.errors import Corrupt
from blockindex.gzipspans import GzipRun
from blockindex.layerindex import LayerIndex, PieceRange
from blockindex.model import BLOCK, PIECE_BLOCKS, Compression, Piece, Span
from blockindex.source import zstd_slices, zstd_step

if TYPE_CHECKING:
    from zstandard import ZstdDecompressionObj

__all__ = ["SpanDecoder"]

_ZEROS = memoryview(bytes(PIECE_BLOCKS * BLOCK))


class _Run(Protocol):
    def feed(self, chunk: bytes) -> Iterator[bytes]: ...


class _TarRun:
    """A plain tar decodes to itself."""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        yield chunk


class _ZstdRun:
    """Decodes zstd frames one after the other."""

    def __init__(self) -> None:
        self._frame: ZstdDecompressionObj | None = None

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        for data in zstd_slices(chunk):
            while data:
                if self._frame is None:
                    self._frame = zstandard.ZstdDecompressor().decompressobj()
                out, data, ended = zstd_step(self._frame, data)
                if ended:
                    self._frame = None
                if out:
                    yield out


def _run(compression: Compression, span: Span) -> _Run:
    if compression is Compression.GZIP:
        return GzipRun(span)
    if compression is Compression.ZSTD:
        return _ZstdRun()
    return _TarRun()


class SpanDecoder:
    """Decodes the spans `[first, last)`; feed it the blob's bytes `[blob_start, blob_end)` in order, in any chunks.

    Both ends are those of the spans in the run that own blocks; when none does they are equal and it is done at once.
    Needs the index's windows if the first of these spans has one.
    """

    def __init__(self, index: LayerIndex, first: int, last: int) -> None:
        assert 0 <= first <= last <= len(index.spans)
        self._index = index
        spans = index.spans
        owners = [i for i in range(first, last) if spans.block_starts[i] < spans.block_ends[i]]
        self._pieces = (piece for i in owners for piece in index.pieces(i))
        self._fed = 0
        self.blob_start = self.blob_end = 0
        self._tar = 0
        if owners:
            span = spans[owners[0]]
            self._decode = _run(index.compression, span)
            self._tar = span.tar_start
            self.blob_start = span.blob_start
            self.blob_end = max(spans.columns.blob_ends[i] for i in owners)
        self._next_piece()

    def __repr__(self) -> str:
        size = self.blob_end - self.blob_start
        return f"<SpanDecoder blob {self.blob_start}+{size}, {self._fed} fed, next piece {self._piece}>"

    @property
    def done(self) -> bool:
        """Whether every block that the run owns has been handed out; more input is ignored."""
        return self._piece is None

    def feed(self, chunk: bytes) -> list[Piece]:
        """The pieces that `chunk` completes, in block order. Corrupt when the bytes are not the blob's, or when all
        were fed and pieces are missing; the decoder must be dropped then."""
        pieces: list[Piece] = []
        if self.done:
            return pieces
        self._fed += len(chunk)
        for tar_bytes in self._decode.feed(chunk):
            self._scatter(tar_bytes, pieces)
            if self.done:
                return pieces
        if self._fed >= self.blob_end - self.blob_start:
            raise Corrupt("blob", f"does not yield the blocks from {self._start // BLOCK} on", self.blob_end)
        return pieces

    def _next_piece(self) -> None:
        self._piece: PieceRange | None = next(self._pieces, None)
        if self._piece is not None:
            self._start = self._filled = self._piece.block_start * BLOCK
            self._end = self._piece.block_end * BLOCK
            self._complete = self._index.files.last_stored(self._end)
            self._parts: list[memoryview] = []

    def _scatter(self, tar_bytes: bytes, pieces: list[Piece]) -> None:
        """Put the next bytes of the tar into the pieces they belong to; bytes before the first piece are dropped (they
        finish a block of the span before)."""
        for offset, view in self._index.files.scatter(self._tar, tar_bytes):
            while self._piece is not None:
                if offset < self._start:
                    view = view[self._start - offset :]
                    offset = self._start
                if not view:
                    break
                part = view[: self._end - offset]
                if offset > self._filled:
                    self._parts.append(_ZEROS[: offset - self._filled])
                self._parts.append(part)
                offset += len(part)
                self._filled = offset
                view = view[len(part) :]
                if offset == self._complete:
                    pieces.append(self._verified(self._piece))
                    self._next_piece()
        self._tar += len(tar_bytes)

    def _verified(self, piece: PieceRange) -> Piece:
        self._parts.append(_ZEROS[: self._end - self._filled])
        data = b"".join(self._parts)
        if sha256(data).digest() != piece.digest:
            raise Corrupt(
                "blob", f"blocks {piece.block_start} to {piece.block_end} do not match their digest", self.blob_start
            )
        return Piece(piece.block_start, piece.block_end, data)
