"""One image with two very different workloads under a real containerd: each is recorded by itself, and each start gets
its own set first. The rules, and a workload that has become stale."""

import contextlib
import gzip
import hashlib
import json
import random
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockindex.codec import decode_index
from blockindex.hotset import HotSet
from blockindex.layerindex import LayerIndex
from snapshotter.cli import main
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.workload.naming import workload_name
from tests.snapshotter.containerd.containerd_node import NEEDED, SNAPSHOTTER, Node, runnable_layer, tar_of
from tests.snapshotter.containerd.test_pull import image_files
from tests.snapshotter.daemon import Daemon, Layer, encoded_index, write_index
from tests.snapshotter.rangeserver import Hold, RangeServer, Request

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
    ),
]
SIZE, COUNT, SPAN = 128 << 10, 8, 1 << 16
SOURCE = random.Random(5)
FILES = {f"data/{name}{number}": SOURCE.randbytes(SIZE) for number in range(COUNT) for name in "abcde"}
"""Two workloads read those of a and b; what nobody reads is most of the image."""
LAYERS = (runnable_layer(), tar_of(FILES))
ARGV = {name: ["/bin/cat", *(f"/{file}" for file in FILES if file[5] == name)] for name in ("a", "b")}
WORKLOADS = {name: workload_name(argv) for name, argv in ARGV.items()}


def _layer(tar: bytes) -> Layer:
    blob = gzip.compress(tar, mtime=0)
    return Layer(blob, {}, Digest("sha256:" + hashlib.sha256(blob).hexdigest()))


DATA = _layer(LAYERS[1])


