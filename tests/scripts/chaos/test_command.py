"""The chaos bench itself: a run is clean, an interrupted one leaves nothing, and mistakes are told in one line."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.rig.link import CHECKOUT
from tests.scripts.test_demo import _await_line, _left

ARGV = [sys.executable, "-m", "scripts.rig.chaos.command"]
FIELDS = ["kills", "upgrades", "faults", "reads", "io_errors", "mismatches", "leaks", "longest_pause_s"]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ARGV, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=500)


@pytest.mark.system
@pytest.mark.timeout(360)
def test_nothing_that_happens_reaches_a_container(tmp_path: Path) -> None:
    done = _run("--seconds", "60", "--seed", "1", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads((tmp_path / "out.json").read_text())
    assert list(result) == FIELDS
    assert [result[name] for name in ("io_errors", "mismatches", "leaks")] == [0, 0, 0]
    assert result["kills"] >= 5 and result["reads"] >= 100 and result["longest_pause_s"] > 0
    assert json.loads(done.stdout.splitlines()[-1]) == result


LOADS = {
    "many at once and very often": (10, 5, [], 1000),
    "128 and 64 layers": (2, 1, ["128", "64"], 20),
}


@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("images", "each", "layers", "cycles"), LOADS.values(), ids=LOADS)
def test_a_load_leaves_nothing(tmp_path: Path, images: int, each: int, layers: list[str], cycles: int) -> None:
    words = ["--images", str(images), "--containers", str(each), "--layers", *layers, "--cycles", str(cycles)]
    done = _run("--load", *words, "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    result = json.loads((tmp_path / "out.json").read_text())
    assert (result["containers"], result["cycles"]) == (images * each, cycles)
    assert [result[name] for name in ("io_errors", "mismatches", "leaks")] == [0, 0, 0]
    assert sorted(result["grown"]) == ["block", "fetch", "service", "supervisor"]
    assert result["reads"] >= max(images * each, sum(map(int, layers)) - len(layers)) and result["cycle_ms"] > 0


@pytest.mark.system
def test_an_interrupted_run_leaves_nothing() -> None:
    with subprocess.Popen(
        [*ARGV, "--seconds", "1000"], cwd=CHECKOUT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        try:
            _await_line(process, "now all is disturbed")
            process.send_signal(signal.SIGTERM)
            _, err = process.communicate(timeout=100)
        finally:
            if process.poll() is None:
                process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert err == "chaos: interrupted by SIGTERM, all cleaned up\n"
    assert not _left(process.pid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "must be above 0"),
        (["--seconds", "x"], "invalid"),
        (["--load", "--cycles", "0"], "must be at least 1"),
        (["--load", "--layers", "1"], "must be from 2 to 400"),
        (["--json", "/nonexistent/dir/out.json"], "no directory /nonexistent/dir"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    done = _run(*arguments)
    assert done.returncode == 2 and message in done.stderr


def test_without_root_it_says_so() -> None:
    code = "import os; os.geteuid = lambda: 1; from scripts.rig.chaos.command import main; raise SystemExit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "chaos: namespaces and mounts need root; run: sudo ./scripts/chaos\n")
