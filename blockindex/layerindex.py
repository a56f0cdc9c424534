"""The layer index: all that is needed to mount a layer and to get any block of it, as one frozen value.

Knows how metadata, file table, span table and piece digests belong together; must not know how they are encoded
(`codec`) or made (`builder`).

Invariants: every stored byte belongs to exactly one span's blocks; pieces are cut from each span's first block every
`PIECE_BLOCKS` blocks, and a cut without any stored byte is no piece (else one sparse file could ask for the digests of
terabytes of zeros).
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from hashlib import sha256

from blockindex.columns import little_endian
from blockindex.errors import Corrupt
from blockindex.filetable import FileTable
from blockindex.model import BLOCK, PIECE_BLOCKS, Compression
from blockindex.spantable import SpanTable

__all__ = ["DIGEST_SIZE", "LayerIndex", "PieceRange"]

DIGEST_SIZE = 32


@dataclass(frozen=True, slots=True)
class PieceRange:
    """Which blocks `[block_start, block_end)` a piece holds, and the sha256 of their bytes."""

    block_start: int
    block_end: int
    digest: bytes


@dataclass(frozen=True)
class LayerIndex:
    """See the module. `blob_digest` and `diff_id` are `sha256:<hex>`; `metadata` is the EROFS image up to the data
    region; `data_size` the data region's size, a multiple of BLOCK; `piece_digests` 32 bytes a piece, in block order;
    `implied_dirs` the paths, ascending, of the directories that no tar entry describes: where a layer below has one,
    its attributes count.
    """

    blob_digest: str
    blob_size: int
    diff_id: str
    tar_size: int
    compression: Compression
    metadata: bytes = field(repr=False)
    data_size: int
    files: FileTable
    spans: SpanTable
    piece_digests: bytes = field(repr=False)
    implied_dirs: tuple[bytes, ...]
    _holes: list[range] = field(init=False, repr=False, compare=False)
    _hole_starts: "array[int]" = field(init=False, repr=False, compare=False)
    _first_pieces: "array[int]" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Derive the holes and each span's first piece; Corrupt when the number of digests does not fit them."""
        holes = self.files.holes(self.data_size)
        object.__setattr__(self, "_holes", holes)
        object.__setattr__(self, "_hole_starts", array("Q", (run.start for run in holes)))
        first_pieces = array("Q", (0,))
        object.__setattr__(self, "_first_pieces", first_pieces)
        for span in range(len(self.spans)):
            empty = sum(len(cells) for cells in self._hole_cells(span))
            first_pieces.append(first_pieces[-1] + self._cell_count(span) - empty)
        if len(self.piece_digests) != first_pieces[-1] * DIGEST_SIZE:
            have = len(self.piece_digests) / DIGEST_SIZE
            raise Corrupt("piece_digests", f"holds {have:g} digests for {first_pieces[-1]} pieces")

    def without_metadata(self) -> "LayerIndex":
        """The same for whoever decodes spans only, with empty `metadata`: they take most of the memory."""
        lean = copy(self)
        object.__setattr__(lean, "metadata", b"")
        return lean

    @property
    def block_count(self) -> int:
        """Blocks of the data region."""
        return self.data_size // BLOCK

    @property
    def image_size(self) -> int:
        """Bytes of the whole layer image."""
        return len(self.metadata) + self.data_size

    @property
    def piece_count(self) -> int:
        """Pieces of all spans."""
        return self._first_pieces[-1]

    @property
    def has_windows(self) -> bool:
        """Whether the windows section has been attached; without it only spans without window can be decoded."""
        return self.spans.windows is not None or not self.spans.windows_size

    def layout(self) -> str:
        """Name of how the tar's bytes lie in the data region: sha256 of the data size and the file table's columns
        (numbers of 8 bytes, little-endian), as `sha256:<hex>`. With the blob's digest it says which bytes a block
        holds, whatever spans the index has."""
        digest = sha256(self.data_size.to_bytes(8, "little"))
        for column in (self.files.tar_offsets, self.files.data_offsets, self.files.sizes):
            digest.update(little_endian(column))
        return f"sha256:{digest.hexdigest()}"

    def hole_blocks(self) -> Iterable[range]:
        """The runs of blocks that no span owns: they hold no stored byte and read as zeros."""
        return iter(self._holes)

    def is_hole(self, block: int) -> bool:
        """Whether no span owns `block`."""
        run = bisect_right(self._hole_starts, block) - 1
        return run >= 0 and block in self._holes[run]

    def span_of_block(self, block: int) -> int | None:
        """Number of the span that owns `block`; None for a hole. IndexError beyond the data region."""
        if not 0 <= block < self.block_count:
            raise IndexError(f"block {block} of a data region of {self.block_count} blocks")
        if self.is_hole(block):
            return None
        return bisect_right(self.spans.block_starts, block) - 1

    def pieces(self, span: int) -> tuple[PieceRange, ...]:
        """The pieces of a span, in block order; between them lie only holes."""
        return tuple(self._pieces(span))

    def piece_of_block(self, block: int) -> PieceRange | None:
        """The piece that holds `block`; None for a hole in no piece."""
        span = bisect_right(self.spans.block_starts, block) - 1
        if span < 0 or block >= self.spans.block_ends[span]:
            return None
        cell = (block - self.spans.block_starts[span]) // PIECE_BLOCKS
        number = cell
        for empty in self._hole_cells(span):
            if cell in empty:
                return None
            if empty.start < cell:
                number -= len(empty)
        return self._piece(span, cell, self._first_pieces[span] + number)

    def verify_piece(self, piece: PieceRange, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` are the bytes of the piece's blocks."""
        assert len(data) == (piece.block_end - piece.block_start) * BLOCK
        return sha256(data).digest() == piece.digest

    def _pieces(self, span: int) -> Iterator[PieceRange]:
        number = self._first_pieces[span]
        cells = self._cell_count(span)
        first = 0
        for empty in (*self._hole_cells(span), range(cells, cells)):
            for cell in range(first, empty.start):
                yield self._piece(span, cell, number)
                number += 1
            first = empty.stop

    def _piece(self, span: int, cell: int, number: int) -> PieceRange:
        start = self.spans.block_starts[span] + cell * PIECE_BLOCKS
        end = min(start + PIECE_BLOCKS, self.spans.block_ends[span])
        return PieceRange(start, end, self.piece_digests[number * DIGEST_SIZE : (number + 1) * DIGEST_SIZE])

    def _cell_count(self, span: int) -> int:
        """Cuts of `PIECE_BLOCKS` blocks that the span's blocks make, the empty ones included."""
        return -(-(self.spans.block_ends[span] - self.spans.block_starts[span]) // PIECE_BLOCKS)

    def _hole_cells(self, span: int) -> Iterator[range]:
        """The runs of cuts without any stored byte. A span's first and last block are no holes, nor are these cuts."""
        start, end = self.spans.block_starts[span], self.spans.block_ends[span]
        for run in range(bisect_right(self._hole_starts, start), len(self._holes)):
            hole = self._holes[run]
            if hole.start >= end:
                return
            cells = range(-(-(hole.start - start) // PIECE_BLOCKS), (hole.stop - start) // PIECE_BLOCKS)
            if cells:
                yield cells
