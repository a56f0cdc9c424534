"""Blocks, spans, pieces and holes of an index, on layers small enough to see what must come out."""

from array import array
from hashlib import sha256

import pytest

from blockindex.errors import Corrupt
from blockindex.filetable import FileTable
from blockindex.layerindex import LayerIndex, PieceRange
from blockindex.model import BLOCK, PIECE_BLOCKS, Compression, Extent
from blockindex.spantable import SpanColumns, SpanTable

MIB = 1 << 20


def index_of(extents: list[Extent], tar_starts: list[int], tar_size: int, data_size: int, pieces: int) -> LayerIndex:
    """A plain-tar index with made-up digests: piece n has 32 times the byte n."""
    files = FileTable(extents)
    starts = array("Q", tar_starts)
    zeros = array("Q", [0] * len(starts))
    columns = SpanColumns(starts, starts, zeros, starts, zeros)
    return LayerIndex(
        blob_digest="sha256:" + "0" * 64,
        blob_size=tar_size,
        diff_id="sha256:" + "0" * 64,
        tar_size=tar_size,
        compression=Compression.TAR,
        metadata=bytes(BLOCK),
        data_size=data_size,
        files=files,
        spans=SpanTable(columns, files, tar_size, b"", sha256(b"").digest()),
        piece_digests=b"".join(bytes((number,)) * 32 for number in range(pieces)),
        implied_dirs=(),
    )


def piece(start: int, end: int, number: int) -> PieceRange:
    return PieceRange(start, end, bytes((number,)) * 32)


def test_a_large_file_over_two_spans() -> None:
    """100 blocks; the second span begins inside block 39, which the first span therefore owns."""
    cut = 512 + 39 * BLOCK + 1
    index = index_of([Extent(512, 0, 100 * BLOCK)], [0, cut], 512 + 100 * BLOCK, 100 * BLOCK, pieces=4)
    assert index.pieces(0) == (piece(0, 32, 0), piece(32, 40, 1))
    assert index.pieces(1) == (piece(40, 72, 2), piece(72, 100, 3))
    assert [index.span_of_block(block) for block in (0, 39, 40, 99)] == [0, 0, 1, 1]
    assert index.piece_of_block(39) == piece(32, 40, 1)
    assert index.piece_of_block(72) == piece(72, 100, 3)
    assert list(index.hole_blocks()) == []
    assert index.block_count == 100 and index.image_size == 101 * BLOCK and index.piece_count == 4
    for block in (-1, 100):
        with pytest.raises(IndexError):
            index.span_of_block(block)


def test_a_cut_of_holes_only_is_no_piece() -> None:
    """Data in blocks 0, 70 and 200 to 209 of 300: cuts 1, 3 to 5 are empty; the rest of the file belongs to nobody."""
    extents = [Extent(512, 0, BLOCK), Extent(512 + BLOCK, 70 * BLOCK, 9), Extent(9000, 200 * BLOCK, 10 * BLOCK)]
    index = index_of(extents, [0], 60_000, 300 * BLOCK, pieces=3)
    assert index.pieces(0) == (piece(0, 32, 0), piece(64, 96, 1), piece(192, 210, 2))
    assert list(index.hole_blocks()) == [range(1, 70), range(71, 200), range(210, 300)]
    assert index.span_of_block(70) == 0 and index.span_of_block(71) is None and index.span_of_block(299) is None
    assert index.piece_of_block(40) is None and index.piece_of_block(250) is None
    assert index.piece_of_block(80) == piece(64, 96, 1), "a hole inside a piece comes with it"
    assert index.piece_of_block(205) == piece(192, 210, 2)
    assert index.is_hole(1) and not index.is_hole(200)


def test_a_terabyte_of_holes_costs_nothing() -> None:
    size = 1 << 40
    index = index_of([Extent(512, 0, 1), Extent(513, size - BLOCK, BLOCK)], [0], 10_000, size, pieces=2)
    last = size // BLOCK
    assert [(p.block_start, p.block_end) for p in index.pieces(0)] == [(0, 32), (last - PIECE_BLOCKS, last)]
    assert index.piece_of_block(last - 1) == index.pieces(0)[1]


def test_spans_that_own_nothing() -> None:
    """Three spans; the middle one lies inside the first's last block."""
    index = index_of([Extent(512, 0, 3 * BLOCK)], [0, 600, 700], 512 + 3 * BLOCK, 3 * BLOCK, pieces=2)
    assert [index.pieces(span) for span in range(3)] == [(piece(0, 1, 0),), (), (piece(1, 3, 1),)]
    assert [index.span_of_block(block) for block in range(3)] == [0, 2, 2]
    assert index.spans[1].block_start == index.spans[1].block_end == 1


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_a_wrong_number_of_digests_is_corrupt(pieces: int) -> None:
    with pytest.raises(Corrupt, match=f"{pieces} digests for 2 pieces"):
        index_of([Extent(512, 0, 40 * BLOCK)], [0], MIB, 40 * BLOCK, pieces)


def test_verify_piece() -> None:
    index = index_of([Extent(512, 0, 10)], [0], MIB, BLOCK, 1)
    data = b"0123456789".ljust(BLOCK, b"\0")
    right = PieceRange(0, 1, sha256(data).digest())
    assert index.verify_piece(right, data) and index.verify_piece(right, memoryview(data))
    assert not index.verify_piece(right, bytes(BLOCK))


def test_spans_are_a_sequence() -> None:
    index = index_of([Extent(512, 0, 10 * BLOCK)], [0, 5000, 9000], MIB, 10 * BLOCK, 3)
    spans = index.spans
    assert len(spans) == 3 and spans[-1] == spans[2] and spans[1:] == (spans[1], spans[2])
    assert [span.tar_start for span in spans] == [0, 5000, 9000]
    with pytest.raises(IndexError):
        spans[3]
    assert repr(spans) == "<SpanTable 3 spans, 0 bytes of windows>" and index.has_windows
