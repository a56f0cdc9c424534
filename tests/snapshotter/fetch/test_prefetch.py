"""The prefetch of hot blocks: a real store, real indexes and packs; a directory that does what the test wants."""

import errno
import gc
import logging
import random
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotpack import encode_hotset
from blockindex.hotset import HotSet
from snapshotter.blockstore import UNVERIFIED, LayerFiles
from snapshotter.errors import NotFound, Transient
from snapshotter.fetch import host as host_module
from snapshotter.fetch import layer as layer_module
from snapshotter.fetch import packplan as packplan_module
from snapshotter.fetch import packrequests as packrequests_module
from snapshotter.fetch import prefetch as prefetch_module
from snapshotter.fetch.host import Lane
from snapshotter.fetch.prefetch import State
from tests.snapshotter.daemon import Layer, make_layer
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.fetch.hotbench import Finder, HotBench, moved

HOT = [(0, 0, 24), (1, 8, 32), (0, 40, 56)]
"""Five frames: (0, 0-8) (0, 8-24) (1, 8-24) (1, 24-32 and 0, 40-48) (0, 48-56); a quarter of the image."""


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=4, size=128 << 10, seed=seed) for seed in (1, 2)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up that is waited for as long as it takes, segments of a frame each, no pauses that only cost time."""
    monkeypatch.setattr(prefetch_module, "_LOOK_S", PATIENCE_S)
    monkeypatch.setattr(packrequests_module, "_BACKOFF_S", 0.002)
    monkeypatch.setattr(packplan_module, "_FIRST", 64 << 10)
    monkeypatch.setattr(packplan_module, "_MOST", 64 << 10)
    monkeypatch.setattr(packplan_module, "_FAR_FIRST", ())
    monkeypatch.setattr(packplan_module, "_FAR_LEAST", 1)
    monkeypatch.setattr(host_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(host_module, "_AFTER_HOT_S", 0.0)
    monkeypatch.setattr(layer_module, "_BACKOFF_S", 0.002)
    submit = host_module.Host.submit

    def without_patience(host: host_module.Host, lane: Lane, job: object, delay_s: float = 0.0) -> None:
        if delay_s < PATIENCE_S:
            submit(host, lane, job, delay_s)  # type: ignore[arg-type]

    monkeypatch.setattr(host_module.Host, "submit", without_patience)


@pytest.fixture
def bench(tmp_path: Path, layers: list[Layer]) -> Iterator[HotBench]:
    bench = HotBench(tmp_path, layers)
    yield bench
    bench.close()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    yield caplog
    caplog.clear()


def all_present(bench: HotBench, extents: list[tuple[int, int, int]] = HOT) -> bool:
    return all(bench.present(*extent) for extent in extents)


def distrust(files: LayerFiles, start: int, end: int) -> None:
    """The machine has booted since these blocks were written."""
    with (files.directory / "present").open("r+b") as present:
        present.seek(start)
        present.write(bytes([UNVERIFIED]) * (end - start))


# -- as it should be -------------------------------------------------------------------------------------------------


def test_the_hot_blocks_come_from_the_pack_alone_each_byte_once(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    assert [frame.last - frame.first for frame in pack.frames] == [1, 1, 1, 2, 1], "as HOT says"
    prefetch = bench.start()
    bench.over(prefetch)
    assert all_present(bench) and bench.blob_requests() == 0
    assert sum(end - start for start, end in bench.once(bench.pack)) == pack.size
    assert not bench.present(0, 24, 25) and not bench.present(1, 0, 8)
    for extent in HOT:
        bench.read(*extent).check()
    assert prefetch.status() == {
        "image_key": pack.hotset.image_key,
        "workload": "default",
        "state": "over",
        "from": "fake",
        "bytes_refused": "",
        "hot_blocks": 64,
        "blocks": 64,
        "bytes": pack.size,
        "requests": len(bench.pack.requests),
        "relieved": 0,
    }
    assert len(bench.pack.requests) == 5, "one for the look-up and the first frame"


def test_a_reader_is_answered_as_its_frame_lands(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    first, second = bench.pack.hold(pack.head_size + 10), bench.pack.hold(pack.frames[1].offset + 20_000)
    prefetch = bench.start()
    first.await_stream()
    reads = [bench.read(0, 0, 1), bench.read(0, 2, 8), bench.read(0, 8, 24)]
    assert all(read.waits for read in reads)
    first.release()
    second.await_stream()
    reads[0].check()
    reads[1].check()
    assert reads[2].waits
    second.release()
    reads[2].check()
    bench.over(prefetch)
    assert bench.blob_requests() == 0


def test_what_is_not_hot_is_fetched_as_ever(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    bench.read(1, 100, 101).check()
    assert len(bench.blobs[1].requests) == 1 and bench.blobs[0].requests == []
    hold.release()
    bench.over(prefetch)


def test_a_reader_of_a_queued_frame_has_it_brought_forward(tmp_path: Path, layers: list[Layer]) -> None:
    bench = HotBench(tmp_path, layers, streams=1)
    pack = bench.publish(bench.hotset(HOT))
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    last = bench.read(0, 48, 56)
    last.check()  # while the only stream stands still
    assert bench.pack.requests[1][0] == pack.frames[4].offset
    assert not bench.present(0, 0, 1)
    hold.release()
    bench.over(prefetch)
    assert all_present(bench) and bench.blob_requests() == 0
    list(bench.once(bench.pack))
    bench.close()


def test_frames_that_are_there_are_not_asked_for(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    bench.fill(1, 8, 24)
    bench.over(bench.start())
    assert all_present(bench)
    frame = pack.frames[2]
    assert all(end <= frame.offset or start >= frame.offset + frame.size for start, end in bench.once(bench.pack))


def test_a_server_without_ranges_is_asked_once(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    bench.first_end = pack.size
    bench.over(bench.start())
    assert all_present(bench) and bench.pack.requests == [(0, pack.size)]


def test_a_head_longer_than_the_first_request(bench: HotBench, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = bench.publish(bench.hotset(HOT))
    bench.first_end = pack.head_size // 3
    monkeypatch.setattr(prefetch_module, "_HEAD_BYTES", pack.head_size // 2)
    bench.over(bench.start())
    assert all_present(bench)
    assert sum(end - start for start, end in bench.once(bench.pack)) == pack.size


def test_blocks_in_doubt_are_checked_and_not_fetched(bench: HotBench) -> None:
    """After a power cut: the bytes are probably right."""
    pack = bench.publish(bench.hotset(HOT))
    bench.fill(0, 0, 24)
    distrust(bench.fetches[0].files, 0, 24)
    hold = bench.pack.hold(pack.frames[3].offset)
    prefetch = bench.start()
    hold.await_stream()
    bench.read(0, 3, 4).check()
    assert bench.blob_requests() == 0
    hold.release()
    bench.over(prefetch)
    assert bench.pack.requests[1][0] >= pack.frames[2].offset


def test_blocks_in_doubt_within_a_frame_that_comes_are_replaced(bench: HotBench) -> None:
    bench.publish(bench.hotset(HOT))
    distrust(bench.fetches[0].files, 8, 12)  # nothing was ever written there
    bench.over(bench.start())
    bench.read(0, 8, 24).check()
    assert bench.blob_requests() == 0


# -- the look-up -----------------------------------------------------------------------------------------------------


def test_readers_wait_for_the_look_up_and_then_for_the_pack(bench: HotBench) -> None:
    bench.publish(bench.hotset(HOT))
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    hot, cold = bench.read(0, 8, 24), bench.read(1, 100, 101)
    assert bench.blob_requests() == 0 and hot.waits and cold.waits
    bench.finder.go.set()
    hot.check()
    cold.check()
    bench.over(prefetch)
    assert (len(bench.blobs[0].requests), len(bench.blobs[1].requests)) == (0, 1)


def test_readers_wait_for_a_look_up_only_so_long(bench: HotBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch_module, "_LOOK_S", 0.1)
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    early = bench.read(0, 0, 8)
    early.check()
    late = bench.read(1, 0, 8)
    late.check()
    assert len(bench.blobs[0].requests) == 1
    bench.finder.go.set()
    bench.over(prefetch, State.NONE)


def test_no_hot_set_lets_readers_go_at_once(bench: HotBench) -> None:
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    read = bench.read(0, 0, 8)
    bench.finder.go.set()
    bench.over(prefetch, State.NONE)
    read.check()
    assert prefetch.status()["state"] == "none" and prefetch.status()["hot_blocks"] == 0


def test_what_is_recorded_and_there_is_not_even_looked_up(bench: HotBench) -> None:
    bench.finder.recorded_set = bench.hotset(HOT)
    for extent in HOT:
        bench.fill(*extent)
    bench.over(bench.start())
    assert bench.finder.looks == 0


def test_what_is_there_costs_the_look_up_only(bench: HotBench) -> None:
    bench.publish(bench.hotset(HOT))
    for extent in HOT:
        bench.fill(*extent)
    bench.over(bench.start())
    bench.settle()
    assert len(bench.pack.requests) == 1 and bench.blob_requests() == 0


def test_a_published_set_replaces_the_recorded_one(bench: HotBench) -> None:
    """What only the record has is no promise of the pack."""
    bench.finder.recorded_set = bench.hotset([(1, 90, 100), (0, 0, 8)])
    pack = bench.publish(bench.hotset([(0, 0, 24), (0, 40, 48)]))
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    bench.read(1, 90, 100).check()
    hold.release()
    bench.over(prefetch)
    assert bench.present(0, 0, 24) and bench.present(0, 40, 48)


def test_a_record_of_another_layout_does_not_spoil_the_pack(
    bench: HotBench, warnings: pytest.LogCaptureFixture
) -> None:
    bench.finder.recorded_set = moved(bench.hotset(HOT), 0)
    bench.publish(bench.hotset(HOT))
    bench.over(bench.start())
    assert all_present(bench) and bench.blob_requests() == 0


# -- where the head is known before any byte --------------------------------------------------------------------------


def test_a_known_head_has_the_pack_asked_for_at_once_side_by_side(tmp_path: Path, layers: list[Layer]) -> None:
    """Beside work that a reader or a pull waits for: the first blocks of the container do not give way to it."""
    bench = HotBench(tmp_path, layers, streams=1)
    bench.publish_with_known_head(bench.hotset(HOT))
    bench.host.urge(+1)  # the index of a layer is on its way
    hold = bench.pack.hold(bench.pack.size() - 1)
    prefetch = bench.start()
    bench.until(lambda: bench.pack.requests)
    bench.until(lambda: bench.present(0, 0, 8))
    bench.host.urge(-1)
    hold.release()
    bench.over(prefetch)
    assert bench.head is not None and bench.pack.requests[0][0] == bench.head.head_size, "the head is not asked for"
    assert all_present(bench) and bench.blob_requests() == 0
    list(bench.once(bench.pack))
    bench.close()


def test_a_far_hosts_pack_comes_by_half_of_the_requests_beside_the_index_then_by_all(
    tmp_path: Path, layers: list[Layer]
) -> None:
    """Those that begin at once do not wait for the index at their later requests either."""
    bench = HotBench(tmp_path, layers, streams=1, far_streams=4)
    pack = bench.publish_with_known_head(bench.hotset(HOT), far=True)
    holds = [bench.pack.hold(frame.offset) for frame in pack.frames]
    with bench.host.hurry():  # the index of a layer is on its way
        prefetch = bench.start()
        holds[0].await_stream()
        holds[1].await_stream()
        holds[0].release()
        holds[2].await_stream()
        assert len(bench.pack.requests) == 3
    holds[3].await_stream()
    holds[4].await_stream()
    assert bench.pack.open == 4
    bench.pack.release_all()
    bench.over(prefetch)
    assert prefetch.status()["requests"] == 5 and all_present(bench) and bench.blob_requests() == 0
    list(bench.once(bench.pack))
    bench.close()


def test_a_near_hosts_pack_comes_by_no_more_requests_than_ever(tmp_path: Path, layers: list[Layer]) -> None:
    bench = HotBench(tmp_path, layers, streams=1, far_streams=4)
    pack = bench.publish_with_known_head(bench.hotset(HOT))
    hold = bench.pack.hold(pack.frames[1].offset)
    prefetch = bench.start()
    hold.await_stream()
    assert bench.pack.open == 1 and "1 running, 0 queued" in repr(bench.host)
    hold.release()
    bench.over(prefetch)
    bench.close()


def test_one_that_stood_back_goes_on_with_all_requests_of_a_far_host(tmp_path: Path, layers: list[Layer]) -> None:
    bench = HotBench(tmp_path, layers, streams=1, far_streams=3)
    pack = bench.publish_with_known_head(bench.hotset(HOT), far=True)
    prefetch = bench.prefetch()
    prefetch.stand_back(True)
    prefetch.start()
    bench.until(lambda: prefetch.state is State.STREAMING)
    bench.settle()
    holds = [bench.pack.hold(frame.offset) for frame in pack.frames[:3]]
    prefetch.stand_back(False)
    for hold in holds:
        hold.await_stream()
    bench.pack.release_all()
    bench.over(prefetch)
    bench.close()


def test_bytes_in_doubt_are_not_asked_for_and_their_extents_are_used(bench: HotBench) -> None:
    bench.publish_with_known_head(bench.hotset(HOT), doubt="is not signed")
    prefetch = bench.start()
    bench.over(prefetch)
    assert all_present(bench) and bench.pack.requests == [] and bench.blob_requests() > 0
    assert prefetch.status()["bytes_refused"] == "is not signed" and prefetch.status()["from"] == "fake"


def test_a_set_in_doubt_does_not_take_the_place_of_the_node_s_own(bench: HotBench) -> None:
    bench.finder.recorded_set = bench.hotset([(1, 90, 100)])
    bench.publish_with_known_head(bench.hotset(HOT), doubt="is not signed")
    prefetch = bench.start()
    bench.over(prefetch)
    assert bench.present(1, 90, 100) and not bench.present(0, 0, 8)
    assert prefetch.status()["hot_blocks"] == 10 and prefetch.status()["from"] == ""


def test_any_set_takes_the_place_of_one_that_was_carried_over(bench: HotBench) -> None:
    """Also where all blocks of that are here: it was a guess."""
    bench.finder.recorded_set = replace(bench.hotset([(1, 90, 100)]), carried_from="sha256:" + "1" * 64)
    bench.fill(1, 90, 100)
    prefetch = bench.start()
    bench.over(prefetch)
    assert prefetch.is_carried and bench.finder.looks == 1 and bench.blob_requests() == 0
    bench.publish_with_known_head(bench.hotset(HOT), doubt="is not signed")
    prefetch = bench.start()
    bench.over(prefetch)
    assert bench.present(0, 0, 8) and not prefetch.is_carried


def test_what_is_there_of_a_known_head_costs_no_request(bench: HotBench) -> None:
    bench.publish_with_known_head(bench.hotset(HOT))
    for extent in HOT:
        bench.fill(*extent)
    bench.over(bench.start())
    bench.settle()
    assert bench.pack.requests == [] and bench.blob_requests() == 0


# -- packs that are not what they should be --------------------------------------------------------------------------


def damage(data: bytes, kind: str, head: int) -> bytes:
    if kind == "truncated":
        return data[:-1]
    if kind == "longer":
        return data + b"x"
    if kind == "cut in the head":
        return data[: head // 2]
    place = 20 if kind == "corrupt prologue" else head - 3
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("kind", ["truncated", "longer", "cut in the head", "corrupt head", "corrupt prologue"])
def test_a_damaged_pack_costs_only_the_warm_up(bench: HotBench, kind: str, warnings: pytest.LogCaptureFixture) -> None:
    pack = bench.publish(bench.hotset(HOT))
    bench.serve(damage(bench.pack._blob, kind, pack.head_size))
    bench.first_end = min(bench.first_end, bench.pack.size())
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    read = bench.read(0, 0, 8)
    bench.finder.go.set()
    bench.over(prefetch)
    read.check()
    assert len(bench.blobs[0].requests) == 1 and "prefetch.given_up" in warnings.text
    assert prefetch.blocks == 0


def test_a_pack_of_another_image_is_not_used(
    bench: HotBench, tmp_path: Path, layers: list[Layer], warnings: pytest.LogCaptureFixture
) -> None:
    other = HotBench(tmp_path / "other", layers[:1])
    other.publish(other.hotset([(0, 0, 24)]))
    bench.serve(other.pack._blob)
    other.close()
    bench.over(bench.start())
    assert "another image" in warnings.text and not bench.present(0, 0, 1)


def test_only_the_layer_of_another_layout_is_passed_over(bench: HotBench, warnings: pytest.LogCaptureFixture) -> None:
    pack = bench.publish(moved(bench.hotset(HOT), 0))
    hold = bench.pack.hold(pack.frames[3].offset + 100)
    prefetch = bench.start()
    hold.await_stream()
    for start, end in ((8, 24), (40, 48)):  # of a frame that nobody wants, of one that another layer wants
        bench.read(0, start, end).check()
    assert len(bench.blobs[0].requests) >= 2 and bench.blobs[1].requests == []
    assert not prefetch.ended_at, "they have not waited for the end"
    hold.release()
    bench.over(prefetch)
    assert bench.present(1, 8, 32) and prefetch.blocks == 24
    assert "other_layout" in warnings.text


def test_a_frame_of_wrong_bytes_ends_it_and_nothing_of_it_is_stored(
    bench: HotBench, warnings: pytest.LogCaptureFixture
) -> None:
    pack = bench.publish(bench.hotset(HOT))
    bench.pack.falsify(pack.frames[1].offset + 700)
    holds = [bench.pack.hold(frame.offset) for frame in pack.frames[2:]]
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    reads = [bench.read(0, 0, 8), bench.read(0, 8, 24), bench.read(1, 8, 24)]
    hold.release()
    bench.over(prefetch)
    for it in holds:
        it.release()
    for read in reads:
        read.check()
    bench.settle()
    assert prefetch.blocks == 8, "the frame before it"
    assert not bench.present(0, 48, 56) and bench.blobs[1].requests
    assert "digest" in warnings.text


# -- networks that are not what they should be -----------------------------------------------------------------------


def test_a_reader_is_helped_when_a_promise_takes_too_long(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    for fetch in bench.fetches.values():  # the background has taken everything, and waits for the prefetch
        fetch.fill_in_background(0.0)
    read = bench.read(0, 0, 8, since=5.0)
    other = bench.read(0, 8, 24, since=50.0)
    bench.fetches[0].insist(4.0)
    assert read.waits and bench.blob_requests() == 0
    bench.fetches[0].insist(10.0)
    read.check()
    assert other.waits
    hold.release()
    other.check()
    bench.over(prefetch)


@pytest.mark.parametrize("frame", [0, 1, 3])
def test_a_stream_that_broke_off_is_resumed_where_it_stopped(
    bench: HotBench, frame: int, warnings: pytest.LogCaptureFixture
) -> None:
    pack = bench.publish(bench.hotset(HOT))
    place = pack.frames[frame].offset + 5_000
    bench.pack.break_off(place, Transient("reset"))
    bench.over(bench.start())
    assert all_present(bench) and bench.blob_requests() == 0
    assert place in [start for start, _ in bench.pack.requests]
    assert sum(end - start for start, end in bench.once(bench.pack)) == pack.size


def test_only_so_many_attempts_then_the_readers_fetch(bench: HotBench, warnings: pytest.LogCaptureFixture) -> None:
    pack = bench.publish(bench.hotset(HOT))
    place = pack.frames[2].offset + 5_000
    for _ in range(packrequests_module._ATTEMPTS):
        bench.pack.break_off(place, Transient("reset"))
    hold, last = bench.pack.hold(pack.head_size + 10), bench.pack.hold(pack.frames[4].offset + 10)
    prefetch = bench.start()
    hold.await_stream()
    read = bench.read(1, 8, 24)
    hold.release()
    read.check()
    assert not prefetch.ended_at, "the rest is still to come"
    last.release()
    bench.over(prefetch)
    assert [start for start, _ in bench.pack.requests].count(place) == packrequests_module._ATTEMPTS - 1
    assert bench.blobs[1].requests and all_present(bench, [HOT[0], HOT[2]])


@pytest.mark.parametrize("error", [NotFound("gone"), Transient("busy", retry_after_s=600.0)])
def test_what_promises_nothing_is_not_tried_again(
    bench: HotBench, error: NotFound | Transient, warnings: pytest.LogCaptureFixture
) -> None:
    pack = bench.publish(bench.hotset(HOT))
    bench.ask_errors = [error] * 10
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    read = bench.read(1, 8, 24)
    read.check()
    hold.release()
    bench.over(prefetch)
    assert bench.present(0, 0, 8) and len(bench.pack.requests) == 1
    assert len(bench.ask_errors) >= 10 - 4


def test_a_stream_that_ends_early_without_a_word_is_one_that_broke_off(
    bench: HotBench, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    pack = bench.publish(bench.hotset(HOT))
    asked: list[int] = []
    stream = bench._stream

    def short(start: int, end: int) -> object:
        asked.append(start)
        return stream(start, end - 1000 if start and asked.count(start) == 1 else end)

    bench._stream = short  # type: ignore[method-assign,assignment]
    bench.over(bench.start())
    assert all_present(bench) and sum(end - start for start, end in bench.once(bench.pack)) == pack.size


def test_one_that_stands_still_is_over(
    bench: HotBench, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    pack = bench.publish(bench.hotset(HOT))
    hold = bench.pack.hold(pack.head_size + 10)
    prefetch = bench.start()
    hold.await_stream()
    read = bench.read(0, 0, 8)
    bench.until(lambda: all_present(bench, [(1, 8, 32)]) and bench.present(0, 48, 56))
    prefetch.tend()
    prefetch.tend()
    assert not prefetch.ended_at and read.waits
    monkeypatch.setattr(prefetch_module, "_STALL_S", 0.0)
    prefetch.tend()
    bench.over(prefetch)
    read.check()
    hold.release()
    bench.settle()
    assert bench.blobs[0].requests
    assert "nothing has come" in warnings.text


def test_a_full_disk_ends_it_and_readers_get_what_they_get_without(
    bench: HotBench, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    bench.publish(bench.hotset(HOT))
    fill, full = LayerFiles.fill, threading.Event()
    full.set()

    def filling(files: LayerFiles, start: int, end: int, data: bytes) -> None:
        if full.is_set():
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(files, start, end, data)

    monkeypatch.setattr(LayerFiles, "fill", filling)
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    read = bench.read(0, 0, 8)
    bench.finder.go.set()
    bench.over(prefetch)
    read.check()
    assert "No space left" in warnings.text


def test_a_bug_leaves_no_promise_and_the_background_goes_on(
    bench: HotBench, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    bench.publish(bench.hotset(HOT))

    def bug(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(prefetch_module, "decode_frame", bug)
    bench.fetches[0].fill_in_background(0.0)
    prefetch = bench.start()
    bench.over(prefetch)
    assert bench.fetches[0].completed.wait(PATIENCE_S)
    assert "prefetch.failed" in warnings.text


# -- layers ----------------------------------------------------------------------------------------------------------


def test_what_belongs_to_a_layer_on_its_way_in_is_held_for_it(tmp_path: Path, layers: list[Layer]) -> None:
    bench = HotBench(tmp_path, layers, there=[0])
    bench.publish(bench.hotset(HOT))
    prefetch = bench.start()
    bench.until(lambda: all_present(bench, [HOT[0], HOT[2]]))
    bench.settle()
    assert prefetch.state is State.STREAMING
    bench.come_in(1)
    prefetch.flush()
    bench.over(prefetch)
    assert all_present(bench) and bench.blob_requests() == 0
    list(bench.once(bench.pack))
    bench.close()


def test_no_layer_is_there_when_it_begins(tmp_path: Path, layers: list[Layer]) -> None:
    """As at the first Prepare of an image: the look-up begins before the layer is in the store."""
    bench = HotBench(tmp_path, layers, there=[])
    pack = bench.publish(bench.hotset(HOT))
    prefetch = bench.start()
    bench.settle()
    assert sum(bench.pack.served) == pack.size
    for number in (0, 1):
        bench.come_in(number)
        prefetch.flush()
    bench.over(prefetch)
    assert all_present(bench) and bench.blob_requests() == 0
    bench.close()


def test_a_layer_that_comes_in_as_its_frame_is_laid_aside_gets_it(tmp_path: Path, layers: list[Layer]) -> None:
    """The flush goes by between the look for the layer and the holding of its blocks."""
    bench = HotBench(tmp_path, layers, there=[0])
    bench.publish(bench.hotset(HOT))
    prefetch = bench.prefetch()
    store, once = prefetch._store, threading.Lock()

    def stopped(extents: object) -> object:
        left = store(extents)  # type: ignore[arg-type]
        if left and once.acquire(blocking=False):
            bench.come_in(1)
            prefetch.flush()
        return left

    prefetch._store = stopped  # type: ignore[method-assign,assignment]
    prefetch.start()
    bench.over(prefetch)
    assert all_present(bench)
    bench.close()


def test_a_layer_that_never_comes_costs_bounded_memory_and_time(
    tmp_path: Path, layers: list[Layer], monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefetch_module, "_HELD_MOST", 100 << 10)
    bench = HotBench(tmp_path, layers, there=[0])
    bench.publish(bench.hotset([(1, 0, 50), (0, 0, 8)]), frame=32 << 10)
    prefetch = bench.start()
    bench.until(lambda: prefetch._held_bytes > 100 << 10)
    read = bench.read(0, 0, 8)  # its frame comes, although the others have stopped
    read.check()
    assert prefetch._held_bytes <= (100 + 3 * 64) << 10 and sum(bench.pack.served) < bench.pack.size()
    assert bench.blob_requests() == 0
    monkeypatch.setattr(prefetch_module, "_STALL_S", 0.0)
    bench.until(lambda: prefetch.tend() or prefetch.ended_at)
    assert prefetch._held_bytes == 0 and prefetch._held == []
    bench.close()


def test_a_broken_layer_spoils_nothing_but_itself(
    tmp_path: Path, layers: list[Layer], warnings: pytest.LogCaptureFixture
) -> None:
    bench = HotBench(tmp_path, layers, there=[0])
    bench.broken[layers[1].digest] = OSError(errno.EIO, "Input/output error")
    bench.publish(bench.hotset(HOT))
    prefetch = bench.start()
    bench.over(prefetch)
    prefetch.flush()
    assert all_present(bench, [HOT[0], HOT[2]]) and "prefetch.broken_layer" in warnings.text
    bench.close()


def test_two_images_that_share_a_layer(tmp_path: Path, layers: list[Layer]) -> None:
    bench = HotBench(tmp_path, layers)
    other = HotBench(tmp_path / "other", layers[:1])
    pack = other.publish(other.hotset([(0, 0, 24), (0, 60, 70)]))
    bench.publish(bench.hotset(HOT))
    finder = Finder(open_file=other._open)
    hold = bench.pack.hold(bench.head.head_size + 10)  # type: ignore[union-attr]
    first = bench.start()
    hold.await_stream()
    second = bench.prefetch(bench.digests[:1], finder)
    reads = [bench.read(0, 0, 8), bench.read(0, 40, 48)]
    second.start()
    bench.over(second)
    reads[0].check()
    assert bench.present(0, 60, 70) and not first.ended_at
    assert bench.host._prefetches == 1, "the background still waits for the other one"
    hold.release()
    bench.over(first)
    reads[1].check()
    assert all_present(bench) and bench.blob_requests() == 0 and sum(other.pack.served) == pack.size
    bench.close()
    other.close()


def test_one_that_is_over_keeps_no_layer_and_no_set(bench: HotBench) -> None:
    bench.publish(bench.hotset(HOT))
    prefetch = bench.start()
    bench.over(prefetch)
    bench.settle()
    prefetch.flush()
    prefetch._layers.find(0)  # as a stream does that runs on for a moment
    assert not prefetch._layers.all() and not bench.fetches[0]._promises
    kept = weakref.ref(bench.fetches[0])
    del bench.fetches[0]
    gc.collect()
    assert kept() is None
    assert prefetch._layers.table is None and prefetch._asked.plan is None and prefetch._asked._file is None


def test_an_answer_that_comes_too_late_is_not_used(
    bench: HotBench, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    bench.publish(bench.hotset(HOT))
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    monkeypatch.setattr(prefetch_module, "_STALL_S", 0.0)
    bench.until(lambda: prefetch.tend() or prefetch.ended_at)
    bench.finder.go.set()
    bench.settle()
    assert prefetch.blocks == 0 and prefetch._layers.table is None and prefetch._asked._file is None
    assert bench.pack.open == 0


# -- without bytes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def extents_only(bench: HotBench) -> HotSet:
    return bench.hotset([(1, 96, 112), (1, 0, 8), (1, 48, 64)])


@pytest.mark.parametrize("published", [False, True])
def test_a_set_without_bytes_brings_spans_in_its_order(
    bench: HotBench, extents_only: HotSet, published: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench._streams = 1
    if published:
        bench.serve(encode_hotset(extents_only))
    else:
        bench.finder.recorded_set = extents_only
    bench.over(bench.start())
    assert all_present(bench, [(1, 96, 112), (1, 0, 8), (1, 48, 64)])
    spans = bench.indexes[1].spans
    firsts = [spans[bench.indexes[1].span_of_block(block)].blob_start for block in (96, 0, 48)]  # type: ignore[index]
    order = [start for start, _ in bench.blobs[1].requests]
    assert [start for start in order if start in firsts] == firsts
    assert bench.fetches[1].tally.hot_fetches == len(order) and bench.blobs[0].requests == []
    assert not bench.present(1, 80, 90)
    assert set(bench.landings[1].values()) == {1}


def test_the_background_does_not_keep_spans_from_it(bench: HotBench, extents_only: HotSet) -> None:
    """The background has asked for the layer's beginning, and waits for the prefetch."""
    bench.finder.recorded_set = extents_only
    bench.finder.go.clear()
    prefetch = bench.start()
    assert bench.finder.looking.wait(PATIENCE_S)
    bench.fetches[1].fill_in_background(0.0)
    bench.finder.go.set()
    bench.until(lambda: bench.present(1, 0, 8))
    bench.over(prefetch)
    assert bench.fetches[1].completed.wait(PATIENCE_S)
    bench.settle()
    assert bench.fetches[1].tally.hot_fetches >= 3
    assert set(bench.landings[1].values()) == {1}


