"""Building images: reproducible, cached by recipe, all or nothing."""

import dataclasses
import os
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES, Step, build, cached

pytestmark = pytest.mark.system
TINY = RECIPES["tiny"]


def _contents(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()} - {".lock-tiny"}


def test_two_builds_give_the_same_digests(tmp_path: Path) -> None:
    first = build(TINY, os.environ, print, tmp_path / "a")
    second = build(TINY, os.environ, print, tmp_path / "b")
    assert (first.manifest, first.layers, first.size) == (second.manifest, second.layers, second.size)


def test_the_second_time_it_comes_from_the_cache(tmp_path: Path) -> None:
    said: list[str] = []
    first = build(TINY, os.environ, said.append, tmp_path)
    assert any("building" in line for line in said)
    said.clear()
    assert build(TINY, os.environ, said.append, tmp_path) == first
    assert said == [f"image tiny from {cached(TINY, tmp_path)}"]


def test_a_changed_recipe_replaces_the_older_image(tmp_path: Path) -> None:
    build(TINY, os.environ, print, tmp_path)
    changed = dataclasses.replace(TINY, steps=(*TINY.steps, Step("more", 'echo more >"$1/more"')))
    assert len(build(changed, os.environ, print, tmp_path).layers) == 4
    assert _contents(tmp_path) == {cached(changed, tmp_path).name}


def test_a_failed_step_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    step = Step("broken", 'mount -t tmpfs tmpfs "$1"; echo "no such package" >&2; exit 3')
    broken = dataclasses.replace(TINY, steps=(TINY.steps[0], step))
    with pytest.raises(RigError, match=r"(?s)building image layer broken: exit code 3.*no such package"):
        build(broken, os.environ, print, tmp_path)
    assert _contents(tmp_path) == set()


def test_a_build_ignores_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".build-tiny-dead" / "root").mkdir(parents=True)
    build(TINY, os.environ, print, tmp_path)
    assert _contents(tmp_path) == {cached(TINY, tmp_path).name}
