"""Whose attributes an implied directory gets. Modes stand for all: the rest needs root, see test_differential."""

import os
from pathlib import Path

import pytest

from snapshotter.containerd.skeleton import build_skeleton
from snapshotter.errors import InvalidArgument


def _layer(root: Path, modes: dict[str, int]) -> Path:
    """A layer of directories with these modes."""
    root.mkdir()
    for name, mode in modes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name).chmod(mode)
    return root


def _modes(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mode & 0o7777 for path in sorted(root.rglob("*"))}


def _build(tmp_path: Path, implied: list[bytes], *layers: dict[str, int]) -> dict[str, int] | None:
    """Modes in the skeleton over `layers`, the uppermost first; None for no skeleton."""
    made = [_layer(tmp_path / f"layer{number}", modes) for number, modes in enumerate(layers)]
    root = _layer(tmp_path / "skeleton", {})
    return _modes(root) if build_skeleton(root, made[0], implied, made[1:]) else None


def test_the_nearest_layer_counts(tmp_path: Path) -> None:
    found = _build(tmp_path, [b"/a", b"/b", b"/c"], {"a": 0o755, "b": 0o755, "c": 0o755}, {"b": 0o701}, {"a": 0o1777})
    assert found == {"a": 0o1777, "b": 0o701}


def test_what_leads_there_keeps_its_attributes(tmp_path: Path) -> None:
    """`a` has an entry in the layer itself, `a/b` has none and is new, `a/b/c` would be found below `a` only."""
    below = {"a": 0o711, "a/b": 0o755, "a/b/c": 0o1770}
    found = _build(tmp_path, [b"/a/b", b"/a/b/c"], {"a": 0o750, "a/b": 0o755, "a/b/c": 0o755}, below)
    assert found == {"a": 0o750, "a/b": 0o755, "a/b/c": 0o1770}


def test_nothing_to_say(tmp_path: Path) -> None:
    assert _build(tmp_path, [b"/a", b"/b"], {"a": 0o755, "b": 0o755}, {"a": 0o755}) is None


@pytest.mark.parametrize("kind", ["file", "symlink", "dangling"])
def test_what_is_no_directory_hides_those_below(tmp_path: Path, kind: str) -> None:
    layer = _layer(tmp_path / "layer", {"a/b": 0o755})
    middle = _layer(tmp_path / "middle", {"elsewhere/b": 0o1777})
    if kind == "file":
        (middle / "a").write_bytes(b"")
    else:
        (middle / "a").symlink_to("elsewhere" if kind == "symlink" else "nowhere")
    lowest = _layer(tmp_path / "lowest", {"a/b": 0o1777})
    root = _layer(tmp_path / "skeleton", {})
    assert not build_skeleton(root, layer, [b"/a", b"/a/b"], [middle, lowest])
    assert _modes(root) == {}


def test_times_come_along(tmp_path: Path) -> None:
    layer = _layer(tmp_path / "layer", {"a/b": 0o755})
    lower = _layer(tmp_path / "lower", {"a/b": 0o1777})
    os.utime(lower / "a/b", ns=(1, 1_234_567_890))
    os.utime(lower / "a", ns=(1, 2_345_678_901))
    root = _layer(tmp_path / "skeleton", {})
    assert build_skeleton(root, layer, [b"/a", b"/a/b"], [lower])
    assert (root / "a").stat().st_mtime_ns == 2_345_678_901
    assert (root / "a/b").stat().st_mtime_ns == 1_234_567_890


@pytest.mark.parametrize("path", [b"/../x", b"/a/../../x", b"/a/..", b"a", b"", b"//a", b"/a/./b", b"/a/"])
def test_no_path_leads_out_of_the_layer(path: bytes, tmp_path: Path) -> None:
    """Names come from indexes."""
    with pytest.raises(InvalidArgument, match="not a path inside the layer"):
        _build(tmp_path, [b"/a", path], {"a": 0o755}, {"a": 0o1777, "x": 0o1777})
    assert not list((tmp_path / "skeleton").iterdir()) and not (tmp_path / "x").exists()
