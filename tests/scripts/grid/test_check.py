"""The gates: 5 % more requests or bytes, wrong output, a missing run; and time only as a wide guard."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from scripts.rig.grid import check
from scripts.rig.grid.run import Run
from scripts.rig.link import CHECKOUT
from tests.scripts.grid.runs import a_run

BASELINE = {"numpy": {"bootseer": {"requests": 20, "bytes": 1_000_000}}}


def _ours(requests: int = 20, bytes: int = 1_000_000, ready_s: float = 4.0, relieved: int = 0) -> Run:
    return a_run("bootseer", ready_s, requests=requests, bytes=bytes, status={"relieved": relieved})


@pytest.mark.parametrize(
    ("runs", "complaints"),
    [
        ([a_run(), _ours()], []),
        ([a_run(), _ours(requests=21, bytes=1_050_000)], []),
        ([a_run(), _ours(requests=1, bytes=1)], []),
        ([a_run(), _ours(requests=23, bytes=1_500_000, relieved=2)], []),
        ([a_run(), _ours(requests=24, relieved=2)], ["numpy, bootseer: 22 requests, the baseline is 20"]),
        ([a_run(), _ours(requests=22)], ["numpy, bootseer: 22 requests, the baseline is 20"]),
        ([a_run(), _ours(bytes=1_050_001)], ["numpy, bootseer: 1050001 bytes, the baseline is 1000000"]),
        ([a_run(), _ours(ready_s=20.0)], []),
        ([a_run(), _ours(ready_s=20.1)], ["numpy, bootseer: ready after 20.10 s, overlayfs after 10.00 s"]),
        ([a_run()], ["numpy, bootseer: was not run"]),
        ([a_run(), a_run("bootseer", ok=False, reason="wrong output: 'x'")], ["numpy, bootseer: wrong output: 'x'"]),
        ([a_run(ok=False, reason="no"), _ours()], ["numpy, overlayfs: no"]),
    ],
)
def test_what_is_complained_of(runs: list[Run], complaints: list[str]) -> None:
    assert check.judge(BASELINE, runs) == complaints


@pytest.fixture
def baseline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(BASELINE))
    monkeypatch.setattr(check, "BASELINE", path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return path


def _fake(runs: list[Run], code: int = 0) -> Callable[[Sequence[str]], int]:
    def run(argv: Sequence[str]) -> int:
        assert argv[: argv.index("--out")] == [
            "--images", "numpy", "--networks", "metro", "--systems", "overlayfs,bootseer", "--rounds", "1",
            "--no-warm", "--any-link", "--no-background", "--seed", "0",
        ]  # fmt: skip
        Path(argv[-1]).write_text("".join(each.line() for each in runs))
        return code

    return run


def test_the_exit_code_says_it(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([], _fake([a_run(), _ours()])) == 0
    assert "every output right" in capsys.readouterr().out
    assert check.main([], _fake([a_run(), _ours(requests=30)])) == 1
    assert "30 requests" in capsys.readouterr().out
    assert check.main([], _fake([], 2)) == 2
    assert check.main([], _fake([], 130)) == 130


def test_update_writes_what_was_measured_and_keeps_what_was_not(baseline: Path) -> None:
    baseline.write_text(json.dumps({"numpy": {**BASELINE["numpy"], "bootseer-hot": {"requests": 5, "bytes": 6}}}))
    runs = [a_run(), _ours(11, 12), a_run("bootseer-hot", ok=False, reason="no")]

    def run(argv: Sequence[str]) -> int:
        Path(argv[-1]).write_text("".join(each.line() for each in runs))
        return 1

    assert check.main(["--update"], run) == 1
    assert json.loads(baseline.read_text()) == {
        "numpy": {"bootseer": {"requests": 11, "bytes": 12}, "bootseer-hot": {"requests": 5, "bytes": 6}}
    }


@pytest.mark.system
@pytest.mark.timeout(900)
def test_cold_starts_need_no_more_than_they_did() -> None:
    argv = [sys.executable, "-m", "scripts.rig.bench", "check"]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_committed_baseline_is_one() -> None:
    """And none of its figures may be left at nothing."""
    committed = json.loads(check.BASELINE.read_text())
    assert {"hello", "numpy"} == set(committed)
    for systems in committed.values():
        assert "bootseer" in systems
        for limits in systems.values():
            assert set(limits) == {"requests", "bytes"} and min(limits.values()) > 0
