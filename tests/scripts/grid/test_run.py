"""Lines of results: exactly the promised fields, and nothing that is no run is read."""

import json
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.grid.run import REQUIRED, Run, read_runs
from tests.scripts.grid.runs import a_run


def test_a_line_has_the_promised_fields_first_and_no_others_but_further_ones() -> None:
    document = json.loads(a_run("bootseer", demand_fetches=3).line())
    assert list(document) == [*REQUIRED, "session", "round"]
    assert list(REQUIRED) == [
        "image", "network", "system", "t_ready_s", "t_pull_s", "t_warm_s", "bytes", "requests", "demand_fetches",
        "floor_s", "ok",
    ]  # fmt: skip


def test_a_line_is_read_back_as_it_was() -> None:
    run = a_run("bootseer", demand_fetches=3, load=0.2, machine={"cpus": 2})
    assert Run.from_line(run.line()) == run
    assert run.line().count("\n") == 1


def test_a_failure_needs_no_figures() -> None:
    failed = a_run(t_ready_s=None, t_pull_s=None, t_warm_s=None, bytes=None, requests=None, floor_s=None, ok=False)
    assert Run.from_line(failed.line()) == failed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ok": "yes"}, "ok cannot be 'yes'"),
        ({"bytes": 1.5}, "bytes cannot be 1.5"),
        ({"bytes": True}, "bytes cannot be True"),
        ({"t_ready_s": float("inf")}, "t_ready_s cannot be inf"),
        ({"t_ready_s": None}, "has t_ready_s"),
        ({"requests": None}, "requests"),
        ({"image": None}, "image cannot be None"),
    ],
)
def test_what_is_no_run_is_refused(change: dict[str, object], reason: str) -> None:
    document = {**json.loads(a_run().line()), **change}
    with pytest.raises(ValueError, match=reason):
        Run.from_line(json.dumps(document))


@pytest.mark.parametrize("name", list(REQUIRED))
def test_every_field_is_needed(name: str) -> None:
    document = json.loads(a_run().line())
    del document[name]
    with pytest.raises(ValueError, match=f"no {name}"):
        Run.from_line(json.dumps(document))


def test_files_are_read_in_order_and_errors_name_the_line(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_text(a_run(ready_s=1.0).line() + a_run(ready_s=2.0).line())
    bad.write_text(a_run().line() + '{"image": "numpy"\n')
    assert [run.ready_s for run in read_runs([good, good])] == [1.0, 2.0, 1.0, 2.0]
    with pytest.raises(RigError, match=r"bad, line 2: this is no run"):
        read_runs([good, bad])
    with pytest.raises(RigError, match="No such file"):
        read_runs([tmp_path / "none"])
