"""EROFS metadata back to entries, for `index show`, tests and whoever compares two layers.

Reads what the writer makes and the validator accepts; anything else is Corrupt, never another exception and never a
read beyond the metadata. It checks what it needs for that; only the validator checks what a *kernel* needs.
"""

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blockindex.erofs.ondisk import (
    DIRENT,
    FORMAT_INLINE,
    FORMAT_PLAIN,
    INODE,
    INODE_SIZE,
    MAGIC,
    SUPERBLOCK,
    SUPERBLOCK_OFFSET,
    XATTR_ENTRY,
    XATTR_HEADER_SIZE,
    XATTR_INDEXES,
    decode_device,
)
from blockindex.errors import Corrupt
from blockindex.model import BLOCK

__all__ = ["Entry", "validate_directories", "walk"]

_MAX_PATH = 1 << 16
"""Beyond what the writer makes. Longer ones could only be a trap: listing nested directories takes quadratic time."""

_PREFIXES = {index: prefix for prefix, index in XATTR_INDEXES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One name in the layer. `path` starts with `/`; entries with one `nid` are hard links of each other (and `nid` is
    the st_ino that the kernel shows). `target` is a symlink's, `data_offset` that of a regular file with a size, both
    None otherwise; `rdev` is (major, minor), (0, 0) for others than devices."""

    path: bytes
    nid: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int
    size: int
    rdev: tuple[int, int]
    xattrs: dict[bytes, bytes]
    target: bytes | None
    data_offset: int | None


def walk(metadata: bytes) -> Iterator[Entry]:
    """Every name of the layer, a directory before what it holds, names in byte order; the root is `/`."""
    if len(metadata) < BLOCK or len(metadata) % BLOCK:
        raise Corrupt("metadata", f"{len(metadata)} bytes are no whole number of blocks")
    superblock = SUPERBLOCK.unpack_from(metadata, SUPERBLOCK_OFFSET)
    if superblock[0] != MAGIC:
        raise Corrupt("magic", "no EROFS superblock", SUPERBLOCK_OFFSET)
    seen: set[int] = set()
    todo: list[tuple[bytes, int]] = [(b"", superblock[5])]
    while todo:
        path, nid = todo.pop()
        if len(path) > _MAX_PATH:
            raise Corrupt("path", f"longer than {_MAX_PATH} bytes", nid * 32)
        inode = _Inode(metadata, nid)
        yield inode.entry(path or b"/")
        if stat.S_ISDIR(inode.mode):
            if nid in seen:
                raise Corrupt("nid", "a directory has two names", nid * 32)
            seen.add(nid)
            names = [item for item in inode.names() if item[0] not in (b".", b"..")]
            todo += [(path + b"/" + name, child) for name, child in reversed(names)]


def validate_directories(metadata: bytes, paths: Sequence[bytes]) -> None:
    """Corrupt unless `paths` are directories of the layer, in ascending order, each once. `metadata` must be valid;
    each directory on the way is read once."""
    for above, path in pairwise(paths):
        if above >= path:
            raise Corrupt("implied_dirs", f"{path[:200]!r} comes after {above[:200]!r}")
    tables: dict[int, dict[bytes, int]] = {}
    root = SUPERBLOCK.unpack_from(metadata, SUPERBLOCK_OFFSET)[5]
    for path in paths:
        nid: int | None = root if path.startswith(b"/") else None
        for name in path[1:].split(b"/"):
            if nid is not None:
                nid = _subdirectories(metadata, nid, tables).get(name)
        if nid is None:
            raise Corrupt("implied_dirs", f"{path[:200]!r} is no directory of the layer")


def _subdirectories(metadata: bytes, nid: int, tables: dict[int, dict[bytes, int]]) -> dict[bytes, int]:
    """The nids of what a directory holds, by name, if they are directories; kept in `tables`."""
    table = tables.get(nid)
    if table is None:
        found = ((name, child) for name, child in _Inode(metadata, nid).names() if name not in (b".", b".."))
        table = {name: child for name, child in found if stat.S_ISDIR(_Inode(metadata, child).mode)}
        tables[nid] = table
    return table


class _Inode:
    """One inode of the metadata, decoded and with its data at hand."""

    def __init__(self, metadata: bytes, nid: int) -> None:
        self._metadata = metadata
        self.nid = nid
        self._offset = nid * 32
        if self._offset + INODE_SIZE > len(metadata):
            raise Corrupt("nid", f"{nid} lies outside of the metadata", self._offset)
        fields = INODE.unpack_from(metadata, self._offset)
        (self._layout, count, self.mode, _, self.size, self._start, _, *owner, seconds, nanoseconds, nlink, _) = fields
        if self._layout not in (FORMAT_PLAIN, FORMAT_INLINE):
            raise Corrupt("i_format", f"{self._layout} is not used here", self._offset)
        self._uid, self._gid = owner
        self._mtime_ns = seconds * 10**9 + nanoseconds
        self._nlink = nlink
        self._xattr_size = XATTR_HEADER_SIZE + 4 * (count - 1) if count else 0

    def entry(self, path: bytes) -> Entry:
        kind = stat.S_IFMT(self.mode)
        is_data = kind == stat.S_IFREG and self.size > 0
        return Entry(
            path=path,
            nid=self.nid,
            mode=self.mode,
            uid=self._uid,
            gid=self._gid,
            mtime_ns=self._mtime_ns,
            nlink=self._nlink,
            size=self.size,
            rdev=decode_device(self._start) if kind in (stat.S_IFCHR, stat.S_IFBLK) else (0, 0),
            xattrs=dict(self._xattrs()),
            target=self._data() if kind == stat.S_IFLNK else None,
            data_offset=self._start * BLOCK - len(self._metadata) if is_data else None,
        )

    def names(self) -> Iterator[tuple[bytes, int]]:
        """(name, nid) of a directory's entries, in order."""
        data = self._data()
        for position in range(0, len(data), BLOCK):
            block = data[position : position + BLOCK]
            names_start = int.from_bytes(block[8:10], "little")
            if names_start < DIRENT.size or names_start % DIRENT.size or names_start > len(block):
                raise Corrupt("nameoff", f"{names_start} in directory {self.nid}", self._offset)
            dirents = list(DIRENT.iter_unpack(block[:names_start]))
            ends = [dirent[1] for dirent in dirents[1:]] + [len(block)]
            for (nid, start, _, _), end in zip(dirents, ends, strict=True):
                yield block[start:end].partition(b"\0")[0], nid

    def _data(self) -> bytes:
        """A directory's or symlink's bytes."""
        whole = self.size if self._layout == FORMAT_PLAIN else self.size // BLOCK * BLOCK
        tail = self._offset + INODE_SIZE + self._xattr_size
        data = self._range(self._start * BLOCK if whole else 0, whole)
        return data + self._range(tail, self.size - whole)

    def _xattrs(self) -> Iterator[tuple[bytes, bytes]]:
        start = self._offset + INODE_SIZE
        area = self._range(start, self._xattr_size)
        position = XATTR_HEADER_SIZE
        while position < len(area):
            name_size, index, value_size = XATTR_ENTRY.unpack_from(area, position)
            middle = position + XATTR_ENTRY.size + name_size
            end = middle + value_size
            if index not in _PREFIXES or end > len(area):
                raise Corrupt("xattr", "bad prefix index or length", start + position)
            yield _PREFIXES[index] + area[position + XATTR_ENTRY.size : middle], area[middle:end]
            position = end + -end % 4

    def _range(self, start: int, size: int) -> bytes:
        if start + size > len(self._metadata):
            raise Corrupt("i_size", f"{self.size} bytes of inode {self.nid} leave the metadata", self._offset)
        return self._metadata[start : start + size]
