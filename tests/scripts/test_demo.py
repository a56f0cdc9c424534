"""The demo leaves nothing behind, however it ends; and it tells the user's mistakes in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scripts.rig.image import CACHE
from scripts.rig.link import CHECKOUT
from scripts.rig.process import MARKER, marked
from scripts.rig.workspace import PARENT, PREFIX, sweep

QUICK = ["--image", "tiny", "--systems", "overlayfs"]


@contextmanager
def _demo(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "scripts.rig.demo", *arguments]
    with subprocess.Popen(
        argv, cwd=CHECKOUT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _left(pid: int) -> list[str]:
    """What is left of the demo with this pid a moment after its end: a child that was killed with it may linger."""
    give_up = time.monotonic() + 2
    while left := _left_now(pid):
        if time.monotonic() > give_up:
            return left
        time.sleep(0.05)
    return []


def _left_now(pid: int) -> list[str]:
    """Directories, processes, mounts."""
    prefix = f"{PARENT}/{PREFIX}{pid}-"
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if prefix in line]
    processes = [f"process {it}" for it, root in marked().items() if root.startswith(prefix)]
    builds = [str(path) for path in CACHE.glob(".build-tiny-*")]
    return [*mounts, *processes, *builds, *(str(path) for path in PARENT.glob(f"{PREFIX}{pid}-*"))]


def _await_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    assert process.stderr is not None
    pytest.fail(f"the demo ended before it said {text!r}: {process.stderr.read()}")


@pytest.mark.system
def test_the_demo_writes_the_promised_json(tmp_path: Path) -> None:
    with _demo([*QUICK, "--rounds", "2", "--json", str(tmp_path / "out.json")]) as process:
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert not _left(process.pid)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["link"] == {"mbit": 100, "rtt_ms": 20}
    assert result["image"]["layers"] == 3
    assert [run["system"] for run in result["runs"]] == ["overlayfs"] * 2
    assert all(run["output_ok"] and run["ready_s"] > 0 for run in result["runs"])
    assert "x overlayfs" in out and "round 2/2" in out


@pytest.mark.system
@pytest.mark.parametrize(
    ("system", "line", "delay_s", "number"),
    [
        ("overlayfs", "testing it", 0.0, signal.SIGINT),  # namespaces and delay line are being made
        ("overlayfs", "link: connect", 0.1, signal.SIGTERM),  # the registry starts or is being filled
        ("overlayfs", "registry:", 0.6, signal.SIGHUP),  # containerd starts
        ("overlayfs", "registry:", 2.0, signal.SIGINT),  # image is pulled, container runs, or the node stops
        ("bootseer-first", "registry:", 1.0, signal.SIGINT),  # the daemon starts
        ("bootseer-first", "registry:", 3.0, signal.SIGTERM),  # layers are mounted
        ("bootseer", "round 1/", 2.5, signal.SIGTERM),
    ],
)
def test_an_interrupted_demo_leaves_nothing(system: str, line: str, delay_s: float, number: signal.Signals) -> None:
    with _demo(["--image", "tiny", "--systems", system, "--rounds", "1000"]) as process:
        _await_line(process, line)
        time.sleep(delay_s)
        process.send_signal(number)
        time.sleep(0.2)  # of two that are pending at once Python takes the lower number first
        process.send_signal(signal.SIGINT)  # an impatient second one changes nothing
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert f"interrupted by {number.name}" in err and "Traceback" not in err
    assert not _left(process.pid)


@pytest.mark.system
def test_a_killed_demo_is_swept_by_the_next_run() -> None:
    with _demo([*QUICK, "--rounds", "1000"]) as process:
        _await_line(process, "registry:")
        time.sleep(1.5)
        process.kill()
    roots = list(PARENT.glob(f"{PREFIX}{process.pid}-*"))
    assert len(roots) == 1
    assert set(roots) <= set(sweep())
    assert not _left(process.pid)


@pytest.mark.system
def test_a_living_run_is_not_swept() -> None:
    with _demo([*QUICK, "--rounds", "1000"]) as process:
        _await_line(process, "testing it")
        sweep()
        assert len(list(PARENT.glob(f"{PREFIX}{process.pid}-*"))) == 1
        process.terminate()
        process.communicate(timeout=60)
    assert not _left(process.pid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--mbit", "-3"], "must be above 0"),
        (["--systems", "stargz"], "invalid choice"),
        (["--json", "/nonexistent/dir/out.json"], "no directory /nonexistent/dir"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with _demo(arguments) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err


def test_without_root_it_says_so() -> None:
    code = "import os; os.geteuid = lambda: 1000; from scripts.rig.demo import main; raise SystemExit(main([]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "demo: namespaces and mounts need root; run: sudo ./scripts/demo\n"


def test_the_marker_is_not_ours() -> None:
    assert MARKER not in os.environ, "tests inside a workspace would kill each other's processes"
