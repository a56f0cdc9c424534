"""The file table: which bytes of the tar are stored where in the data region (one row an extent).

Knows tar offsets, data offsets and blocks; must not know names, compressions or spans.

Invariants (checked by `validate`): rows in archive order; neither the tar ranges nor the data ranges of two rows
overlap; every size is positive. So the map between stored tar bytes and data offsets is monotone, and both directions
are a bisection.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from blockindex.errors import Corrupt
from blockindex.model import BLOCK, Extent, block_ceil

__all__ = ["FileTable"]


class FileTable:
    """Rows of (tar offset, data offset, size), as columns of 64-bit numbers. Only the builder adds rows."""

    __slots__ = ("data_offsets", "sizes", "tar_offsets")

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self.tar_offsets: array[int] = array("Q")
        self.data_offsets: array[int] = array("Q")
        self.sizes: array[int] = array("Q")
        self.extend(extents)

    @classmethod
    def from_columns(cls, tar_offsets: "array[int]", data_offsets: "array[int]", sizes: "array[int]") -> "FileTable":
        """A table that takes over the three columns (equally long, not checked otherwise)."""
        assert len(tar_offsets) == len(data_offsets) == len(sizes)
        table = cls()
        table.tar_offsets, table.data_offsets, table.sizes = tar_offsets, data_offsets, sizes
        return table

    def extend(self, extents: Iterable[Extent]) -> None:
        """Add rows at the end; extents without bytes are left out."""
        for extent in extents:
            if extent.size:
                self.tar_offsets.append(extent.tar_offset)
                self.data_offsets.append(extent.data_offset)
                self.sizes.append(extent.size)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, row: int) -> Extent:
        return Extent(self.tar_offsets[row], self.data_offsets[row], self.sizes[row])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, FileTable):
            return NotImplemented
        return (self.tar_offsets, self.data_offsets, self.sizes) == (
            other.tar_offsets,
            other.data_offsets,
            other.sizes,
        )

    __hash__ = None  # type: ignore[assignment]  # mutable while it is built

    def __repr__(self) -> str:
        return f"<FileTable {len(self)} extents>"

    def scatter(self, tar_offset: int, chunk: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
        """Where the tar bytes `chunk` at `tar_offset` are stored: (data offset, part of `chunk`), growing offsets."""
        view = memoryview(chunk)
        end = tar_offset + len(view)
        first_row = max(bisect_right(self.tar_offsets, tar_offset) - 1, 0)
        for row in range(first_row, len(self.sizes)):
            start = self.tar_offsets[row]
            if start >= end:
                return
            first = max(start, tar_offset)
            last = min(start + self.sizes[row], end)
            if first < last:
                yield self.data_offsets[row] + first - start, view[first - tar_offset : last - tar_offset]

    def stored_before(self, tar_offset: int) -> int:
        """Data offset just past the last stored byte that lies before `tar_offset` in the tar; 0 when there is none."""
        row = bisect_left(self.tar_offsets, tar_offset) - 1
        if row < 0:
            return 0
        return self.data_offsets[row] + min(self.sizes[row], tar_offset - self.tar_offsets[row])

    def first_stored(self, data_offset: int) -> int | None:
        """Data offset of the first stored byte at or past `data_offset`, or None."""
        row = bisect_right(self.data_offsets, data_offset) - 1
        if row >= 0 and data_offset < self.data_offsets[row] + self.sizes[row]:
            return data_offset
        return self.data_offsets[row + 1] if row + 1 < len(self.sizes) else None

    def last_stored(self, data_offset: int) -> int:
        """Data offset just past the last stored byte that lies before `data_offset`; 0 when there is none."""
        row = bisect_left(self.data_offsets, data_offset) - 1
        if row < 0:
            return 0
        return min(self.data_offsets[row] + self.sizes[row], data_offset)

    def tar_end(self, data_offset: int) -> int:
        """Tar offset just past the last stored byte that lies before `data_offset` in the data region (0: none)."""
        row = bisect_left(self.data_offsets, data_offset) - 1
        if row < 0:
            return 0
        return self.tar_offsets[row] + min(self.sizes[row], data_offset - self.data_offsets[row])

    def owned_blocks(self, tar_start: int, tar_end: int) -> tuple[int, int]:
        """The blocks whose first stored byte lies in the tar range: from the first of them to past the last of them
        (blocks without stored bytes may lie between). Empty at the place where they would be when there are none."""
        before = block_ceil(self.stored_before(tar_start)) // BLOCK
        end = block_ceil(self.stored_before(tar_end)) // BLOCK
        if end <= before:
            return before, before
        first = self.first_stored(before * BLOCK)
        assert first is not None
        return first // BLOCK, end

    def holes(self, data_size: int) -> list[range]:
        """The maximal runs of blocks without any stored byte in a data region of `data_size` bytes."""
        runs: list[range] = []
        covered = 0
        for start, size in zip(self.data_offsets, self.sizes, strict=True):
            if start >= covered + BLOCK:
                runs.append(range(covered // BLOCK, start // BLOCK))
            covered = -(-(start + size) // BLOCK) * BLOCK
        if covered < data_size:
            runs.append(range(covered // BLOCK, data_size // BLOCK))
        return runs

    def validate(self, tar_size: int, data_size: int) -> None:
        """Check the invariants and that all rows lie within the tar and the data region; raises Corrupt."""
        tar_end = data_end = 0
        rows = zip(self.tar_offsets, self.data_offsets, self.sizes, strict=True)
        for row, (tar_offset, data_offset, size) in enumerate(rows):
            if not size:
                raise Corrupt("files", f"row {row} has no bytes")
            if tar_offset < tar_end or data_offset < data_end:
                raise Corrupt("files", f"row {row} begins before the row above it ends")
            tar_end = tar_offset + size
            data_end = data_offset + size
        if tar_end > tar_size or data_end > data_size:
            raise Corrupt("files", f"the last row ends beyond the tar ({tar_size}) or the data region ({data_size})")
