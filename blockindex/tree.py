"""Tar entries to the directory tree of one layer, with the semantics of containerd's unpacking into overlayfs.

Knows nothing of tar or EROFS. Rules, in the order of the archive:

- A path is cleaned against the layer's root: `..` never leaves it. Symlinks among its *parents* are followed inside the
  layer, the last component never is. Missing parents become directories 0755 root:root with mtime 0 ("implied").
- The root is 0755 root:root whatever its entry says, of which only the time is taken.
- The last entry of a path wins. A directory over a directory merges (children and older xattrs stay, attributes are
  replaced); everything else replaces what is there, with its subtree.
- A hard link shares its target's inode and gives it its own header's attributes, as containerd does. One that comes
  before its target (which containerd refuses) is resolved at the end and leaves the target as it is.
- `.wh.NAME` becomes overlayfs's whiteout, a char device 0:0 of mode 0 called NAME; `.wh..wh..opq` becomes
  `trusted.overlay.opaque=y` on its directory; other `.wh..wh.` names are aufs's and are left out, with all below them.
- A whiteout hides only lower layers. If the layer holds NAME too, before or after the whiteout, the file wins, and a
  directory becomes opaque: that is the OCI specification. (containerd's overlay unpacking fails if the whiteout comes
  second and forgets it if it comes first.)
- xattrs that no kernel would store (unknown namespaces; `user.*` on other than files and directories) are left out, as
  in unpacking, and so are `trusted.*`, which could tell overlayfs lies; xattrs and names that are legal but too large
  for EROFS are Unsupported.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from blockindex.errors import Corrupt, Unsupported
from blockindex.layerpath import MAX_PATH, WHITEOUT, WHITEOUT_META

__all__ = [
    "OPAQUE_XATTR",
    "Attributes",
    "Device",
    "Dir",
    "File",
    "Node",
    "Symlink",
    "Tree",
]

OPAQUE_XATTR = b"trusted.overlay.opaque"

_ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")
_XATTR_PREFIXES = (b"user.", b"security.")
_MAX_LINKS = 255
_TYPE = 0o170000
_MODES: dict[int, int] = {}  # at most 64 Ki values: one int object for all inodes of a mode, 28 bytes each less
_MAX_UID = 2**32 - 2  # 2^32 - 1 is chown's "leave it as it is"
_MAX_MTIME_NS = (2**63 - 1) * 10**9


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


@dataclass(slots=True, eq=False)
class _Forward(Node):
    """Stands where a hard link is whose target has not come yet."""

    target: tuple[bytes, ...]


class Tree:
    """The tree of one layer; apply the entries in archive order, then call `finish` once."""

    def __init__(self) -> None:
        self.root = _new_dir()
        self._forwards: list[tuple[Dir, bytes, _Forward]] = []
        # The parent of the last entry: archives list directories in runs. Void once a directory is replaced.
        self._last_parent: tuple[list[bytes], Dir] = ([], self.root)

    def __repr__(self) -> str:
        return f"<Tree {len(self.root.children)} names in the root, {len(self._forwards)} open hard links>"

    def add_dir(self, parts: list[bytes], attributes: Attributes) -> None:
        """Add or merge a directory; the root too (no parts)."""
        if not parts:
            _apply(self.root, Attributes(0o755, 0, 0, attributes.mtime_ns), parts)
            return
        parent = self._parent(parts)
        known = parent.children.get(parts[-1])
        if not isinstance(known, Dir):
            known = _new_dir()
            self._put(parent, parts, known)
        _apply(known, attributes, parts)
        known.implied = False

    def add_file(self, parts: list[bytes], attributes: Attributes, size: int, data_offset: int) -> None:
        node = File(stat.S_IFREG, 0, 0, 0, None, size, data_offset)
        self._add(parts, node, attributes)

    def add_symlink(self, parts: list[bytes], attributes: Attributes, target: bytes) -> None:
        if not target:
            raise Corrupt("symlink", f"{_show(parts)} has no target")
        if len(target) > 4095:
            raise Unsupported(f"target of symlink {_show(parts)} has {len(target)} bytes; Linux allows 4095")
        node = Symlink(stat.S_IFLNK | 0o777, 0, 0, 0, None, target)
        self._add(parts, node, attributes)

    def add_device(self, parts: list[bytes], attributes: Attributes, kind: int, major: int = 0, minor: int = 0) -> None:
        """`kind`: S_IFCHR, S_IFBLK, or S_IFIFO (without numbers)."""
        if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise Unsupported(f"device {_show(parts)} has numbers {major}:{minor}; Linux allows 4095:1048575")
        self._add(parts, Device(kind, 0, 0, 0, None, major, minor), attributes)

    def add_hardlink(self, parts: list[bytes], attributes: Attributes, target: list[bytes]) -> None:
        if any(part.startswith(WHITEOUT_META) for part in target):
            raise Unsupported(f"hard link {_show(parts)} points into aufs's metadata {_show(target)}")
        parent = self._parent(parts)
        node = self._find(target)
        if node is not None and node is parent.children.get(parts[-1]):
            pass  # `tar cf x a a` stores the second `a` as a link to itself
        elif node is None or isinstance(node, _Forward):
            node = _Forward(0, 0, 0, 0, None, tuple(target))
            self._put(parent, parts, node)
            self._forwards.append((parent, parts[-1], node))
            return
        else:
            _check_linkable(node, parts, target)
            self._put(parent, parts, node)
        _apply(node, attributes, parts)

    def add_whiteout(self, parts: list[bytes], attributes: Attributes) -> None:
        """Apply `.wh.NAME`."""
        name = parts[-1][len(WHITEOUT) :]
        if name in (b"", b".", b".."):
            raise Corrupt("whiteout", f"{_show(parts)} names nothing")
        parent = self._parent(parts)
        if parent.whiteouts is None:
            parent.whiteouts = set()
        parent.whiteouts.add(name)
        known = parent.children.get(name)
        if isinstance(known, Dir):
            _set_opaque(known)
            known.implied = False  # a new directory that owes nothing to the one below
        elif known is None:
            node = Device(stat.S_IFCHR, 0, 0, 0, None, 0, 0)
            self._put(parent, [*parts[:-1], name], node)
            _apply(node, attributes._replace(mode=0, xattrs=None), parts)

    def add_opaque(self, parts: list[bytes]) -> None:
        """Apply `.wh..wh..opq`: lower layers do not show in its directory."""
        _set_opaque(self._parent(parts))

    def finish(self) -> None:
        """Resolve the hard links that came before their targets; Corrupt if one has none."""
        for parent, name, forward in self._forwards:
            if parent.children.get(name) is not forward:
                continue
            node, seen = self._find(list(forward.target)), {forward}
            while isinstance(node, _Forward) and node not in seen:
                seen.add(node)
                node = self._find(list(node.target))
            if node is None or isinstance(node, _Forward):
                raise Corrupt("hard link", f"{name!r} points to {_show(list(forward.target))}: not in this layer")
            _check_linkable(node, [name], list(forward.target))
            parent.children[name] = node
        self._forwards.clear()

    def implied_dirs(self) -> Iterator[bytes]:
        """Paths of the directories no entry described, parents first. Unpacking gives them the attributes they have
        in the layers below, which one layer alone cannot know."""
        todo: list[tuple[bytes, Dir]] = [(b"", self.root)]
        while todo:
            path, node = todo.pop()
            if node.implied:
                yield path
            todo += [(path + b"/" + n, c) for n, c in node.children.items() if isinstance(c, Dir)]

    def _add(self, parts: list[bytes], node: Node, attributes: Attributes) -> None:
        _apply(node, attributes, parts)
        self._put(self._parent(parts), parts, node)

    def _put(self, parent: Dir, parts: list[bytes], node: Node) -> None:
        name = parts[-1]
        if len(name) > 255:
            raise Unsupported(f"name {_show(parts)} has {len(name)} bytes; Linux allows 255")
        if name in parent.children:
            self._last_parent = ([], self.root)
        if isinstance(node, Dir) and parent.whiteouts and name in parent.whiteouts:
            _set_opaque(node)
        parent.children[name] = node

    def _parent(self, parts: list[bytes]) -> Dir:
        head = parts[:-1]
        if head == self._last_parent[0]:
            return self._last_parent[1]
        parent = self._walk(head, create=True)
        assert parent is not None
        self._last_parent = (head, parent)
        return parent

    def _find(self, parts: list[bytes]) -> Node | None:
        """The node called `parts`, a symlink itself if it is one; None if there is none."""
        if not parts:
            return self.root
        parent = self._walk(parts[:-1], create=False)
        return parent.children.get(parts[-1]) if parent else None

    def _walk(self, parts: list[bytes], create: bool) -> Dir | None:
        """The directory called `parts`, symlinks followed inside the layer; made if missing and `create`."""
        path, todo, links, length = [self.root], parts[::-1], 0, 0
        while todo:
            part = todo.pop()
            if part in (b"", b"."):
                continue
            if part == b"..":
                del path[max(1, len(path) - 1) :]
                continue
            length += len(part) + 1
            if length > MAX_PATH:
                raise Unsupported(f"path {_show(parts)} is longer than {MAX_PATH} bytes, symlinks followed")
            child = path[-1].children.get(part)
            if isinstance(child, Symlink):
                links += 1
                if links > _MAX_LINKS:
                    raise Corrupt("path", f"{_show(parts)} runs in a circle of symlinks")
                if child.target.startswith(b"/"):
                    del path[1:]
                todo += child.target.split(b"/")[::-1]
                continue
            if not isinstance(child, Dir):
                if not create:
                    return None
                child = self._imply(path[-1], part, child, parts)
            path.append(child)
        return path[-1]

    def _imply(self, parent: Dir, name: bytes, known: Node | None, parts: list[bytes]) -> Dir:
        if known is not None and not (parent.whiteouts and name in parent.whiteouts and _is_whiteout(known)):
            raise Corrupt("path", f"{name!r} in {_show(parts)} is no directory")
        made = _new_dir(implied=known is None)  # over a whiteout it is a new one
        self._put(parent, [*parts, name], made)
        return made


def _new_dir(implied: bool = False) -> Dir:
    return Dir(stat.S_IFDIR | 0o755, 0, 0, 0, None, implied=implied)


def _is_whiteout(node: Node) -> bool:
    return node.mode == stat.S_IFCHR and isinstance(node, Device) and node.major == node.minor == 0


def _set_opaque(node: Dir) -> None:
    node.xattrs = {**(node.xattrs or {}), OPAQUE_XATTR: b"y"}


def _check_linkable(node: Node, parts: list[bytes], target: list[bytes]) -> None:
    if isinstance(node, Dir):
        raise Corrupt("hard link", f"{_show(parts)} points to the directory {_show(target)}")


def _apply(node: Node, attributes: Attributes, parts: list[bytes]) -> None:
    """Give `node` the attributes of an entry, as unpacking would: a symlink keeps its mode, older xattrs stay."""
    mode, node.uid, node.gid, node.mtime_ns, xattrs = attributes
    if not (0 <= node.uid <= _MAX_UID and 0 <= node.gid <= _MAX_UID):
        raise Unsupported(f"owner {node.uid}:{node.gid} of {_show(parts)}: beyond what Linux can store")
    if abs(node.mtime_ns) > _MAX_MTIME_NS:
        raise Unsupported(f"time of {_show(parts)} is beyond 64-bit seconds")
    if not isinstance(node, Symlink):
        mode = node.mode & _TYPE | mode & 0o7777
        node.mode = _MODES.setdefault(mode, mode)
    if xattrs:
        kept = dict(_storable(xattrs, isinstance(node, File | Dir), parts))
        if kept:
            node.xattrs = {**(node.xattrs or {}), **kept}


def _storable(xattrs: dict[bytes, bytes], plain: bool, parts: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Those xattrs that a kernel would store; `plain`: on a file or directory."""
    for name, value in xattrs.items():
        if name in _ACLS:
            if len(value) % 8 != 4 or value[:4] != b"\2\0\0\0":
                raise Unsupported(f"{name!r} of {_show(parts)} is no POSIX ACL of version 2")
        elif not name.startswith(_XATTR_PREFIXES) or (name.startswith(b"user.") and not plain):
            continue
        elif len(name) > 255 or name in _XATTR_PREFIXES or len(value) > 65535:
            raise Unsupported(f"xattr {name[:80]!r} of {_show(parts)}: {len(name)} + {len(value)} bytes do not fit")
        yield name, value


def _show(parts: list[bytes]) -> str:
    path = "/" + b"/".join(parts).decode("utf-8", "backslashreplace")
    return path if len(path) <= 200 else path[:200] + "..."