def test_spans_of_a_layer_that_comes_in_later(tmp_path: Path, layers: list[Layer]) -> None:
    bench = HotBench(tmp_path, layers, there=[0])
    bench.finder.recorded_set = bench.hotset(HOT)
    prefetch = bench.start()
    bench.until(lambda: all_present(bench, [HOT[0], HOT[2]]))
    bench.settle()
    assert prefetch.state is State.STREAMING
    bench.come_in(1)
    prefetch.flush()
    bench.over(prefetch)
    assert all_present(bench)
    bench.close()


def test_most_of_an_image_is_downloaded_as_it_is(bench: HotBench) -> None:
    """The pack's frames would be the image once more."""
    bench.publish(bench.hotset([(0, 0, 100), (1, 0, 100)]))
    hold = bench.blobs[0].hold(bench.indexes[0].spans[0].blob_start)
    prefetch = bench.start()
    hold.await_stream()
    bench.until(lambda: len(bench.blobs[0].requests) + len(bench.blobs[1].requests) >= 2)
    read = bench.read(1, 120, 128)
    read.check()
    hold.release()
    bench.over(prefetch)
    assert bench.fetches[0].files.complete() and bench.fetches[1].files.complete()
    assert bench.fetches[0].completed.is_set() and bench.fetches[1].completed.is_set()
    assert len(bench.pack.requests) == 1
    assert set(bench.landings[0].values()) == set(bench.landings[1].values()) == {1}


