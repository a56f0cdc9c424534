"""Plans and their order; and real runs of the small image, end to end."""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.rig.coldstart import ColdStart, System
from scripts.rig.grid import measure
from scripts.rig.grid.measure import Plan, missing, run_of
from scripts.rig.grid.network import NETWORKS
from scripts.rig.grid.run import REQUIRED, read_runs
from scripts.rig.image import RECIPES
from scripts.rig.link import CHECKOUT
from scripts.rig.process import marked
from scripts.rig.workspace import PARENT, PREFIX
from tests.scripts.grid.runs import a_run

TINY, METRO, DC = RECIPES["tiny"], NETWORKS["metro"], NETWORKS["dc"]
SYSTEMS = (System.OVERLAYFS, System.BOOTSEER, System.BOOTSEER_HOT)
PLAN = Plan((TINY, RECIPES["numpy"]), (METRO, DC), SYSTEMS, rounds=4, seed=3)


def test_each_round_has_every_combination_once_in_an_order_of_its_own() -> None:
    rounds = [PLAN.round(number) for number in range(1, 5)]
    for each in rounds:
        assert len(each) == len({(r.name, n.name, s) for r, n, s in each}) == 12
    assert len({tuple((r.name, n.name, s) for r, n, s in each) for each in rounds}) == 4
    assert PLAN.round(2) == rounds[1], "the seed decides"
    assert random.random() != random.random()


def test_resuming_counts_what_this_commit_has() -> None:
    done = [
        a_run("bootseer", image="tiny", commit="c"),
        a_run("bootseer", image="tiny", commit="b"),
        a_run("bootseer", image="tiny", commit="c", ok=False),
        a_run("overlayfs", image="tiny", commit="c", together=5),
    ]
    wanted = missing(PLAN, done, "c")
    assert [wanted(TINY, METRO, System.BOOTSEER) for _ in range(3)] == [False, True, True]
    assert wanted(TINY, METRO, System.OVERLAYFS)
    assert wanted(TINY, DC, System.BOOTSEER)
    dirty = [a_run("bootseer", image="tiny", commit="c+")]
    assert missing(PLAN, dirty, "c+")(TINY, METRO, System.BOOTSEER), "nobody knows what those files were"


def test_wrong_output_is_a_failure_with_its_reason() -> None:
    result = ColdStart(
        System.BOOTSEER, 0.5, 1.25, 1000, 7, False, "no such file", (1.25,), (0.3,), {"demand_fetches": 4}
    )
    run = run_of(result, TINY, METRO, 0.9, {"round": 2})
    assert not run.ok
    assert run.more["reason"] == "wrong output: 'no such file'"
    assert (run.t_ready_s, run.t_pull_s, run.t_warm_s, run.bytes, run.requests) == (1.25, 0.5, 0.3, 1000, 7)
    assert (run.demand_fetches, run.floor_s) == (4, 0.9)


