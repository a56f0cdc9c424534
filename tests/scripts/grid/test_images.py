"""The list of images, and their recipes."""

from pathlib import Path

import pytest

from scripts.rig.grid.images import files_of, listing, main
from scripts.rig.image import RECIPES, Generated, build, cached
from scripts.rig.workspace import Workspace


def test_the_bench_has_these_images() -> None:
    assert list(RECIPES) == [
        "hello", "numpy", "gcc", "java", "postgres", "node", "scan", "weights", "big", "tiny",
    ]  # fmt: skip
    assert all(recipe.name == name and recipe.ready.startswith("ready") for name, recipe in RECIPES.items())


def test_scan_runs_the_numpy_image_and_no_other_shares_one(tmp_path: Path) -> None:
    paths = {name: cached(recipe, tmp_path) for name, recipe in RECIPES.items()}
    assert paths.pop("scan") == paths["numpy"]
    assert len(set(paths.values())) == len(paths)


def test_big_has_fifty_layers_and_eight_gigabytes() -> None:
    generated = [step for step in RECIPES["big"].steps if isinstance(step, Generated)]
    assert len(RECIPES["big"].steps) == 50
    assert sum(size for step in generated for _, size in step.files) == pytest.approx(8e9, rel=0.03)
    names = {path for step in generated for path, _ in step.files}
    assert set(RECIPES["big"].reads) <= names
    sizes = {path: size for step in generated for path, size in step.files}
    assert RECIPES["big"].ready == f"ready {sum(sizes[path] for path in RECIPES['big'].reads)}"


def test_weights_is_two_gibibytes_that_do_not_shrink() -> None:
    (layer,) = [step for step in RECIPES["weights"].steps if isinstance(step, Generated)]
    assert layer.files == (("model/weights.bin", 2 << 30),) and layer.bits == 8


@pytest.mark.system
def test_the_list_tells_layers_size_and_files(tmp_path: Path) -> None:
    tiny = RECIPES["tiny"]
    with Workspace() as workspace:
        layout = build(tiny, workspace.env, print, tmp_path)
    # 8 generated ones (a ninth name is a link, the removal of one no file), the script, the name, busybox, libraries.
    assert files_of(tiny, layout) >= 11
    lines = listing([tiny, RECIPES["numpy"]], tmp_path).splitlines()
    assert lines[2].split()[:3] == ["tiny", "3", f"{layout.size / 1e6:.1f}"]
    assert lines[3].split() == ["numpy", "-", "-", "-", "not", "built"]
    assert f"{tmp_path}: " in lines[-1] and lines[-1].endswith(" MB on disk")


def test_an_unknown_image_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["moon"])
    assert "moon" in capsys.readouterr().err
