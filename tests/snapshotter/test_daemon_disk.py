"""What disks do to a daemon: they fill up, flip bits, and lose what was not synced. Real kernel, FUSE and mounts."""

import contextlib
import errno
import hashlib
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from proto import snapshots_pb2
from snapshotter.blockstore import node_name
from snapshotter.cli import main
from tests.snapshotter.daemon import Daemon, Layer, drop_caches, expected, make_layer, origin, reader, write_index
from tests.snapshotter.rangeserver import Action, Hold, Request, Status
from tests.snapshotter.test_integrity import flip

pytestmark = pytest.mark.system

Out = pytest.CaptureFixture[str]

_NO_STREAM = "[fetch]\nbackground = false\n"


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=6, size=200 << 10, seed=seed) for seed in range(4)]


@pytest.fixture
def indexed(tmp_path: Path, layers: list[Layer]) -> str:
    for layer in layers:
        write_index(tmp_path / "indexes", layer)
    return f'[index]\nurl = "{tmp_path}/indexes"\n'


def where(daemon: Daemon) -> list[str]:
    return ["--config", str(daemon.home / "config.toml")]


def until(holds: Callable[[], bool], patience_s: float = 30.0) -> None:
    deadline = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


def read(daemon: Daemon, layer: Layer) -> None:
    """All of it is as it should be."""
    mount = daemon.root / "m" / node_name(layer.digest)
    process = reader("read", *(mount / name for name in layer.contents))
    digests, _ = process.communicate(timeout=60)
    assert digests.split() == expected(layer, *layer.contents)


def row(daemon: Daemon, layer: Layer) -> dict[str, object]:
    found = [row for row in daemon.status()["layers"] if row.get("digest") == layer.digest]
    return found[0] if found else {"state": "none"}


def directory(daemon: Daemon, layer: Layer) -> Path:
    return daemon.root / "layers" / node_name(layer.digest)


def forget(daemon: Daemon) -> None:
    """What containerd does when images are removed."""
    with daemon.snapshots() as stub:
        infos = [info for message in stub.List(snapshots_pb2.ListSnapshotsRequest()) for info in message.info]
        for info in reversed(infos):
            stub.Remove(snapshots_pb2.RemoveSnapshotRequest(key=info.name))


@contextlib.contextmanager
def power_cut(daemon: Daemon, *layers: Layer) -> Iterator[None]:
    """The machine loses power and comes up again: mounts are gone, and so is what the block does to the files."""
    daemon.stop()
    for layer in layers:
        subprocess.run(["umount", str(daemon.root / "m" / node_name(layer.digest))], check=True)
    yield
    (daemon.root / "boot_id").write_text("another boot")
    drop_caches()
    daemon.start()


# -- a full disk


@contextlib.contextmanager
def small_disk(path: Path, kib: int) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "none", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(path)], check=True)


def test_a_disk_that_is_full_and_freed_again(tmp_path: Path, indexed: str, layers: list[Layer]) -> None:
    """Reads are right all along: with room, without, and when there is some again."""
    toml = f"{indexed}[cache]\nmin_free_percent = 0\nunstored_mib = 1\n"
    big = make_layer(files=24, size=256 << 10, seed=9)
    write_index(tmp_path / "indexes", big)
    with small_disk(tmp_path / "root", 4096), origin(big) as registry, Daemon(tmp_path, registry, toml) as daemon:
        daemon.prepare(big)
        for _ in range(2):
            read(daemon, big)
            drop_caches()
        assert 0 < daemon.status()["unstored_bytes"] <= 1 << 20 and row(daemon, big)["state"] != "complete"
        subprocess.run(["mount", "-o", "remount,size=32m", str(tmp_path / "root")], check=True)
        until(lambda: row(daemon, big)["state"] == "complete")
        until(lambda: not daemon.status()["unstored_bytes"])
        before = len(registry.requests)
        read(daemon, big)
        drop_caches()
        read(daemon, big)
        assert len(registry.requests) == before


