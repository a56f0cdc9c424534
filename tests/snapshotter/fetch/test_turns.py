"""A workload's own hot set comes before what `default` still has to bring: packs, and sets without bytes."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotpack import Codec, write_pack
from blockindex.hotset import HotSet, image_key
from snapshotter.config import HotSetConfig
from snapshotter.errors import NotFound
from snapshotter.fetch import host as host_module
from snapshotter.fetch import packplan as packplan_module
from snapshotter.fetch.hotsets import Prefetches
from snapshotter.fetch.workloads import WorkloadCalls
from snapshotter.registry.hotfile import HotFile, HotStream
from tests.snapshotter.daemon import Layer, make_layer
from tests.snapshotter.fetch.blobs import FakeBlob
from tests.snapshotter.fetch.hotbench import IMAGE, HotBench

DEFAULT = [(0, 0, 24), (1, 8, 32), (0, 40, 56)]
TRAIN = [(1, 64, 100), (0, 100, 116)]
FIRST = 40 << 10


class Site:
    """One image whose workloads have sets; all streams of the packs leave their starts in `asked`."""

    def __init__(self, root: Path, layers: Sequence[Layer], there: Sequence[int] = (0, 1)) -> None:
        self.bench = HotBench(root, layers, streams=3, there=there)
        self.asked: list[tuple[str, int]] = []
        self.packs: dict[str, FakeBlob] = {}
        self.sets: dict[str, HotSet] = {}
        host, layer_of = self.bench.host, self.bench.layer_of
        self.prefetches = Prefetches(self, lambda _: host, layer_of, lambda _: self.bench.digests, streams=1)
        self.key = image_key(self.bench.digests)

    def recorded(self, key: str, workload: str) -> HotSet | None:
        return self.sets.get(workload)

    def find(self, image: str, key: str, workload: str) -> HotFile | None:
        pack = self.packs.get(workload)
        if pack is None:
            return None

        def ask(start: int, end: int) -> HotStream:
            self.asked.append((workload, start))
            stream = pack.stream(start, min(end, pack.size()))
            return HotStream(start, min(end, pack.size()), stream, stream.close)

        return HotFile(workload, pack.size(), ask(0, FIRST), ask)

    def publish(self, workload: str, extents: Sequence[tuple[int, int, int]]) -> FakeBlob:
        out, bench = io.BytesIO(), self.bench
        hotset = replace(bench.hotset(extents), workload=workload)
        write_pack(
            hotset, lambda it: bench.region(it.layer, it.start, it.end), Codec.LZ4, out, first_frame=32 << 10,
            frame=64 << 10,
        )  # fmt: skip
        self.packs[workload] = FakeBlob(out.getvalue(), chunk=4096)
        return self.packs[workload]

    def states(self) -> dict[str, str]:
        return {row["workload"]: row["state"] for row in self.prefetches.status()}

    def present(self, extents: Sequence[tuple[int, int, int]]) -> bool:
        return all(self.bench.present(*extent) for extent in extents)

    def until_over(self) -> None:
        self.bench.until(lambda: set(self.states().values()) <= {"over", "none"})
        self.bench.settle()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("_FIRST", "_MOST"):
        monkeypatch.setattr(packplan_module, name, 64 << 10)
    for name in ("_QUIET_S", "_AFTER_HOT_S"):
        monkeypatch.setattr(host_module, name, 0.0)
    made = Site(tmp_path, [make_layer(files=4, size=128 << 10, seed=seed) for seed in (1, 2)])
    yield made
    for blob in made.packs.values():
        blob.release_all()
    for prefetch in made.prefetches._active():
        prefetch._give_up("end of the test")
    made.bench.close()
    assert all(blob.open == 0 for blob in made.packs.values())


def test_what_default_brings_is_not_brought_twice(site: Site) -> None:
    """As where an image has one workload: of its own set only the head is needed; its blocks come first."""
    own = [(1, 40, 56), (0, 120, 128)]
    default, train = site.publish("default", [*DEFAULT, (0, 64, 100), *own]), site.publish("train", own)
    first = default.hold(36 << 10)
    site.prefetches.begin(IMAGE, site.bench.digests)
    first.await_stream()
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    site.bench.until(lambda: site.states().get("train") == "over")
    first.release()
    site.until_over()
    assert site.present(DEFAULT) and site.present(own)
    assert [start for workload, start in site.asked if workload == "train"] == [0]
    starts = [start for workload, start in site.asked if workload == "default"]
    assert starts[1] != min(starts[1:]), "the segment with the workload's blocks comes before those that lie in front"
    assert site.prefetches.promote(IMAGE, site.bench.digests, "train") == "found"
    assert train.open == 0


def test_what_default_had_queued_comes_after_the_workloads_own(site: Site) -> None:
    default, train = site.publish("default", DEFAULT), site.publish("train", TRAIN)
    first, own = default.hold(36 << 10), train.hold(100 << 10)
    assert site.prefetches.begin(IMAGE, site.bench.digests) == "unknown"
    first.await_stream()
    assert site.prefetches.promote(IMAGE, site.bench.digests, "train") == "unknown"
    own.await_stream()
    first.release()
    site.bench.until(lambda: "1 running, 0 queued" in repr(site.bench.host))
    assert [start for workload, start in site.asked if workload == "default"] == [0], "it stands back"
    assert site.states() == {"default": "streaming", "train": "streaming"}
    assert site.prefetches.promote(IMAGE, site.bench.digests, "train") == "found"
    own.release()
    site.until_over()
    assert site.present(DEFAULT) and site.present(TRAIN)
    order = [workload for workload, _ in site.asked]
    last = max(place for place, workload in enumerate(order) if workload == "train")
    assert order[:last] == ["default"] + ["train"] * (last - 1) and "default" in order[last:]
    for blob in (default, train):
        assert sum(end - start for start, end in site.bench.once(blob)) == blob.size()
    assert site.bench.blob_requests() == 0


@pytest.mark.parametrize("rest", [[], [(0, 40, 56)]])
def test_what_the_workloads_own_brought_does_not_come_again(site: Site, rest: list[tuple[int, int, int]]) -> None:
    more = (1, 104, 106)  # that default has not: else it would bring all itself
    default, train = site.publish("default", [(0, 0, 24), *TRAIN, *rest]), site.publish("train", [*TRAIN, more])
    first = default.hold(36 << 10)
    site.prefetches.begin(IMAGE, site.bench.digests)
    first.await_stream()
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    site.bench.until(lambda: site.states()["train"] == "streaming")
    first.release()
    site.until_over()
    assert site.present([(0, 0, 24), *TRAIN, more, *rest])
    came = sum(end - start for start, end in site.bench.once(default))
    hot = sum(end - start for _, start, end in TRAIN) * 4096
    assert default.size() - hot - (64 << 10) < came < default.size() - hot + (64 << 10), "but for frames of both"
    assert sum(end - start for start, end in site.bench.once(train)) == train.size()


def test_spans_too_wait_for_the_workloads_own(site: Site) -> None:
    """Sets without bytes, as a node records them."""
    site.sets = {"default": site.bench.hotset([(0, 0, 8), (0, 96, 112), (1, 0, 8)])}
    site.sets["train"] = replace(site.bench.hotset([(0, 48, 64), (1, 100, 110)]), workload="train")
    blob = site.bench.blobs[0]

    def place(layer: int, block: int) -> int:
        span = site.bench.indexes[layer].span_of_block(block)
        assert span is not None
        return site.bench.indexes[layer].spans[span].blob_start

    hold, other = blob.hold(place(0, 0) + 4096), site.bench.blobs[1].hold(place(1, 100) + 4096)
    site.prefetches.begin(IMAGE, site.bench.digests)
    hold.await_stream()
    site.bench.until(lambda: site.bench.present(1, 0, 8))
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    other.await_stream()
    site.bench.until(lambda: site.bench.present(0, 48, 64))
    hold.release()
    site.bench.until(lambda: site.bench.present(0, 0, 8))
    site.bench.until(lambda: "1 running, 0 queued" in repr(site.bench.host))
    assert not site.bench.present(0, 96, 112) and place(0, 96) not in [start for start, _ in blob.requests]
    other.release()
    site.until_over()
    starts = [start for start, _ in blob.requests]
    assert starts.index(place(0, 48)) < starts.index(place(0, 96))
    assert site.present([(0, 0, 8), (0, 96, 112), (1, 0, 8), (0, 48, 64), (1, 100, 110)])


def test_a_default_that_begins_later_stands_back_at_once(site: Site) -> None:
    default, train = site.publish("default", DEFAULT), site.publish("train", TRAIN)
    own = train.hold(100 << 10)
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    own.await_stream()
    site.prefetches.begin(IMAGE, site.bench.digests)
    site.bench.until(lambda: site.states()["default"] == "streaming")
    site.bench.until(lambda: "1 running, 0 queued" in repr(site.bench.host))
    assert len(default.requests) == 1
    own.release()
    site.until_over()
    assert site.present(DEFAULT) and site.present(TRAIN)


def test_a_reader_of_what_stands_back_is_not_kept_waiting(site: Site) -> None:
    site.publish("default", DEFAULT)
    train = site.publish("train", TRAIN)
    own = train.hold(100 << 10)
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    own.await_stream()
    site.prefetches.begin(IMAGE, site.bench.digests)
    site.bench.until(lambda: site.states()["default"] == "streaming")
    site.bench.read(0, 50, 52).check()
    own.release()
    site.until_over()


def test_a_workload_without_a_set_changes_nothing(site: Site) -> None:
    default = site.publish("default", DEFAULT)
    hold = default.hold(36 << 10)
    site.prefetches.begin(IMAGE, site.bench.digests)
    hold.await_stream()
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    site.bench.until(lambda: site.states()["train"] == "none")
    hold.release()
    site.until_over()
    assert site.present(DEFAULT) and site.prefetches.promote(IMAGE, site.bench.digests, "train") == "none"


def test_one_that_breaks_lets_default_go_on(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    default, train = site.publish("default", DEFAULT), site.publish("train", TRAIN)
    first, own = default.hold(36 << 10), train.hold(36 << 10)
    site.prefetches.begin(IMAGE, site.bench.digests)
    first.await_stream()
    train.break_off(100 << 10, NotFound("it was removed"))
    site.prefetches.promote(IMAGE, site.bench.digests, "train")
    own.await_stream()
    own.release()
    first.release()
    site.until_over()
    assert site.present(DEFAULT) and "prefetch.broke_off" in caplog.text
    caplog.clear()


def test_a_layer_that_came_in_without_a_word_is_seen(tmp_path: Path) -> None:
    made = Site(tmp_path, [make_layer(files=4, size=128 << 10, seed=seed) for seed in (1, 2)], there=[0])
    made.sets = {"default": made.bench.hotset(DEFAULT)}
    made.prefetches.begin(IMAGE, made.bench.digests)
    made.bench.until(lambda: made.bench.present(0, 0, 24))
    made.bench.settle()
    made.bench.come_in(1)
    assert made.states() == {"default": "streaming"}
    made.prefetches.tend()
    made.until_over()
    assert made.present(DEFAULT)
    made.bench.close()


def test_the_services_call(site: Site) -> None:
    site.sets = {"train": replace(site.bench.hotset(TRAIN), workload="train")}
    request = {"image": IMAGE, "layers": site.bench.digests, "workload": "train"}
    assert WorkloadCalls(HotSetConfig(prefetch=False), site.prefetches).promote(request) == {"state": "none"}
    assert site.states() == {}
    assert WorkloadCalls(HotSetConfig(), site.prefetches).promote(request) == {"state": "unknown"}
    site.until_over()
    assert site.present(TRAIN)
