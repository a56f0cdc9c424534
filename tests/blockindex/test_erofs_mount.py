"""The kernel's view of a layer image against GNU tar's extraction of the same archive: names, attributes, contents."""

import contextlib
import hashlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.blockindex.tarcases import ACL, CAPABILITY, END, Layer, file, header, pax, unpack
from tests.blockindex.tarstrategies import Drawn, drawn, encoded

pytestmark = pytest.mark.system

View = dict[str, tuple[object, ...]]

FORMATS = {
    "pax": ["--format=pax", "--xattrs", "--xattrs-include=*"],
    "pax, sparse 0.0": ["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.0"],
    "pax, sparse 0.1": ["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=0.1"],
    "pax, sparse 1.0": ["--format=pax", "--xattrs", "--xattrs-include=*", "--sparse", "--sparse-version=1.0"],
    "gnu, sparse": ["--format=gnu", "--sparse"],
    "ustar": ["--format=ustar", "--exclude=./long"],
    "v7": ["--format=v7", "--exclude=./long", "--exclude=./d/null", "--exclude=./d/disk", "--exclude=./d/pipe"],
}


def run(*command: str | Path) -> None:
    subprocess.run([str(part) for part in command], check=True, capture_output=True)


@contextlib.contextmanager
def mounted(layer: Layer, place: Path) -> Iterator[Path]:
    """The layer image on a loop device, mounted."""
    image, target = place / "image", place / "mnt"
    target.mkdir(parents=True)
    with image.open("wb") as out:
        out.write(layer.metadata)
        for extent in layer.extents:
            out.seek(len(layer.metadata) + extent.data_offset)
            out.write(layer.data[extent.data_offset : extent.data_offset + extent.size])
        out.truncate(len(layer.metadata) + len(layer.data))
    run("fsck.erofs", image)
    run("mount", "-t", "erofs", "-o", "loop,ro", image, target)
    try:
        yield target
    finally:
        run("umount", target)


def view(root: Path) -> View:
    """Everything that can be seen of a tree: by path, what lstat, readlink, getxattr and read say."""
    inodes: dict[int, str] = {}
    paths = sorted([root, *root.rglob("*")])
    return {str(path.relative_to(root)): _look(path, inodes, str(path.relative_to(root))) for path in paths}


