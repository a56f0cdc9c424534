"""A layer's tree to EROFS metadata: two passes, the same bytes for the same tree.

Pass one (`_Plan`) gives every inode its place, for directories name them by place; pass two writes. The order is that
of a walk with names sorted; inodes of 64 bytes also fill the gaps that larger ones leave at the end of a block. An
inode with its xattrs and tail never crosses a block; one whose xattrs alone exceed a block starts at one.

Layout: superblock at 1024, inodes from 1152 on, then whole blocks of directories and of symlinks too long for a tail.
The data region follows right behind, so a file's start block is known as soon as pass one is done.
"""

import stat
from array import array
from dataclasses import dataclass
from itertools import islice
from typing import Final

from blockindex.erofs.ondisk import (
    CHECKSUM_OFFSET,
    DIRENT,
    FEATURES_COMPAT,
    FILE_TYPES,
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
    checksum,
    encode_device,
)
from blockindex.errors import Unsupported
from blockindex.model import BLOCK, block_ceil
from blockindex.tree import Device, Dir, File, Node, Symlink, Tree

__all__ = ["build_metadata"]

_SLOT: Final = 32
_NS: Final = 10**9
_MAX_BLOCKS: Final = (1 << 32) - 1
_MAX_XATTR_COUNT: Final = 0xFFFF

_Names = list[tuple[bytes, Node]]


def build_metadata(tree: Tree, data_size: int, uuid: bytes) -> bytes:
    """The EROFS image of `tree` without its data, a whole number of blocks; a data region of `data_size` bytes is to
    follow right behind it. `uuid`: 16 bytes, different for different layers (overlayfs needs that). Raises
    Unsupported when the layer does not fit the format."""
    assert len(uuid) == 16 and data_size % BLOCK == 0
    plan = _Plan(tree)
    blocks = (plan.size + data_size) // BLOCK
    if blocks > _MAX_BLOCKS:
        raise Unsupported(f"the layer image would have {blocks} blocks; EROFS addresses {_MAX_BLOCKS}")
    out = bytearray(plan.size)
    _Writer(plan, out).write()
    root_nid = plan.nids[tree.root]
    SUPERBLOCK.pack_into(
        out, SUPERBLOCK_OFFSET,
        MAGIC, 0, FEATURES_COMPAT, 12, 0, root_nid, len(plan.nids), 0, 0, blocks, 0, 0,
        uuid, b"", 0, 0, 0, 0, 0, 0, 0, 0, b"",
    )  # fmt: skip
    del plan  # as large as the metadata, of which a copy comes now
    crc = checksum(bytes(out[:BLOCK]))
    out[CHECKSUM_OFFSET : CHECKSUM_OFFSET + 4] = crc.to_bytes(4, "little")
    return bytes(out)


@dataclass(frozen=True, slots=True)
class _DirPlan:
    """A directory's parent, how many names each of its blocks has, its size, and the first of its whole blocks (counted
    from the start of the block area); the last block is the tail if `inline`. (The names themselves, sorted, would take
    64 bytes each until they are written: they are sorted once more then.)"""

    parent: Dir
    counts: "array[int]"
    size: int
    start: int
    inline: bool


