"""The span table: all restart points of a blob, as columns; its windows stay compressed until they are asked for.

Knows spans and the blocks they own; must not know files' names, digests of pieces or the encoding of an index file.

Invariant: which blocks a span owns is never stored, it follows from the file table and the spans' places in the tar.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import overload

import zstandard

from blockindex.deflate import WINDOW_SIZE
from blockindex.errors import Corrupt
from blockindex.filetable import FileTable
from blockindex.model import Compression, Span

__all__ = ["SpanColumns", "SpanTable", "compress_window"]

_WINDOW_LEVEL = 6  # 1566 bytes, 0.15 ms a trimmed window; level 3: 1629 bytes, 0.05 ms; 19: 1487 bytes, 7.3 ms


def compress_window(window: bytes) -> bytes:
    """A window as it lies in the windows section: one zstd frame; nothing for an empty window."""
    return zstandard.ZstdCompressor(level=_WINDOW_LEVEL, write_checksum=False).compress(window) if window else b""


@dataclass(frozen=True, slots=True)
class SpanColumns:
    """One entry a span in each column; see `Span`. `flags` is bit + 8 * raw; `window_sizes` are compressed sizes."""

    blob_starts: "array[int]"
    blob_ends: "array[int]"
    flags: "array[int]"
    tar_starts: "array[int]"
    window_sizes: "array[int]"

    @classmethod
    def empty(cls) -> "SpanColumns":
        """Columns to append to."""
        return cls(array("Q"), array("Q"), array("Q"), array("Q"), array("Q"))

    def validate(self, compression: Compression, blob_size: int, tar_size: int) -> None:
        """Check every number against its neighbours and the sizes; raises Corrupt."""
        for span, (start, end) in enumerate(zip(self.blob_starts, self.blob_ends, strict=True)):
            if not start <= end <= blob_size:
                raise Corrupt("spans.blob", f"span {span} is not a range within the blob ({blob_size})", start)
        for name, column in (("blob_start", self.blob_starts), ("tar_start", self.tar_starts)):
            if any(left >= right for left, right in pairwise(column)):
                raise Corrupt(f"spans.{name}", "does not grow from span to span")
        if self.tar_starts and (self.tar_starts[0] != 0 or self.tar_starts[-1] > tar_size):
            raise Corrupt("spans.tar_start", f"does not run from 0 to within the tar ({tar_size})")
        if any(flags > 15 or 0 < flags < 8 for flags in self.flags) or (self.flags and self.flags[0]):
            raise Corrupt("spans.flags", "holds an impossible value")
        if compression is not Compression.GZIP and any(self.flags):
            raise Corrupt("spans.flags", f"has raw spans in a {compression.value} layer")
        if compression is Compression.TAR and self.blob_starts != self.tar_starts:
            raise Corrupt("spans.blob_start", "differs from tar_start in a plain tar")
        if any(size and not flags for size, flags in zip(self.window_sizes, self.flags, strict=True)):
            raise Corrupt("spans.window_size", "is not 0 where a span needs no window")


class SpanTable(Sequence[Span]):
    """The spans in tar order. `windows` is the windows section, or None while it has not arrived: until then only the
    columns may be read, no span that has a window."""

    __slots__ = ("_window_ends", "block_ends", "block_starts", "columns", "windows", "windows_digest")

    def __init__(
        self,
        columns: SpanColumns,
        files: FileTable,
        tar_size: int,
        windows: bytes | bytearray | None,
        windows_digest: bytes,
    ) -> None:
        self.columns = columns
        self.windows = windows
        self.windows_digest = windows_digest
        self._window_ends = array("Q", accumulate(columns.window_sizes))
        self.block_starts: array[int] = array("Q")
        self.block_ends: array[int] = array("Q")
        for tar_start, tar_end in pairwise((*columns.tar_starts, tar_size)):
            start, end = files.owned_blocks(tar_start, tar_end)
            self.block_starts.append(start)
            self.block_ends.append(end)

    @property
    def windows_size(self) -> int:
        """Bytes of the windows section."""
        return self._window_ends[-1] if self._window_ends else 0

    def __len__(self) -> int:
        return len(self.columns.tar_starts)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...
    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if index < 0:
            index += len(self)
        columns = self.columns
        return Span(
            blob_start=columns.blob_starts[index],
            blob_end=columns.blob_ends[index],
            bit=columns.flags[index] & 7,
            raw=columns.flags[index] >= 8,
            tar_start=columns.tar_starts[index],
            block_start=self.block_starts[index],
            block_end=self.block_ends[index],
            window=self._window(index),
        )

    def __iter__(self) -> Iterator[Span]:
        return (self[i] for i in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SpanTable):
            return NotImplemented
        return (self.columns, self.windows, self.windows_digest) == (other.columns, other.windows, other.windows_digest)

    __hash__ = None  # type: ignore[assignment]  # its columns are arrays

    def __repr__(self) -> str:
        windows = f"{self.windows_size} bytes of windows" if self.windows is not None else "windows missing"
        return f"<SpanTable {len(self)} spans, {windows}>"

    def _window(self, index: int) -> bytes:
        size = self.columns.window_sizes[index]
        if not size:
            return b""
        assert self.windows is not None, "the windows section has not been attached yet"
        end = self._window_ends[index]
        frame = self.windows[end - size : end]
        try:
            if not 0 < zstandard.get_frame_parameters(frame).content_size <= WINDOW_SIZE:
                raise Corrupt("windows", f"window of span {index} is not 1 to {WINDOW_SIZE} bytes long", end - size)
            return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise Corrupt("windows", f"window of span {index} does not decompress: {error}", end - size) from error
