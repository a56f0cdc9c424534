"""Starts of containers: whose set comes first, who is recorded, who is judged. The neighbours are played here."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from blockindex.hotset import image_key
from snapshotter.blockstore import node_name
from snapshotter.config import Config, PublishConfig, RecordConfig, WorkloadConfig
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest, LayerRef
from snapshotter.record.recorder import Recorder
from snapshotter.record.records import Records
from snapshotter.workload.container import Container, argv_digest
from snapshotter.workload.naming import workload_name
from snapshotter.workload.starts import Starts
from tests.blockindex.hotsets import hotset, layer_digest

DIGEST = Digest(layer_digest(0))
IMAGE = "registry.test/app:1"
REFS = [LayerRef(IMAGE, DIGEST, ())]
KEY = image_key([DIGEST])
TRAIN, SERVE = Container(("python", "train.py")), Container(("python", "serve.py"))
NAMES = {it.argv: workload_name(it.argv) for it in (TRAIN, SERVE)}


class Neighbours:
    """Recorder, fetch process and containerd."""

    def __init__(self) -> None:
        self.containers: dict[tuple[str, str], Container] = {}
        self.states: dict[str, str] = {}
        self.promoted: list[str] = []
        self.recorded: dict[str, tuple[str, str]] = {}
        self.named: list[tuple[str, str, str]] = []
        self.released: list[str] = []
        self.waits: list[dict[str, Any]] = []
        self.whole_since = 0.0
        self.problem: Exception | None = None

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        return {}

    def record(self, key: str, refs: Sequence[LayerRef], workload: str, argv: str) -> None:
        self.recorded[key] = (workload, argv)

    def name(self, key: str, workload: str, argv: str) -> None:
        self.named.append((key, workload, argv))

    def private(self, key: str) -> Mapping[Digest, Path]:
        return {DIGEST: Path("/private")} if key in self.recorded else {}

    def release(self, key: str) -> None:
        self.released.append(key)

    def promote(self, image: str, layers: Sequence[str], workload: str) -> str:
        self.promoted.append(workload)
        return self.states.get(workload, "none")

    def hot_state(self, image: str, layers: Sequence[str], workload: str = "default") -> str:
        return self.states.get(workload, "none")

    def history(self, names: Sequence[str], since: float, until: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        assert 0 < since <= until
        if self.problem is not None:
            raise self.problem
        return {"whole_since": self.whole_since, "waits": self.waits}, []

    def mounted(self) -> dict[str, str]:
        return {}

    def find(self, namespace: str, name: str) -> Container | None:
        return self.containers.get((namespace, name))


class Bench:
    """Starts on real records."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.store = HotStore(root)
        config = Config(
            record=RecordConfig(auto=options.pop("auto", True), window_s=options.pop("window_s", 3600.0)),
            publish=options.pop("publish", PublishConfig()),
            workload=WorkloadConfig(**options),
        )
        self.records = Records(root, self.store, config.workload)
        self.neighbours = Neighbours()
        recorder = cast(Recorder, self.neighbours)  # what is used of it is played
        self.starts = Starts(config, recorder, self.records, self.neighbours, self.neighbours)

    def start(self, name: str, container: Container | None) -> Mapping[Digest, Path]:
        """Prepare, creation, Mounts; what Mounts gets."""
        key = f"k8s.io/7/{name}"
        self.starts.begin(key, REFS)
        if container is not None:
            self.neighbours.containers[("k8s.io", name)] = container
        return self.starts.private(key, REFS)

    def kept(self, container: Container, *extents: tuple[int, int, int, int]) -> None:
        """There is a recording of such a container."""
        made = hotset((1000,), *extents, workload=NAMES[container.argv])
        self.records.keep(replace(made, argvs=(argv_digest(container.argv),)), commanded=False)

    def judged(self, name: str) -> dict[str, Any]:
        """End the start; what status shows then."""
        self.starts.release(f"k8s.io/7/{name}")
        until(lambda: all(start.is_judged for start in self.starts._starts.values() if start.is_removed))
        return next(row for row in self.starts.status() if row["key"].endswith(f"/{name}"))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.starts.close()


