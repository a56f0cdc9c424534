"""Directories of snapshots: made, adopted, thrown away, measured."""

import os
import stat
from pathlib import Path

import pytest

from snapshotter.containerd.dirs import SnapshotDirs, disk_usage
from snapshotter.containerd.model import Usage


def test_made_with_owner_and_mode_of_the_parent(tmp_path: Path) -> None:
    parent = tmp_path / "parent"
    parent.mkdir()
    parent.chmod(0o1750)
    if os.getuid() == 0:
        os.chown(parent, 1234, 4321)
    dirs = SnapshotDirs(tmp_path / "root")
    old = os.umask(0o077)
    try:
        dirs.adopt(dirs.make(parent.stat()), 7)
        dirs.adopt(dirs.make(None), 8)
    finally:
        os.umask(old)
    made, plain = dirs.upper(7).stat(), dirs.upper(8).stat()
    expected = parent.stat()
    assert (made.st_uid, made.st_gid, made.st_mode) == (expected.st_uid, expected.st_gid, expected.st_mode)
    assert stat.S_IMODE(plain.st_mode) == 0o755
    assert dirs.work(7).is_dir()
    assert stat.S_IMODE(dirs.upper(7).parent.stat().st_mode) == 0o700


def test_adopting_an_id_whose_insert_was_lost(tmp_path: Path) -> None:
    dirs = SnapshotDirs(tmp_path)
    dirs.adopt(dirs.make(None), 1)
    (dirs.upper(1) / "lost").touch()
    dirs.adopt(dirs.make(None), 1)
    assert list(dirs.upper(1).iterdir()) == []
    dirs.delete_discarded()
    assert [entry.name for entry in (tmp_path / "s").iterdir()] == ["1"]


def test_orphans_and_unfinished_directories_go(tmp_path: Path) -> None:
    dirs = SnapshotDirs(tmp_path)
    for number in (1, 2):
        dirs.adopt(dirs.make(None), number)
    unfinished = dirs.make(None)
    dirs.discard_orphans({1})
    assert unfinished.exists(), "somebody is making it"
    again = SnapshotDirs(tmp_path)
    again.delete_discarded()
    assert [entry.name for entry in (tmp_path / "s").iterdir()] == ["1"]


def test_discarding_what_a_lazy_snapshot_never_had(tmp_path: Path) -> None:
    SnapshotDirs(tmp_path).discard(5)
    assert list((tmp_path / "s").iterdir()) == []


def test_deletes_trees_of_any_depth(tmp_path: Path) -> None:
    dirs = SnapshotDirs(tmp_path)
    dirs.adopt(dirs.make(None), 1)
    here = os.getcwd()
    os.chdir(dirs.upper(1))
    try:
        for _ in range(1500):  # deeper than Python's recursion limit, longer than PATH_MAX
            os.mkdir("long-name")
            os.chdir("long-name")
    finally:
        os.chdir(here)
    assert disk_usage(dirs.upper(1)).inodes > 300  # an estimate, but not an error
    dirs.discard(1)
    dirs.delete_discarded()
    assert list((tmp_path / "s").iterdir()) == []


def test_failed_deletion_is_logged_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dirs = SnapshotDirs(tmp_path)
    dirs.adopt(dirs.make(None), 1)
    dirs.discard(1)
    path = os.environ["PATH"]
    fake = tmp_path / "bin" / "rm"
    fake.parent.mkdir()
    fake.write_text("#!/bin/sh\necho disk on fire >&2; exit 1\n")
    fake.chmod(0o755)
    try:
        os.environ["PATH"] = f"{fake.parent}:{path}"
        dirs.delete_discarded()
    finally:
        os.environ["PATH"] = path
    assert "disk on fire" in caplog.text
    dirs.delete_discarded()
    assert list((tmp_path / "s").iterdir()) == []


def test_usage_counts_blocks_and_hard_links_once(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    empty = disk_usage(tree)
    assert empty.inodes == 1
    (tree / "file").write_bytes(b"x" * 100_000)
    os.link(tree / "file", tree / "link")
    (tree / "to-nowhere").symlink_to("nowhere")
    with (tree / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 30)
    measured = disk_usage(tree)
    assert measured.inodes == 4
    assert 100_000 <= measured.size - empty.size < 200_000
    assert disk_usage(tree / "absent") == Usage(0, 0)
