"""When a hot set is carried over by itself: once, when it is lacking and everything is there."""

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotset import HotSet, from_touches
from snapshotter.blockstore import node_name
from snapshotter.fetch import carrying as carrying_module
from snapshotter.fetch.carrying import Carrying
from snapshotter.fetch.host import Host
from snapshotter.fetch.hotsets import Prefetches
from snapshotter.fetch.prefetch import State
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.test_cli_hotset_carry import BASE, NEW_APP, NEW_KEY, OLD, OLD_APP, WANTED, layers_of, put, rows

IMAGE = "registry.example/team/app:2"
LAYERS = [Digest(it.digest) for it in layers_of(BASE, NEW_APP)]


class Bench:
    """A node with the old image and its hot set; `lacks` is what the look-up has found."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.lacks = True
        self.begun: list[tuple[str, Sequence[Digest]]] = []
        for blob in (BASE, OLD_APP):
            put(root, blob, "registry.example/team/app:1")
        HotStore(root).save(OLD)
        self.carrying = Carrying(
            root, lambda layers: self.lacks, lambda image, layers: self.begun.append((image, layers))
        )

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"does not happen: {self.carrying!r}"
            time.sleep(0.005)

    def settle(self) -> None:
        self.until(lambda: not [it for it in threading.enumerate() if it.name == "carry"])

    def is_carried(self) -> bool:
        return HotStore(self.root).load(NEW_KEY, "default") is not None


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.settle()


def test_when_the_last_layer_has_come(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.carrying.consider(IMAGE, LAYERS)
    bench.settle()
    assert not bench.begun and repr(bench.carrying) == "<Carrying 1 images wait, 0 tried>"
    put(bench.root, NEW_APP, IMAGE)
    bench.carrying.tend()
    bench.until(lambda: bench.begun)
    bench.settle()
    pack = HotStore(bench.root).load(NEW_KEY, "default")
    assert pack is not None and rows(pack.hotset) == WANTED
    assert bench.begun == [(IMAGE, tuple(LAYERS))] and repr(bench.carrying) == "<Carrying 0 images wait, 1 tried>"
    (line,) = [it.getMessage() for it in caplog.records]
    assert f"hotset.carried image={IMAGE} image_key={NEW_KEY}" in line and f"carried_from={OLD.image_key}" in line


def test_not_before_it_is_lacking_and_once_only(bench: Bench) -> None:
    put(bench.root, NEW_APP, IMAGE)
    bench.lacks = False
    bench.carrying.consider(IMAGE, LAYERS)
    bench.settle()
    assert not bench.is_carried()
    bench.lacks = True
    for _ in range(3):
        bench.carrying.consider(IMAGE, LAYERS)
    bench.until(lambda: bench.begun)
    HotStore(bench.root).remove(NEW_KEY, "default")
    bench.carrying.consider(IMAGE, LAYERS)
    bench.settle()
    assert len(bench.begun) == 1 and not bench.is_carried()


def test_no_program_is_run_for_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    put(bench.root, NEW_APP, IMAGE)
    HotStore(bench.root).remove(OLD.image_key, "default")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    bench.carrying.consider(IMAGE, LAYERS)
    bench.carrying.consider(IMAGE, ())
    bench.settle()
    assert not bench.begun


def test_a_pull_that_does_not_end_is_not_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying_module, "_WANTED_S", -1.0)
    put(bench.root, NEW_APP, IMAGE)
    bench.carrying.consider(IMAGE, LAYERS)
    assert repr(bench.carrying) == "<Carrying 0 images wait, 1 tried>"


def test_only_so_many_images_are_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrying_module, "_WANTED_S", -1.0)
    monkeypatch.setattr(carrying_module, "_REMEMBERED", 3)
    for number in range(9):
        bench.carrying.consider(IMAGE, [Digest(f"sha256:{number:064x}")])
    assert repr(bench.carrying) == "<Carrying 0 images wait, 3 tried>"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("#!/bin/sh\necho first >&2; echo the disk is full >&2; exit 1\n", "the disk is full"),
        ("#!/bin/sh\nkill -9 $$\n", "exit code -9"),
        ("#!/bin/sh\nexec sleep 600\n", "not done after 0 s"),
        ("#!/bin/sh\necho rubbish\n", "Expecting value"),
        ("", "No such file"),
    ],
)
def test_what_goes_wrong_is_a_line_in_the_log(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: str, reason: str
) -> None:
    python = bench.root / "python"
    if program:
        python.write_text(program)
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(carrying_module, "_MOST_S", 0.3 if "sleep" in program else 20.0)
    put(bench.root, NEW_APP, IMAGE)
    bench.carrying.consider(IMAGE, LAYERS)
    bench.until(lambda: caplog.records)
    bench.settle()
    (line,) = [it.getMessage() for it in caplog.records]
    assert "hotset.not_carried" in line and reason in line
    assert not bench.begun and not bench.is_carried()
    caplog.clear()


def test_without_a_thread_the_pull_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(bench.root, NEW_APP, IMAGE)
    record = bench.root / "layers" / node_name(LAYERS[1]) / "layer.json"
    whole = record.read_text()
    record.write_text("{")
    bench.carrying.consider(IMAGE, LAYERS)
    assert repr(bench.carrying) == "<Carrying 1 images wait, 0 tried>", "a broken layer is none"
    record.write_text(whole)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    bench.carrying.tend()
    (line,) = [it.getMessage() for it in caplog.records]
    assert "hotset.not_carried" in line and "can't start new thread" in line
    caplog.clear()


class Finder:
    """A HotFinder; whether anybody else was asked is counted."""

    def __init__(self) -> None:
        self.recorded_set: HotSet | None = None
        self.asked = 0

    def recorded(self, key: str, workload: str) -> HotSet | None:
        return self.recorded_set

    def find(self, *where: str) -> None:
        self.asked += 1


def test_the_prefetch_looks_again_and_the_image_is_to_be_recorded_all_the_same() -> None:
    """Nobody else is asked a second time: readers would wait for the answer."""
    host, finder = Host("registry.example", demand_threads=1, hot_threads=1, background_threads=1), Finder()
    prefetches = Prefetches(finder, lambda _: host, lambda _: None, lambda _: LAYERS, 1)

    def settled() -> bool:
        return "0 running, 0 queued" in repr(host)

    patience = time.monotonic() + PATIENCE_S
    assert not prefetches.lacks(LAYERS), "it has not been looked for"
    prefetches.begin(IMAGE, LAYERS)
    while not settled():
        assert time.monotonic() < patience
        time.sleep(0.005)
    assert prefetches.lacks(LAYERS) and finder.asked == 1
    finder.recorded_set = replace(from_touches(layers_of(BASE, NEW_APP), [(0, 0, 1, 0)]), carried_from=OLD.image_key)
    prefetches.begin_anew(IMAGE, LAYERS)
    while not settled():
        assert time.monotonic() < patience
        time.sleep(0.005)
    assert [it["state"] for it in prefetches.status()] == ["streaming"] and finder.asked == 1
    assert prefetches.begin(IMAGE, LAYERS) == "none", "whoever asks is to record"
    assert not prefetches.lacks(LAYERS)
    for prefetch in prefetches._active():
        prefetch._end(State.OVER)
    host.close()
