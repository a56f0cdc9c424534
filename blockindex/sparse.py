"""Maps of sparse tar entries: which parts of a file are stored; the four GNU encodings in, segments out.

A map is a list of `(offset, size)` of the stored segments, in file order. `checked` is the only way out: it promises
that the segments are sorted, disjoint, inside the file, and that their sizes add up to the payload that is there.
"""

import struct
from typing import Final

from blockindex.errors import Corrupt, Unsupported
from blockindex.pax import Pax, decimal
from blockindex.tarheader import number

__all__ = [
    "MAX_MAP_BYTES",
    "MapText",
    "Segments",
    "checked",
    "extension_segments",
    "header_segments",
    "pax_segments",
    "pax_version",
    "sparse_name",
]

Segments = list[tuple[int, int]]

MAX_MAP_BYTES: Final = 1 << 20
"""A map beyond 1 MiB (some 50,000 segments) is refused, as containerd's tar reader does."""

_ENTRY = struct.Struct("12s12s")


def header_segments(block: bytes, offset: int) -> tuple[Segments, int, bool]:
    """Old GNU format, the header itself: up to 4 segments, the file's real size, and whether records follow."""
    try:
        real_size = number(block[483:495])
    except ValueError as error:
        raise Corrupt("sparse map", f"real size {error}", offset) from None
    return _binary_entries(block[386:482], offset), real_size, block[482] not in (0, 0x30)


def extension_segments(block: bytes, offset: int) -> tuple[Segments, bool]:
    """Old GNU format, an extension record: up to 21 segments, and whether another record follows."""
    return _binary_entries(block[:504], offset), block[504] not in (0, 0x30)


def pax_version(pax: Pax) -> str | None:
    """The PAX sparse format that the records announce: "0" (map in the records), "1" (map in the payload), or None:
    no sparse file, or of a version that nobody knows, which containerd takes for a plain file."""
    version = pax.sparse.get(b"major", b""), pax.sparse.get(b"minor", b"")
    if version == (b"1", b"0"):
        return "1"
    if version in ((b"0", b"0"), (b"0", b"1")):
        return "0"
    if version != (b"", b""):
        return None
    return "0" if pax.sparse.get(b"map") or pax.sparse_list else None


def sparse_name(pax: Pax) -> bytes | None:
    """The name that the sparse records give; it goes before all others."""
    return pax.sparse.get(b"name") if pax.sparse and pax_version(pax) else None


def pax_segments(pax: Pax, offset: int) -> Segments:
    """Formats 0.0 and 0.1: the map is in the records."""
    text = pax.sparse.get(b"map")
    values = text.split(b",") if text else pax.sparse_list
    numbers = [decimal(value, "sparse map", offset) for value in values]
    count = pax.sparse.get(b"numblocks")
    if len(numbers) % 2 or (count and decimal(count, "numblocks", offset) != len(numbers) // 2):
        raise Corrupt("sparse map", "its length does not match", offset)
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class MapText:
    """Format 1.0: the map leads the payload, as decimal lines in whole records; feed it record after record."""

    def __init__(self, offset: int) -> None:
        self._offset = offset
        self._text = bytearray()
        self._lines = 0
        self._wanted: int | None = None

    @property
    def size(self) -> int:
        """Bytes of the map so far, whole records."""
        return len(self._text)

    def feed(self, record: bytes) -> Segments | None:
        """The segments once `record` completes the map, else None."""
        self._text += record
        self._lines += record.count(b"\n")
        if self._wanted is None and self._lines:
            count = bytes(self._text[: self._text.index(b"\n")])
            self._wanted = 1 + 2 * decimal(count, "number of segments", self._offset)
        if self._wanted is None or self._lines < self._wanted:
            if len(self._text) >= MAX_MAP_BYTES or (self._wanted or 0) > MAX_MAP_BYTES // 2:
                raise Unsupported(f"sparse map at byte {self._offset} is larger than {MAX_MAP_BYTES} bytes")
            return None
        lines = bytes(self._text).split(b"\n")[1 : self._wanted]
        numbers = [decimal(line, "sparse map", self._offset) for line in lines]
        return list(zip(numbers[::2], numbers[1::2], strict=True))


def checked(segments: Segments, real_size: int, stored_size: int, offset: int) -> Segments:
    """`segments` without the empty ones, neighbours joined; Corrupt unless they fit the file and the payload."""
    if real_size < 0:
        raise Corrupt("sparse map", f"the file has {real_size} bytes", offset)
    result: Segments = []
    end = stored = 0
    for start, size in segments:
        if start < end or size < 0 or start + size > real_size:
            raise Corrupt("sparse map", f"segment {start}+{size} overlaps, or lies outside of the file", offset)
        stored += size
        if result and size and result[-1][0] + result[-1][1] == start:
            result[-1] = (result[-1][0], result[-1][1] + size)
        elif size:
            result.append((start, size))
        end = start + size
    if stored != stored_size:
        raise Corrupt("sparse map", f"names {stored} bytes, the payload has {stored_size}", offset)
    return result


def _binary_entries(data: bytes, offset: int) -> Segments:
    segments: Segments = []
    for start, size in _ENTRY.iter_unpack(data):
        if start[0] == 0:
            break
        try:
            segments.append((number(start), number(size)))
        except ValueError as error:
            raise Corrupt("sparse map", str(error), offset) from None
    return segments
