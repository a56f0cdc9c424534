"""The cache commands: what is chosen, what is refused; with a real daemon, that nothing stale is left behind."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proto import snapshots_pb2
from snapshotter.blockstore import BlockStore, node_name
from snapshotter.cache import CachedLayer, inventory, pick, plan
from snapshotter.cli import main
from snapshotter.cli.cache import size
from snapshotter.errors import NotFound, Precondition
from snapshotter.rpc import call
from tests.snapshotter.daemon import Daemon, Layer, drop_caches, expected, make_layer, origin, reader, write_index
from tests.snapshotter.rangeserver import Hold

Out = pytest.CaptureFixture[str]


def cached(character: str, age_s: float, disk: int, *images: str) -> CachedLayer:
    return CachedLayer(f"sha256:{character * 64}", character * 14, "complete", disk, 1, 1, 1e9 - age_s, "", images)


# --- choosing


def test_the_plan_takes_the_oldest_unused_and_no_more_than_needed() -> None:
    layers = [cached("a", 4, 10), cached("b", 9, 10, "app"), cached("c", 8, 10), cached("d", 1, 10)]

    def names(max_bytes: int) -> tuple[str, int]:
        chosen, left = plan(layers, max_bytes)
        return "".join(layer.name[0] for layer in chosen), left

    assert [names(limit) for limit in (40, 39, 30, 29, 0)] == [("", 40), ("c", 30), ("c", 30), ("ca", 20), ("cad", 10)]


@pytest.mark.parametrize(
    ("text", "found"),
    [("sha256:" + "a" * 64, "a"), ("AAAAAA", "a"), ("sha256:bbbbbb", "b"), ("b" * 14, "b"), ("c" * 14, "c")],
)
def test_picking(text: str, found: str) -> None:
    broken = replace(cached("c", 1, 1), digest="", state="broken")
    assert pick([cached("a", 1, 1), cached("b", 1, 1), broken], text).name[0] == found


@pytest.mark.parametrize(("text", "words"), [("aaaaa", "at least 6"), ("bbbbbb", "no layer"), ("aaaaaa", "more than")])
def test_picking_nothing(text: str, words: str) -> None:
    with pytest.raises(NotFound, match=words):
        pick([cached("a", 1, 1), replace(cached("a", 1, 1), digest=f"sha256:{'a' * 63}b")], text)


@pytest.mark.parametrize(("text", "wanted"), [("7", 7), ("1.5k", 1500), ("2MB", 2 * 10**6), ("3Gi", 3 << 30), ("0", 0)])
def test_sizes(text: str, wanted: int) -> None:
    assert size(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "-1", "1 G", "1Q"])
def test_not_a_size(text: str, capsys: Out) -> None:
    assert main(["cache", "gc", f"--max-size={text}"]) == 2
    assert "is not a size" in capsys.readouterr().err


# --- a real daemon


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=8, size=256 << 10)


@pytest.fixture(params=["loop"])
def daemon(tmp_path: Path, layer: Layer, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    write_index(tmp_path / "indexes", layer)
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n[fetch]\nbackground = false\n[mount]\nattach = "{request.param}"\n'
    toml += "[cache]\nmin_free_percent = 0\n"  # however full this machine's disk is
    with origin(layer, make_layer(2, 5000, seed=7)) as registry, Daemon(tmp_path, registry, toml) as made:
        yield made


def ls(daemon: Daemon, capsys: Out) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["cache", "ls", "--json", *where(daemon)]) == 0
    layers: list[dict[str, object]] = json.loads(capsys.readouterr().out)["layers"]
    return layers


def where(daemon: Daemon) -> list[str]:
    return ["--config", str(daemon.home / "config.toml")]


def forget_image(daemon: Daemon) -> None:
    """What containerd does when the image is removed."""
    with daemon.snapshots() as stub:
        infos = [info for message in stub.List(snapshots_pb2.ListSnapshotsRequest()) for info in message.info]
        for info in reversed(infos):
            stub.Remove(snapshots_pb2.RemoveSnapshotRequest(key=info.name))


def read(mount: Path, layer: Layer) -> None:
    process = reader("read", *(mount / name for name in layer.contents))
    digests, _ = process.communicate(timeout=60)
    assert digests.split() == expected(layer, *layer.contents)


def open_in(daemon: Daemon, worker: str) -> list[str]:
    """The files of the store that a process of the daemon has open."""
    found = []
    for number in os.listdir(directory := f"/proc/{daemon.pid(worker)}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"{directory}/{number}"))
    return [path for path in found if path.startswith(f"{daemon.root}/layers/")]


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.system
@pytest.mark.parametrize("daemon", ["loop", "file"], indirect=True)
def test_remove_and_pull_again(daemon: Daemon, layer: Layer, capsys: Out) -> None:
    """Twice; the second time by another index, whose metadata must not be mixed up with the first's."""
    for span_size in (1 << 17, 1 << 19):
        mount = daemon.prepare(layer)
        assert (mount / "f0003").read_bytes() == layer.contents["f0003"]
        (row,) = ls(daemon, capsys)
        assert row["used"] and row["images"] == [f"{daemon.registry.host}/app:1"] and row["state"] == "partial"
        assert main(["cache", "rm", layer.digest[7:20], *where(daemon)]) == 1
        assert "in use" in capsys.readouterr().err
        read(mount, layer)
        forget_image(daemon)
        (row,) = ls(daemon, capsys)
        assert not row["used"] and row["mount"] == "" and row["state"] == "complete"
        assert main(["cache", "rm", "--dry-run", layer.digest, *where(daemon)]) == 0
        assert len(ls(daemon, capsys)) == 1
        assert main(["cache", "rm", layer.digest, *where(daemon)]) == 0
        assert capsys.readouterr().out.startswith("removed " + layer.digest[7:19])
        assert ls(daemon, capsys) == [] and list((daemon.root / "layers").iterdir()) == []
        assert open_in(daemon, "block") == []
        _until(lambda: open_in(daemon, "fetch") == [])
        write_index(daemon.home / "indexes", layer, span_size)
    drop_caches()
    read(daemon.prepare(layer), layer)
    assert main(["cache", "rm", "0" * 12, *where(daemon)]) == 1
    assert "no layer" in capsys.readouterr().err


