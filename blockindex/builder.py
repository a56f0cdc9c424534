"""One streaming pass over a layer blob: data-region writes on the way, the layer index at the end.

Knows how the tar reader, the restart points, the file table and the digests work together; must not know where the blob
comes from or where the writes go.

Invariant: memory does not grow with the blob's size but for the index itself (windows are kept compressed).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from blockindex.erofs import build_metadata
from blockindex.errors import Corrupt
from blockindex.filetable import FileTable
from blockindex.gzipspans import GzipSource
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK, PIECE_BLOCKS, Compression
from blockindex.source import (
    DEFAULT_SPAN_SIZE,
    Boundary,
    Event,
    Point,
    Source,
    TarSource,
    Window,
    ZstdSource,
    detect,
)
from blockindex.spantable import SpanColumns, SpanTable, compress_window
from blockindex.tar import TarReader

__all__ = ["LayerBuilder", "image_uuid"]

_DETECT_SIZE = 4
_ZEROS = memoryview(bytes(PIECE_BLOCKS * BLOCK))


def image_uuid(diff_id: str) -> bytes:
    """The UUID of a layer's EROFS image: derived from what is in it, so that it is the same on every node and differs
    between layers (overlayfs needs that)."""
    uuid = bytearray(sha256(b"bootseer" + diff_id.encode()).digest()[:16])
    uuid[6] = uuid[6] & 0x0F | 0x80  # version 8, "custom", and the variant of RFC 9562
    uuid[8] = uuid[8] & 0x3F | 0x80
    return bytes(uuid)


class _PieceHasher:
    """Digests of the pieces, from writes in data order and the spans' ends as they become known."""

    def __init__(self) -> None:
        self.digests = bytearray()
        self._hash = sha256()
        self._base: int | None = None  # where the span's pieces are counted from; None until its first write
        self._open = False
        self._filled = self._end = 0  # of the open piece: data offsets

    def write(self, offset: int, data: memoryview) -> None:
        """The next stored bytes (and zeros between them)."""
        while data:
            if not self._open or offset >= self._end:
                self._close()
                self._begin(offset)
            self._zeros(offset)
            part = data[: self._end - offset]
            self._hash.update(part)
            offset += len(part)
            self._filled = offset
            data = data[len(part) :]

    def end_span(self, block_end: int) -> None:
        """Blocks from `block_end` on belong to another span than those before."""
        self._end = min(self._end, block_end * BLOCK)
        self._base = None

    def finish(self) -> None:
        """No further write comes."""
        self._close()

    def _begin(self, offset: int) -> None:
        if self._base is None:
            self._base = offset // BLOCK * BLOCK
        size = PIECE_BLOCKS * BLOCK
        self._filled = self._base + (offset - self._base) // size * size
        self._end = self._filled + size
        self._hash = sha256()
        self._open = True

    def _zeros(self, end: int) -> None:
        if end > self._filled:
            self._hash.update(_ZEROS[: end - self._filled])

    def _close(self) -> None:
        if self._open:
            self._zeros(self._end)
            self.digests += self._hash.digest()
            self._open = False


@dataclass(slots=True)
class _OpenEnd:
    """A span whose last block is complete at `tar_end`; where the blob has yielded that much is not known yet."""

    span: int
    tar_end: int


class _SpanRecorder:
    """Turns points, boundaries and windows into span columns."""

    def __init__(self, files: FileTable, exact: bool) -> None:
        self.columns = SpanColumns.empty()
        self.windows = bytearray()
        self._files = files
        self._exact = exact  # plain tar: the blob ends where the tar does
        self._open_ends: list[_OpenEnd] = []
        self._windowless: list[int] = []  # raw spans whose window has not come yet

    def point(self, point: Point) -> int:
        """A span begins (and the one before ends); returns the block up to which the one before owns."""
        block_end = self.end(point.tar_start, point.blob_start + (1 if point.bit else 0))
        if point.raw:
            self._windowless.append(len(self.columns.tar_starts))
        self.columns.blob_starts.append(point.blob_start)
        self.columns.blob_ends.append(point.blob_start)
        self.columns.flags.append(point.bit + 8 * point.raw)
        self.columns.tar_starts.append(point.tar_start)
        self.columns.window_sizes.append(0)
        return block_end

    def end(self, tar_end: int, blob_end: int) -> int:
        """The last span ends at `tar_end`, which the blob up to `blob_end` yields; returns the block up to which it
        owns."""
        span = len(self.columns.tar_starts) - 1
        if span < 0:
            return 0
        block_start, block_end = self._files.owned_blocks(self.columns.tar_starts[span], tar_end)
        if block_start < block_end:
            need = self._files.tar_end(block_end * BLOCK)
            if self._exact:
                self.columns.blob_ends[span] = need
            else:
                self._open_ends.append(_OpenEnd(span, need))
                self.boundary(tar_end, blob_end)
        return block_end

    def boundary(self, tar_end: int, blob_end: int) -> None:
        """The blob up to `blob_end` yields the tar up to `tar_end`."""
        for open_end in self._open_ends:
            if open_end.tar_end <= tar_end:
                self.columns.blob_ends[open_end.span] = blob_end
        self._open_ends = [open_end for open_end in self._open_ends if open_end.tar_end > tar_end]

    def window(self, window: bytes) -> None:
        """The window of the oldest raw span without one."""
        frame = compress_window(window)
        self.columns.window_sizes[self._windowless.pop(0)] = len(frame)
        self.windows += frame

    def finish(self, tar_size: int, blob_end: int) -> int:
        """The compressed data ends; returns the block up to which the last span owns."""
        block_end = self.end(tar_size, blob_end)
        self.boundary(tar_size, blob_end)
        assert not self._open_ends and not self._windowless
        return block_end


