"""The mounts handed to containerd."""

import subprocess
from pathlib import Path

import pytest

from snapshotter.containerd import overlay
from snapshotter.containerd.model import Kind, Mount
from snapshotter.containerd.overlay import check_path, mounts
from snapshotter.errors import InvalidArgument

UPPER, WORK = Path("/r/s/3/fs"), Path("/r/s/3/work")


@pytest.fixture(params=[True, False], ids=["index", "no-index"])
def index_option(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """What stands before the other options: it depends on what the kernel knows."""
    parameter = tmp_path / "index"
    if request.param:
        parameter.write_text("N")
    monkeypatch.setattr(overlay, "_INDEX_PARAMETER", parameter)
    return ("index=off",) if request.param else ()


def test_without_parents_its_own_directory_is_bound() -> None:
    assert mounts(Kind.ACTIVE, UPPER, WORK, []) == [Mount("bind", "/r/s/3/fs", ("rw", "rbind"))]
    assert mounts(Kind.VIEW, UPPER, WORK, []) == [Mount("bind", "/r/s/3/fs", ("ro", "rbind"))]


def test_view_of_one_layer_binds_it() -> None:
    assert mounts(Kind.VIEW, UPPER, WORK, [Path("/m/1")]) == [Mount("bind", "/m/1", ("ro", "rbind"))]


def test_overlay(index_option: tuple[str, ...]) -> None:
    lowers = [Path("/m/2"), Path("/m/1")]
    rw = (*index_option, "workdir=/r/s/3/work", "upperdir=/r/s/3/fs")
    assert mounts(Kind.ACTIVE, UPPER, WORK, lowers[:1]) == [Mount("overlay", "overlay", (*rw, "lowerdir=/m/2"))]
    assert mounts(Kind.ACTIVE, UPPER, WORK, lowers) == [Mount("overlay", "overlay", (*rw, "lowerdir=/m/2:/m/1"))]
    assert mounts(Kind.VIEW, UPPER, WORK, lowers) == [
        Mount("overlay", "overlay", (*index_option, "lowerdir=/m/2:/m/1"))
    ]


def test_a_layer_that_occurs_twice_is_mounted_once() -> None:
    a, b = Path("/m/a"), Path("/m/b")
    assert mounts(Kind.ACTIVE, UPPER, WORK, [a, b, a])[0].options[-1] == "lowerdir=/m/a:/m/b"
    assert mounts(Kind.VIEW, UPPER, WORK, [a, a]) == [Mount("bind", "/m/a", ("ro", "rbind"))]


@pytest.mark.parametrize("path", ["/a:b", "/a,b", "/a\\b"])
def test_paths_that_overlayfs_would_take_apart(path: str) -> None:
    with pytest.raises(InvalidArgument, match="overlayfs"):
        check_path(Path(path))


@pytest.mark.system
def test_the_upper_occurrence_of_a_layer_covers_the_lower_one(tmp_path: Path) -> None:
    """Kernel's own answer: the layers a, b, a give what unpacking a, b, a gives."""
    names = ("a", "b", "fs", "work", "merged")
    a, b, upper, work, merged = (tmp_path / name for name in names)
    for directory in (a, b, upper, work, merged):
        directory.mkdir()
    (a / "again").write_text("from a")
    (b / "only-b").write_text("from b")
    subprocess.run(["mknod", b / "again", "c", "0", "0"], check=True)  # b removes what a brings twice
    (mount,) = mounts(Kind.ACTIVE, upper, work, [a, b, a])
    command = ["mount", "-t", mount.type, mount.source, "-o", ",".join(mount.options), str(merged)]
    subprocess.run(command, check=True)
    try:
        assert sorted(path.name for path in merged.iterdir()) == ["again", "only-b"]
        assert (merged / "again").read_text() == "from a"
    finally:
        subprocess.run(["umount", str(merged)], check=True)
