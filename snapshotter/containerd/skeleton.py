"""Directories over a lazy layer that give its implied directories the attributes of the layers below.

A tar may hold `tmp/x` without an entry for `tmp`. Unpacking then makes `tmp` with mode, owner and xattrs of the `tmp`
in the layers below, so that it stays 1777. The mounted layer is the same for every image and cannot know them; and
overlayfs takes a merged directory's attributes from its topmost layer. So a *skeleton*, a tree of such directories and
what leads to them, with nothing else in it, goes on top of the layer.

It must not know snapshots or the provider. Layers are hostile: no path component is a symlink unless it was looked at.
Invariant: with the skeleton on top only attributes of implied directories differ from the layers without it. Where
they would differ in time alone there is none: unpacking leaves the time of unpacking there, and a mount holds only so
many layers.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import InvalidArgument

__all__ = ["build_skeleton"]

_OPAQUE = "trusted.overlay.opaque"
_IMPLIED_MODE = 0o755


@dataclass(frozen=True, slots=True)
class _Attributes:
    mode: int
    uid: int
    gid: int
    atime_ns: int
    mtime_ns: int
    xattrs: dict[str, bytes]

    @property
    def is_default(self) -> bool:
        """Whether the layer itself shows an implied directory like this, but for its time."""
        return (self.mode, self.uid, self.gid, self.xattrs) == (_IMPLIED_MODE, 0, 0, {})


def build_skeleton(root: Path, layer: Path, implied: Iterable[bytes], lowers: Sequence[Path]) -> bool:
    """Fill the empty directory `root` with the skeleton over `layer` and return True; or leave it alone and return
    False, when none is needed. `implied` are absolute paths within the layer, `lowers` the layers below it, the nearest
    first. Raises OSError and leaves what it has made then; InvalidArgument, before anything, for a path that would lead
    out of the layer: an index is mounted before its metadata are judged, if its writer is trusted."""
    implied = tuple(implied)
    for path in implied:
        names = path.split(b"/")
        if path != b"/" and (not path.startswith(b"/") or not {b"", b".", b".."}.isdisjoint(names[1:])):
            raise InvalidArgument(f"implied directory {path[:100]!r}: not a path inside the layer")
    below = _Below(os.fsencode(layer), [os.fsencode(lower) for lower in lowers])
    inherited: dict[bytes, _Attributes] = {}
    for path in implied:
        merged = below.directories(path)
        if merged:
            # Of trusted xattrs containerd copies none; they are overlayfs's own, mostly.
            inherited[path] = _read(merged[0], without="trusted.")
    wanted = [path for path, attributes in inherited.items() if not attributes.is_default]
    if not wanted:
        return False
    paths = sorted({step for path in wanted for step in _steps(path)})
    top = os.fsencode(root)
    for path in paths[1:]:
        os.mkdir(top + path, 0o700)
    for path in reversed(paths):  # children first: making them changes a directory's time
        attributes = inherited.get(path) or _read(os.fsencode(layer) + path, without="trusted.overlay.")
        _apply(top + path, attributes)
    return True


class _Below:
    """What overlayfs would merge below the layer, remembered for each directory asked for."""

    def __init__(self, layer: bytes, lowers: Sequence[bytes]) -> None:
        self._layer = layer
        self._merged: dict[bytes, tuple[bytes, ...]] = {b"/": tuple(_merge(lowers))}
        if _is_opaque(layer):
            self._merged[b"/"] = ()

    def directories(self, path: bytes) -> tuple[bytes, ...]:
        """The directories of lower layers that make up `path`, the topmost first; empty when they show none there."""
        parent = b"/"
        for step in _steps(path):
            if step not in self._merged:
                name = step[step.rindex(b"/") :]
                above = self._merged[parent] if parent == b"/" or not _is_opaque(self._layer + parent) else ()
                self._merged[step] = tuple(_merge([directory + name for directory in above]))
            parent = step
        return self._merged[path]


def _steps(path: bytes) -> Iterator[bytes]:
    """`/`, then every directory on the way to `path`, then `path`."""
    yield b"/"
    end = 0
    while end >= 0:
        end = path.find(b"/", end + 1)
        yield path[:end] if end >= 0 else path


def _merge(candidates: Iterable[bytes]) -> Iterator[bytes]:
    """Those of one path in several layers that overlayfs merges: down to whatever is no directory, or is opaque."""
    for candidate in candidates:
        try:
            mode = os.lstat(candidate).st_mode
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(mode):
            return
        yield candidate
        if _is_opaque(candidate):
            return


def _is_opaque(directory: bytes) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def _read(directory: bytes, without: str) -> _Attributes:
    """Attributes of a directory; of its xattrs those whose names do not start with `without`."""
    status = os.lstat(directory)
    names = [name for name in os.listxattr(directory, follow_symlinks=False) if not name.startswith(without)]
    xattrs = {name: os.getxattr(directory, name, follow_symlinks=False) for name in names}
    mode = stat.S_IMODE(status.st_mode)
    return _Attributes(mode, status.st_uid, status.st_gid, status.st_atime_ns, status.st_mtime_ns, xattrs)


def _apply(directory: bytes, attributes: _Attributes) -> None:
    status = os.lstat(directory)
    if (status.st_uid, status.st_gid) != (attributes.uid, attributes.gid):
        os.chown(directory, attributes.uid, attributes.gid)
    for name, value in attributes.xattrs.items():
        os.setxattr(directory, name, value)
    os.chmod(directory, attributes.mode)  # after chown, which clears setgid, and after ACLs, which change modes
    os.utime(directory, ns=(attributes.atime_ns, attributes.mtime_ns))
