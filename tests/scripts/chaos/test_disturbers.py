"""Disturbers by themselves: what the seed decides, and what is counted."""

import random
from pathlib import Path

import pytest

from scripts.rig.chaos.disturbers import KillAtPoint
from scripts.rig.chaos.record import Record

NAMES = [f"fetch.step-{number}" for number in range(20)]


@pytest.fixture
def killer(tmp_path: Path) -> KillAtPoint:
    points = tmp_path / "points"
    points.mkdir()
    (points / "points").write_text("\n".join(NAMES))
    return KillAtPoint(points, Record(tmp_path / "actions.log"))


def _armed(killer: KillAtPoint) -> dict[str, int]:
    return {path.name: int(path.read_text()) for path in killer.points.iterdir() if path.name in NAMES}


def test_the_seed_says_at_which_points_processes_die(killer: KillAtPoint) -> None:
    said = []
    for seed in (1, 1, 2):
        text = killer.act(random.Random(seed))
        said.append((text, _armed(killer)))
        assert all(f"{name} ({times})" in text for name, times in _armed(killer).items())
    assert said[0] == said[1] != said[2]
    killer.calm()
    assert [path.name for path in killer.points.iterdir()] == ["points"]


def test_who_has_died_is_counted_once(killer: KillAtPoint) -> None:
    killer.act(random.Random(1))
    first, second = sorted(_armed(killer))[:2]
    for name in (first, second):
        (killer.points / name).rename(killer.points / f"{name}.reached")
    assert killer.act(random.Random(2)).startswith(f"died at {first}, {second}; ")
    assert killer.record.counts.kills == 2
    killer.calm()
    assert killer.record.counts.kills == 2
    assert killer.record.path.read_text().splitlines()[-1].endswith("point: died at none")