class _Plan:
    """Where everything goes. `nids` is in the order of placing; `links` counts the names of inodes with several;
    `long_links` are the blocks of symlinks without a tail; `area` is the block that the block area starts with."""

    def __init__(self, tree: Tree) -> None:
        self.nids: dict[Node, int] = {}
        self.links: dict[Node, int] = {}
        self.xattrs: dict[Node, bytes] = {}
        self.dirs: dict[Dir, _DirPlan] = {}
        self.long_links: dict[Symlink, int] = {}
        self._end = SUPERBLOCK_OFFSET + SUPERBLOCK.size
        self._gaps: list[int] = []
        self._blocks = 0
        self._walk(tree.root)
        self.area = block_ceil(self._end) // BLOCK
        self.size = (self.area + self._blocks) * BLOCK

    def _walk(self, root: Dir) -> None:
        todo: list[tuple[Dir, Dir]] = [(root, root)]
        while todo:
            node, parent = todo.pop()
            names = _sorted_names(node, parent)
            self._place_dir(node, parent, names)
            subdirs: list[tuple[Dir, Dir]] = []
            for _, child in names:
                if isinstance(child, Dir):
                    if child is not node and child is not parent:
                        subdirs.append((child, node))
                elif child in self.nids:
                    self.links[child] = self.links.get(child, 1) + 1
                else:
                    self._place_leaf(child)
            todo += reversed(subdirs)

    def _place_dir(self, node: Dir, parent: Dir, names: _Names) -> None:
        counts, tail = _split(names)
        room = BLOCK - INODE_SIZE - self._xattr_size(node)
        inline = tail <= room
        size = (len(counts) - 1) * BLOCK + tail
        self.dirs[node] = _DirPlan(parent, counts, size, self._blocks, inline)
        self._blocks += len(counts) - inline
        self._place(node, tail if inline else 0)

    def _place_leaf(self, node: Node) -> None:
        tail = 0
        xattr_size = self._xattr_size(node)
        if isinstance(node, Symlink):
            tail = len(node.target)
            if INODE_SIZE + xattr_size + tail > BLOCK:
                self.long_links[node] = self._blocks
                self._blocks += 1
                tail = 0
        self._place(node, tail)

    def _place(self, node: Node, tail: int) -> None:
        size = -(-(INODE_SIZE + len(self.xattrs.get(node, b"")) + tail) // _SLOT) * _SLOT
        if size == INODE_SIZE and self._gaps:
            gap = self._gaps.pop()
            self.nids[node] = gap // _SLOT
            if (gap + 2 * INODE_SIZE - 1) // BLOCK == gap // BLOCK:
                self._gaps.append(gap + INODE_SIZE)
            return
        left = -self._end % BLOCK
        if left and size > left:
            if left >= INODE_SIZE:
                self._gaps.append(self._end)
            self._end += left
        self.nids[node] = self._end // _SLOT
        self._end += size

    def _xattr_size(self, node: Node) -> int:
        if not node.xattrs:
            return 0
        encoded = self.xattrs[node] = _encode_xattrs(node.xattrs)
        return len(encoded)


def _name(item: tuple[bytes, Node]) -> bytes:
    return item[0]


def _sorted_names(node: Dir, parent: Dir) -> _Names:
    """What a directory lists, in its order."""
    return sorted([*node.children.items(), (b".", node), (b"..", parent)], key=_name)


def _split(names: _Names) -> tuple["array[int]", int]:
    """The sorted names in runs that fill a block each: how many each has, and the bytes of the last."""
    counts = array("I", (0,))
    room = BLOCK
    for name, _ in names:
        need = DIRENT.size + len(name)
        if need > room:
            counts.append(0)
            room = BLOCK
        counts[-1] += 1
        room -= need
    return counts, BLOCK - room


def _encode_xattrs(xattrs: dict[bytes, bytes]) -> bytes:
    """The inline xattr area: header, then entries sorted by prefix and name."""
    entries: list[tuple[int, bytes, bytes]] = []
    for name, value in xattrs.items():
        prefix = next(prefix for prefix in XATTR_INDEXES if name.startswith(prefix))
        entries.append((XATTR_INDEXES[prefix], name[len(prefix) :], value))
    out = bytearray(XATTR_HEADER_SIZE)
    for index, name, value in sorted(entries):
        out += XATTR_ENTRY.pack(len(name), index, len(value)) + name + value
        out += bytes(-len(out) % 4)
    if _xattr_count(out) > _MAX_XATTR_COUNT:
        raise Unsupported(f"xattrs of one inode take {len(out)} bytes; EROFS has room for 262148")
    return bytes(out)


def _xattr_count(encoded: bytes | bytearray) -> int:
    return 1 + (len(encoded) - XATTR_HEADER_SIZE) // 4 if encoded else 0


class _Writer:
    """Pass two: writes the planned inodes and blocks into `out`."""

    def __init__(self, plan: _Plan, out: bytearray) -> None:
        self._plan = plan
        self._out = out
        self._ino = 0

    def write(self) -> None:
        data_block = self._plan.size // BLOCK
        for node in self._plan.nids:
            if isinstance(node, File):
                start = data_block + node.data_offset // BLOCK if node.size else 0
                self._inode(node, FORMAT_PLAIN, node.size, start)
            elif isinstance(node, Dir):
                self._write_dir(node)
            elif isinstance(node, Symlink):
                self._write_symlink(node)
            else:
                assert isinstance(node, Device)
                self._inode(node, FORMAT_PLAIN, 0, encode_device(node.major, node.minor))

    def _inode(self, node: Node, layout: int, size: int, start: int, nlink: int = 0, tail: bytes = b"") -> None:
        plan = self._plan
        offset = plan.nids[node] * _SLOT
        xattrs = plan.xattrs.get(node, b"")
        seconds, nanoseconds = divmod(node.mtime_ns, _NS)
        self._ino += 1
        INODE.pack_into(
            self._out, offset,
            layout, _xattr_count(xattrs), node.mode, 0, size, start, self._ino, node.uid, node.gid,
            seconds, nanoseconds, nlink or plan.links.get(node, 1), b"",
        )  # fmt: skip
        if xattrs or tail:
            offset += INODE_SIZE
            self._out[offset : offset + len(xattrs) + len(tail)] = xattrs + tail

    def _write_dir(self, node: Dir) -> None:
        plan = self._plan.dirs[node]
        start = self._plan.area + plan.start
        names = iter(_sorted_names(node, plan.parent))
        whole = [self._dir_block(list(islice(names, count))) for count in plan.counts]
        nlink = 2 + sum(isinstance(child, Dir) for child in node.children.values())
        tail = whole.pop() if plan.inline else b""
        for index, block in enumerate(whole):
            offset = (start + index) * BLOCK
            self._out[offset : offset + len(block)] = block
        layout = FORMAT_INLINE if plan.inline else FORMAT_PLAIN
        self._inode(node, layout, plan.size, start if whole else 0, nlink, tail)

    def _dir_block(self, names: _Names) -> bytes:
        nids = self._plan.nids
        offset = DIRENT.size * len(names)
        dirents: list[bytes] = []
        for name, child in names:
            dirents.append(DIRENT.pack(nids[child], offset, FILE_TYPES[stat.S_IFMT(child.mode)], 0))
            offset += len(name)
        return b"".join(dirents) + b"".join(map(_name, names))

    def _write_symlink(self, node: Symlink) -> None:
        block = self._plan.long_links.get(node)
        if block is None:
            self._inode(node, FORMAT_INLINE, len(node.target), 0, tail=node.target)
            return
        start = self._plan.area + block
        self._out[start * BLOCK : start * BLOCK + len(node.target)] = node.target
        self._inode(node, FORMAT_PLAIN, len(node.target), start)
