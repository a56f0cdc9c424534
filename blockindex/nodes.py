"""The inodes of a layer's tree, and what an entry's attributes make of one.

Knows what unpacking as root on Linux would leave of modes, owners and xattrs; must not know names, archives or EROFS.

- Owners are what chown makes of them: the low 32 bits, and 2^32 - 1 leaves the owner that is there.
- xattrs that no kernel would store (unknown namespaces; `user.*` on other than files and directories; ACLs of symlinks)
  are left out, as in unpacking, and so are `trusted.*`, which could tell overlayfs lies. ACLs and capabilities that a
  kernel refuses, and xattrs that are legal but too large for EROFS, are Unsupported.
- An access ACL follows the mode of its entry, as chmod makes it. (A default ACL is not passed on to entries that come
  later: each has the ACL of its own header, as with GNU tar; unpacking on Linux adds those.)
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from blockindex.acl import ACL_ACCESS, ACL_DEFAULT, checked_acl, with_mode
from blockindex.errors import Unsupported
from blockindex.layerpath import show_path

__all__ = ["Attributes", "Device", "Dir", "File", "Node", "Symlink", "apply_attributes", "new_dir"]

_XATTR_PREFIXES: Final = (b"user.", b"security.")
_CAPABILITY: Final = b"security.capability"
_CAPABILITY_SIZES: Final = {2: 20, 3: 24}  # by revision; older ones are refused by kernels
_TYPE: Final = 0o170000
_MODES: dict[int, int] = {}  # at most 64 Ki values: one int object for all inodes of a mode, 28 bytes each less
_KEEP_OWNER: Final = 2**32 - 1
_MAX_MTIME_NS: Final = (2**63 - 1) * 10**9


class Attributes(NamedTuple):
    """What every entry has: permission bits (0o7777), owner, time in ns since 1970, xattrs by their full name."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[bytes, bytes] | None = None


@dataclass(slots=True, eq=False)
class Node:
    """An inode: `mode` with the type bits; compared and hashed by identity, for hard links share it."""

    mode: int
    uid: int
    gid: int
    mtime_ns: int
    xattrs: dict[bytes, bytes] | None


@dataclass(slots=True, eq=False)
class File(Node):
    """A regular file: `size` bytes at `data_offset` of the data region (0 when empty)."""

    size: int
    data_offset: int


@dataclass(slots=True, eq=False)
class Symlink(Node):
    target: bytes


@dataclass(slots=True, eq=False)
class Device(Node):
    """A char or block device (with numbers), a fifo (without), or an overlayfs whiteout."""

    major: int
    minor: int


@dataclass(slots=True, eq=False)
class Dir(Node):
    """`whiteouts`: names of children that lower layers must not show; `implied`: no entry has described it (yet)."""

    children: dict[bytes, Node] = field(default_factory=dict)
    whiteouts: set[bytes] | None = None
    implied: bool = False


def new_dir(implied: bool = False) -> Dir:
    """A directory as unpacking makes one for which there is no entry."""
    return Dir(stat.S_IFDIR | 0o755, 0, 0, 0, None, implied=implied)


def apply_attributes(node: Node, attributes: Attributes, parts: list[bytes]) -> None:
    """Give `node` the attributes of an entry, as unpacking would: a symlink keeps its mode, older xattrs stay."""
    mode, uid, gid, node.mtime_ns, xattrs = attributes
    uid &= 0xFFFFFFFF
    gid &= 0xFFFFFFFF
    if uid != _KEEP_OWNER:
        node.uid = uid
    if gid != _KEEP_OWNER:
        node.gid = gid
    if not -_MAX_MTIME_NS <= node.mtime_ns <= _MAX_MTIME_NS:
        raise Unsupported(f"time of {show_path(parts)} is beyond 64-bit seconds")
    if not isinstance(node, Symlink):
        mode = node.mode & _TYPE | mode & 0o7777
        node.mode = _MODES.setdefault(mode, mode)
    if xattrs:
        kept = dict(_storable(xattrs, node, parts))
        if kept:
            node.xattrs = {**(node.xattrs or {}), **kept}
    if node.xattrs and ACL_ACCESS in node.xattrs:
        acl = with_mode(node.xattrs[ACL_ACCESS], mode)
        others = {name: value for name, value in node.xattrs.items() if name != ACL_ACCESS}
        node.xattrs = {**others, ACL_ACCESS: acl} if acl else others or None


def _storable(xattrs: dict[bytes, bytes], node: Node, parts: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Those xattrs that a kernel would store with `node`."""
    for name, value in xattrs.items():
        if name in (ACL_ACCESS, ACL_DEFAULT):
            if isinstance(node, Symlink) or _acl(name, value, node, parts) is None:
                continue
        elif not name.startswith(_XATTR_PREFIXES) or (name.startswith(b"user.") and not isinstance(node, File | Dir)):
            continue
        elif len(name) > 255 or name in _XATTR_PREFIXES or len(value) > 65535:
            raise Unsupported(f"xattr {name[:80]!r} of {show_path(parts)}: {len(name)} + {len(value)} bytes do not fit")
        elif name == _CAPABILITY and _CAPABILITY_SIZES.get(value[3] if len(value) > 3 else 0) != len(value):
            raise Unsupported(f"capabilities of {show_path(parts)} are of no form that Linux takes")
        yield name, value


def _acl(name: bytes, value: bytes, node: Node, parts: list[bytes]) -> bytes | None:
    try:
        acl = checked_acl(value)
    except ValueError as error:
        raise Unsupported(f"{name!r} of {show_path(parts)} {error}") from None
    if acl and name == ACL_DEFAULT and not isinstance(node, Dir):
        raise Unsupported(f"{show_path(parts)} has a default ACL and is no directory")
    return acl