# -- whose bytes come first ------------------------------------------------------------------------------------------


def test_the_background_waits_until_it_is_over(bench: HotBench) -> None:
    pack = bench.publish(bench.hotset(HOT))
    hold = bench.pack.hold(pack.frames[4].offset + 10)
    prefetch = bench.start()
    for fetch in bench.fetches.values():
        fetch.fill_in_background(0.0)
    hold.await_stream()
    bench.until(lambda: prefetch.blocks == 56)
    assert bench.blob_requests() == 0
    hold.release()
    bench.over(prefetch)
    for fetch in bench.fetches.values():
        assert fetch.completed.wait(PATIENCE_S)


def test_hot_blocks_wait_while_a_reader_waits_for_a_flight(bench: HotBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_HOT_PATIENCE_S", PATIENCE_S)
    bench.publish(bench.hotset(HOT))
    hold = bench.blobs[1].hold(bench.indexes[1].spans[-1].blob_start)
    read = bench.read(1, 126, 127)
    hold.await_stream()
    prefetch = bench.start()
    bench.until(lambda: bench.present(0, 0, 8))  # the look-up's own stream
    queued = bench.read(0, 48, 56)
    queued.check()  # another reader waits for this one
    bench.until(lambda: bench.host._urgent == 1)
    assert not bench.present(1, 8, 24)
    hold.release()
    read.check()
    bench.over(prefetch)
    assert all_present(bench)


def test_it_shows_its_state(bench: HotBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.publish(bench.hotset(HOT))
    prefetch = bench.prefetch()
    assert repr(prefetch) == f"<Prefetch {prefetch.key[:19]} looking >"
    prefetch.start()
    bench.over(prefetch)
    bench.until(lambda: "prefetch.over" in caplog.text)
    assert "prefetch.begun" in caplog.text


# -- everything at once ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_readers_failures_and_layers_in_any_order(
    tmp_path: Path, layers: list[Layer], seed: int, warnings: pytest.LogCaptureFixture
) -> None:
    """Whatever happens when: each reader gets the right bytes once, and nothing is left behind."""
    source = random.Random(seed)
    bench = HotBench(tmp_path, layers, streams=source.choice([1, 2, 3]), there=[0])
    extents = [(layer, start, start + 8) for layer in (0, 1) for start in range(0, 72, 8)]
    source.shuffle(extents)
    pack = bench.publish(bench.hotset(extents))
    for _ in range(source.randrange(6)):
        bench.pack.break_off(source.randrange(pack.size), Transient("reset"))
    for blob in bench.blobs:
        blob.break_off(source.randrange(blob.size()), Transient("reset"))
    if source.random() < 0.3:
        bench.pack.falsify(source.randrange(pack.head_size, pack.size))
    prefetch, reads, done = bench.prefetch(), [], threading.Event()

    def sweep() -> None:
        while not done.wait(0.01):
            for fetch in tuple(bench.fetches.values()):
                fetch.insist(time.monotonic() - 0.05)
            prefetch.flush()
            prefetch.tend()

    def read(own: random.Random) -> None:
        for _ in range(25):
            layer = own.randrange(len(bench.fetches))
            start = own.randrange(127)
            reads.append(bench.read(layer, start, own.randrange(start + 1, min(start + 12, 129))))
            if own.random() < 0.3:
                reads[-1].check()

    threads = [threading.Thread(target=sweep)]
    threads += [threading.Thread(target=read, args=(random.Random(seed * 100 + it),)) for it in range(4)]
    prefetch.start()
    for thread in threads:
        thread.start()
    bench.fetches[0].fill_in_background(0.0)
    bench.come_in(1).fill_in_background(0.0)
    for thread in threads[1:]:
        thread.join()
    for it in reads:
        it.check()
    bench.until(lambda: prefetch.ended_at)
    done.set()
    threads[0].join()
    for fetch in bench.fetches.values():
        fetch.fill_in_background(0.0)
        assert fetch.completed.wait(PATIENCE_S)
    bench.close()
