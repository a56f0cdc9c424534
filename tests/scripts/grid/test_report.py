"""Tables: what is in each column, failures apart, Markdown and text."""

from pathlib import Path

import pytest

from scripts.rig.grid.report import main, report
from tests.scripts.grid.runs import a_run

MACHINE = {"cpu": "Some CPU", "cpus": 2, "memory_mib": 24_000, "kernel": "6.18"}
RUNS = [
    a_run(
        "bootseer-hot", 1.0, round=1, demand_fetches=2, layers=3, image_bytes=82_000_000, machine=MACHINE, commit="c1"
    ),
    a_run("overlayfs", 10.0, round=1, bytes=85_000_000, load=0.1),
    a_run("overlayfs", 20.0, round=2, bytes=86_000_000, load=0.3),
    a_run("bootseer-hot", 4.0, round=2, demand_fetches=2),
    a_run("bootseer", ok=False, t_ready_s=None, reason="the pull failed\nwith much text"),
]


def _cells(text: str, system: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {system} |")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_the_columns_of_a_table() -> None:
    text = report(RUNS, markdown=True)
    assert _cells(text, "overlayfs") == [
        "overlayfs", "2", "15.00 [10.00-20.00]", "1.00", "0.08", "85.5 [85.0-86.0]", "12", "-", "0.50",
    ]  # fmt: skip
    assert _cells(text, "bootseer-hot") == [
        "bootseer-hot", "2", "2.50 [1.00-4.00]", "0.15", "0.62", "8.0", "12", "2", "0.50",
    ]  # fmt: skip
    assert _cells(text, "bootseer") == ["bootseer", "0 (1 failed)", *["-"] * 7]


def test_systems_come_in_one_order() -> None:
    systems = [line.split()[0] for line in report(RUNS).splitlines() if line.split(" ")[0] in ("overlayfs", "bootseer")]
    assert systems == ["overlayfs", "bootseer"]


def test_title_machine_and_failures_are_told() -> None:
    text = report(RUNS)
    assert "numpy, metro (100 Mbit/s, 20 ms); 3 layers, 82.0 MB; floor 1.00 s" in text
    assert "2 CPUs (Some CPU), 23 GiB, Linux 6.18; commits c1; load before a run 0.1-0.3" in text
    assert "Failed, and no samples: 1\n- numpy, metro, bootseer: the pull failed" in text
    assert "much text" not in text


def test_several_at_once_are_a_table_of_their_own() -> None:
    text = report([a_run(), a_run(together=50)])
    assert text.count("ready, s") == 2
    assert "50 containers at once" in text


def test_a_link_that_failed_its_test_is_told() -> None:
    assert "failed their test" not in report(RUNS)
    text = report([*RUNS, a_run(link="REFUSED: wrong rate")])
    assert "Links that failed their test, and whose times mean nothing: metro" in text


def test_no_runs() -> None:
    assert report([]) == "no runs"


def test_the_command_prints_it_or_names_the_bad_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(run.line() for run in RUNS))
    assert main([str(path)]) == 0
    assert "15.00 [10.00-20.00]" in capsys.readouterr().out
    path.write_text("nonsense\n")
    assert main([str(path)]) == 1
    assert capsys.readouterr().err.startswith(f"scripts/bench report: {path}, line 1: this is no run")
    with pytest.raises(SystemExit):
        main([])
