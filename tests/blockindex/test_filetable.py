"""The file table against a byte-by-byte model of it."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.errors import Corrupt
from blockindex.filetable import FileTable
from blockindex.model import BLOCK, Extent, block_ceil


@st.composite
def tables(draw: st.DrawFn) -> tuple[FileTable, int, int]:
    """A table, its tar size and its data size; sparse files have several extents in one run of blocks."""
    extents, tar, data = [], 0, 0
    for _ in range(draw(st.integers(0, 5))):
        tar += draw(st.sampled_from([0, 512, 1500]))
        start = data = block_ceil(data)
        segments = draw(st.integers(1, 3))
        for _ in range(segments):
            if segments > 1:
                data += draw(st.sampled_from([0, 1, 100, BLOCK, 3 * BLOCK + 7]))
            size = draw(st.sampled_from([1, 7, 100, 500, BLOCK, BLOCK + 1, 2 * BLOCK]))
            extents.append(Extent(tar, data, size))
            tar, data = tar + size, data + size
        data = max(data, start + 1) + draw(st.sampled_from([0, 0, 2 * BLOCK]))
    return FileTable(extents), tar + 1024, block_ceil(data)


def stored(table: FileTable) -> list[tuple[int, int]]:
    """(tar offset, data offset) of each stored byte."""
    extents = [table[row] for row in range(len(table))]
    return [
        place
        for extent in extents
        for place in zip(
            range(extent.tar_offset, extent.tar_offset + extent.size),
            range(extent.data_offset, extent.data_offset + extent.size),
            strict=True,
        )
    ]


@settings(max_examples=40, deadline=None)
@given(tables(), st.data())
def test_lookups(case: tuple[FileTable, int, int], data: st.DataObject) -> None:
    table, tar_size, data_size = case
    table.validate(tar_size, data_size)
    bytes_ = stored(table)
    start = data.draw(st.integers(0, tar_size))
    end = data.draw(st.integers(start, tar_size))
    assert table.stored_before(start) == max((d + 1 for t, d in bytes_ if t < start), default=0)
    place = data.draw(st.integers(0, data_size))
    assert table.first_stored(place) == min((d for _, d in bytes_ if d >= place), default=None)
    assert table.tar_end(place) == max((t + 1 for t, d in bytes_ if d < place), default=0)
    assert table.last_stored(place) == max((d + 1 for _, d in bytes_ if d < place), default=0)
    firsts: dict[int, int] = {}
    for tar, offset in bytes_:
        firsts.setdefault(offset // BLOCK, tar)
    owned = [block for block, tar in firsts.items() if start <= tar < end]
    blocks = table.owned_blocks(start, end)
    assert (blocks == (owned[0], owned[-1] + 1)) if owned else (blocks[0] == blocks[1])
    holes = [block for run in table.holes(data_size) for block in run]
    assert holes == [block for block in range(data_size // BLOCK) if block not in firsts]


@settings(max_examples=40, deadline=None)
@given(tables(), st.data())
def test_scatter_puts_each_byte_in_its_place(case: tuple[FileTable, int, int], data: st.DataObject) -> None:
    table, tar_size, data_size = case
    tar = bytes(i * 7 % 251 + 1 for i in range(tar_size))
    region = bytearray(data_size)
    position = last = 0
    while position < tar_size:
        size = data.draw(st.sampled_from([1, 300, 5000, 10**6]))
        chunk = tar[position : position + size]
        for offset, view in table.scatter(position, chunk):
            assert offset >= last and view
            last = offset + len(view)
            region[offset:last] = view
        position += size if size > 1 else 1
        if size == 1:  # single bytes only now and then: there are too many
            chunk = tar[position : position + 2000]
            for offset, view in table.scatter(position, memoryview(chunk)):
                region[offset : offset + len(view)] = view
                last = offset + len(view)
            position += 2000
    expected = bytearray(data_size)
    for tar_offset, data_offset in stored(table):
        expected[data_offset] = tar[tar_offset]
    assert region == expected


def test_owned_blocks_split_at_the_first_stored_byte() -> None:
    table = FileTable([Extent(512, 0, 5000), Extent(6656, 8192, 10)])
    assert table.owned_blocks(0, 512) == (0, 0)
    assert table.owned_blocks(0, 513) == (0, 1)
    assert table.owned_blocks(513, 4608) == (1, 1), "block 0 began before"
    assert table.owned_blocks(513, 4609) == (1, 2), "block 1 begins with tar byte 4608"
    assert table.owned_blocks(4609, 99_999) == (2, 3)


def test_extents_without_bytes_are_left_out() -> None:
    table = FileTable([Extent(512, 0, 0), Extent(1024, 0, 3)])
    assert len(table) == 1 and table[0] == Extent(1024, 0, 3)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([(0, 0, 10), (5, 4096, 1)], "row 1 begins before"),
        ([(0, 4096, 10), (512, 0, 1)], "row 1 begins before"),
        ([(0, 0, 1001)], "beyond the tar"),
        ([(0, 8190, 10)], "beyond the tar"),
        ([(0, 0, 0)], "row 0 has no bytes"),
    ],
)
def test_validate_names_the_row(rows: list[tuple[int, int, int]], problem: str) -> None:

    columns = [array("Q", column) for column in zip(*rows, strict=True)]
    with pytest.raises(Corrupt, match=problem):
        FileTable.from_columns(*columns).validate(1000, 8192)
