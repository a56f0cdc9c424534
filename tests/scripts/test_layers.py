"""Layers between two states of a tree: complete, minimal, and the same bytes every time."""

import gzip
import hashlib
import io
import os
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from scripts.rig.image import excluded
from scripts.rig.layers import EPOCH_S, Blob, Tree, read_tree, write_layer

OLD_NS = 1_600_000_000_123_456_789


def _write(path: Path, text: str, mtime_ns: int | None = OLD_NS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if mtime_ns is not None:
        os.utime(path, ns=(mtime_ns, mtime_ns))


def _base(root: Path) -> None:
    """A tree as a first build step makes it."""
    root.mkdir()
    _write(root / "etc/passwd", "root")
    _write(root / "usr/lib/module.py", "pass")
    _write(root / "usr/lib/stale.py", "old")
    _write(root / "var/gone/inner/file", "x")
    _write(root / "etc/made", "by the build", mtime_ns=None)
    os.link(root / "etc/passwd", root / "etc/passwd-link")
    os.symlink("../etc/passwd", root / "usr/symlink")
    (root / "usr/lib/module.py").chmod(0o4755)
    _write(root / ("usr/" + "d" * 90 + "/" + "n" * 200), "long")


def _second_step(root: Path) -> None:
    _write(root / "usr/lib/stale.py", "new")
    _write(root / "usr/new", "fresh")
    (root / "var/gone/inner/file").unlink()
    (root / "var/gone/inner").rmdir()
    (root / "var/gone").rmdir()


def _layer(root: Path, before: Tree, after: Tree, started_ns: int) -> tuple[Blob, bytes]:
    out = io.BytesIO()
    blob = write_layer(root, before, after, started_ns, out)
    return blob, out.getvalue()


def _build(root: Path) -> list[tuple[Blob, bytes]]:
    started_ns = time.time_ns()
    time.sleep(0.02)  # file systems stamp with the last tick, up to 10 ms in the past
    _base(root)
    first = read_tree(root)
    base = _layer(root, {}, first, started_ns)
    _second_step(root)
    return [base, _layer(root, first, read_tree(root), started_ns)]


def _members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive}


def test_two_builds_at_different_times_give_the_same_layers(tmp_path: Path) -> None:
    first = _build(tmp_path / "a")
    time.sleep(1.1)
    second = _build(tmp_path / "b")
    assert first == second


def test_digests_and_size_are_those_of_what_was_written(tmp_path: Path) -> None:
    blob, data = _build(tmp_path / "a")[0]
    assert blob.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert blob.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(data)).hexdigest()}"
    assert blob.size == len(data)
    assert data[3] == 0 and data[4:8] == bytes(4), "no name and no time in the gzip header"


def test_the_upper_layer_holds_only_what_changed(tmp_path: Path) -> None:
    _, upper = _build(tmp_path / "a")[1]
    names = _members(upper)
    assert set(names) == {"usr", "usr/lib/stale.py", "usr/new", "var", "var/.wh.gone"}
    assert names["var/.wh.gone"].size == 0
    assert list(names) == sorted(names, key=lambda name: name.split("/"))


def test_package_times_are_kept_and_build_times_are_not(tmp_path: Path) -> None:
    _, base = _build(tmp_path / "a")[0]
    members = _members(base)
    assert members["usr/lib/module.py"].pax_headers["mtime"] == "1600000000.123456789"
    assert members["etc/made"].mtime == EPOCH_S
    assert members["etc"].mtime == EPOCH_S


def test_tar_extracts_the_same_tree(tmp_path: Path) -> None:
    root = tmp_path / "a"
    started_ns = time.time_ns()
    _base(root)
    (tmp_path / "layer.tar.gz").write_bytes(_layer(root, {}, read_tree(root), started_ns)[1])
    (tmp_path / "out").mkdir()
    subprocess.run(["tar", "-xpf", "../layer.tar.gz"], cwd=tmp_path / "out", check=True)
    subprocess.run(["diff", "-r", "--no-dereference", root, tmp_path / "out"], check=True)
    extracted = read_tree(tmp_path / "out")
    for path, entry in read_tree(root).items():
        twin = extracted[path]
        assert (entry.mode, entry.uid, entry.target) == (twin.mode, twin.uid, twin.target), path
        if entry.mtime_ns == OLD_NS:
            assert twin.mtime_ns == OLD_NS, path
    assert extracted["etc/passwd"].inode == extracted["etc/passwd-link"].inode


def test_xattrs_of_any_bytes_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "a"
    _write(root / "file", "x")
    try:
        os.setxattr(root / "file", "user.bytes", b"\x00\xff\n=\x80")
    except OSError as error:
        pytest.skip(f"{tmp_path} keeps no user xattrs: {error}")
    _, data = _layer(root, {}, read_tree(root), 2**62)
    value = _members(data)["file"].pax_headers["SCHILY.xattr.user.bytes"]
    assert value.encode("utf-8", "surrogateescape") == b"\x00\xff\n=\x80"


def test_excluded_paths_are_in_no_tree(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for path in ("var/log/dpkg.log", "var/cache/apt/archives/x.deb", "etc/machine-id", "usr/bin/tool"):
        _write(root / path, "x")
    files = {path for path, entry in read_tree(root, excluded).items() if entry.size}
    assert files == {"usr/bin/tool"}


def test_a_directory_that_becomes_a_file_needs_no_whiteouts(tmp_path: Path) -> None:
    root = tmp_path / "a"
    _write(root / "thing/inner", "x")
    before = read_tree(root)
    (root / "thing/inner").unlink()
    (root / "thing").rmdir()
    _write(root / "thing", "now a file")
    _, data = _layer(root, before, read_tree(root), 2**62)
    assert set(_members(data)) == {"thing"}
