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
  `trusted.overlay.opaque=y` on its directory; other `.wh..wh.` names are aufs's and are taken out at the end, with all
  below them: until then there may be hard links to them.
- A whiteout hides only lower layers. If the layer holds NAME too, before or after the whiteout, the file wins, and a
  directory becomes opaque: that is the OCI specification. (containerd's overlay unpacking fails if the whiteout comes
  second and forgets it if it comes first.)
- What an entry's attributes leave of an inode is said in `nodes`. Names too large for EROFS are Unsupported.
"""

import stat
from collections.abc import Iterator
from dataclasses import dataclass

from blockindex.errors import Corrupt, Unsupported
from blockindex.layerpath import MAX_IMPLIED_PATH, MAX_PATH, WHITEOUT, WHITEOUT_META, show_path
from blockindex.nodes import Attributes, Device, Dir, File, Node, Symlink, apply_attributes, new_dir

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

_MAX_LINKS = 255
_MAX_IMPLIED_BYTES = 64 << 20  # of paths of implied directories: what a layer cannot have, but a trap can


@dataclass(slots=True, eq=False)
class _Forward(Node):
    """Stands where a hard link is whose target has not come yet."""

    target: tuple[bytes, ...]


class Tree:
    """The tree of one layer; apply the entries in archive order, then call `finish` once."""

    def __init__(self) -> None:
        self.root = new_dir()
        self._forwards: list[tuple[Dir, bytes, _Forward]] = []
        self._aufs: list[tuple[Dir, bytes]] = []  # names of aufs's metadata, to take out
        # The parent of the last entry: archives list directories in runs. Void once a directory is replaced.
        self._last_parent: tuple[list[bytes], Dir] = ([], self.root)

    def __repr__(self) -> str:
        return f"<Tree {len(self.root.children)} names in the root, {len(self._forwards)} open hard links>"

    def add_dir(self, parts: list[bytes], attributes: Attributes) -> None:
        """Add or merge a directory; the root too (no parts)."""
        if not parts:
            apply_attributes(self.root, Attributes(0o755, 0, 0, attributes.mtime_ns), parts)
            return
        parent = self._parent(parts)
        known = parent.children.get(parts[-1])
        if not isinstance(known, Dir):
            known = new_dir()
            self._put(parent, parts, known)
        apply_attributes(known, attributes, parts)
        known.implied = False

    def add_file(self, parts: list[bytes], attributes: Attributes, size: int, data_offset: int) -> None:
        node = File(stat.S_IFREG, 0, 0, 0, None, size, data_offset)
        self._add(parts, node, attributes)

    def add_symlink(self, parts: list[bytes], attributes: Attributes, target: bytes) -> None:
        if not target:
            raise Corrupt("symlink", f"{show_path(parts)} has no target")
        if len(target) > 4095:
            raise Unsupported(f"target of symlink {show_path(parts)} has {len(target)} bytes; Linux allows 4095")
        node = Symlink(stat.S_IFLNK | 0o777, 0, 0, 0, None, target)
        self._add(parts, node, attributes)

    def add_device(self, parts: list[bytes], attributes: Attributes, kind: int, major: int = 0, minor: int = 0) -> None:
        """`kind`: S_IFCHR, S_IFBLK, or S_IFIFO (without numbers)."""
        if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
            raise Unsupported(f"device {show_path(parts)} has numbers {major}:{minor}; Linux allows 4095:1048575")
        self._add(parts, Device(kind, 0, 0, 0, None, major, minor), attributes)

    def add_hardlink(self, parts: list[bytes], attributes: Attributes, target: list[bytes]) -> None:
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
        apply_attributes(node, attributes, parts)

    def add_whiteout(self, parts: list[bytes], attributes: Attributes) -> None:
        """Apply `.wh.NAME`."""
        name = parts[-1][len(WHITEOUT) :]
        if name in (b"", b".", b".."):
            raise Corrupt("whiteout", f"{show_path(parts)} names nothing")
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
            apply_attributes(node, attributes._replace(mode=0, xattrs=None), parts)

    def add_opaque(self, parts: list[bytes]) -> None:
        """Apply `.wh..wh..opq`: lower layers do not show in its directory."""
        _set_opaque(self._parent(parts))

    def remove(self, parts: list[bytes]) -> None:
        """What is called `parts` goes, whatever it is; lower layers show again. Parents appear."""
        parent = self._parent(parts)
        if parent.children.pop(parts[-1], None) is not None:
            self._last_parent = ([], self.root)
            if parent.whiteouts:
                parent.whiteouts.discard(parts[-1])

    def finish(self) -> None:
        """Resolve the hard links that came before their targets, then take out aufs's metadata; Corrupt if a link of
        the layer has no target."""
        broken: list[tuple[Dir, bytes, _Forward]] = []
        known: dict[_Forward, Node | None] = {}
        for parent, name, forward in self._forwards:
            if parent.children.get(name) is forward:
                node = self._resolve(forward, known)
                if node is None or isinstance(node, Dir):
                    broken.append((parent, name, forward))
                else:
                    parent.children[name] = node
        self._forwards.clear()
        for parent, name in self._aufs:
            parent.children.pop(name, None)
        self._aufs.clear()
        if broken:
            self._refuse(broken)

    def _resolve(self, forward: _Forward, known: dict[_Forward, Node | None]) -> Node | None:
        """What `forward` points to, over other forwards if need be; None if that is nothing. `known` remembers, so that
        a chain is walked once."""
        chain: list[_Forward] = []
        node: Node | None = forward
        while isinstance(node, _Forward) and node not in known:
            known[node] = None  # until it is known: a circle points to nothing
            chain.append(node)
            node = self._find(list(node.target))
        if isinstance(node, _Forward):
            node = known[node]
        known.update(dict.fromkeys(chain, node))
        return node

    def _refuse(self, broken: list[tuple[Dir, bytes, _Forward]]) -> None:
        """Corrupt for the first of the links that is still in the layer; its directory may have been replaced."""
        reachable = {id(directory) for _, directory in self._directories()}
        for parent, name, forward in broken:
            if id(parent) in reachable and parent.children.get(name) is forward:
                target = list(forward.target)
                if isinstance(self._find(target), Dir):
                    raise Corrupt("hard link", f"{name!r} points to the directory {show_path(target)}")
                raise Corrupt("hard link", f"{name!r} points to {show_path(target)}: not in this layer")

    def implied_dirs(self) -> Iterator[bytes]:
        """Paths of the directories no entry described, parents first. Unpacking gives them the attributes they have
        in the layers below, which one layer alone cannot know."""
        total = 0
        for names, directory in self._directories():
            if directory.implied:
                path = b"".join(b"/" + name for name in names)
                total += len(path)
                if len(path) > MAX_IMPLIED_PATH or total > _MAX_IMPLIED_BYTES:
                    raise Unsupported(f"directories without entries have paths too long to look up: {path[:80]!r}...")
                yield path

    def _directories(self) -> Iterator[tuple[list[bytes], Dir]]:
        """Every directory after its parent, with the names of its path, a list that is reused."""
        names: list[bytes] = []
        open_dirs: list[Iterator[tuple[bytes, Node]]] = [iter([(b"", self.root)])]
        while open_dirs:
            for name, node in open_dirs[-1]:
                if isinstance(node, Dir):
                    names.append(name)
                    yield names[1:], node
                    open_dirs.append(iter(node.children.items()))
                    break
            else:
                open_dirs.pop()
                if names:
                    names.pop()

    def _add(self, parts: list[bytes], node: Node, attributes: Attributes) -> None:
        apply_attributes(node, attributes, parts)
        self._put(self._parent(parts), parts, node)

    def _put(self, parent: Dir, parts: list[bytes], node: Node) -> None:
        name = parts[-1]
        if len(name) > 255:
            raise Unsupported(f"name {show_path(parts)} has {len(name)} bytes; Linux allows 255")
        if name in parent.children:
            self._last_parent = ([], self.root)
        elif name.startswith(WHITEOUT_META):
            self._aufs.append((parent, name))
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
                raise Unsupported(f"path {show_path(parts)} is longer than {MAX_PATH} bytes, symlinks followed")
            child = path[-1].children.get(part)
            if isinstance(child, Symlink):
                links += 1
                if links > _MAX_LINKS:
                    raise Corrupt("path", f"{show_path(parts)} runs in a circle of symlinks")
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
            raise Corrupt("path", f"{name!r} in {show_path(parts)} is no directory")
        made = new_dir(implied=known is None)  # over a whiteout it is a new one
        self._put(parent, [*parts, name], made)
        return made


def _is_whiteout(node: Node) -> bool:
    return node.mode == stat.S_IFCHR and isinstance(node, Device) and node.major == node.minor == 0


def _set_opaque(node: Dir) -> None:
    node.xattrs = {**(node.xattrs or {}), OPAQUE_XATTR: b"y"}


def _check_linkable(node: Node, parts: list[bytes], target: list[bytes]) -> None:
    if isinstance(node, Dir):
        raise Corrupt("hard link", f"{show_path(parts)} points to the directory {show_path(target)}")
