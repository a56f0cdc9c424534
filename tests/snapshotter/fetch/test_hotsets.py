"""Which images are prefetched: one at a time, again after a while, found out by the registry."""

import threading
from collections.abc import Iterator, Sequence

import pytest

from blockindex.hotset import HotSet, image_key
from snapshotter.fetch import hotsets as hotsets_module
from snapshotter.fetch import prefetch as prefetch_module
from snapshotter.fetch.host import Host
from snapshotter.fetch.hotsets import Prefetches
from snapshotter.model import Digest
from snapshotter.registry.hotfile import HotFile
from tests.snapshotter.fetch.blobs import PATIENCE_S

IMAGE = "registry.test/app:1"
LAYERS = [Digest("sha256:" + character * 64) for character in "ab"]


class Bench:
    """Prefetches whose look-ups wait for `go`."""

    def __init__(self) -> None:
        self.host = Host("registry.test", demand_threads=2, hot_threads=2, background_threads=1)
        self.looks: list[str] = []
        self.asked: list[str] = []
        self.go, self.answer = threading.Event(), threading.Event()
        self.go.set()
        self.answer.set()
        self.registry: Sequence[Digest] = LAYERS
        self.prefetches = Prefetches(self, lambda _: self.host, lambda _: None, self._layers_of, 2)

    def recorded(self, key: str, workload: str) -> HotSet | None:
        self.looks.append(key)
        assert self.go.wait(PATIENCE_S)
        return None

    def find(self, image: str, key: str, workload: str) -> HotFile | None:
        return None

    def _layers_of(self, image: str) -> Sequence[Digest]:
        self.asked.append(image)
        assert self.answer.wait(PATIENCE_S)
        return self.registry

    def settle(self) -> None:
        patience = threading.Event()
        for _ in range(int(PATIENCE_S * 1000)):
            if "0 running, 0 queued" in repr(self.host):
                return
            patience.wait(0.001)
        raise AssertionError(f"does not come to rest: {self.host!r}")

    def states(self) -> list[str]:
        return [row["state"] for row in self.prefetches.status()]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(prefetch_module, "_LOOK_S", 0.01)
    bench = Bench()
    yield bench
    bench.go.set()
    bench.answer.set()
    bench.settle()
    assert bench.host._prefetches == 0
    bench.host.close()


def test_the_prepares_of_one_pull_have_one_prefetch(bench: Bench) -> None:
    bench.go.clear()
    assert [bench.prefetches.begin(IMAGE, LAYERS) for _ in range(3)] == ["unknown"] * 3
    assert repr(bench.prefetches) == "<Prefetches 1 active, 1 known>"
    bench.go.set()
    bench.settle()
    assert bench.prefetches.begin(IMAGE, LAYERS) == "none"
    assert bench.prefetches.begin("registry.test/same:2", LAYERS) == "none", "it is the same image"
    bench.settle()
    assert bench.looks == [image_key(LAYERS)]


def test_images_do_not_wait_for_each_other(bench: Bench) -> None:
    assert bench.prefetches.begin(IMAGE, LAYERS) == bench.prefetches.begin(IMAGE, LAYERS[:1]) == "unknown"
    bench.settle()
    assert sorted(bench.looks) == sorted([image_key(LAYERS), image_key(LAYERS[:1])])
    assert bench.states() == ["none", "none"]


def test_it_begins_again_after_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.prefetches.begin(IMAGE, LAYERS)
    bench.settle()
    monkeypatch.setattr(hotsets_module, "_AGAIN_S", 0.0)
    assert bench.prefetches.begin(IMAGE, LAYERS) == "unknown"
    bench.settle()
    assert len(bench.looks) == 2 and len(bench.states()) == 1


def test_the_registry_is_asked_once_for_layers_that_a_pull_does_not_name(bench: Bench) -> None:
    bench.answer.clear()
    assert [bench.prefetches.begin(IMAGE, []) for _ in range(3)] == ["unknown"] * 3
    bench.answer.set()
    bench.settle()
    assert bench.looks == [image_key(LAYERS)]
    assert bench.prefetches.begin(IMAGE, []) == "none", "known by now"
    bench.settle()
    assert bench.asked == [IMAGE] and len(bench.looks) == 1


def test_a_registry_that_does_not_answer_is_asked_again_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.registry = ()
    for _ in range(3):
        assert bench.prefetches.begin(IMAGE, []) == "unknown"
        bench.settle()
    assert bench.asked == [IMAGE] and bench.looks == []
    bench.registry = LAYERS
    monkeypatch.setattr(hotsets_module, "_AGAIN_S", 0.0)
    bench.prefetches.begin(IMAGE, [])
    bench.settle()
    assert bench.looks == [image_key(LAYERS)]


def test_what_is_remembered_is_bounded_but_never_what_is_under_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotsets_module, "_REMEMBERED", 3)
    for number in range(10):
        bench.prefetches.begin(IMAGE, [Digest("sha256:" + f"{number:064x}")])
        bench.prefetches.begin(f"registry.test/app:{number}", [])
        bench.settle()
    assert len(bench.prefetches.status()) <= 4 and len(bench.prefetches._resolved) <= 3
    bench.go.clear()
    for number in range(10):
        bench.prefetches.begin(IMAGE, [Digest("sha256:" + f"{100 + number:064x}")])
    assert len(bench.prefetches._active()) == 10


def test_all_active_ones_are_tended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.go.clear()
    bench.prefetches.begin(IMAGE, LAYERS)
    bench.prefetches.flush()
    bench.prefetches.tend()
    assert bench.states() == ["looking"]
    monkeypatch.setattr(prefetch_module, "_STALL_S", 0.0)
    bench.prefetches.tend()
    assert bench.states() == ["over"] and bench.prefetches.begin(IMAGE, LAYERS) == "found"
    caplog.clear()
