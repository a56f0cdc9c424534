"""`scripts/bench`: its table of measurements."""

import subprocess
from pathlib import Path

import pytest

from scripts.rig import bench
from scripts.rig.link import CHECKOUT


def test_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in bench.VERBS)


def test_options_go_to_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(bench, "VERBS", {"it": (lambda rest: seen.append(list(rest)) or 7, "words")})
    assert bench.main(["it", "--json", "file", "--help", "more"]) == 7
    assert seen == [["--json", "file", "--help", "more"]]


def test_an_unknown_measurement_is_refused() -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["luck"])
    assert ended.value.code == 2


def test_the_script_runs_it(tmp_path: Path) -> None:
    done = subprocess.run([CHECKOUT / "scripts/bench", "index", str(tmp_path / "no")], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("scripts/bench index: ")