def wait(start: int, end: int) -> dict[str, Any]:
    return {"name": node_name(DIGEST), "start": start, "end": end, "brought_by": "demand"}


def test_a_container_that_is_known_has_its_own_set_first(bench: Bench) -> None:
    bench.kept(TRAIN, (0, 0, 200, 0))
    assert bench.start("a", TRAIN) == {}
    assert bench.neighbours.promoted == [NAMES[TRAIN.argv]]
    assert bench.starts.workload("k8s.io/7/a") == NAMES[TRAIN.argv]
    assert bench.neighbours.named == [("k8s.io/7/a", NAMES[TRAIN.argv], argv_digest(TRAIN.argv))]
    bench.starts.private("k8s.io/7/a", REFS)
    assert len(bench.neighbours.promoted) == 1, "once a start"
    assert bench.neighbours.recorded == {}, "it has a set"


def test_the_event_of_its_creation_may_come_first(bench: Bench) -> None:
    bench.starts.begin("k8s.io/7/a", REFS)
    bench.starts.created("k8s.io", "a")
    assert bench.neighbours.promoted == [], "nobody knows it"
    bench.neighbours.containers[("k8s.io", "a")] = TRAIN
    bench.starts.created("default", "a")
    bench.starts.created("k8s.io", "other")
    assert bench.neighbours.promoted == []
    bench.starts.created("k8s.io", "a")
    assert bench.neighbours.promoted == [NAMES[TRAIN.argv]]


def test_mounts_before_the_container_is_there_decide_nothing(bench: Bench) -> None:
    bench.kept(SERVE, (0, 0, 9, 0))
    bench.start("a", None)
    assert bench.neighbours.promoted == [] and bench.neighbours.recorded == {}
    assert bench.starts.workload("k8s.io/7/a") == "" and bench.starts.status() == []
    assert bench.start("a", TRAIN) == {DIGEST: Path("/private")}
    assert bench.neighbours.recorded == {"k8s.io/7/a": (NAMES[TRAIN.argv], argv_digest(TRAIN.argv))}


@pytest.mark.parametrize(
    ("why", "recorded"),
    [
        ("default was made here, of another workload", True),
        ("another node has published its set", False),
        ("nobody knows yet whether one has", False),
        ("default came from elsewhere", False),
        ("there is no hot set at all: the recorder decided that at Prepare", False),
        ("its set here was carried over", True),
        ("it is stale", True),
        ("auto is off", False),
    ],
)
def test_who_is_recorded(tmp_path: Path, why: str, recorded: bool) -> None:
    bench = Bench(tmp_path, auto=why != "auto is off")
    name = NAMES[TRAIN.argv]
    if why == "default came from elsewhere":
        bench.store.save(hotset((1000,), (0, 0, 9, 0)))
    elif not why.startswith("there is no"):
        bench.kept(SERVE, (0, 0, 9, 0))
    if why.startswith("another node"):
        bench.neighbours.states[name] = "found"
    elif why.startswith("nobody"):
        bench.neighbours.states[name] = "unknown"
    elif why.startswith("its set"):
        made = hotset((1000,), (0, 0, 9, 0), workload=name)
        bench.store.save(replace(made, carried_from="sha256:" + "0" * 64))
    elif why == "it is stale":
        bench.kept(TRAIN, (0, 0, 9, 0))
        bench.records.mark_stale(KEY, name, 0.5)
    bench.start("a", TRAIN)
    assert bool(bench.neighbours.recorded) is recorded
    bench.starts.close()


@pytest.mark.parametrize(
    ("why", "ends", "recorded"),
    [
        ("one is none", [100], True),
        ("the newest two do not agree", [100, 200], True),
        ("they do", [100, 200, 205], False),
        ("they never will", [100, 200, 300, 400], False),
        ("a person's is not touched", [100], False),
        ("nor one that was imported", [], False),
    ],
)
def test_a_node_that_publishes_records_until_recordings_agree(
    tmp_path: Path, why: str, ends: list[int], recorded: bool
) -> None:
    bench = Bench(tmp_path, publish=PublishConfig(enabled=True), records=4)
    name = NAMES[TRAIN.argv]
    for end in ends:
        made = hotset((1000,), (0, 0, end, 0), workload=name, manifest=DIGEST if why.startswith("a person") else "")
        bench.records.keep(made, commanded=bool(made.manifest))
    if not ends:
        bench.kept(SERVE, (0, 0, 9, 0))
        bench.store.save(hotset((1000,), (0, 0, 9, 0), workload=name))
    bench.start("a", TRAIN)
    assert bool(bench.neighbours.recorded) is recorded
    bench.starts.close()