@contextlib.contextmanager
def quota(path: Path, disk: Path, mib: int) -> Iterator[Callable[[int], None]]:
    """`path` is part of a disk with room, and may use only so much of it; what it gives changes the bound. The kernel
    holds root to it, as btrfs does alone."""
    path.mkdir()
    disk.mkdir()
    image = disk.with_suffix(".image")
    with image.open("wb") as file:
        file.truncate(256 << 20)

    def limit(mib: int) -> None:
        run("btrfs", "qgroup", "limit", f"{mib}M", "0/256", disk)  # 256: the first subvolume

    run("mkfs.btrfs", "--quiet", image)
    with contextlib.ExitStack() as stack:
        run("mount", "-o", "loop", image, disk)
        stack.callback(run, "umount", disk)
        run("btrfs", "--quiet", "subvolume", "create", disk / "limited")
        run("btrfs", "quota", "enable", disk)
        run("mount", "--bind", disk / "limited", path)
        stack.callback(run, "umount", path)
        limit(mib)
        yield limit


def run(*words: str | Path) -> None:
    subprocess.run(words, check=True)


def test_a_quota_that_is_used_up_and_raised(tmp_path: Path, indexed: str, capfd: pytest.CaptureFixture[str]) -> None:
    """EDQUOT, from the kernel: as on a full disk, reads are right all along, after a power cut too."""
    toml = f"{indexed}[cache]\nmin_free_percent = 0\n"
    big = make_layer(files=24, size=256 << 10, seed=9)
    write_index(tmp_path / "indexes", big)
    with (
        quota(tmp_path / "root", tmp_path / "disk", 4) as limit,
        origin(big) as registry,
        Daemon(tmp_path, registry, toml) as daemon,
    ):
        daemon.prepare(big)
        for _ in range(2):
            read(daemon, big)
            drop_caches()
        assert daemon.status()["unstored_bytes"] and row(daemon, big)["state"] != "complete"
        err = capfd.readouterr().err
        sys.stderr.write(err)
        assert "store.full" in err and f"[Errno {errno.EDQUOT}]" in err
        limit(64)
        until(lambda: row(daemon, big)["state"] == "complete" and not daemon.status()["unstored_bytes"])
        with power_cut(daemon, big):
            (tmp_path / "config.toml").write_text((tmp_path / "config.toml").read_text() + _NO_STREAM)
        limit(4)  # a note of what was found right needs new room here, as any write does
        before, fetch = len(registry.requests), daemon.pid("fetch")
        for _ in range(2):
            read(daemon, big)
            drop_caches()
        assert daemon.pid("fetch") == fetch and len(registry.requests) > before
        limit(64)
        until(lambda: not daemon.status()["unstored_bytes"])
        read(daemon, big)
        drop_caches()
        before = len(registry.requests)
        read(daemon, big)
        assert len(registry.requests) == before and row(daemon, big)["state"] == "complete"


def test_unused_layers_make_room(tmp_path: Path, indexed: str, layers: list[Layer], capsys: Out) -> None:
    """By themselves, the oldest first, when the bound is passed; on command, all. What an image uses stays, although it
    is beyond the bound alone."""
    old, young, used = layers[:3]
    toml = f"{indexed}[cache]\nmax_gib = 0.001\nmin_free_percent = 0\n"
    with origin(*layers) as registry, Daemon(tmp_path, registry, toml) as daemon:
        daemon.prepare(old, young)
        forget(daemon)
        daemon.prepare(used)
        daemon.stop()  # it remembers what pulls have asked for, for a minute
        os.utime(directory(daemon, old) / "used", (1, 1))
        daemon.start()
        until(lambda: daemon.status()["cache"]["evicted"] == 1)
        assert not directory(daemon, old).exists()
        assert directory(daemon, young).exists(), "it was used a moment ago"
        assert main(["gc", "--dry-run", *where(daemon)]) == 0
        assert capsys.readouterr().out.startswith(f"would remove {young.digest[7:19]}")
        assert main(["gc", *where(daemon)]) == 0
        assert not directory(daemon, young).exists() and capsys.readouterr().err == ""
        read(daemon, used)


