"""The demo's images, layer by layer: what a daemon serves lazily against what GNU tar extracts."""

import itertools
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.rig.image import RECIPES, build
from scripts.rig.oci import Layout
from snapshotter.blockstore import node_name
from snapshotter.model import Digest
from tests.snapshotter.daemon import Daemon, Layer, origin, write_index

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]  # a first build fetches Debian

_WHITEOUT = ("whiteout",)
_TAR = ["--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*", "-xpzf"]


@pytest.mark.parametrize(("image", "entries", "whiteouts"), [("numpy", 9_000, 0), ("tiny", 10, 1)])
def test_every_layer_is_what_tar_extracts(image: str, entries: int, whiteouts: int, tmp_path: Path) -> None:
    layout = build(RECIPES[image], os.environ, print)
    seen: list[tuple[object, ...]] = []
    layers = [_layer(layout, digest) for digest in layout.layers]
    for layer in layers:
        write_index(tmp_path / "indexes", layer, span_size=1 << 20)
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n'
    with origin(*layers) as registry, Daemon(tmp_path, registry, toml) as daemon:
        daemon.prepare(*layers)
        for layer in layers:
            mount = daemon.root / "m" / node_name(layer.digest)
            extracted = tmp_path / "extracted" / node_name(layer.digest)
            _extract(_blob(layout, layer.digest), extracted)
            assert _diff(mount, extracted) == []
            ours, theirs = _tree(mount), _tree(extracted)
            for path in _implied(_blob(layout, layer.digest)):
                ours[path], theirs[path] = ours[path][:1], theirs[path][:1]  # tar makes its attributes up
            differing = {path for path in ours.keys() | theirs.keys() if ours.get(path) != theirs.get(path)}
            assert not differing, [(path, ours.get(path), theirs.get(path)) for path in sorted(differing)[:10]]
            seen += ours.values()
        assert len(seen) > entries and seen.count(_WHITEOUT) == whiteouts  # the images are what they should be
        assert not any(row["failures"] for row in daemon.status()["layers"])


def _blob(layout: Layout, digest: str) -> Path:
    return layout.path / "blobs" / "sha256" / digest.removeprefix("sha256:")


def _layer(layout: Layout, digest: str) -> Layer:
    return Layer(_blob(layout, digest).read_bytes(), {}, Digest(digest))


def _extract(blob: Path, target: Path) -> None:
    """What containerd would unpack: whiteouts become devices and attributes of overlayfs."""
    target.mkdir(parents=True)
    subprocess.run(["tar", "-C", target, *_TAR, blob], check=True)
    for path in sorted(target.rglob(".wh.*")):
        parent = path.parent.lstat()
        path.unlink()
        if path.name == ".wh..wh..opq":
            os.setxattr(path.parent, "trusted.overlay.opaque", b"y")
        else:
            os.mknod(path.with_name(path.name.removeprefix(".wh.")), stat.S_IFCHR, os.makedev(0, 0))
        os.utime(path.parent, ns=(parent.st_atime_ns, parent.st_mtime_ns))


def _diff(ours: Path, theirs: Path) -> list[str]:
    """What `diff -r` has to say, but for what it says of any two devices: `_look` compares those."""
    done = subprocess.run(["diff", "-r", "--no-dereference", ours, theirs], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if line.count("is a character special file") != 2]


def _implied(blob: Path) -> set[str]:
    """Directories of the layer that no entry describes, the root among them."""
    listing = subprocess.run(["tar", "-tzf", blob], check=True, capture_output=True, text=True).stdout
    names = {os.path.normpath(name) for name in listing.splitlines()}
    parents = {str(parent) for name in names for parent in Path(name).parents}
    return parents - names | {"."}


def _tree(root: Path) -> dict[str, tuple[object, ...]]:
    """By path: kind, permissions, owner, time, size, links, device, target, xattrs, and which names are one inode."""
    inodes: dict[int, str] = {}
    return {
        name: _look(root / name, inodes, name)
        for name in sorted(itertools.chain(["."], (os.path.relpath(path, root) for path in _walk(root))))
    }


def _walk(root: Path) -> Iterator[str]:
    for entry in os.scandir(root):
        yield entry.path
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))


def _look(path: Path, inodes: dict[int, str], name: str) -> tuple[object, ...]:
    info = path.lstat()
    kind = stat.S_IFMT(info.st_mode)
    if kind == stat.S_IFCHR and info.st_rdev == 0:
        return _WHITEOUT  # overlayfs looks at nothing else
    folder = kind == stat.S_IFDIR
    names = os.listxattr(path, follow_symlinks=False)
    return (
        kind,
        oct(info.st_mode),
        info.st_uid,
        info.st_gid,
        info.st_mtime_ns,
        None if folder else info.st_size,
        None if folder else info.st_nlink,
        info.st_rdev,
        os.readlink(path) if kind == stat.S_IFLNK else None,
        {key: os.getxattr(path, key, follow_symlinks=False) for key in names},
        None if folder else inodes.setdefault(info.st_ino, name),
    )