@pytest.mark.system
def test_gc_by_age(daemon: Daemon, layer: Layer, capsys: Out) -> None:
    small = make_layer(2, 5000, seed=7)
    daemon.prepare(layer, small)
    read(daemon.root / "m" / node_name(layer.digest), layer)
    forget_image(daemon)
    os.utime(daemon.root / "layers" / node_name(layer.digest) / "used", (1, 1))
    assert [row["digest"] for row in ls(daemon, capsys)] == [layer.digest, small.digest]
    assert main(["cache", "gc", "--max-size", "1T", *where(daemon)]) == 0
    assert capsys.readouterr().out == "nothing to remove\n"
    assert main(["cache", "gc", "--max-size", "100K", "--json", *where(daemon)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["digest"] for row in result["removed"]] == [layer.digest] and result["left_bytes"] < 100_000
    read(daemon.prepare(small), small)
    assert main(["cache", "gc", "--max-size", "0", *where(daemon)]) == 0
    assert "in use" in capsys.readouterr().err and len(ls(daemon, capsys)) == 1


@pytest.mark.system
@pytest.mark.parametrize(
    ("daemon", "words"),
    [("loop", "a container still runs with it"), ("file", "the kernel still has its file open")],
    indirect=["daemon"],
)
def test_a_container_that_outlives_its_snapshot_keeps_its_layer(
    daemon: Daemon, layer: Layer, words: str, capsys: Out
) -> None:
    """Somebody has a file of the layer open when the image is removed: the mount goes, its file stays open."""
    mount = daemon.prepare(layer)
    with (mount / "f0001").open("rb") as file:
        forget_image(daemon)
        assert not mount.exists()
        assert main(["cache", "rm", layer.digest, *where(daemon)]) == 1
        assert words in capsys.readouterr().err
        assert file.read() == layer.contents["f0001"], "also blocks that had to be fetched"
    assert main(["cache", "rm", layer.digest, *where(daemon)]) == 0


@pytest.mark.system
def test_an_open_file_on_the_connection_is_seen_without_a_loop(daemon: Daemon, layer: Layer) -> None:
    """What `attach = "file"` looks like: only the kernel's FORGET tells whether the file is still in use. Here this
    process holds it, as a mount would."""
    daemon.prepare(layer)
    forget_image(daemon)
    name = node_name(layer.digest)
    held = _hold(daemon, name)
    try:
        with pytest.raises(Precondition, match="kernel still has its file open"):
            call(daemon.run / "fetch.sock", "remove", 30, name=name, digest=layer.digest)
        assert (daemon.root / "layers" / name / "data").exists()
        assert len(os.pread(held, 4096, 0)) == 4096
    finally:
        os.close(held)
    call(daemon.run / "fetch.sock", "remove", 30, name=name, digest=layer.digest)
    assert list((daemon.root / "layers").iterdir()) == []


def _hold(daemon: Daemon, name: str) -> int:
    """A descriptor of the layer's FUSE file, by way of the service's descriptor of the mount."""
    for number in os.listdir(directory := f"/proc/{daemon.pid('service')}/fd"):
        with contextlib.suppress(OSError):
            path = f"{directory}/{number}"
            if os.path.isdir(path) and os.readlink(path) == "/":
                return os.open(f"{path}/{name}", os.O_RDONLY)
    raise AssertionError("the service has no descriptor of the mount")


@pytest.mark.system
@pytest.mark.parametrize("worker", ["block", "fetch"])
def test_a_killed_worker_in_between(daemon: Daemon, layer: Layer, worker: str, capsys: Out) -> None:
    """Removal, with a worker killed before and after, and a pull: right bytes."""
    daemon.prepare(layer)
    forget_image(daemon)
    daemon.kill(worker)
    assert main(["cache", "rm", layer.digest, *where(daemon)]) == 0
    daemon.kill(worker)
    drop_caches()
    read(daemon.prepare(layer), layer)


@pytest.mark.system
def test_what_a_killed_fetch_process_had_set_aside_is_put_back(daemon: Daemon, layer: Layer) -> None:
    """The worst moment: after the rename, before anybody knows whether the layer is in use; it is."""
    mount = daemon.prepare(layer)
    with (mount / min(layer.contents)).open("rb") as held:
        BlockStore(daemon.root).set_aside(node_name(layer.digest))
        daemon.kill("block")  # what it had open would hide that the directory has gone
        daemon.kill("fetch")
        assert held.read() == layer.contents[min(layer.contents)]
    drop_caches()
    read(mount, layer)
    forget_image(daemon)
    assert main(["cache", "rm", layer.digest, *where(daemon)]) == 0
    assert list((daemon.root / "layers").iterdir()) == []


@pytest.mark.system
def test_inodes_that_the_kernel_drops_together_are_closed(daemon: Daemon, layer: Layer) -> None:
    """They come as one BATCH_FORGET."""
    layers = [make_layer(2, 5000, seed=7), layer]
    daemon.prepare(*layers)
    assert len(open_in(daemon, "block")) >= 2 * len(layers)
    forget_image(daemon)
    _until(lambda: drop_caches() is None and open_in(daemon, "block") == [])
    read(daemon.prepare(*layers), layer)


@pytest.mark.system
def test_pulls_and_removals_against_each_other(daemon: Daemon, layer: Layer) -> None:
    """Whoever wins, a pull ends with a mount that has the right bytes, and a removal is done or refused."""
    stop = threading.Event()
    removed: list[str] = []

    def remove() -> None:
        while not stop.is_set():
            try:
                call(daemon.run / "control.sock", "cache-remove", 30, name=node_name(layer.digest))
                removed.append("done")
            except (Precondition, NotFound):
                time.sleep(0.001)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for _ in range(15):
            mount = daemon.prepare(layer)
            assert (mount / "f0002").read_bytes() == layer.contents["f0002"]
            forget_image(daemon)
            _until(lambda: bool(removed))
            removed.clear()
    finally:
        stop.set()
        remover.join(30)


@pytest.mark.system
def test_a_stream_in_the_air_is_let_go(tmp_path: Path, layer: Layer) -> None:
    """The layer is removed while the background is in the middle of a request for it; what still comes of that goes
    nowhere, and the next pull has a stream of its own."""
    write_index(tmp_path / "indexes", layer)
    gate = threading.Event()
    behaviour = lambda request: Hold(after=60_000, until=gate)  # noqa: E731
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n'
    with origin(layer, behaviour=behaviour) as registry, Daemon(tmp_path, registry, toml) as daemon:
        name = node_name(layer.digest)
        daemon.prepare(layer)
        _until(lambda: daemon.status()["layers"][0]["background_bytes"] > 0)
        forget_image(daemon)
        call(daemon.run / "control.sock", "cache-remove", 30, name=name)
        assert daemon.status()["layers"] == []
        mount = daemon.prepare(layer)
        gate.set()
        read(mount, layer)
        _until(lambda: daemon.status()["layers"][0]["state"] == "complete")
        _until(lambda: all("dead" not in path for path in open_in(daemon, "fetch") + open_in(daemon, "block")))


@pytest.mark.system
def test_without_a_daemon(daemon: Daemon, layer: Layer, capsys: Out) -> None:
    daemon.prepare(layer)
    daemon.stop()
    assert ls(daemon, capsys)[0]["used"]
    assert main(["cache", "rm", layer.digest, *where(daemon)]) == 1
    assert "in use" in capsys.readouterr().err
    daemon.start()
    forget_image(daemon)
    daemon.stop()
    assert main(["cache", "gc", "--max-size", "0", *where(daemon)]) == 0
    assert ls(daemon, capsys) == []
    daemon.start()
    read(daemon.prepare(layer), layer)


# --- the store alone


def test_a_broken_layer_is_listed_and_can_be_removed(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}"\n')
    store = BlockStore(tmp_path / "root")
    (store.layers / ("ab" * 7)).mkdir()
    (layer,) = inventory(store, {}, {})
    assert (layer.state, layer.digest, layer.name) == ("broken", "", "ab" * 7)
    assert main(["cache", "ls", "--config", str(tmp_path / "c.toml")]) == 0
    assert "broken" in capsys.readouterr().out
    assert main(["cache", "rm", "ab" * 7, "--config", str(tmp_path / "c.toml")]) == 0
    assert list(store.names()) == []


def test_an_empty_node(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}"\n')
    assert main(["cache", "ls", "--config", str(tmp_path / "c.toml")]) == 0
    assert capsys.readouterr().out.startswith("no layers")


def test_set_aside_and_back(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    (store.layers / ("ab" * 7)).mkdir()
    aside = store.set_aside("ab" * 7)
    assert list(store.names()) == []
    with pytest.raises(NotFound):
        store.set_aside("ab" * 7)
    store.put_back(aside)
    assert list(store.names()) == ["ab" * 7]
    (store.set_aside("ab" * 7) / "data").touch()
    store.sweep()
    assert list(store.names()) == ["ab" * 7], "nobody knew whether it could go"
    store.set_aside("ab" * 7)
    (store.layers / ("ab" * 7)).mkdir()
    (store.layers / ("ab" * 7) / "layer.json.1234").touch()
    (store.layers / ("ab" * 7) / "layer.json").touch()
    (store.layers / f".dead-{'cd' * 7}-00000000").mkdir()
    store.sweep()
    assert [path.name for path in store.layers.iterdir()] == ["ab" * 7], "another one has come meanwhile"
    assert [path.name for path in (store.layers / ("ab" * 7)).iterdir()] == ["layer.json"]
    store.delete(store.set_aside("ab" * 7))
    assert list(store.layers.iterdir()) == []
