"""A hot set carried over to another image: the same files, wherever the other image has them.

For an image that was built again nobody knows yet what its start reads, but most of it is what the image before read.
So each hot block is followed to its file in the old image, and the file to the new one: to the same path, or, where
that is gone, to a path of the same name that the old image did not have (it was moved). Layers that both images have
need not be unpacked for that, but their files count only where nothing in the new image hides them.

The result has no bytes and is a guess. It says what to fetch from the new image's own layers, and what comes is
verified there as always: a wrong guess costs a fetch, and can never be a wrong byte. That is why a file whose content
has changed keeps its hot blocks, too: those at its end stay at its end, the others where they were.

Knows trees by their metadata and overlayfs's rules of hiding; must not know files, containerd or where sets come from.

Invariants: every block of the result lies in a regular file that the new image shows; a file with the same content at
the same path keeps exactly its hot blocks; order, times, workload and arguments are those of the old set.
"""

import stat
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from blockindex.erofs import Entry, walk
from blockindex.errors import Unsupported
from blockindex.hotset import HotExtent, HotLayer, HotSet, from_touches, image_key
from blockindex.model import BLOCK, block_ceil

__all__ = ["Carried", "Carrier", "LayerTree"]

_OPAQUE = b"trusted.overlay.opaque"


@dataclass(frozen=True, slots=True)
class LayerTree:
    """A layer as hot sets name it, and its EROFS metadata, which must be valid."""

    layer: HotLayer
    metadata: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Carried:
    """The set of the new image, and what became of the blocks of the old one: `kept` in files of the same path, size
    and time (or of the same layer), `changed` in others of the same path, `moved` to another path, or `lost`."""

    hotset: HotSet
    kept: int
    changed: int
    moved: int
    lost: int


class _Kind(Enum):
    FILE = "regular file with bytes"
    DIR = "directory"
    OPAQUE = "directory that hides those below"
    OTHER = "anything else: a symlink, a whiteout, an empty file"


@dataclass(frozen=True, slots=True)
class _Name:
    """One name of a layer; of a file, its blocks `[start, end)` of the data region."""

    kind: _Kind
    start: int = 0
    end: int = 0
    size: int = 0
    mtime_ns: int = 0


_Names = Mapping[bytes, _Name]


@dataclass(frozen=True, slots=True)
class _Place:
    """A file of the new image: the position of its layer, and its name there."""

    layer: int
    file: _Name


class _Fate(Enum):
    KEPT = "kept"
    CHANGED = "changed"
    MOVED = "moved"
    LOST = "lost"


class Carrier:
    """Carries the sets of one image over to another."""

    def __init__(
        self, old: Iterable[LayerTree], new: Sequence[LayerTree], walked: Callable[[int], None] = lambda size: None
    ) -> None:
        """`old` are the layers of the sets' image that are at hand, in any order: what is hot in others is lost. `new`
        are those of the other image, from the bottom up, each once. This walks all trees, 10 µs a name, and calls
        `walked` for each with the size of its metadata."""
        self._layers = [tree.layer for tree in new]
        self._names: dict[HotLayer, _Names] = {}
        for tree in (*old, *new):
            if tree.layer not in self._names:
                self._names[tree.layer] = {entry.path: _name(entry) for entry in walk(tree.metadata)}
            walked(len(tree.metadata))

    def carry(self, hotset: HotSet) -> Carried:
        """The other image's set. Unsupported when both are one image."""
        if image_key([layer.digest for layer in self._layers]) == hotset.image_key:
            raise Unsupported(
                f"{hotset.image_key} is the key of both: images with the same layers share their hot sets"
            )
        then = [self._names.get(layer, {}) for layer in hotset.layers]
        return _Carrying(hotset, then, self._layers, [self._names[layer] for layer in self._layers]).run()