def test_only_our_systems_have_demand_fetches() -> None:
    result = ColdStart(System.OVERLAYFS, 0.5, 1.25, 1000, 7, True, layers={})
    assert run_of(result, TINY, METRO, None, {}).demand_fetches is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "moon"], "no image moon; there are hello, numpy"),
        (["--networks", "moon"], "no network moon; there are dc, metro"),
        (["--systems", "moon"], "no system moon; there are overlayfs"),
        (["--rounds", "0"], "must be at least 1"),
        (["--out", "/nonexistent/dir/out"], "no directory /nonexistent/dir"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        measure.main(["--out", str(tmp_path / "out"), *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_there_is_no_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit):
        measure.main(["--out", str(tmp_path / "out"), "--systems", "stargz"])
    program = tmp_path / "containerd-stargz-grpc"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    parsed = measure._plan(argparse.Namespace(
        images="tiny", networks="metro", systems="stargz,overlayfs,stargz", seed=1, rounds=1, together=1, no_warm=False,
        timeline=None, measure_floor=False, max_load=None, any_link=False, no_background=False,
    ))  # fmt: skip
    assert parsed.systems == (System.STARGZ, System.OVERLAYFS)


def _bench(*arguments: str, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "scripts.rig.bench", *arguments]
    return subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=timeout_s)


def _nothing_left() -> bool:
    return not [root for root in marked().values() if root.startswith(f"{PARENT}/{PREFIX}bench-test")]


@pytest.mark.system
def test_run_and_report_end_to_end(tmp_path: Path) -> None:
    out, kept = tmp_path / "runs.jsonl", tmp_path / "timelines"
    done = _bench(
        "run", "--images", "tiny", "--networks", "metro", "--systems", "overlayfs,bootseer,bootseer-hot,oracle",
        "--rounds", "1", "--out", str(out), "--timeline", str(kept), "--seed", "5", "--any-link",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {run.system: run for run in read_runs([out])}
    assert set(runs) == {"overlayfs", "bootseer", "bootseer-hot", "oracle"}
    for run in runs.values():
        assert run.ok and run.t_pull_s is not None and 0 < run.t_pull_s < run.ready_s
        assert run.t_warm_s is not None and run.t_warm_s > 0
        assert run.floor_s is not None and run.floor_s > 6 * 0.02
        assert run.more["machine"]["cpus"] > 0 and run.more["round"] == 1 and run.more["seed"] == 5
    assert runs["overlayfs"].requests == 6, "manifest by HEAD and GET, config, three layers"
    assert runs["overlayfs"].demand_fetches is None and runs["bootseer"].demand_fetches is not None
    assert runs["oracle"].requests == 1
    assert all(list(json.loads(line))[: len(REQUIRED)] == list(REQUIRED) for line in out.read_text().splitlines())

    again = _bench("report", str(out), "--markdown")
    assert again.returncode == 0
    assert all(f"\n| {system} | 1 |" in again.stdout for system in runs), again.stdout

    shown = _bench("report", "--timeline", str(kept / "tiny-metro-bootseer-1"))
    for expected in ("pull started", "pull returned", "ready", "layer.mounted", ".bootseer-layerindex", "100 % of the"):
        assert expected in shown.stdout, shown.stdout


@pytest.mark.system
def test_a_failing_start_is_a_line_and_no_sample(tmp_path: Path) -> None:
    """A containerd that is none: overlayfs cannot start, and the next run is made all the same."""
    out = tmp_path / "runs.jsonl"
    code = (
        "import sys; from scripts.rig import coldstart; from scripts.rig.grid import measure;"
        "real = measure.cold_start\n"
        "def broken(bench, system, name, extras=None):\n"
        "    import dataclasses\n"
        "    if system is coldstart.System.OVERLAYFS:\n"
        "        bench = dataclasses.replace(bench, reference=bench.reference + 'x')\n"
        "    return real(bench, system, name, extras)\n"
        "measure.cold_start = broken\n"
        "sys.exit(measure.main(sys.argv[1:]))"
    )
    argv = [
        "--images",
        "tiny",
        "--networks",
        "metro",
        "--systems",
        "overlayfs,bootseer-first",
        "--rounds",
        "1",
        "--any-link",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *argv, "--no-warm", "--out", str(out)],
        cwd=CHECKOUT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    runs = {run.system: run for run in read_runs([out])}
    assert not runs["overlayfs"].ok and "the pull failed" in runs["overlayfs"].more["reason"]
    assert runs["overlayfs"].t_ready_s is None
    assert runs["bootseer-first"].ok and runs["bootseer-first"].t_warm_s is None
    report = _bench("report", str(out))
    assert "0 (1 failed)" in report.stdout and "Failed, and no samples: 1" in report.stdout


@pytest.mark.system
def test_containers_together_download_the_image_once(tmp_path: Path) -> None:
    out = tmp_path / "runs.jsonl"
    done = _bench(
        "run", "--images", "tiny", "--networks", "metro", "--systems", "bootseer", "--rounds", "1", "--together", "8",
        "--no-warm", "--any-link", "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = read_runs([out])
    assert len(run.more["t_ready_each_s"]) == 8
    assert max(run.more["t_ready_each_s"]) == run.t_ready_s
    assert run.bytes is not None and run.bytes < 1.2 * run.more["image_bytes"]
