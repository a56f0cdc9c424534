"""A real containerd on our socket: pulls, containers, garbage collection. The layers come from a fake provider."""

import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from snapshotter.containerd.model import Counters, Kind, Mount
from snapshotter.containerd.service import serve
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import AlreadyExists
from snapshotter.listening import bind
from tests.snapshotter.containerd.containerd_node import (
    NEEDED,
    SNAPSHOTTER,
    Node,
    layer_digest,
    runnable_layer,
    serve_layers,
    tar_of,
)
from tests.snapshotter.containerd.fake_provider import FakeProvider

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
    ),
]

MARKER = tar_of({"etc/marker": b"bootseer was here"})
EMPTY = tar_of({})
LAYERS = (runnable_layer(), EMPTY, MARKER, EMPTY)
"""The empty layer twice, as in many real images."""


class Rig:
    """Our service and a node that uses it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.provider = FakeProvider(root / "p")
        self.socket = root / "b.sock"
        self.snapshots = Snapshots(root / "b", self.provider)
        self.server = serve(self.snapshots, bind(self.socket))
        self.node = Node(root, self.socket)

    def restart_service(self) -> None:
        """End our service and begin a new one over the same files, with no layer mounted."""
        self.stop_service()
        shutil.rmtree(self.root / "p" / "m")
        self.snapshots = Snapshots(self.root / "b", self.provider)
        self.server = serve(self.snapshots, bind(self.socket))

    def stop_service(self) -> None:
        self.server.stop(None).wait(10)
        self.snapshots.close()

    def kinds(self) -> list[bool]:
        """For each committed snapshot, parents first: whether it is lazy."""
        return [found.lazy is not None for found in self.snapshots.select(["kind==committed"])]

    def leftovers(self) -> list[str]:
        """Directories of snapshots and mounted layers."""
        mounted = self.root / "p" / "m"
        found = [*(self.root / "b" / "s").iterdir(), *(mounted.iterdir() if mounted.exists() else ())]
        return [str(path) for path in found]

    def blobs(self) -> set[str]:
        """Digests of the blobs that containerd has fetched."""
        return set(self.node.ctr("content", "ls", "-q").split())


@pytest.fixture
def rig() -> Iterator[Rig]:
    root = Path(tempfile.mkdtemp(prefix="bs", dir="/tmp"))  # short: socket paths end at 107 bytes
    made = Rig(root)
    try:
        made.node.start()
        made.node.push(LAYERS)
        yield made
    finally:
        made.node.stop()
        made.stop_service()
        subprocess.run(["rm", "-rf", "--one-file-system", str(root)], check=True)


def _until(holds: Callable[[], bool], limit_s: float = 20) -> None:
    """containerd collects garbage when it likes."""
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_lazy_pull_run_and_removal(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS)
    rig.node.rpull()
    assert rig.kinds() == [True] * 4
    assert rig.snapshots.counters() == Counters(lazy=4)
    layers = {layer_digest(tar) for tar in LAYERS}
    assert rig.blobs() & layers == set(), "containerd fetched layers that are lazy"
    assert {ref.image for ref in rig.provider.refs} == {rig.node.image}
    first = rig.provider.refs[0]
    assert first.siblings == tuple(dict.fromkeys(layer_digest(tar) for tar in LAYERS))

    assert rig.node.run("one", "cat /etc/marker; echo changed > /etc/marker; cat /etc/marker") == (
        "bootseer was herechanged\n"
    )
    assert rig.node.run("two", "cat /etc/marker") == "bootseer was here"

    rig.node.ctr("images", "rm", "--sync", rig.node.image)
    _until(lambda: rig.snapshots.select() == [] and rig.leftovers() == [])
    assert set(rig.provider.released) == layers
    assert rig.node.snapshots() == []


def test_removal_waits_for_the_container(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS)
    rig.node.rpull()
    rig.node.ctr("run", "-d", "--snapshotter", SNAPSHOTTER, rig.node.image, "c", "/bin/sh", "-c", "cat /dev/zero >&2")
    rig.node.ctr("images", "rm", "--sync", rig.node.image)
    assert rig.provider.released == []
    assert rig.node.ctr("task", "exec", "--exec-id", "e", "c", "/bin/cat", "/etc/marker") == "bootseer was here"
    rig.node.ctr("task", "kill", "-s", "KILL", "c")
    _until(lambda: "STOPPED" in rig.node.ctr("task", "ls"))
    rig.node.ctr("task", "rm", "c")
    rig.node.ctr("container", "rm", "c")
    _until(lambda: rig.leftovers() == [])


def test_pull_without_labels(rig: Rig) -> None:
    """All layers are there before the first Prepare, which does not say what is to come of it."""
    prepare = rig.snapshots.prepare
    seen: list[tuple[set[str], dict[str, str]]] = []

    def noting(key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        seen.append((rig.blobs(), dict(labels)))
        return prepare(key, parent, labels)

    rig.snapshots.prepare = noting  # type: ignore[method-assign]  # to look in between
    rig.node.ctr("images", "pull", "--plain-http", "--snapshotter", SNAPSHOTTER, rig.node.image)
    rig.snapshots.prepare = prepare  # type: ignore[method-assign]  # as above
    assert len(seen) == 4
    assert all({layer_digest(tar) for tar in LAYERS} <= blobs and labels == {} for blobs, labels in seen)
    assert rig.kinds() == [False] * 4
    assert rig.snapshots.counters() == Counters(ordinary=4)
    assert not rig.provider.refs
    assert rig.node.run("one", "cat /etc/marker") == "bootseer was here"
    assert "KiB" in rig.node.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "usage")
    rig.node.ctr("images", "rm", "--sync", rig.node.image)
    _until(lambda: rig.snapshots.select() == [] and rig.leftovers() == [])


def test_a_lazy_answer_without_a_target_fails_the_pull(rig: Rig) -> None:
    """Why such layers are unpacked, although their image could be found."""

    def answer(key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        raise AlreadyExists("it is there")

    rig.snapshots.prepare = answer  # type: ignore[method-assign]  # as it must not be
    with pytest.raises(AssertionError, match="unexpected error from snapshotter: it is there"):
        rig.node.ctr("images", "pull", "--plain-http", "--snapshotter", SNAPSHOTTER, rig.node.image)


def test_layers_that_cannot_be_served_are_unpacked(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS[:1])
    rig.node.rpull()
    assert rig.kinds() == [True, False, False, False]
    assert rig.snapshots.counters() == Counters(lazy=1, fallback=3)
    assert rig.node.run("one", "cat /etc/marker") == "bootseer was here"


def test_lazy_layers_on_top_of_an_unpacked_one(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS[1:])
    rig.node.rpull()
    assert rig.kinds() == [False, True, True, True]
    assert rig.node.run("one", "cat /etc/marker") == "bootseer was here"


def test_containers_after_a_restart(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS)
    rig.node.rpull()
    rig.restart_service()
    rig.node.wait_for_snapshotter()
    assert rig.node.run("one", "cat /etc/marker") == "bootseer was here"
    rig.node.ctr("images", "rm", "--sync", rig.node.image)
    _until(lambda: rig.leftovers() == [])


def test_several_pulls_of_one_image_at_once(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS)
    failures: list[BaseException] = []

    def pull() -> None:
        try:
            rig.node.rpull()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=pull) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert failures == []
    assert [found.kind for found in rig.snapshots.select()] == [Kind.COMMITTED] * 4
    assert rig.node.run("one", "cat /etc/marker") == "bootseer was here"


def test_another_namespace_shares_what_is_there(rig: Rig) -> None:
    serve_layers(rig.provider, LAYERS)
    rig.node.rpull()
    fetched = sum(rig.provider.ensured.values())
    rig.node.rpull(namespace="other")
    assert sum(rig.provider.ensured.values()) == fetched
    assert len(rig.snapshots.select()) == 4
    rig.node.ctr("images", "rm", "--sync", rig.node.image)
    assert len(rig.snapshots.select()) == 4
    rig.node.ctr("-n", "other", "images", "rm", "--sync", rig.node.image)
    _until(lambda: rig.snapshots.select() == [] and rig.leftovers() == [])
