"""Archives of other tools than GNU tar, as the kernel shows their layer images, against extraction by GNU tar."""

import gzip
import io
import os
import re
import shutil
import stat
import subprocess
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.blockindex.tarcases import padded, unpack
from tests.blockindex.test_erofs_mount import differences, mounted, rich_tree, run, view

pytestmark = pytest.mark.system


def _bsdtar(source: Path, kind: str) -> bytes:
    command = ["bsdtar", "--format", kind, "--numeric-owner", "-C", str(source), "-cf", "-", "."]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _python(source: Path, kind: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=kind) as tar:
        tar.add(source, ".")
    return out.getvalue()


def _plain(root: Path) -> None:
    """The rich tree without what these tools' formats cannot hold alike: sub-second times, long names, xattrs."""
    rich_tree(root)
    shutil.rmtree(root / "long")
    for path in sorted(root.rglob("*")):
        for name in os.listxattr(path, follow_symlinks=False):
            os.removexattr(path, name, follow_symlinks=False)
    for number, path in enumerate([root, *sorted(root.rglob("*"))]):
        os.utime(path, ns=(0, (1_600_000_000 + number) * 10**9), follow_symlinks=False)


@pytest.mark.parametrize("kind", ["pax", "ustar", "gnutar"])
@pytest.mark.skipif(shutil.which("bsdtar") is None, reason="needs bsdtar (package libarchive-tools)")
def test_bsdtar(kind: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    _plain(source)
    if kind == "ustar":
        os.chown(source / "d/sub", 2000, 5)
    _compare(_bsdtar(source, kind), tmp_path)


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_pythons_tarfile(kind: int, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    _plain(source)
    _compare(_python(source, kind), tmp_path)


def _packaged(root: Path) -> None:
    """A tree such as packages hold."""
    for directory in ("usr/bin", "etc/tree", "var/lib/" + "long" * 30):
        (root / directory).mkdir(parents=True)
    for number in range(30):
        (root / f"usr/bin/tool{number}").write_bytes(os.urandom(number * 1000))
    (root / "usr/bin/tool1").chmod(0o4755)
    (root / "etc/tree/conf").write_text("x" * 5000)
    os.chown(root / "etc/tree/conf", 1000, 70000)
    (root / "etc/link").symlink_to("tree/conf")
    (root / f"var/lib/{'long' * 30}/name").symlink_to("target" * 20)
    os.link(root / "usr/bin/tool2", root / "usr/bin/also-tool2")
    for number, path in enumerate([root, *sorted(root.rglob("*"))]):
        os.utime(path, ns=(0, (1_600_000_000 + number) * 10**9), follow_symlinks=False)


def test_dpkg(tmp_path: Path) -> None:
    """The data part of a Debian package, as dpkg-deb writes it."""
    source, package = tmp_path / "source", tmp_path / "tree.deb"
    _packaged(source)
    (source / "DEBIAN").mkdir()
    (source / "DEBIAN/control").write_text(
        "Package: tree\nVersion: 1\nArchitecture: all\nMaintainer: nobody <nobody@example.org>\nDescription: a tree\n"
    )
    run("dpkg-deb", "--build", "-Zgzip", source, package)
    _compare(subprocess.run(["dpkg-deb", "--fsys-tarfile", package], check=True, capture_output=True).stdout, tmp_path)


@pytest.mark.parametrize("make", [_packaged, rich_tree])
def test_umoci(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A layer as umoci writes it. umoci 0.4.7 ends it with the last file's last byte, without padding and end mark;
    GNU tar then calls it cut short if padding is missing, containerd takes it, and so do we."""
    source, layout = tmp_path / "source", tmp_path / "layout"
    source.mkdir()
    make(source)
    run("umoci", "init", "--layout", layout)
    run("umoci", "new", "--image", f"{layout}:tree")
    run("umoci", "insert", "--image", f"{layout}:tree", source, "/")
    layer = max((layout / "blobs/sha256").iterdir(), key=lambda blob: blob.stat().st_size)
    _compare(gzip.decompress(layer.read_bytes()), tmp_path)


def _compare(archive: bytes, tmp_path: Path) -> None:
    extracted = tmp_path / "extracted"
    extracted.mkdir()
    (tmp_path / "archive").write_bytes(padded(archive))
    options = ["--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*", "--delay-directory-restore"]
    run("tar", "-C", extracted, *options, "-xpf", tmp_path / "archive")
    with mounted(unpack(archive), tmp_path / "layer") as mount:
        assert differences(view(mount), view(extracted)) == {}


def test_dump_erofs_counts_the_same(tmp_path: Path) -> None:
    """erofs-utils' reader, which shares nothing with ours, counts names by type, and inodes."""
    source, image = tmp_path / "source", tmp_path / "image"
    source.mkdir()
    rich_tree(source)
    layer = unpack(_gnu_tar(source))
    image.write_bytes(layer.metadata + bytes(len(layer.data)))
    found = _dumped("-S", image) | _dumped("-s", image)
    status = [path.lstat() for path in (source, *source.rglob("*"))]
    kinds = Counter(stat.S_IFMT(each.st_mode) for each in status)
    names = {
        "regular file count": kinds[stat.S_IFREG],
        "directory count": kinds[stat.S_IFDIR],
        "symlink file count": kinds[stat.S_IFLNK],
        "char dev count": kinds[stat.S_IFCHR],
        "block dev count": kinds[stat.S_IFBLK],
        "FIFO file count": kinds[stat.S_IFIFO],
        "total file count": len(status),
        "unknown type count": 0,
        "inode count": len({each.st_ino for each in status}),
    }
    assert {name: found[name] for name in names} == names


def _gnu_tar(source: Path) -> bytes:
    command = ["tar", "-C", str(source), "--format=pax", "--xattrs", "--xattrs-include=*", "-c", "."]
    return subprocess.run(command, check=True, capture_output=True).stdout


def _dumped(option: str, image: Path) -> dict[str, int]:
    printed = subprocess.run(["dump.erofs", option, image], check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"^Filesystem ([\w ]+):\s+(\d+)$", printed, re.MULTILINE)}