def test_a_start_that_missed_too_much_makes_its_workload_stale(bench: Bench) -> None:
    bench.kept(TRAIN, (0, 0, 900, 0))
    bench.start("few", TRAIN)
    bench.neighbours.waits = [wait(900, 960), wait(0, 500)]
    row = bench.judged("few")
    assert row["missed_share"] == round(60 / 900, 3) and row["stale_share"] is None, "what is in the set was foreseen"
    bench.start("many", TRAIN)
    bench.neighbours.waits = [wait(900, 1000)]
    row = bench.judged("many")
    assert row["missed_share"] == round(100 / 900, 3) == row["stale_share"]
    bench.start("next", TRAIN)
    assert bench.neighbours.recorded == {"k8s.io/7/next": (NAMES[TRAIN.argv], argv_digest(TRAIN.argv))}
    assert bench.judged("next")["recorded"], "and is not judged: its reads were its own"


def test_a_default_from_elsewhere_is_judged_for_each_workload(bench: Bench) -> None:
    bench.store.save(hotset((1000,), (0, 0, 100, 0)))
    bench.start("a", TRAIN)
    bench.neighbours.waits = [wait(200, 300)]
    bench.judged("a")
    bench.neighbours.waits = []
    bench.start("b", SERVE)
    assert bench.judged("b")["stale_share"] is None and bench.neighbours.recorded == {}
    bench.start("c", TRAIN)
    assert list(bench.neighbours.recorded) == ["k8s.io/7/c"]


def test_a_start_is_judged_when_the_window_is_over(tmp_path: Path) -> None:
    bench = Bench(tmp_path, window_s=0.0)
    bench.kept(TRAIN, (0, 0, 100, 0))
    bench.neighbours.waits = [wait(200, 300)]
    bench.start("a", TRAIN)
    until(lambda: [row["stale_share"] for row in bench.starts.status()] == [1.0])
    bench.starts.close()


def test_a_start_ends_when_another_container_of_the_image_starts(bench: Bench) -> None:
    """Nobody can say whose misses come after that."""
    bench.kept(TRAIN, (0, 0, 100, 0))
    bench.start("a", TRAIN)
    bench.neighbours.waits = [wait(200, 300)]
    bench.start("b", TRAIN)
    until(lambda: [row["missed_share"] for row in bench.starts.status()] == [1.0, None])


def test_what_cannot_be_judged_is_not(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.kept(TRAIN, (0, 0, 100, 0))
    bench.neighbours.waits = [wait(200, 300)]
    bench.neighbours.whole_since = time.time() + 3600  # the fetch process was restarted
    bench.start("a", TRAIN)
    assert bench.judged("a")["missed_share"] is None
    bench.neighbours.problem = SnapshotterError("the fetch process is away")
    bench.start("b", TRAIN)
    assert bench.judged("b")["stale_share"] is None and "workload.not_judged" in caplog.text
    caplog.clear()


def test_nothing_keeps_a_container_from_starting(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.neighbours.recorded["k8s.io/7/a"] = ("by", "prepare")
    bench.neighbours.promote = None  # type: ignore[assignment]  # a bug
    assert bench.start("a", TRAIN) == {DIGEST: Path("/private")}
    assert "workload.failed" in caplog.text
    bench.starts.created("k8s.io", "b")
    caplog.clear()
    assert bench.starts.private("k8s.io/7/mixed", []) == {}, "not all of its layers are lazy"
    bench.starts.release("k8s.io/7/never")
    assert bench.neighbours.released == ["k8s.io/7/never"]