class Gate:
    """A behaviour: while it is shut, requests for bytes of the data layer wait, and all of them are noted."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self._open = threading.Event()
        self._open.set()

    def __call__(self, request: Request) -> Hold | None:
        if request.path != DATA.path or request.method != "GET" or request.range is None:
            return None
        self.asked.append(request.range[0])
        return None if self._open.is_set() else Hold(0, self._open)

    def shut(self) -> None:
        self.asked.clear()
        self._open.clear()

    def open(self) -> None:
        self._open.set()


class Site:
    """A node, and what is done with its one image."""

    def __init__(self, node: Node, daemon: Daemon, host: str, gate: Gate) -> None:
        self.node, self.daemon, self.image, self.gate = node, daemon, f"{host}/app:1", gate
        self.config = ["--config", str(daemon.home / "config.toml")]

    def pull(self) -> None:
        assert main(["pull", self.image, "--containerd-address", f"{self.node.root}/c.sock", *self.config]) == 0

    def run(self, name: str, argv: list[str], *options: str) -> None:
        where = ["--rm", "--snapshotter", SNAPSHOTTER, "--cgroup", ""]
        self._quietly("run", *where, *options, self.image, name, *argv)

    def begin(self, name: str) -> None:
        """Start a container that was created, and wait for its end."""
        self._quietly("tasks", "start", name)

    def _quietly(self, *words: str) -> None:
        command = ["ctr", "-a", f"{self.node.root}/c.sock", *words]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=60, check=True)

    def forget(self) -> None:
        """Nothing of the image is on the node but its hot sets."""
        self.node.ctr("images", "rm", "--sync", self.image)
        until(lambda: self.node.snapshots() == [])
        names = [row["name"] for row in self.daemon.status()["layers"]]
        assert main(["cache", "rm", *names, *self.config]) == 0
        self.daemon.kill("fetch")  # else it would not look again for hot sets so soon after the last pull

    def recordings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.status()["recordings"]
        return found

    def until_kept(self, number: int) -> None:
        until(lambda: self.recordings()["kept"] == number)

    def until_prefetched(self, workload: str, state: str) -> None:
        until(lambda: self.prefetched(workload) == state)

    def start(self, name: str) -> dict[str, Any]:
        """What status says of a container."""
        return next(row for row in self.daemon.status()["workloads"] if row["key"].endswith(f"/{name}"))

    def prefetched(self, workload: str) -> str:
        """The state of the workload's prefetch."""
        rows = self.daemon.status()["prefetches"]
        return next((str(row["state"]) for row in rows if row["workload"] == workload), "")

    def hotset(self, workload: str) -> HotSet:
        [key] = {key for key, _, _ in HotStore(self.daemon.root).entries()}
        pack = HotStore(self.daemon.root).load(key, workload)
        assert pack is not None
        return pack.hotset

    def hot(self, workload: str) -> set[str]:
        """Which of the two kinds of files a set has."""
        blocks, names = SIZE // 4096, list(FILES)
        rows = [it for it in self.hotset(workload).extents if it.layer == 1]
        return {names[block // blocks][5] for it in rows for block in range(it.start, it.end)}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end, "does not happen"
        time.sleep(0.02)


@contextlib.contextmanager
def site(more: str = "") -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="bw", dir="/tmp") as directory:
        root, gate = Path(directory), Gate()
        for tar in LAYERS:
            write_index(root / "indexes", _layer(tar), SPAN)
        with RangeServer(image_files(LAYERS, False, "1"), gate) as server:
            node = Node(root, root / "run" / "bootseer.sock")
            toml = f'[containerd]\naddress = "{root}/c.sock"\n[index]\nurl = "{root}/indexes"\n'
            toml += f"[fetch]\nbackground = false\n[record]\nquiet_s = 60\n[hotset]\nstreams = 2\n{more}"
            try:
                with Daemon(root, server, toml) as daemon:
                    node.start()
                    yield Site(node, daemon, server.host, gate)
                    gate.open()
                    node.stop()
            finally:
                gate.open()
                node.stop()


def _places(index: LayerIndex, name: str) -> set[int]:
    """Where the spans begin that own blocks of files of this kind."""
    blocks, places = SIZE // 4096, set()
    for number, file in enumerate(FILES):
        for block in range(number * blocks, (number + 1) * blocks):
            span = index.span_of_block(block)
            if file[5] == name and span is not None:
                places.add(index.spans[span].blob_start)
    return places


def test_each_start_gets_its_own_set_first() -> None:
    with site('[workload]\nrules = ["named label who=me"]\n') as made:
        made.pull()
        for number, name in enumerate(("a", "b"), 1):
            made.run(name, ARGV[name])
            made.until_kept(number)
            made.run(f"{name}-again", ARGV[name])
        assert made.recordings()["opened"] == 2, "one for each workload"
        assert {name: made.hot(WORKLOADS[name]) for name in ("a", "b")} == {"a": {"a"}, "b": {"b"}}
        assert made.hot("default") == {"a", "b"} and made.hotset("default").records == 2
        made.run("labelled", ARGV["a"], "--label", "who=me")
        made.until_kept(3)
        assert (made.start("labelled")["workload"], made.hot("named")) == ("named", {"a"})
        assert HotStore(made.daemon.root).remove(made.hotset("named").image_key, "named")

        index = decode_index(encoded_index(DATA, SPAN))
        for own, other in (("a", "b"), ("b", "a")):
            made.forget()
            made.gate.shut()
            made.pull()
            until(lambda: len(made.gate.asked) >= 2)  # `default` has begun: nobody knows yet what will run
            create = ["containers", "create", "--snapshotter", SNAPSHOTTER]
            made.node.ctr(*create, made.image, f"{own}-warm", *ARGV[own])
            made.until_prefetched(WORKLOADS[own], "streaming")
            assert made.prefetched("default") == "streaming"
            held = len(made.gate.asked)
            made.gate.open()
            made.until_prefetched("default", "over")
            assert made.prefetched(WORKLOADS[own]) == "over"
            asked = made.gate.asked[held:]
            of_own, of_other = _places(index, own), _places(index, other) - _places(index, own)
            mine = [place for place, start in enumerate(asked) if start in of_own]
            others = [place for place, start in enumerate(asked) if start in of_other]
            assert len(mine) > 2 and len(others) > 2
            assert max(mine) < min(others), "its own come first, what default had queued comes after"
            made.begin(f"{own}-warm")
            assert (made.start(f"{own}-warm")["workload"], made.start(f"{own}-warm")["recorded"]) == (
                WORKLOADS[own], False,
            )  # fmt: skip
            made.node.ctr("containers", "rm", f"{own}-warm")


def test_a_workload_that_reads_something_else_now_is_recorded_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Its arguments stay the same; what they mean comes from outside."""
    with site() as made:
        reads = made.daemon.home / "reads"
        argv = ["/bin/sh", "/reads"]
        mount = ["--mount", f"type=bind,src={reads},dst=/reads,options=rbind:ro"]
        workload = workload_name(argv)
        made.pull()
        reads.write_text("cat /data/a*")
        made.run("first", argv, *mount)
        made.until_kept(1)
        made.run("second", argv, *mount)
        reads.write_text("cat /data/b*")
        words = ["containers", "create", "--snapshotter", SNAPSHOTTER, *mount, made.image, "third", *argv]
        made.node.ctr(*words)
        made.begin("third")
        capsys.readouterr()
        assert main(["explain", "third", *made.config, "--json"]) == 0
        explained = json.loads(capsys.readouterr().out)
        assert explained["workload"] == explained["hot"]["workload"] == workload
        assert sum(layer["missed_blocks"] for layer in explained["layers"]) > COUNT * SIZE // 4096 // 2
        made.node.ctr("containers", "rm", "third")
        until(lambda: made.start("third")["stale_share"] is not None)
        assert made.start("third")["missed_share"] > 0.5 and made.start("second")["missed_share"] == 0
        assert main(["status", *made.config]) == 0
        assert "yes: recorded next time" in capsys.readouterr().out
        assert made.recordings()["opened"] == 1
        made.run("fourth", argv, *mount)
        made.until_kept(2)
        assert made.hot(workload) == {"a", "b"} and made.hotset(workload).records == 2
        assert made.start("fourth")["stale_share"] is None
