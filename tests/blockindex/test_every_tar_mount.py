"""The odd archives of `test_every_tar` as a kernel sees them, against what GNU tar extracts where it can."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from blockindex.erofs import build_metadata, validate_metadata
from tests.blockindex.tarcases import ACL, CAPABILITY, END, UUID, base256, file, header, long_name, pax, read, unpack
from tests.blockindex.test_erofs_mount import differences, mounted, run, view

pytestmark = pytest.mark.system


def directory(name: bytes, **fields: object) -> bytes:
    return header(name + b"/", b"5", **({"mode": 0o755} | fields))  # type: ignore[arg-type]


def extracted(archive: bytes, place: Path) -> Path:
    """`archive` as GNU tar extracts it."""
    out = place / "gnu"
    out.mkdir()
    (place / "a.tar").write_bytes(archive)
    options = ["--numeric-owner", "--same-owner", "--xattrs", "--xattrs-include=*", "--warning=no-timestamp"]
    run("tar", "-C", out, *options, "-xpf", place / "a.tar")
    return out


def test_numbers_and_names_at_their_ends(tmp_path: Path) -> None:
    """Times before 1901 and after 2106, owners near 2^32, the largest devices, names of 255 arbitrary bytes."""
    archive = b"".join(
        (
            directory(b".", mtime=5),
            file(b"1901", mtime=base256(-(2**31), 12)),
            file(b"1969", mtime=base256(-1, 12)),
            file(b"2106", mtime=base256(2**32, 12)),
            file(b"2242", mtime=base256(2**33, 12)),
            pax([(b"mtime", b"-1.25")]),
            directory(b"d"),
            pax([(b"mtime", b"8589934592.123456789")]),
            header(b"symlink", b"2", link=b"x"),
            file(b"owner", uid=base256(2**32 - 2, 8), gid=base256(2**31, 8)),
            header(b"char", b"3", device=(4095, 1048575), mode=0o600),
            header(b"block", b"4", device=(259, 1048575), mode=0o660),
            header(b"fifo", b"6", mode=0o622),
            pax([(b"path", b"\xff" * 255)]),
            file(b"x", b"not UTF-8"),
            pax([(b"path", b"n" * 255)]),
            file(b"x", b"long"),
            file(b"sticky", b"x", mode=0o7777),
            END,
        )
    )
    theirs = view(extracted(archive, tmp_path))
    with mounted(unpack(archive), tmp_path / "layer") as mount:
        ours = view(mount)
    assert differences(ours, theirs) == {}
    assert ours["2242"][3] == 2**33 * 10**9 and ours["owner"][1] == 2**32 - 2


def test_acls_and_capabilities(tmp_path: Path) -> None:
    """Set as unpacking sets them (owner, xattrs, mode), and seen through EROFS."""
    archive = b"".join(
        (
            pax([(b"SCHILY.xattr.system.posix_acl_access", ACL)]),
            file(b"acl", mode=0o640),
            pax([(b"SCHILY.xattr.system.posix_acl_default", ACL), (b"SCHILY.xattr.user.a", b"b")]),
            directory(b"d"),
            pax([(b"SCHILY.xattr.security.capability", CAPABILITY)]),
            file(b"capable", mode=0o755),
            END,
        )
    )
    other = tmp_path / "by-hand"
    (other / "d").mkdir(parents=True)
    (other / "acl").touch()
    (other / "capable").touch()
    os.setxattr(other / "acl", "system.posix_acl_access", ACL)
    os.setxattr(other / "d", "system.posix_acl_default", ACL)
    os.setxattr(other / "d", "user.a", b"b")
    os.setxattr(other / "capable", "security.capability", CAPABILITY)
    for name, mode in (("acl", 0o640), ("d", 0o755), ("capable", 0o755)):
        os.chmod(other / name, mode)
        os.utime(other / name, (0, 0))
    os.utime(other, (0, 0))
    os.chmod(other, 0o755)
    with mounted(unpack(archive), tmp_path / "layer") as mount:
        assert differences(view(mount), view(other)) == {}
        acls = subprocess.run(["getfacl", "-cpn", mount / "acl"], check=True, capture_output=True, text=True).stdout
        assert "user:1000:r--" in acls and "mask::r--" in acls


def test_a_path_of_32_kilobytes(tmp_path: Path) -> None:
    """A tree deeper than any system call's path: walked step by step, as `find -execdir` or `rm -r` walk it."""
    names = [b"%03d" % depth + b"d" * 200 for depth in range(159)]
    paths = [b"/".join(names[: depth + 1]) for depth in range(len(names))]
    archive = b"".join(long_name(path + b"/") + directory(b"x") for path in paths)
    archive += long_name(paths[-1] + b"/file") + file(b"x", b"deep") + END
    with mounted(unpack(archive), tmp_path) as mount:
        place = os.open(mount, os.O_RDONLY | os.O_DIRECTORY)
        for name in names:
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=place)
            os.close(place)
            place = below
        try:
            assert os.listdir(place) == ["file"]
            with open("file", "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=place)) as deep:
                assert deep.read() == b"deep"
        finally:
            os.close(place)


def test_a_directory_of_100_000_files(tmp_path: Path) -> None:
    """Looked up and listed by the kernel; in the archive in an order of its own."""
    count = 100_000
    archive = directory(b"d") + b"".join(file(b"d/f%d" % (number * 7919 % count)) for number in range(count)) + END
    with mounted(unpack(archive), tmp_path) as mount:
        assert sorted(os.listdir(mount / "d")) == sorted(f"f{number}" for number in range(count))
        for number in range(0, count, 997):
            assert stat.S_ISREG((mount / "d" / f"f{number}").lstat().st_mode)
        assert not (mount / "d" / "f100000").exists()


def test_sparse_files_of_terabytes(tmp_path: Path) -> None:
    """Four bytes far apart; the image is as sparse as the file."""
    size = 1 << 40
    records = [(b"GNU.sparse.map", b"0,2,%d,2" % (size - 2)), (b"GNU.sparse.size", b"%d" % size)]
    layer_archive = pax(records) + file(b"sparse", b"abcd") + file(b"after", b"x") + END
    reader, extents = read(layer_archive)
    tree = reader.finish()
    metadata = build_metadata(tree, reader.data_size, UUID)
    validate_metadata(metadata, reader.data_size)
    image, target = tmp_path / "image", tmp_path / "mnt"
    target.mkdir()
    with image.open("wb") as out:
        out.write(metadata)
        for extent in extents:
            out.seek(len(metadata) + extent.data_offset)
            out.write(layer_archive[extent.tar_offset : extent.tar_offset + extent.size])
        out.truncate(len(metadata) + reader.data_size)
    run("mount", "-t", "erofs", "-o", "loop,ro", image, target)
    try:
        assert (target / "sparse").stat().st_size == size
        with (target / "sparse").open("rb") as file_:
            assert file_.read(4) == b"ab\0\0"
            file_.seek(size - 4)
            assert file_.read() == b"\0\0cd"
        assert (target / "after").read_bytes() == b"x"
    finally:
        run("umount", target)
