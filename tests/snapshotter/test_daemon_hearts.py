"""A process of a real daemon that stands still is replaced, and whoever waits for a block gets it from its successor.

It is stopped by SIGSTOP: alive, with its descriptors and locks, and answering nothing.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.snapshotter.daemon import Daemon, Layer, expected, make_layer, origin, reader, write_index
from tests.snapshotter.rangeserver import Hold

pytestmark = [pytest.mark.system, pytest.mark.timeout(150)]

PROGRAM = (sys.executable, "-m", "tests.snapshotter.impatient")
COLD = """
[index]
url = "{home}/indexes"
[fetch]
background = false
span_growth_kib = 256
[hotset]
prefetch = false
[lookup]
registry = false
"""
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(8, 300_000)


class Gate:
    """A registry's behaviour: nothing comes before `open`; `asked` is set by the first request."""

    def __init__(self) -> None:
        self.open, self.asked = threading.Event(), threading.Event()

    def __call__(self, request: object) -> Hold:
        self.asked.set()
        return Hold(after=-1, until=self.open)


@pytest.mark.parametrize("worker", ["fetch", "block"])
def test_a_read_that_begins_while_it_stands_still(
    worker: str, layer: Layer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_index(tmp_path / "indexes", layer)
    toml = COLD.format(home=tmp_path)
    with origin(layer) as registry, Daemon(tmp_path, registry, toml, PROGRAM) as daemon:
        mount = daemon.prepare(layer)
        before = _pids(daemon)
        os.kill(before[worker], signal.SIGSTOP)
        waiting = reader("read", mount / "f0002")
        _until(lambda: _pids(daemon)[worker] not in (0, before[worker]))
        assert waiting.communicate(timeout=PATIENCE_S)[0].split() == expected(layer, "f0002")
        after = _pids(daemon)
        others = {"supervisor", "block", "fetch", "service"} - {worker}
        assert {name: after[name] for name in others} == {name: before[name] for name in others}
        assert (mount / "f0005").read_bytes() == layer.contents["f0005"], "the successor goes on"
    said = capfd.readouterr().err
    assert f"worker.stuck name={worker} pid={before[worker]} heart=" in said and "read.timed_out" not in said


def test_a_fetch_process_that_stops_amid_a_flight(
    layer: Layer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The read has been taken over by the process that stands still: its sweep alone gives that away."""
    write_index(tmp_path / "indexes", layer)
    gate, toml = Gate(), COLD.format(home=tmp_path)
    with origin(layer, behaviour=gate) as registry, Daemon(tmp_path, registry, toml, PROGRAM) as daemon:
        mount = daemon.prepare(layer)
        before = _pids(daemon)["fetch"]
        waiting = reader("read", mount / "f0003")
        assert gate.asked.wait(PATIENCE_S)
        os.kill(before, signal.SIGSTOP)
        gate.open.set()
        _until(lambda: _pids(daemon)["fetch"] not in (0, before))
        assert waiting.communicate(timeout=PATIENCE_S)[0].split() == expected(layer, "f0003")
    assert f"worker.stuck name=fetch pid={before} heart=sweep" in capfd.readouterr().err


def _pids(daemon: Daemon) -> dict[str, int]:
    """As the supervisor notes them: the service would ask the process that stands still."""
    return {row["name"]: row["pid"] for row in json.loads((daemon.run / "processes.json").read_text())}


def _until(there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < give_up
        time.sleep(0.01)
