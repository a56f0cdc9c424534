"""Tar archives made by hand, field by field, and what a layer looks like after unpacking: shared by the tests here."""

import hashlib
import stat
from dataclasses import dataclass

from blockindex.erofs import Entry, build_metadata, validate_metadata, walk
from blockindex.model import BLOCK, Extent
from blockindex.tar import TarReader

UUID = bytes(range(16))
END = bytes(1024)
WAYS = ["whole", "bytewise", "trailing"]
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")  # cap_net_bind_service, of revision 2
ACL = bytes.fromhex("02000000 01000700ffffffff 02000400e8030000 04000500ffffffff 10000500ffffffff 20000500ffffffff")


def octal(value: int, width: int) -> bytes:
    return b"%0*o\0" % (width - 1, value)


def base256(value: int, width: int) -> bytes:
    raw = bytearray((value % (1 << 8 * width)).to_bytes(width, "big"))
    raw[0] |= 0x80
    return bytes(raw)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def header(
    name: bytes,
    typeflag: bytes = b"0",
    size: int | bytes = 0,
    mode: int | bytes = 0o644,
    uid: int | bytes = 0,
    gid: int | bytes = 0,
    mtime: int | bytes = 0,
    link: bytes = b"",
    magic: bytes = b"ustar\00000",
    device: tuple[int, int] = (0, 0),
    prefix: bytes = b"",
    patches: dict[int, bytes] | None = None,
    signed: bool = False,
) -> bytes:
    """One header; numbers may be given as raw field bytes; `patches` are written over it before the checksum."""

    def field(value: int | bytes, width: int) -> bytes:
        return octal(value, width) if isinstance(value, int) else value.ljust(width, b"\0")

    block = bytearray(512)
    parts = [
        (0, name),
        (100, field(mode, 8)),
        (108, field(uid, 8)),
        (116, field(gid, 8)),
        (124, field(size, 12)),
        (136, field(mtime, 12)),
        (148, b" " * 8),
        (156, typeflag),
        (157, link),
        (257, magic),
        (345, prefix),
        *(patches or {}).items(),
    ]
    if typeflag in (b"3", b"4"):
        parts += [(329, octal(device[0], 8)), (337, octal(device[1], 8))]
    for offset, data in parts:
        block[offset : offset + len(data)] = data
    total = sum(byte - 256 if signed and byte > 127 else byte for byte in block)
    block[148:156] = b"%06o\0 " % total
    return bytes(block)


def file(name: bytes, data: bytes = b"", **fields: object) -> bytes:
    return header(name, size=len(data), **fields) + padded(data)  # type: ignore[arg-type]


def pax(records: list[tuple[bytes, bytes]], typeflag: bytes = b"x") -> bytes:
    out = bytearray()
    for key, value in records:
        body = b" " + key + b"=" + value + b"\n"
        length = len(body) + 1
        while len(b"%d" % length) + len(body) != length:
            length += 1
        out += b"%d" % length + body
    return header(b"PaxHeaders/x", typeflag, len(out)) + padded(bytes(out))


def long_name(value: bytes, typeflag: bytes = b"L") -> bytes:
    return header(b"././@LongLink", typeflag, len(value) + 1, magic=b"ustar  \0") + padded(value + b"\0")


@dataclass(frozen=True)
class Layer:
    """What became of an archive."""

    extents: list[Extent]
    metadata: bytes
    data: bytes
    entries: dict[bytes, Entry]

    def content(self, path: bytes) -> bytes:
        entry = self.entries[path]
        if entry.data_offset is None:
            return b""
        return self.data[entry.data_offset : entry.data_offset + entry.size]

    def summary(self) -> dict[bytes, object]:
        """Path to content, target, `dir` or device; the root left out."""
        return {path: self._what(entry) for path, entry in self.entries.items() if path != b"/"}

    def _what(self, entry: Entry) -> object:
        match stat.S_IFMT(entry.mode):
            case stat.S_IFREG:
                content = self.content(entry.path)
                return content if len(content) < 1000 else hashlib.sha256(content).hexdigest()
            case stat.S_IFDIR:
                return "opaque dir" if entry.xattrs.get(b"trusted.overlay.opaque") == b"y" else "dir"
            case stat.S_IFLNK:
                return ("symlink", entry.target)
            case stat.S_IFIFO:
                return "fifo"
            case stat.S_IFCHR:
                return "whiteout" if entry.rdev == (0, 0) else ("char", *entry.rdev)
            case _:
                return ("block", *entry.rdev)


def read(archive: bytes, way: str = "whole") -> tuple[TarReader, list[Extent]]:
    """Feed `archive` in one of the WAYS."""
    reader = TarReader()
    step = 1 if way == "bytewise" else len(archive)
    extents: list[Extent] = []
    for start in range(0, len(archive), max(step, 1)):
        extents += reader.feed(memoryview(archive)[start : start + step])
    if way == "trailing":
        assert reader.feed(b"trailing rubbish" * 100) == []
    return reader, extents


def unpack(archive: bytes, way: str = "whole") -> Layer:
    """The layer of `archive`: metadata written, validated and read back, data region assembled from the extents."""
    reader, extents = read(archive, way)
    tree = reader.finish()
    data = bytearray(reader.data_size)
    tar_end = data_end = 0
    for extent in extents:
        assert extent.size > 0
        assert extent.tar_offset >= tar_end
        assert extent.data_offset >= data_end
        tar_end, data_end = extent.tar_offset + extent.size, extent.data_offset + extent.size
        data[extent.data_offset : data_end] = archive[extent.tar_offset : tar_end]
    metadata = build_metadata(tree, reader.data_size, UUID)
    assert reader.data_size % BLOCK == len(metadata) % BLOCK == 0
    validate_metadata(metadata, reader.data_size)
    return Layer(extents, metadata, bytes(data), {entry.path: entry for entry in walk(metadata)})
