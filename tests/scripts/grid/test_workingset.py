"""The working set: which pages were touched, how small they are, and that it is kept beside the image."""

import dataclasses
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.grid import workingset
from scripts.rig.grid.floor import WorkingSet
from scripts.rig.grid.touched import regions, resident
from scripts.rig.grid.workingset import compressed_size, load, save, touched
from scripts.rig.image import RECIPES, build, cached
from scripts.rig.workspace import Workspace

TINY = RECIPES["tiny"]
SET = WorkingSet(5, 51, 1_056_768, 439_636, warm_s=0.3, warm_runs=5)


def test_regions_of_pages() -> None:
    assert regions(b"") == []
    assert regions(bytes([1, 1, 0, 0, 1])) == [(0, 2), (4, 5)]
    assert regions(bytes([0, 0x81, 0x80, 1])) == [(1, 2), (3, 4)], "only the lowest bit counts"


def test_a_page_that_was_read_is_resident_and_looking_reads_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(64 * 4096 + 5))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        assert regions(resident(str(path))) == []
        os.pread(file.fileno(), 10, 5 * 4096)
        os.pread(file.fileno(), 5000, 63 * 4096)
        assert regions(resident(str(path))) == [(5, 6), (63, 65)]
    (tmp_path / "empty").touch()
    assert resident(str(tmp_path / "empty")) == b""


def test_the_compressed_size_is_that_of_gzip(tmp_path: Path) -> None:
    data = b"some text " * 100_000 + os.urandom(70_000)
    path = tmp_path / "data"
    path.write_bytes(data)
    with path.open("rb") as file:
        size = compressed_size(file.read)
    by_tool = len(subprocess.run(["gzip", "-6nc", path], capture_output=True, check=True).stdout)
    assert size == len(zlib.compress(data, 6, 31)) or abs(size - by_tool) < 0.01 * by_tool


def test_it_is_kept_beside_the_image_until_image_command_or_method_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(TINY, tmp_path).mkdir()
    assert load(TINY, tmp_path) is None
    save(TINY, SET, {"kernel": "6.18"}, tmp_path)
    assert load(TINY, tmp_path) == SET
    assert load(dataclasses.replace(TINY, command=("/bin/other",)), tmp_path) is None
    monkeypatch.setattr(workingset, "METHOD", "another")
    assert load(TINY, tmp_path) is None


@pytest.mark.system
def test_the_small_image_touches_what_its_script_reads(tmp_path: Path) -> None:
    """It reads three of seven files of 20,000 lines, and what busybox needs."""
    with Workspace() as workspace:
        layout = build(TINY, workspace.env, print, tmp_path)
        found = touched(TINY, layout, workspace)
        assert not list(workspace.root.glob("working-set-*")), "up to twice the image is not kept"
        tree = tmp_path / "tree"
        tree.mkdir()
        workingset._unpack(TINY, layout, tree, workspace.env)
    assert sorted(path.name for path in (tree / "data").iterdir()) == ["1", "2", "3", "4", "5", "6", "7", "one"]
    data = sum(-(-(tree / "data" / name).stat().st_size // 4096) * 4096 for name in "123")
    most = data + sum(p.stat().st_size + 4096 for top in ("bin", "lib", "lib64", "usr") for p in (tree / top).rglob("*")
                      if p.is_file() and not p.is_symlink())  # fmt: skip
    assert 5 <= found.files <= 12
    assert data < found.page_bytes <= most
    assert 0.1 * found.page_bytes < found.gzip_bytes < 0.9 * found.page_bytes


@pytest.mark.system
def test_a_page_cache_that_was_emptied_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that has read its files, then waits until the caches are dropped, as another bench would."""
    monkeypatch.setattr(workingset, "_ATTEMPTS", 2)
    program = "cat /data/1 >/dev/null; echo 3 >/proc/sys/vm/drop_caches; echo ready"
    dropping = dataclasses.replace(TINY, command=("/bin/sh", "-c", program), ready="ready")
    with Workspace() as workspace:
        layout = build(TINY, workspace.env, print, tmp_path)
        with pytest.raises(RigError, match="in 2 attempts somebody emptied the page cache"):
            touched(dropping, layout, workspace)


@pytest.mark.system
def test_no_mount_or_loop_is_left_by_a_container_that_fails(tmp_path: Path) -> None:
    with Workspace() as workspace:
        layout = build(TINY, workspace.env, print, tmp_path)
        broken = dataclasses.replace(TINY, command=("/bin/sh", "-c", "exit 3"))
        with pytest.raises(RigError, match="without read-ahead"):
            touched(broken, layout, workspace)
