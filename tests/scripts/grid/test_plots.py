"""Plots: which are drawn, that they are whole SVG, and that they are the same each time."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.rig.grid.report import main
from tests.scripts.grid.runs import a_run

RUNS = [
    a_run(system, ready_s, round=number, image=image, network=network, image_bytes=82_000_000)
    for image in ("numpy", "gcc")
    for network in ("metro", "sweep-1", "sweep-100")
    for system, ready_s in (("overlayfs", 10.0), ("bootseer-hot", 1.5), ("something-new", 3.0))
    for number in (1, 2)
]


@pytest.fixture(scope="module", autouse=True)
def fonts_are_open(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps the fonts it has used open: once, before anybody looks for leaks."""
    directory = tmp_path_factory.mktemp("first")
    (directory / "runs.jsonl").write_text("".join(run.line() for run in RUNS))
    assert main([str(directory / "runs.jsonl"), "--plots", str(directory)]) == 0


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(run.line() for run in RUNS))
    return path


def test_which_plots_are_drawn(lines: Path, tmp_path: Path) -> None:
    assert main([str(lines), "--plots", str(tmp_path / "p")]) == 0
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"ready-metro.svg", "bytes-metro.svg", "rtt-numpy.svg", "rtt-gcc.svg"}
    for path in (tmp_path / "p").iterdir():
        assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_same_runs_give_the_same_bytes(lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([str(lines), "--plots", str(tmp_path / "a")]) == 0
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.delenv("DISPLAY", raising=False)
    assert main([str(lines), "--plots", str(tmp_path / "b")]) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_other_runs_give_other_plots(lines: Path, tmp_path: Path) -> None:
    assert main([str(lines), "--plots", str(tmp_path / "a")]) == 0
    lines.write_text(lines.read_text().replace('"t_ready_s": 1.5', '"t_ready_s": 4.5'))
    assert main([str(lines), "--plots", str(tmp_path / "b")]) == 0
    for name in ("ready-metro.svg", "rtt-numpy.svg"):
        assert (tmp_path / "a" / name).read_bytes() != (tmp_path / "b" / name).read_bytes()


def test_failures_alone_draw_nothing(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(a_run(ok=False, t_ready_s=None, reason="x").line())
    assert main([str(path), "--plots", str(tmp_path / "p")]) == 0
    assert not list((tmp_path / "p").iterdir())
