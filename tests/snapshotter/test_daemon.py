"""The daemon under attack: killed workers, killed readers, dead registries. Real kernel, real FUSE, real mounts."""

import contextlib
import hashlib
import os
import signal
import socket
import sqlite3
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotter.errors import SnapshotterError
from tests.snapshotter.daemon import (
    Daemon,
    Layer,
    drop_caches,
    expected,
    make_layer,
    origin,
    reader,
    write_index,
)
from tests.snapshotter.rangeserver import Action, Hold, Request, Status

pytestmark = pytest.mark.system

_NO_STREAM = "[fetch]\nbackground = false\nspan_growth_kib = 256\n"


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=64, size=512 << 10)


@pytest.fixture(scope="module")
def small() -> Layer:
    return make_layer(files=16, size=64 << 10, seed=1)


@pytest.fixture
def indexed(tmp_path: Path, layer: Layer) -> Iterator[str]:
    """TOML that points to the layer's index."""
    write_index(tmp_path / "indexes", layer)
    yield f'[index]\nurl = "{tmp_path}/indexes"\n'


def _all(layer: Layer) -> list[str]:
    return sorted(layer.contents)


@pytest.mark.parametrize("resend", ["auto", "never"])
def test_killed_workers_are_only_a_pause(tmp_path: Path, layer: Layer, indexed: str, resend: str) -> None:
    """Twenty `kill -9` of the block server and twenty of the fetch process while a cold layer is read whole."""

    def slow(request: Request) -> Action | None:
        time.sleep(0.05)
        return None

    toml = f'resend = "{resend}"\n{indexed}{_NO_STREAM}'
    with origin(layer, behaviour=slow) as registry, Daemon(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        reading = reader("read", *(mount / name for name in _all(layer)))
        for kills in range(40):
            daemon.kill("block" if kills % 2 else "fetch")
        assert reading.poll() is None, "the layer was complete before the last kill: make the registry slower"
        digests, _ = reading.communicate(timeout=120)
        assert reading.returncode == 0
        assert digests.split() == expected(layer, *_all(layer))
        restarts = {row["name"]: row["restarts"] for row in daemon.status()["processes"]}
        assert restarts["block"] >= 20 and restarts["fetch"] >= 20


def test_hits_survive_a_killed_block_server(tmp_path: Path, layer: Layer, indexed: str) -> None:
    """The same on a complete layer, where the block server itself answers, with the page cache dropped each round."""
    with origin(layer) as registry, Daemon(tmp_path, registry, indexed) as daemon:
        mount = daemon.prepare(layer)
        paths = [mount / name for name in _all(layer)]
        for _ in range(5):
            drop_caches()
            reading = reader("read", *paths)
            for _ in range(4):
                daemon.kill("block")
            digests, _ = reading.communicate(timeout=120)
            assert digests.split() == expected(layer, *_all(layer))


@pytest.mark.parametrize("way", ["loop", "file"])
@pytest.mark.parametrize("how", ["read", "mmap"])
def test_killed_readers_leave_no_wrong_pages(tmp_path: Path, layer: Layer, indexed: str, how: str, way: str) -> None:
    """Twenty readers SIGKILLed while they wait for the network; whoever reads next gets the right bytes."""
    gate = threading.Event()
    toml = f'{indexed}{_NO_STREAM}[mount]\nattach = "{way}"\n'
    behaviour = lambda request: Hold(after=2000, until=gate)  # noqa: E731
    with origin(layer, behaviour=behaviour) as registry, Daemon(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        names = _all(layer)[:40:2]
        readers = [reader(how, mount / name) for name in names]
        _until(lambda: daemon.status()["layers"][0]["waiting_readers"] >= len(readers))
        for process in readers:
            process.kill()
        for process in readers:
            assert process.wait(20) == -signal.SIGKILL  # they die although their bytes have not come
            assert process.stdout is not None
            process.stdout.close()
        gate.set()
        after = reader("mmap" if how == "read" else "read", *(mount / name for name in _all(layer)))
        digests, _ = after.communicate(timeout=120)
        assert digests.split() == expected(layer, *_all(layer))


def test_readers_of_a_dead_layer_hold_up_nobody_else(tmp_path: Path, layer: Layer, small: Layer, indexed: str) -> None:
    """200 readers wait for a registry that answers nothing; a complete layer is read through and through meanwhile."""
    gate = threading.Event()

    def dead(request: Request) -> Action | None:
        return Hold(after=-1, until=gate) if layer.digest in request.path else None

    with origin(layer, small, behaviour=dead) as registry, Daemon(tmp_path, registry, indexed + _NO_STREAM) as daemon:
        complete = daemon.prepare(small)  # has no index: streamed whole
        lost = daemon.prepare(layer)
        stuck = subprocess.Popen(
            ["python3", "-c", _MANY_READERS, "200", *(str(lost / name) for name in _all(layer))],
            stdout=subprocess.DEVNULL,
        )
        try:
            _until(lambda: _waiting(daemon, layer) >= _LOOP_DEPTH)
            for _ in range(20):
                drop_caches()
                for name in small.contents:
                    assert (complete / name).read_bytes() == small.contents[name]
            assert _waiting(daemon, layer) >= _LOOP_DEPTH
        finally:
            stuck.kill()
            gate.set()  # those beyond the loop's depth wait for a request of theirs and cannot be killed before
            stuck.wait(20)


_LOOP_DEPTH = 120  # a loop device passes on at most 128 requests; the other readers wait in the block layer

_MANY_READERS = """
import os, sys, threading
count, *paths = sys.argv[1:]
def read(number):
    fd = os.open(paths[number % len(paths)], os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    os.pread(fd, 4096, number // len(paths) * 65536)
threads = [threading.Thread(target=read, args=(number,)) for number in range(int(count))]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.parametrize("way", ["loop", "file"])
def test_a_reader_gets_an_error_after_the_stated_time_and_the_right_bytes_later(
    tmp_path: Path, layer: Layer, indexed: str, way: str
) -> None:
    """The kernel must not take the failed read for pages of zeros, as buffered file-backed mounts do."""
    broken = threading.Event()
    broken.set()
    behaviour = lambda request: Status(503) if broken.is_set() else None  # noqa: E731
    toml = f'{indexed}{_NO_STREAM}read_timeout_s = 2.0\n[mount]\nattach = "{way}"\n'
    with origin(layer, behaviour=behaviour) as registry, Daemon(tmp_path, registry, toml) as daemon:
        path = daemon.prepare(layer) / "f0003"
        with pytest.raises(OSError, match="Input/output error"):
            path.read_bytes()
        broken.clear()
        assert path.read_bytes() == layer.contents["f0003"]


def test_wrong_bytes_from_the_registry_never_reach_a_reader(tmp_path: Path, layer: Layer, indexed: str) -> None:
    lies = 3
    start = len(layer.blob) // 2

    def lying(request: Request) -> Action | None:
        nonlocal lies
        if not lies or request.range is None:
            return None
        lies -= 1
        first, end = request.range
        assert end is not None
        part = bytearray(layer.blob[first:end])
        part[len(part) // 2] ^= 1
        headers = {"Content-Range": f"bytes {first}-{end - 1}/{len(layer.blob)}"}
        return Status(206, headers, bytes(part))

    assert start
    with origin(layer, behaviour=lying) as registry, Daemon(tmp_path, registry, indexed + _NO_STREAM) as daemon:
        mount = daemon.prepare(layer)
        for name in ("f0000", "f0031", "f0063"):
            assert (mount / name).read_bytes() == layer.contents[name]
        assert not lies
        assert daemon.status()["layers"][0]["failures"] == 3


def test_a_new_daemon_brings_live_mounts_back(tmp_path: Path, layer: Layer, indexed: str) -> None:
    """A container that still holds a layer of a daemon that has ended goes on with the next one."""
    with origin(layer) as registry, Daemon(tmp_path, registry, indexed + _NO_STREAM) as daemon:
        mount = daemon.prepare(layer)
        with (mount / "f0001").open("rb") as held:
            assert held.read(4096) == layer.contents["f0001"][:4096]
            daemon.stop(signal.SIGKILL)
            daemon.start()
            assert held.read() == layer.contents["f0001"][4096:]
        assert (mount / "f0050").read_bytes() == layer.contents["f0050"]


def test_a_service_killed_in_the_middle_of_a_removal_unmounts_the_layer_later(tmp_path: Path, small: Layer) -> None:
    with origin(small) as registry, Daemon(tmp_path, registry) as daemon:
        mount = daemon.prepare(small)
        with contextlib.closing(sqlite3.connect(daemon.root / "metadata.db")) as database, database:
            database.execute("DELETE FROM snapshots")  # the row is gone, the mount is not yet
        daemon.kill("service")
        _until(lambda: not mount.exists())
        _until(lambda: _listens(daemon.run / "bootseer.sock"))
        assert daemon.prepare(small) == mount
        assert (mount / "f0001").read_bytes() == small.contents["f0001"]


@pytest.mark.parametrize("way", ["loop", "file"])
def test_an_aborted_connection_is_replaced(tmp_path: Path, layer: Layer, indexed: str, way: str) -> None:
    """By `echo 1 > abort`, or by the kernel's own time-out: the mounts come back without anybody's help."""
    control = tmp_path / "connections"
    control.mkdir()
    toml = f'{indexed}{_NO_STREAM}[mount]\nattach = "{way}"\n'
    with _fusectl(control), origin(layer) as registry, Daemon(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        assert (mount / "f0001").read_bytes() == layer.contents["f0001"]
        before = daemon.pid("block")
        (control / _connection(daemon) / "abort").write_text("1")
        _until(lambda: _pid_or_0(daemon) not in (0, before) and (daemon.run / "bootseer.sock").exists())
        assert _read_when_mounted(mount / "f0050") == layer.contents["f0050"]
        drop_caches()
        assert (mount / "f0001").read_bytes() == layer.contents["f0001"]


@contextlib.contextmanager
def _fusectl(directory: Path) -> Iterator[None]:
    """The kernel's directory of FUSE connections."""
    subprocess.run(["mount", "-t", "fusectl", "none", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def _connection(daemon: Daemon) -> str:
    """The name of the daemon's connection there: the minor number of its mount, the one directory that it holds."""
    directory = f"/proc/{daemon.pid('service')}/fd"
    minors = set()
    for number in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed between the listing and the look
            if os.readlink(f"{directory}/{number}") == "/":
                minors.add(os.minor(os.stat(f"{directory}/{number}").st_dev))
    [minor] = minors
    return str(minor)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(path)) == 0


def _pid_or_0(daemon: Daemon) -> int:
    try:
        return daemon.pid("block")
    except SnapshotterError:
        return 0


def _read_when_mounted(file: Path) -> bytes:
    deadline = time.monotonic() + 20
    while True:
        try:
            return file.read_bytes()
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_new_daemon_mounts_file_backed_layers_anew(tmp_path: Path, layer: Layer, indexed: str) -> None:
    """The old mount is dead for good: the next container must not get it."""
    toml = f'{indexed}{_NO_STREAM}[mount]\nattach = "file"\n'
    with origin(layer) as registry, Daemon(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        assert (mount / "f0001").read_bytes() == layer.contents["f0001"]
        daemon.stop(signal.SIGKILL)
        daemon.start()
        _until(lambda: mount.is_mount() and (mount / "f0050").read_bytes() == layer.contents["f0050"])
        drop_caches()
        assert (mount / "f0001").read_bytes() == layer.contents["f0001"]


def test_after_a_reboot_local_bytes_are_checked_before_they_are_served(
    tmp_path: Path, layer: Layer, indexed: str
) -> None:
    with origin(layer) as registry, Daemon(tmp_path, registry, indexed + _NO_STREAM) as daemon:
        mount = daemon.prepare(layer)
        names = _all(layer)[:32]
        for name in names:
            assert (mount / name).read_bytes() == layer.contents[name]
        daemon.stop()
        subprocess.run(["umount", str(mount)], check=True)
        (daemon.root / "boot_id").write_text("another boot")
        data = next((daemon.root / "layers").glob("*/data"))
        with data.open("r+b") as file:  # a page that the power cut ate
            file.write(bytes(4096))
        before = len(registry.requests)
        daemon.start()
        for name in names:
            assert (mount / name).read_bytes() == layer.contents[name]
        fetched = len(registry.requests) - before
        assert 1 <= fetched <= 3  # the broken piece's span, not everything


def test_two_daemons_cannot_share_a_run_directory(tmp_path: Path, small: Layer) -> None:
    with origin(small) as registry, Daemon(tmp_path, registry) as daemon:
        other = Daemon(tmp_path, registry)
        with pytest.raises(AssertionError, match="ended at its start"):
            os.rename(daemon.run / "control.sock", daemon.run / "hidden")
            try:
                other.start()
            finally:
                other.stop()
                os.rename(daemon.run / "hidden", daemon.run / "control.sock")


def test_removing_the_last_snapshot_unmounts_the_layer_and_keeps_its_blocks(tmp_path: Path, small: Layer) -> None:
    from proto import snapshots_pb2

    with origin(small) as registry, Daemon(tmp_path, registry) as daemon:
        mount = daemon.prepare(small)
        assert os.path.ismount(mount)
        name = "sha256:" + hashlib.sha256(small.digest.encode()).hexdigest()
        with daemon.snapshots() as snapshots:
            snapshots.Remove(snapshots_pb2.RemoveSnapshotRequest(snapshotter="b", key=name))
            snapshots.Cleanup(snapshots_pb2.CleanupRequest(snapshotter="b"))
        assert not os.path.ismount(mount)
        before = len(registry.requests)
        assert (daemon.prepare(small) / "f0000").read_bytes() == small.contents["f0000"]
        assert len(registry.requests) == before


def _waiting(daemon: Daemon, layer: Layer) -> int:
    return sum(row["waiting_readers"] for row in daemon.status()["layers"] if row["digest"] == layer.digest)


def _until(condition: object, patience_s: float = 30.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)
