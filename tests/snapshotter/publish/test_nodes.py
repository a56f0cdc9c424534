"""Two nodes, each a containerd and a daemon, that share a registry and a public key, and nothing else.

The first has [publish] on, and runs containers, no more. The second finds what they have read, and fetches that.
"""

import contextlib
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshotter.cli import main
from snapshotter.trust.keys import SecretKey
from snapshotter.workload.naming import workload_name
from tests.registries import docker_registry, go_registry
from tests.snapshotter.containerd.containerd_node import NEEDED, SNAPSHOTTER, Node, runnable_layer, tar_of
from tests.snapshotter.daemon import Daemon, origin

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
    ),
]
SOURCE = random.Random(7)
FILES = {f"data/{kind}{number}": SOURCE.randbytes(64 << 10).hex().encode() for number in range(6) for kind in "abcde"}
"""A container reads those of a; the rest keeps `default` below its share of the image."""
ARGV = ["/bin/cat", *(f"/{name}" for name in FILES if name.startswith("data/a"))]
WORKLOAD = workload_name(ARGV)
BOTH_SETS = {"default", WORKLOAD}
TOML = """
[containerd]
address = "{root}/c.sock"
[fetch]
background = false
[record]
quiet_s = 60
[trust]
keys = ["{key}.pub"]
"""
PUBLISH = """
[publish]
enabled = true
key = "{key}"
every_s = 1
jitter_s = 0
"""


class Site:
    """A node, with an empty store at first."""

    def __init__(self, node: Node, daemon: Daemon) -> None:
        self.node, self.daemon = node, daemon
        self.config = ["--config", str(daemon.home / "config.toml")]

    def pull(self, wait: str) -> None:
        where = ["--containerd-address", f"{self.node.root}/c.sock", *self.config]
        assert main(["pull", self.node.image, "--wait", wait, *where]) == 0

    def run(self, name: str) -> None:
        """A container, from its creation until it is gone."""
        self.node.ctr("run", "--rm", "--cgroup", "", "--snapshotter", SNAPSHOTTER, self.node.image, name, *ARGV)

    def recordings(self) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.status()["recordings"]
        return found

    def recorded(self) -> int:
        """Recordings that have ended."""
        counts = self.recordings()
        return int(counts["kept"] + counts["discarded"])

    def published(self) -> dict[str, dict[str, Any]]:
        """By workload; "" is the layer index."""
        return {row["workload"]: row for row in self.daemon.status()["publishing"]["done"]}


@contextlib.contextmanager
def site(image: str, toml: str, key: Path) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="bp", dir="/tmp") as directory, origin() as unused:
        root = Path(directory)
        node = Node(root, root / "run" / "bootseer.sock")
        node.image = image
        try:
            with Daemon(root, unused, toml.format(root=root, key=key)) as daemon:
                node.start_containerd()
                yield Site(node, daemon)
                node.stop()
        finally:
            node.stop()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "does not happen"
        time.sleep(0.05)


@pytest.fixture(params=["docker", "go"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A registry without the referrers API, and one with it."""
    with docker_registry(tmp_path / "registry") if request.param == "docker" else go_registry(announce=True) as it:
        yield it


def test_what_one_node_learns_another_finds(host: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    key, image = tmp_path / "node.key", f"{host}/team/app:1"
    secret = SecretKey.generate()
    secret.save(key)
    secret.public.save(tmp_path / "node.key.pub")
    _push(image, tmp_path)

    with site(image, TOML + PUBLISH, key) as first:
        first.pull("mounted")
        until(lambda: set(first.published()) == {""})
        starts = 0
        while first.recordings()["kept"] < 2:  # of one that ends at once it may not be seen how
            starts += 1
            first.run(f"start{starts}")
            until(lambda starts=starts: first.recorded() == starts)  # type: ignore[misc]
        until(lambda: set(first.published()) == {"", *BOTH_SETS})
        first.run("more")
        assert first.recordings()["opened"] == starts, "these two agree"
        rows = first.published()
        assert {row["status"] for row in rows.values()} == {"published"} and rows["default"]["reason"] == ""
        assert first.daemon.status()["publishing"]["pauses"] == []
        log = capfd.readouterr().err
        assert main(["status", *first.config]) == 0
        said = [line.split() for line in capfd.readouterr().out.splitlines()]
        for workload, row in rows.items():
            assert [row["what"], workload or "-", image, f"{host}/team/app", "published"] in said
            (line,) = (line for line in log.splitlines() if row["digest"] in line and "publish.done" in line)
            assert "status=published" in line
    assert main(["artifact", "verify", image, "--keys", f"{key}.pub", "--json", "--config", "/dev/null"]) == 0
    listed = json.loads(capfd.readouterr().out)["artifacts"]
    assert {it["digest"] for it in listed} == {row["digest"] for row in rows.values()}

    with site(image, TOML, key) as second:
        second.pull("hot")
        second.run("start")
        status = second.daemon.status()
        found = {row["workload"]: row for row in status["prefetches"]}
        for workload in BOTH_SETS:
            assert found[workload]["from"] == f"{host}/team/app@{rows[workload]['digest']}"
        assert found["default"]["bytes_refused"] == "" and found["default"]["bytes"] > 0
        assert {row["index_from"] for row in status["layers"]} == {f"{host}/team/app@{rows['']['digest']}"}
        assert {row["state"] for row in status["layers"]} == {"partial"}
        assert sum(row["demand_fetches"] for row in status["layers"]) == 0, "all came before it was read"
        (start,) = status["workloads"]
        assert (start["workload"], start["recorded"]) == (WORKLOAD, False) and second.recordings()["opened"] == 0


def _push(image: str, directory: Path) -> None:
    pusher = Node(directory, directory)
    pusher.image = image
    pusher.push([runnable_layer(), tar_of(FILES)])