class _Carrying:
    """One set's way."""

    def __init__(
        self, hotset: HotSet, old: Sequence[_Names], layers: Sequence[HotLayer], new: Sequence[_Names]
    ) -> None:
        self._hotset = hotset
        self._layers = layers
        self._old = old
        self._new = new
        self._places: dict[tuple[int, int], tuple[_Fate, _Place | None]] = {}  # by layer and first block of a file
        self._newcomers: dict[bytes, list[tuple[bytes, _Place]]] | None = None

    def run(self) -> Carried:
        blocks = dict.fromkeys(_Fate, 0)
        touches: list[tuple[int, int, int, int]] = []
        files = [_Files(names) for names in self._old]
        for extent in self._hotset.extents:
            found = 0
            for path, file, start, end in files[extent.layer].of(extent):
                fate, place = self._place(extent.layer, path, file)
                found += end - start
                blocks[fate] += end - start
                if place is not None:
                    first, last = _translated(file, place.file, start - file.start, end - file.start)
                    touches.append((place.layer, first, last, extent.time_ms))
            blocks[_Fate.LOST] += extent.end - extent.start - found
        made = from_touches(self._layers, touches, workload=self._hotset.workload)
        origin = self._hotset.carried_from or self._hotset.image_key
        made = replace(made, records=self._hotset.records, argvs=self._hotset.argvs, carried_from=origin)
        return Carried(made, *(blocks[fate] for fate in _Fate))

    def _place(self, layer: int, paths: Sequence[bytes], file: _Name) -> tuple[_Fate, _Place | None]:
        """Where the new image has the old one's file, which has these paths (hard links); remembered."""
        known = self._places.get((layer, file.start))
        if known is None:
            known = self._places[layer, file.start] = self._found(paths, file)
        return known

    def _found(self, paths: Sequence[bytes], file: _Name) -> tuple[_Fate, _Place | None]:
        for path in paths:
            place = _shown(self._new, path)
            if place is not None:
                same = (place.file.size, place.file.mtime_ns) == (file.size, file.mtime_ns)
                return (_Fate.KEPT if same else _Fate.CHANGED), place
        candidates = [it for path in paths for it in self._moved(path, file)]
        if not candidates:
            return _Fate.LOST, None
        return _Fate.MOVED, max(candidates, key=lambda it: it[0])[1]

    def _moved(self, path: bytes, file: _Name) -> Iterator[tuple[tuple[bool, bool, int], _Place]]:
        """The files of that name at paths that the old image did not have, with how much speaks for each. One of
        another size must at least be in a directory of the same name."""
        if self._newcomers is None:
            self._newcomers = self._find_newcomers()
        for other, place in self._newcomers.get(_base(path), ()):
            common = _common_suffix(path, other)
            same_size = place.file.size == file.size
            if same_size or common > 1:
                yield (same_size, place.file.mtime_ns == file.mtime_ns, common), place

    def _find_newcomers(self) -> dict[bytes, list[tuple[bytes, _Place]]]:
        """By their last name, the files that the new image shows where the old one showed none."""
        found: dict[bytes, list[tuple[bytes, _Place]]] = {}
        for names in self._new:
            for path, name in names.items():
                if name.kind is _Kind.FILE and _shown(self._old, path) is None:
                    place = _shown(self._new, path)
                    if place is not None and place.file is name:
                        found.setdefault(_base(path), []).append((path, place))
        return found


class _Files:
    """Which file of a layer holds a block."""

    def __init__(self, names: _Names) -> None:
        paths: dict[int, list[bytes]] = {}
        files: dict[int, _Name] = {}
        for path, name in names.items():
            if name.kind is _Kind.FILE:
                paths.setdefault(name.start, []).append(path)
                files[name.start] = name
        self._rows = [(paths[start], files[start]) for start in sorted(files)]
        self._ends = [file.end for _, file in self._rows]  # ascending, as their starts: files share no block

    def of(self, extent: HotExtent) -> Iterator[tuple[list[bytes], _Name, int, int]]:
        """(paths, file, start, end) of each part `[start, end)` of the extent that lies in a file."""
        for row in range(bisect_left(self._ends, extent.start + 1), len(self._rows)):
            paths, file = self._rows[row]
            if file.start >= extent.end:
                return
            yield paths, file, max(extent.start, file.start), min(extent.end, file.end)


def _name(entry: Entry) -> _Name:
    if stat.S_ISDIR(entry.mode):
        return _OPAQUE_DIR if _OPAQUE in entry.xattrs else _DIR
    if entry.data_offset is None:
        return _OTHER
    start = entry.data_offset // BLOCK
    return _Name(_Kind.FILE, start, start + block_ceil(entry.size) // BLOCK, entry.size, entry.mtime_ns)


_DIR, _OPAQUE_DIR, _OTHER = _Name(_Kind.DIR), _Name(_Kind.OPAQUE), _Name(_Kind.OTHER)


def _shown(image: Sequence[_Names], path: bytes) -> _Place | None:
    """The regular file with bytes that the image shows at `path`: overlayfs's rules, without following symlinks."""
    above = _ancestors(path)
    for layer in range(len(image) - 1, -1, -1):
        names = image[layer]
        name = names.get(path)
        if name is not None:
            return _Place(layer, name) if name.kind is _Kind.FILE else None
        for ancestor in above:
            kind = names.get(ancestor, _DIR).kind
            if kind is not _Kind.DIR:
                return None
    return None


def _ancestors(path: bytes) -> list[bytes]:
    """The directories above, the root too."""
    parts = path.split(b"/")
    return [b"/".join(parts[:count]) or b"/" for count in range(1, len(parts))]


def _translated(old: _Name, new: _Name, start: int, end: int) -> tuple[int, int]:
    """Blocks of the new layer for the blocks `[start, end)` of the old file; empty (start = end) where the new one is
    too short. A file that was hot as a whole is, up to twice its size."""
    old_blocks, new_blocks = old.end - old.start, new.end - new.start
    if (start, end) == (0, old_blocks):
        end = min(new_blocks, 2 * old_blocks)
    elif end == old_blocks:
        start, end = max(new_blocks - (end - start), 0), new_blocks
    return new.start + min(start, new_blocks), new.start + min(end, new_blocks)


def _base(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _common_suffix(left: bytes, right: bytes) -> int:
    """How many names at their ends the paths have in common."""
    count = 0
    for one, other in zip(reversed(left.split(b"/")), reversed(right.split(b"/")), strict=False):
        if one != other or not one:
            break
        count += 1
    return count