class LayerBuilder:
    """Feed it the blob in order, write what it yields, then `finish`. After an error drop it, and what was written.

    `blob_digest` (`sha256:<hex>`) is what the blob must hash to; `span_size` compressed bytes lie between two restart
    points at least.
    """

    def __init__(self, blob_digest: str, span_size: int = DEFAULT_SPAN_SIZE) -> None:
        self._blob_digest = blob_digest
        self._span_size = span_size
        self._head = b""
        self._source: Source | None = None
        self._blob_hash = sha256()
        self._blob_size = 0
        self._tar_hash = sha256()
        self._tar_size = 0
        self._tar = TarReader()
        self._files = FileTable()
        self._pieces = _PieceHasher()
        self._feeding = False

    def __repr__(self) -> str:
        return f"<LayerBuilder {self._blob_digest[:19]} {self._blob_size} bytes of blob, {self._tar_size} of tar>"

    @property
    def blob_size(self) -> int:
        """Bytes of the blob fed so far."""
        return self._blob_size

    def feed(self, chunk: bytes) -> Iterator[tuple[int, memoryview]]:
        """Take the next bytes of the blob and yield (data offset, bytes) to write to the data region, in data order:
        stored bytes, with the zeros between files that lie less than a block apart; all else there is zeros. The
        iterator must be exhausted before the next call; what it yields stays valid. Raises Corrupt, Unsupported."""
        assert not self._feeding, "the iterator of the feed before was not exhausted"
        self._feeding = True
        self._blob_hash.update(chunk)
        self._blob_size += len(chunk)
        if self._source is None:
            self._head += chunk
            chunk = self._head
        if self._source is not None or len(chunk) >= _DETECT_SIZE:
            yield from self._run(chunk)
        self._feeding = False

    def finish(self) -> LayerIndex:
        """The index of the blob, which was fed whole. Corrupt when it is cut short or does not match its digest."""
        assert not self._feeding, "the iterator of the last feed was not exhausted"
        if self._source is None:  # shorter than any magic: no tar either, which the tar reader says
            for _ in self._run(self._head):
                raise AssertionError("a blob of 3 bytes holds no file")
        assert self._source is not None
        blob_end = self._source.finish()
        blob_digest = "sha256:" + self._blob_hash.hexdigest()
        if blob_digest != self._blob_digest:
            raise Corrupt("blob", f"its digest is {blob_digest}, not {self._blob_digest}")
        self._tar.finish()  # whether the tar is whole; spans of one that is not have no end
        self._pieces.end_span(self._spans.finish(self._tar_size, blob_end))
        self._pieces.finish()
        diff_id = "sha256:" + self._tar_hash.hexdigest()
        data_size = self._tar.data_size
        metadata, implied_dirs = self._take_tree(image_uuid(diff_id))
        windows = self._spans.windows  # not copied: 40 MB and more of a layer of 20 GB
        return LayerIndex(
            blob_digest=blob_digest,
            blob_size=self._blob_size,
            diff_id=diff_id,
            tar_size=self._tar_size,
            compression=self._compression,
            metadata=metadata,
            data_size=data_size,
            files=self._files,
            spans=SpanTable(self._spans.columns, self._files, self._tar_size, windows, sha256(windows).digest()),
            piece_digests=bytes(self._pieces.digests),
            implied_dirs=implied_dirs,
        )

    def _take_tree(self, uuid: bytes) -> tuple[bytes, tuple[bytes, ...]]:
        """The metadata and the implied directories; the tree, which takes most of the memory, is gone then."""
        tree, data_size = self._tar.finish(), self._tar.data_size
        self._tar = TarReader()
        return build_metadata(tree, data_size, uuid), tuple(sorted(tree.implied_dirs()))

    def _run(self, chunk: bytes) -> Iterator[tuple[int, memoryview]]:
        if self._source is None:
            self._compression = detect(chunk)
            self._source = _source(self._compression, self._span_size)
            self._spans = _SpanRecorder(self._files, exact=self._compression is Compression.TAR)
            self._head = b""
        for event in self._source.feed(chunk):
            if isinstance(event, memoryview):
                yield from self._on_tar(event)
            else:
                self._on_place(event)

    def _on_place(self, event: Event) -> None:
        if isinstance(event, Point):
            self._pieces.end_span(self._spans.point(event))
        elif isinstance(event, Boundary):
            self._spans.boundary(event.tar_end, event.blob_end)
        elif isinstance(event, Window):
            self._spans.window(event.data)

    def _on_tar(self, view: memoryview) -> Iterator[tuple[int, memoryview]]:
        self._tar_hash.update(view)
        self._files.extend(self._tar.feed(view))
        for offset, data in _joined(self._files.scatter(self._tar_size, view)):
            self._pieces.write(offset, data)
            yield offset, data
        self._tar_size += len(view)


def _joined(writes: Iterator[tuple[int, memoryview]]) -> Iterator[tuple[int, memoryview]]:
    """The same writes, but those less than a block apart as one, with zeros between: a write a file is slow."""
    start = end = 0
    parts: list[memoryview] = []
    for offset, view in writes:
        if parts and offset - end >= BLOCK:
            yield start, _one(parts)
            parts = []
        if not parts:
            start = end = offset
        elif offset > end:
            parts.append(_ZEROS[: offset - end])
        parts.append(view)
        end = offset + len(view)
    if parts:
        yield start, _one(parts)


def _one(parts: list[memoryview]) -> memoryview:
    return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))


def _source(compression: Compression, span_size: int) -> Source:
    if compression is Compression.GZIP:
        return GzipSource(span_size)
    if compression is Compression.ZSTD:
        return ZstdSource(span_size)
    return TarSource(span_size)
