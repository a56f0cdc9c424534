"""When a recording ends, and whether it is kept; what it counts."""

from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotset import HotExtent, HotLayer
from snapshotter.errors import SnapshotterError
from snapshotter.record.log import Touch
from snapshotter.record.recording import End, Facts, Recording, Task, TaskState, Touched, ending

LAYERS = (HotLayer("sha256:" + "a1" * 32, 100, "sha256:" + "00" * 32), HotLayer("sha256:" + "b2" * 32, 50, "x"))
BEGAN, QUIET = 1000.0, 10.0
ITS = Recording(1, "k8s.io/1/c", "r.test/a:1", LAYERS, "default", "", False, 120.0, BEGAN, "boot")
RUNNING = Task(TaskState.RUNNING)


def _ends(at: float, task: Task = RUNNING, **facts: object) -> End | None:
    """How it ends so many seconds after its beginning; `new`, `removed`, `started` count from there too."""
    its = replace(ITS, commanded=bool(facts.get("commanded")), started_s=BEGAN + float(str(facts.get("started", 0))))
    new, removed = facts.get("new", 1.0), facts.get("removed")
    known = Facts(
        task,
        None if removed is None else BEGAN + float(str(removed)),
        None if new is None else BEGAN + float(str(new)),
        BEGAN + float(str(facts.get("busy", 0))),
        bool(facts.get("failed")),
    )
    return ending(its, known, QUIET, BEGAN + at)


@pytest.mark.parametrize(
    ("at", "task", "facts", "keep"),
    [
        # time
        (10.9, RUNNING, {}, None),
        (11.0, RUNNING, {}, True),
        (11.0, RUNNING, {"started": 5}, None),
        (15.0, RUNNING, {"started": 5}, True),
        (60.0, RUNNING, {"new": 55}, None),
        (40.0, RUNNING, {"busy": 35}, None),
        (45.0, RUNNING, {"busy": 35}, True),
        (120.0, RUNNING, {"new": 119}, True),
        (60.0, RUNNING, {"new": None}, None),
        (120.0, RUNNING, {"new": None}, False),
        # containerd cannot be asked
        (11.0, Task(TaskState.UNKNOWN), {}, True),
        (120.0, Task(TaskState.UNKNOWN), {"new": 119}, True),
        (2.0, Task(TaskState.UNKNOWN), {"removed": 1}, False),
        # not started: only the image's users file, say, has been read
        (60.0, Task(TaskState.NONE), {}, None),
        (120.0, Task(TaskState.NONE), {}, False),
        # it has ended
        (2.0, Task(TaskState.EXITED, 0), {}, True),
        (2.0, Task(TaskState.EXITED, 0), {"removed": 1.9}, True),
        (2.0, Task(TaskState.EXITED, 0), {"new": None}, False),
        (2.0, Task(TaskState.EXITED, 1), {}, False),
        (2.0, Task(TaskState.EXITED, 137), {}, False),
        (200.0, Task(TaskState.EXITED, 1), {}, False),
        (2.0, Task(TaskState.GONE), {}, False),
        # the snapshot is gone, its end may still be on the way
        (2.9, RUNNING, {"removed": 2}, None),
        (3.0, RUNNING, {"removed": 2}, False),
        (300.0, RUNNING, {"removed": 299.5}, None),
        (3.0, Task(TaskState.NONE), {"removed": 2}, False),
        (3.0, Task(TaskState.GONE), {"removed": 2}, False),
        # the log
        (2.0, RUNNING, {"failed": True}, False),
        (2.0, Task(TaskState.EXITED, 0), {"failed": True}, False),
        # by command
        (100.0, RUNNING, {"commanded": True}, None),
        (100.0, Task(TaskState.EXITED, 0), {"commanded": True}, None),
        (120.0, RUNNING, {"commanded": True}, False),
        (2.0, RUNNING, {"commanded": True, "removed": 2}, False),
        (2.0, RUNNING, {"commanded": True, "failed": True}, False),
    ],
)
def test_the_rule(at: float, task: Task, facts: dict[str, object], keep: bool | None) -> None:
    end = _ends(at, task, **facts)
    assert (None if end is None else end.keep) is keep
    assert end is None or end.why
    assert end is None or end.is_quiet is ("quiet" in end.why)


def _touched(*reads: tuple[str, int, int, float]) -> Touched:
    touched = Touched(ITS, lambda digest: digest[7:21])
    for name, start, end, at in reads:
        touched.add(Touch(name, start, end, BEGAN + at))
    return touched


A, B = "a1" * 7, "b2" * 7


def test_first_touches_in_their_order() -> None:
    touched = _touched((B, 5, 9, 0.5), (A, 0, 2, 0.6), (B, 5, 7, 0.7), (A, 1, 4, 2.0), (A, 98, 104, 3.0))
    assert touched.blocks == 4 + 2 + 2 + 2 and touched.new_s == BEGAN + 3.0
    hotset = touched.hotset()
    assert hotset.extents == (HotExtent(1, 5, 9, 500), HotExtent(0, 0, 4, 600), HotExtent(0, 98, 100, 3000))
    assert hotset.layers == LAYERS and hotset.workload == "default" and hotset.records == 1


def test_what_is_read_again_is_not_new() -> None:
    touched = _touched((A, 0, 4, 1.0), (A, 1, 3, 50.0))
    assert (touched.blocks, touched.new_s) == (4, BEGAN + 1.0)


def test_reads_of_other_layers_and_beyond_the_end_are_left_out() -> None:
    touched = _touched(("c3" * 7, 0, 4, 1.0), (A, 100, 101, 2.0))
    assert (touched.blocks, touched.new_s) == (0, None)


def test_it_is_written_down_whole(tmp_path: Path) -> None:
    path = tmp_path / "01.json"
    ITS.save(path)
    assert Recording.load(path) == ITS
    path.write_text(path.read_text()[:50])
    with pytest.raises(SnapshotterError, match="01"):
        Recording.load(path)