def _look(path: Path, inodes: dict[int, str], name: str) -> tuple[object, ...]:
    info = path.lstat()
    kind = stat.S_IFMT(info.st_mode)
    content: object = None
    if kind == stat.S_IFREG:
        content = hashlib.sha256(path.read_bytes()).hexdigest()
    elif kind == stat.S_IFLNK:
        content = os.readlink(path)
    attributes = {
        key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
    }
    size = 0 if kind == stat.S_IFDIR else info.st_size
    device = info.st_rdev if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
    first = inodes.setdefault(info.st_ino, name)  # the same for all names of an inode
    owner = (oct(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns, attributes)
    return (*owner, info.st_nlink, size, device, content, first)


def differences(ours: View, theirs: View) -> dict[str, object]:
    """What differs, by path: small enough to read."""
    return {path: (ours.get(path), theirs.get(path)) for path in ours | theirs if ours.get(path) != theirs.get(path)}


def rich_tree(root: Path) -> None:
    """One of everything that a Linux file system holds and an image may."""
    (root / "d/sub/deeper").mkdir(parents=True)
    (root / "empty-dir").mkdir()
    (root / "d/file").write_bytes(os.urandom(10_000))
    (root / "d/block").write_bytes(os.urandom(4096))
    (root / "d/empty").write_bytes(b"")
    (root / "d/suid").write_bytes(b"suid")
    os.chown(root / "d/suid", 1234, 65534)
    os.chmod(root / "d/suid", 0o6711)
    os.chmod(root / "empty-dir", 0o1777)
    os.chmod(root / "d/sub", 0o2750)
    os.chown(root / "d/sub", 2_000_000, 5)
    os.symlink("../d/file", root / "d/link")
    os.lchown(root / "d/link", 7, 8)
    os.symlink("x" * 99, root / "d/link99")
    os.link(root / "d/file", root / "d/sub/hard")
    os.link(root / "d/file", root / "hard2")
    os.link(root / "d/link", root / "d/hard-symlink")
    os.mknod(root / "d/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(root / "d/disk", stat.S_IFBLK | 0o660, os.makedev(259, 65537))
    os.mkfifo(root / "d/pipe")
    (root / "d/na\u00efve \n name").write_bytes(b"odd name")
    (root / os.fsdecode(b"d/\xff\xfe")).write_bytes(b"no UTF-8")
    long = root / "long" / ("n" * 255) / ("m" * 200)
    long.mkdir(parents=True)
    (long / "file").write_bytes(b"long")
    os.symlink("t" * 3000, root / "long/target3000")
    os.symlink("t" * 4095, root / "long/target4095")
    for index in range(500):
        (root / "d/sub/deeper" / f"some-file-{index:03d}").write_bytes(b"%d" % index * (index % 7))
    with (root / "sparse").open("wb") as out:
        for index in range(40):
            out.seek(index * 100_000)
            out.write(os.urandom(3000))
        out.truncate(5_000_000)
    with (root / "hole").open("wb") as out:
        out.truncate(300_000)
    os.setxattr(root / "d/file", "user.value", b"=\0\n1 =x\n")
    os.setxattr(root / "d/file", "user.big", os.urandom(1000))
    os.setxattr(root / "d/suid", "security.capability", CAPABILITY)
    os.setxattr(root / "d/sub", "user.dir", b"on a directory")
    os.setxattr(root / "d/link", "security.link", b"on a symlink", follow_symlinks=False)
    os.setxattr(root / "d/null", "security.test", b"on a device")
    for index, path in enumerate(sorted(root.rglob("*"))):
        os.utime(path, ns=(0, 1_600_000_000_123_456_789 + index * 1_000_003), follow_symlinks=False)
    os.utime(root / "d/empty", ns=(0, -1_234_567_890_123_456_789))
    os.utime(root, ns=(0, 1_500_000_000_987_654_321))


@pytest.mark.parametrize("name", FORMATS)
def test_kernel_shows_what_gnu_tar_extracts(name: str, tmp_path: Path) -> None:
    source, extracted, archive = tmp_path / "source", tmp_path / "extracted", tmp_path / "archive.tar"
    source.mkdir()
    extracted.mkdir()
    rich_tree(source)
    if name in ("ustar", "v7", "gnu, sparse"):
        os.utime(source / "d/empty", ns=(0, 5 * 10**9))
        if name != "gnu, sparse":
            os.chown(source / "d/sub", 20_000, 5)
    run("tar", "-C", source, "--numeric-owner", "--sort=name", *FORMATS[name], "-cf", archive, ".")
    run("tar", "-C", extracted, "--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*", "-xpf", archive)
    with mounted(unpack(archive.read_bytes()), tmp_path / "layer") as mount:
        assert differences(view(mount), view(extracted)) == {}


def test_acl_xattr(tmp_path: Path) -> None:
    """A POSIX ACL, which unpacking would set as an xattr, is in force."""
    layer = unpack(pax([(b"SCHILY.xattr.system.posix_acl_access", ACL)]) + file(b"a", b"x", mode=0o755) + END)
    with mounted(layer, tmp_path) as mount:
        assert os.getxattr(mount / "a", "system.posix_acl_access") == ACL


def test_large_xattrs_and_link_targets(tmp_path: Path) -> None:
    """Xattrs beyond a block: inodes across blocks, tails that need blocks of their own."""
    big, small = os.urandom(60_000), os.urandom(3980)
    archive = b"".join(
        pax([(b"SCHILY.xattr.security.v%d" % number, value) for number in range(3)]) + entry
        for value, suffix in ((big, b"1"), (small, b"2"))
        for entry in (
            header(b"s" + suffix, b"2", link=b"target"),
            header(b"d" + suffix + b"/", b"5", mode=0o755),
            file(b"d" + suffix + b"/f", b"content"),
        )
    )
    with mounted(unpack(archive + END), tmp_path) as mount:
        for value, suffix in ((big, "1"), (small, "2")):
            assert os.readlink(mount / f"s{suffix}") == "target"
            assert os.listdir(mount / f"d{suffix}") == ["f"]
            assert (mount / f"d{suffix}/f").read_bytes() == b"content"
            for path in (f"s{suffix}", f"d{suffix}", f"d{suffix}/f"):
                assert os.getxattr(mount / path, "security.v2", follow_symlinks=False) == value


def test_overlay_hides_what_whiteouts_name(tmp_path: Path) -> None:
    lower = tmp_path / "lower"
    for path in ("gone", "kept", "opaque/old", "replaced/old", "merged/old"):
        (lower / path).parent.mkdir(parents=True, exist_ok=True)
        (lower / path).write_text("lower")
    layer = unpack(
        file(b".wh.gone")
        + header(b"opaque/", b"5", mode=0o755)
        + file(b"opaque/.wh..wh..opq")
        + file(b"opaque/new", b"upper")
        + file(b".wh.replaced")
        + header(b"replaced/", b"5", mode=0o755)
        + file(b"replaced/new", b"upper")
        + file(b"merged/new", b"upper")
        + END
    )
    merged = tmp_path / "merged"
    merged.mkdir()
    with mounted(layer, tmp_path / "layer") as mount:
        run("mount", "-t", "overlay", "-o", f"lowerdir={mount}:{lower}", "overlay", merged)
        try:
            found = {
                os.path.relpath(os.path.join(top, name), merged) for top, _, files in os.walk(merged) for name in files
            }
        finally:
            run("umount", merged)
    assert found == {"kept", "opaque/new", "replaced/new", "merged/old", "merged/new"}


_names = st.text("ab.-\u00e4", min_size=1, max_size=90).filter(lambda name: name not in (".", ".."))
_entries = st.lists(st.tuples(drawn(-(2**31) + 10, 2**33), _names, st.integers(0, 20)), max_size=15)


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(_entries)
def test_generated_archives(tmp_path: Path, entries: list[tuple[Drawn, str, int]]) -> None:
    """Generated archives: what the metadata says is what GNU tar extracts."""
    dirs, files, archive, seen = [b""], [], b"", set()
    for entry, name, pick in entries:
        path = dirs[pick % len(dirs)] + name.encode()
        if path in seen or (entry.kind == "hardlink" and not files):
            continue
        seen.add(path)
        archive += encoded(entry, path, files[pick % len(files)] if files else b"")
        if entry.kind == "dir":
            dirs.append(path + b"/")
        elif entry.kind == "file":
            files.append(path)
    with _fresh(tmp_path) as place:
        (place / "a.tar").write_bytes(archive + END)
        out = place / "out"
        out.mkdir()
        options = ["--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*", "--delay-directory-restore"]
        run("tar", "-C", out, *options, "-xpf", place / "a.tar")
        layer = unpack(archive + END)
        with mounted(layer, place / "layer") as mount:
            ours, theirs = view(mount), view(out)
    ours.pop("."), theirs.pop(".")
    # GNU tar leaves a linked file's attributes as they were, containerd sets the link's: compare only the rest.
    for found in (ours, theirs):
        found.update({path: what[5:] for path, what in found.items() if what[5] != 1 and what[8] is not None})
    assert differences(ours, theirs) == {}


@contextlib.contextmanager
def _fresh(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
    place.mkdir()
    yield place
