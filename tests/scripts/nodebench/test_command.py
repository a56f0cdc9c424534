"""`scripts/bench node`, end to end on tiny images and layers: each measurement, and that nothing stays behind."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scripts.rig.link import CHECKOUT
from scripts.rig.nodebench.command import MEASUREMENTS
from scripts.rig.process import marked
from scripts.rig.workspace import PARENT, PREFIX


@contextmanager
def _bench(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "scripts.rig.bench", "node", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=CHECKOUT, text=True, stdout=pipe, stderr=pipe, start_new_session=True) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def _left(pid: int) -> list[str]:
    """What is left of the run with this pid: directories, processes, mounts, loop devices."""
    prefix = f"{PARENT}/{PREFIX}{pid}-"
    mounts = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if prefix in line]
    processes = [f"process {it}" for it, root in marked().items() if root.startswith(prefix)]
    backing = [file.read_text() for file in Path("/sys/block").glob("loop*/loop/backing_file")]
    loops = [text for text in backing if text.startswith(prefix)]
    return [*mounts, *processes, *loops, *(str(path) for path in PARENT.glob(f"{PREFIX}{pid}-*"))]


def _small(name: str, tmp_path: Path, *more: str) -> tuple[dict[str, Any], str]:
    """The JSON document's result of a small measurement, and what was printed."""
    file = tmp_path / "figures.json"
    with _bench("--small", "--rounds", "2", "--only", name, "--json", str(file), *more) as process:
        out, err = process.communicate(timeout=250)
    assert process.returncode == 0, err
    assert not _left(process.pid)
    document = json.loads(file.read_text())
    assert list(document["results"]) == [name]
    assert all(row["what"] in out for row in document["rows"])
    result: dict[str, Any] = document["results"][name]
    return result, err


@pytest.mark.system
def test_warm(tmp_path: Path) -> None:
    result, err = _small("warm", tmp_path)
    for part in ("whole", "inside", "stat"):
        assert result[part]["n"] == 2 and result[part]["median"] > 0 and result[f"{part}_s"] > 0
    assert "warm: pair 2/2" in err


@pytest.mark.system
def test_record(tmp_path: Path) -> None:
    result, err = _small("record", tmp_path, "--network", "dc")
    assert "dc: connect " in err or "dc: REFUSED" in err
    for part in ("start", "container"):
        assert result[part]["n"] == 2 and result[part]["median"] > 0 and result[f"{part}_s"] > 0
    assert result["start_s"] > result["container_s"]
    assert 100 < result["least_blocks"] <= result["most_blocks"] and "record: pair 2/2" in err


@pytest.mark.system
def test_tar(tmp_path: Path) -> None:
    result, _ = _small("tar", tmp_path)
    assert result["ratio"]["n"] == 2 and result["bootseer_s"] > 0 and result["ext4_s"] > 0
    assert result["tar_bytes"] > 2_000_000


@pytest.mark.system
def test_hit(tmp_path: Path) -> None:
    result, _ = _small("hit", tmp_path)
    assert result["idle"]["n"] > 256 and 1 < result["idle"]["median_us"] <= result["idle"]["p99_us"]
    assert result["loaded"]["n"] > 256 and result["threads"] >= 1 and result["stored_mb_s"] > 1


@pytest.mark.system
def test_prepare(tmp_path: Path) -> None:
    result, _ = _small("prepare", tmp_path)
    assert [(layer["files"], layer["n"]) for layer in result["layers"]] == [(1, 2), (300, 2)]
    for layer in result["layers"]:
        assert 0 < layer["low_ms"] <= layer["ms"] <= layer["high_ms"]
        assert layer["ready_ms"] + layer["mount_ms"] <= layer["high_ms"] + 1


@pytest.mark.system
def test_memory(tmp_path: Path) -> None:
    result, _ = _small("memory", tmp_path)
    names = ["supervisor", "block", "fetch", "service"]
    assert [moment["moment"] for moment in result["moments"]] == ["mounted", "read"] * 2
    for moment in result["moments"]:
        assert [process["name"] for process in moment["processes"]] == names
        assert all(1 << 20 < process["pss_bytes"] <= process["rss_bytes"] for process in moment["processes"])


@pytest.mark.system
def test_together(tmp_path: Path) -> None:
    result, _ = _small("together", tmp_path)
    assert result["containers"] == 3 and result["ratio"]["n"] == 2
    assert result["bootseer_s"] > result["bootseer_start_s"] > 0
    assert 0.9 < result["sent"] < 1.2, "every layer is sent once"


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "line", "delay_s"),
    [
        ("tar", "tar: pair 1/", 0.1),
        ("warm", "image tiny", 4.0),
        ("hit", "hit: begins", 4.0),
        ("together", "round 1/", 2.0),
    ],
)
def test_an_interrupted_run_leaves_nothing_and_shows_what_it_has(name: str, line: str, delay_s: float) -> None:
    with _bench("--small", "--rounds", "1000", "--only", name) as process:
        assert process.stderr is not None
        for text in process.stderr:
            if line in text:
                break
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err
    assert "interrupted by SIGINT" in err and "Traceback" not in err
    assert "| what " in out
    assert not _left(process.pid)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "must be at least 1"),
        (["--only", "warm,luck"], f"unknown: luck; known: {', '.join(MEASUREMENTS)}"),
        (["--json", "/nonexistent/dir/out.json"], "no directory /nonexistent/dir"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: list[str], message: str) -> None:
    with _bench(*arguments) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == 2
    assert message in err
