"""What needs no daemon: a process dies between two steps of what it writes, and the next one goes on. See `killpoints`.

The process is a fork of the test, armed with a directory of its own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from blockindex.hotset import HotLayer, HotSet, from_touches
from snapshotter import killpoints
from snapshotter.blockstore import BlockStore, node_name
from snapshotter.config import WorkloadConfig
from snapshotter.hotstore import HotStore
from snapshotter.judgement import Judgements
from snapshotter.killpoints import VARIABLE, KillPoints
from snapshotter.publish.state import State
from snapshotter.record.records import Records
from tests.registries import docker_registry
from tests.snapshotter.daemon import encoded_index, make_layer
from tests.snapshotter.fetch.test_latejudge import _arrive
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.imagesource.layouts import LayoutWriter, tagged
from tests.snapshotter.publish.nodes import Node

PUBLISHING = ("publish.put", "publish.state-written")
JUDGEMENT = ("fetch.judged",)
MIXING = ("service.default-stamped", "service.hotset-written")
BLOBS = [gzip_layer({"usr/base": b"base" * 30_000})]
LAYERS = {"sha256:" + sha256(blob).hexdigest(): blob for blob in BLOBS}


@pytest.fixture
def points(tmp_path: Path) -> KillPoints:
    (tmp_path / "points").mkdir(mode=0o700)
    return KillPoints(tmp_path / "points")


def _dies(points: KillPoints, tmp_path: Path, work: Callable[[], object], point: str, times: int = 1) -> None:
    """A process that does this work dies at the point."""
    points.arm(point, times)
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            killpoints.use({VARIABLE: str(tmp_path / "points")})
            work()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert points.was_reached(point)


def _hotset(workload: str, first: int) -> HotSet:
    layer = HotLayer("sha256:" + "a" * 64, 100, "sha256:" + "b" * 64)
    return from_touches([layer], [(0, first, first + 5, 0)], workload=workload)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("point", MIXING)
def test_a_default_that_was_mixed_stays_one(points: KillPoints, tmp_path: Path, point: str, is_first: bool) -> None:
    """One that a person made would stay as it is for ever."""
    records = Records(tmp_path, HotStore(tmp_path), WorkloadConfig())
    if not is_first:
        records.keep(_hotset("train", 0), commanded=False)
    key = _hotset("train", 0).image_key
    # the workload's own set is written before `default`
    _dies(points, tmp_path, lambda: records.keep(_hotset("train", 10), False), point, 2 if "hotset" in point else 1)
    default = records.hotsets.load(key, "default")
    assert (default is None) == is_first and records.mixes_default(key) != is_first
    records.keep(_hotset("serve", 50), commanded=False)
    default = records.hotsets.load(key, "default")
    assert default is not None and {it.start for it in default.hotset.extents} >= {50}
    assert records.mixes_default(key)


def test_a_persons_default_does_not_pass_for_a_mixed_one(points: KillPoints, tmp_path: Path) -> None:
    records = Records(tmp_path, HotStore(tmp_path), WorkloadConfig())
    records.hotsets.save(_hotset("default", 7))
    mix = replace(_hotset("default", 60))
    _dies(points, tmp_path, lambda: records.keep(mix, commanded=False), "service.default-stamped")
    assert not records.mixes_default(mix.image_key)


def test_what_was_not_finished_goes_an_hour_later(points: KillPoints, tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    _dies(points, tmp_path, lambda: store.save(_hotset("train", 0)), "service.hotset-written")
    [left] = (tmp_path / "hot").glob("*/.*")
    store.save(_hotset("train", 1))
    assert left.exists(), "somebody may be writing it"
    long_ago = time.time() - 3601
    os.utime(left, (long_ago, long_ago))
    store.save(_hotset("train", 2))
    assert not left.exists()


@pytest.mark.parametrize("point", JUDGEMENT)
def test_a_judgement(points: KillPoints, tmp_path: Path, point: str) -> None:
    """It is made once more."""
    judgements, layer = Judgements(tmp_path), tmp_path / "layers" / ("ab" * 7)
    layer.mkdir(parents=True)
    judgements.owe(layer)
    _dies(points, tmp_path, lambda: judgements.settle(layer.name, "a loop"), point)
    assert list(judgements.due()) == [layer.name] and judgements.unsound(layer.name) == "a loop"
    judgements.settle(layer.name, "a loop")
    assert not list(judgements.due())


def test_an_unsound_layer_that_comes_anew(points: KillPoints, tmp_path: Path) -> None:
    """It is known as unsound until the sound one is there: else its index would be mounted unjudged once more."""
    layer = make_layer(files=2, size=20_000)
    judgements = Judgements(tmp_path)
    judgements.settle(node_name(layer.digest), "a loop")
    encoded = encoded_index(layer)
    _dies(points, tmp_path, lambda: _arrive(tmp_path, layer, encoded, True), "fetch.layer-described")
    assert judgements.unsound(node_name(layer.digest)) == "a loop"
    BlockStore(tmp_path).sweep()
    _arrive(tmp_path, layer, encoded, vouched=True)
    assert judgements.unsound(node_name(layer.digest)) == "" and not list(judgements.due())


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as it:
        yield it


@pytest.mark.system
@pytest.mark.parametrize(("point", "times"), [(PUBLISHING[0], 2), (PUBLISHING[1], 1)])
def test_a_round_of_publishing(
    points: KillPoints, tmp_path: Path, host: str, capsys: pytest.CaptureFixture[str], point: str, times: int
) -> None:
    """The program dies after an artifact was put: the next round finds it there, and puts what is left, once."""
    from snapshotter.cli import main

    writer = LayoutWriter(tmp_path / "layout")
    writer.index([tagged(writer.several((writer.image(BLOBS), "linux/amd64")), "v1")])
    image = f"{host}/{point}-{times}/app:1".replace("publish.", "")
    assert main(["copy", f"oci-layout:{writer.directory}:v1", image, "--config", "/dev/null"]) == 0
    capsys.readouterr()
    node = Node(tmp_path / "root", image, LAYERS)  # type: ignore[arg-type]
    node.record([(0, 0, 20, 0)], times=2)
    points.arm(point, times)
    words = [sys.executable, "-P", "-m", "snapshotter.publish"]
    environment = {**os.environ, VARIABLE: str(tmp_path / "points")}
    done = subprocess.run(words, input=node.config.to_toml(), text=True, capture_output=True, env=environment)
    assert done.returncode == -signal.SIGKILL and points.was_reached(point), done.stderr
    known = {row.workload for row in State.load(node.root).done}
    assert len(known) == times - 1
    rows = node.done()
    assert set(rows) == {"", "train", "default"} - known
    assert sorted(rows.values()) == sorted(["there", *["published"] * (3 - times)])
    assert node.done() == {}
    assert not list(node.root.glob("*.new"))