def test_the_removal_of_an_image_ends_its_fetches(tmp_path: Path, indexed: str, layers: list[Layer]) -> None:
    """A request that is on the wire is finished, and none follows."""
    big = make_layer(files=24, size=256 << 10, seed=9)
    write_index(tmp_path / "indexes", big)
    gate = threading.Event()
    behaviour = lambda request: Hold(after=60_000, until=gate)  # noqa: E731
    with origin(big, behaviour=behaviour) as registry, Daemon(tmp_path, registry, indexed) as daemon:
        daemon.prepare(big)
        until(lambda: row(daemon, big).get("background_bytes", 0) != 0)
        forget(daemon)
        begun = len(registry.requests)
        gate.set()
        until(lambda: row(daemon, big)["state"] == "partial" and _is_at_rest(daemon, big))
        assert len(registry.requests) == begun
        assert not (daemon.root / "m" / node_name(big.digest)).exists()


def _is_at_rest(daemon: Daemon, layer: Layer) -> bool:
    before = row(daemon, layer)["background_bytes"]
    time.sleep(0.3)
    return row(daemon, layer)["background_bytes"] == before


# -- flipped bits


def test_flipped_blocks_are_found_on_command_and_fetched_again(
    tmp_path: Path, indexed: str, layers: list[Layer], capsys: Out
) -> None:
    layer = layers[0]
    with origin(*layers) as registry, Daemon(tmp_path, registry, indexed) as daemon:
        daemon.prepare(layer)
        until(lambda: row(daemon, layer)["state"] == "complete")
        before = len(registry.requests)
        drop_caches()
        flip(directory(daemon, layer) / "data", 100_000)
        assert main(["verify", *where(daemon)]) == 1
        assert main(["verify", "--repair", layer.digest, *where(daemon)]) == 0
        assert "(fetched again)" in capsys.readouterr().out
        drop_caches()
        read(daemon, layer)
        until(lambda: row(daemon, layer)["state"] == "complete")
        assert 1 <= len(registry.requests) - before <= 2, "its span, and no more"
        assert main(["verify", *where(daemon)]) == 0


def test_what_the_disk_cannot_read_back_is_fetched_again(tmp_path: Path, indexed: str, layers: list[Layer]) -> None:
    """Here the end of the file is gone, and comes back; a container sees right bytes, and no I/O error."""
    layer = layers[0]
    with origin(*layers) as registry, Daemon(tmp_path, registry, indexed) as daemon:
        daemon.prepare(layer)
        until(lambda: row(daemon, layer)["state"] == "complete")
        drop_caches()
        before = len(registry.requests)
        os.truncate(directory(daemon, layer) / "data", 500_000)
        read(daemon, layer)
        assert len(registry.requests) > before


def test_flipped_metadata_and_indexes_reach_nobody(tmp_path: Path, indexed: str, layers: list[Layer]) -> None:
    """The layer is mounted again, from what the disk made of it: before the kernel sees it, it is right."""
    layer = layers[0]
    with origin(*layers) as registry, Daemon(tmp_path, registry, indexed) as daemon:
        daemon.prepare(layer)
        good = (directory(daemon, layer) / "meta").read_bytes()
        for name, offset in (("meta", 1500), ("index", 20), ("layer.json", 20)):
            forget(daemon)
            drop_caches()
            flip(directory(daemon, layer) / name, offset, 7)
            daemon.prepare(layer)
            assert (directory(daemon, layer) / "meta").read_bytes() == good
            read(daemon, layer)


def test_a_damaged_database_of_snapshots(tmp_path: Path, indexed: str, layers: list[Layer]) -> None:
    """Damage that shows while the daemon runs costs a restart of the service; and nothing of the file can be read when
    the daemon starts. Both times the snapshots of the last copy are there, and containers go on."""
    with origin(*layers) as registry, Daemon(tmp_path, registry, indexed) as daemon:
        path, copy = daemon.root / "metadata.db", daemon.root / "metadata.db.copy"
        daemon.prepare(layers[0])
        service = daemon.pid("service")
        until(lambda: copy.exists() and _rows(copy) == 1)
        with contextlib.closing(sqlite3.connect(path)) as other:  # what it writes makes the daemon look at the file
            with other:
                other.execute("UPDATE snapshots SET updated_ns = updated_ns + 1")
            os.truncate(path.with_name("metadata.db-wal"), 0)
            path.write_bytes(path.read_bytes()[:4096] + bytes(60_000))
            until(lambda: _asked(daemon) and daemon.pid("service") not in (0, service))
        until(lambda: _asked(daemon))
        _prepare_container(daemon, layers[0], "first")
        daemon.stop()
        for file in daemon.root.glob("metadata.db-*"):
            file.unlink()
        path.write_bytes(random.Random(1).randbytes(50_000))
        daemon.start()
        read(daemon, layers[0])
        _prepare_container(daemon, layers[0], "second")
        kept = [it for it in daemon.root.glob("metadata.db.damaged-*") if it.stat().st_size >= 50_000]
        assert len(kept) == 2


