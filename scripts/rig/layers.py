"""Directory trees as layers: what changed between two states of a tree, written as a reproducible tar.

A `Tree` is a list of what lies under a root at one moment, without contents. The layer between two trees holds every
entry that is new or differs, and a whiteout for what has gone, sorted by name: the same trees give the same bytes.
Owners, modes, xattrs, hard links within the layer and modification times (ns) are kept. A time at or after the
build's start cannot be reproduced and becomes `EPOCH_S`; older times came with the packages and must stay: Python
compares a source's time with the one inside its .pyc.
"""

import hashlib
import io
import os
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from isal import isal_zlib

__all__ = ["EPOCH_S", "Blob", "BlobWriter", "Entry", "Tree", "read_tree", "write_layer"]

EPOCH_S = 1_700_000_000
"""Modification time (Unix seconds) of what the build itself made."""

_KINDS = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tree holds under one name.

    `inode` tells hard links, and with `ctime_ns` what was rewritten under its old size and time; neither is part of a
    layer.
    """

    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    device: int
    target: str
    xattrs: tuple[tuple[str, bytes], ...]
    inode: int
    ctime_ns: int


Tree = dict[str, Entry]
"""Path relative to the root, without leading slash -> entry. The root itself is not in it."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A written layer: digests (`sha256:...`) of the gzip blob and of its tar, and the blob's size in bytes."""

    digest: str
    diff_id: str
    size: int


def read_tree(root: Path, excluded: Callable[[str], bool] = lambda path: False) -> Tree:
    """The tree under `root`, less the paths for which `excluded` holds and what is below them."""
    tree: Tree = {}
    pending = [""]
    while pending:
        directory = pending.pop()
        for item in os.scandir(root / directory):
            path = f"{directory}/{item.name}" if directory else item.name
            if excluded(path):
                continue
            tree[path] = _read_entry(root / path)
            if item.is_dir(follow_symlinks=False):
                pending.append(path)
    return tree


def write_layer(root: Path, before: Tree, after: Tree, started_ns: int, out: BinaryIO) -> Blob:
    """Write the gzip blob of the layer that turns `before` into `after`, the state `root` is in now."""
    compressor = BlobWriter(out)
    with tarfile.open(
        fileobj=compressor,
        mode="w",
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as archive:
        links: dict[int, str] = {}
        for path, entry in _changes(before, after):
            _add(archive, root, path, entry, started_ns, links)
    return compressor.finish()


def _read_entry(path: Path) -> Entry:
    status = path.lstat()
    mode = status.st_mode
    regular = stat.S_ISREG(mode)
    return Entry(
        mode=mode,
        uid=status.st_uid,
        gid=status.st_gid,
        size=status.st_size if regular else 0,
        mtime_ns=status.st_mtime_ns,
        device=status.st_rdev if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) else 0,
        target=os.readlink(path) if stat.S_ISLNK(mode) else "",
        xattrs=tuple(
            (name, os.getxattr(path, name, follow_symlinks=False))
            for name in sorted(os.listxattr(path, follow_symlinks=False))
        ),
        inode=status.st_ino,
        ctime_ns=status.st_ctime_ns,
    )


def _changes(before: Tree, after: Tree) -> Iterator[tuple[str, Entry | None]]:
    """Names of the layer in order, each with its entry; None is a whiteout for that name."""
    changed: dict[str, Entry | None] = {
        path: entry for path, entry in after.items() if path not in before or entry != before[path]
    }
    for path in before:
        parent = path.rpartition("/")[0]
        if path not in after and (not parent or _is_directory(after.get(parent))):
            changed[path] = None
    return iter(sorted(changed.items(), key=lambda item: item[0].split("/")))


def _is_directory(entry: Entry | None) -> bool:
    return entry is not None and stat.S_ISDIR(entry.mode)


def _add(
    archive: tarfile.TarFile, root: Path, path: str, entry: Entry | None, started_ns: int, links: dict[int, str]
) -> None:
    if entry is None:
        parent, _, name = path.rpartition("/")
        whiteout = tarfile.TarInfo(f"{parent}/.wh.{name}" if parent else f".wh.{name}")
        whiteout.mtime = EPOCH_S
        archive.addfile(whiteout)
        return
    if stat.S_ISSOCK(entry.mode):  # a tar has no sockets
        return
    info = _tar_info(path, entry, started_ns)
    if not stat.S_ISREG(entry.mode):
        archive.addfile(info)
    elif entry.inode in links:
        info.type, info.linkname, info.size = tarfile.LNKTYPE, links[entry.inode], 0
        archive.addfile(info)
    else:
        links[entry.inode] = path
        with (root / path).open("rb") as content:
            archive.addfile(info, content)


def _tar_info(path: str, entry: Entry, started_ns: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type = _KINDS[stat.S_IFMT(entry.mode)]
    info.mode = stat.S_IMODE(entry.mode)
    info.uid, info.gid, info.size, info.linkname = entry.uid, entry.gid, entry.size, entry.target
    info.devmajor, info.devminor = os.major(entry.device), os.minor(entry.device)
    mtime_ns = entry.mtime_ns if entry.mtime_ns < started_ns else EPOCH_S * 10**9
    info.mtime, fraction_ns = divmod(mtime_ns, 10**9)
    headers = {f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape") for name, value in entry.xattrs}
    if fraction_ns:
        headers["mtime"] = f"{info.mtime}.{fraction_ns:09d}"
    info.pax_headers = headers
    return info


class BlobWriter(io.RawIOBase):
    """Writes a gzip member without name or time to `out`, and both digests on the way: as `gzip -6` does, or with
    `fast` as igzip does at its level 1."""

    def __init__(self, out: BinaryIO, fast: bool = False) -> None:
        self._out = out
        self._deflate = isal_zlib.compressobj(1, zlib.DEFLATED, 31) if fast else zlib.compressobj(6, zlib.DEFLATED, 31)
        self._tar = hashlib.sha256()
        self._blob = hashlib.sha256()
        self._offset = 0
        self._size = 0

    def write(self, data: bytes) -> int:  # type: ignore[override] # tarfile writes bytes only
        self._tar.update(data)
        self._offset += len(data)
        self._emit(self._deflate.compress(data))
        return len(data)

    def tell(self) -> int:
        return self._offset

    def finish(self) -> Blob:
        """Write the end of the stream and return what was written."""
        self._emit(self._deflate.flush())
        return Blob(f"sha256:{self._blob.hexdigest()}", f"sha256:{self._tar.hexdigest()}", self._size)

    def _emit(self, data: bytes) -> None:
        self._blob.update(data)
        self._size += len(data)
        self._out.write(data)