def _rows(database: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return int(connection.execute("SELECT count(*) FROM snapshots").fetchone()[0])


def _asked(daemon: Daemon) -> bool:
    """Have containerd's socket asked for something that takes a look into the database; whether there is an answer."""
    with daemon.snapshots() as stub:
        try:
            list(stub.List(snapshots_pb2.ListSnapshotsRequest(), timeout=5))
        except grpc.RpcError:
            return False
    return daemon.pid("service") != 0


# -- a power cut


def test_after_a_power_cut_layers_come_back_without_registry_and_credentials(
    tmp_path: Path, indexed: str, layers: list[Layer]
) -> None:
    """What is complete is served; what was lost of a data file is not taken for zeros; a layer that cannot be restored
    holds up no other, and comes back when the registry does."""
    whole, torn, lost, partial = layers
    away = threading.Event()

    def behaviour(request: Request) -> Action | None:
        return Status(503) if away.is_set() else None

    toml = f"{indexed}{_NO_STREAM}"
    with origin(*layers, behaviour=behaviour) as registry, Daemon(tmp_path, registry, toml) as daemon:
        for layer in layers:
            daemon.prepare(layer)
        for layer in (whole, torn, lost):
            read(daemon, layer)
        first, *others = partial.contents
        mount = daemon.root / "m" / node_name(partial.digest)
        assert (mount / first).read_bytes() == partial.contents[first]
        with power_cut(daemon, *layers):
            away.set()
            (tmp_path / "indexes").rename(tmp_path / "no indexes")
            size = (directory(daemon, torn) / "data").stat().st_size
            os.truncate(directory(daemon, torn) / "data", size // 2)  # zeros in the place of what was not synced
            os.truncate(directory(daemon, torn) / "data", size)
            flip(directory(daemon, whole) / "meta", 1500)  # they come back out of the index
            os.truncate(directory(daemon, lost) / "index", 100)
        before = len(registry.requests)
        read(daemon, whole)
        assert (mount / first).read_bytes() == partial.contents[first]
        assert (daemon.root / "m" / node_name(torn.digest) / "f0000").read_bytes() == torn.contents["f0000"]
        assert row(daemon, lost)["state"] == "none" and not (daemon.root / "m" / node_name(lost.digest)).is_mount()
        asked = {it.path for it in registry.requests[before:]}  # for the lost one, and for what its image is, all along
        assert not asked & {layer.path for layer in (whole, torn, partial)}
        waiting = [
            reader("read", daemon.root / "m" / node_name(torn.digest) / "f0005"),
            reader("mmap", mount / others[-1]),
        ]
        until(lambda: all(row(daemon, layer)["waiting_readers"] for layer in (torn, partial)))
        assert all(process.poll() is None for process in waiting), "no zeros for what is missing"
        (tmp_path / "no indexes").rename(tmp_path / "indexes")
        away.clear()
        digests = [process.communicate(timeout=60)[0].split() for process in waiting]
        assert digests == [expected(torn, "f0005"), expected(partial, others[-1])]
        for layer in (torn, partial):
            read(daemon, layer)
        daemon.prepare(lost)
        _prepare_container(daemon, lost, "container")
        read(daemon, lost)


def _prepare_container(daemon: Daemon, layer: Layer, key: str) -> None:
    """What containerd does for a container on the layer."""
    name = "sha256:" + hashlib.sha256(layer.digest.encode()).hexdigest()
    with daemon.snapshots() as stub:
        answer = stub.Prepare(snapshots_pb2.PrepareSnapshotRequest(key=key, parent=name))
    assert [mount.type for mount in answer.mounts] == ["overlay"]
