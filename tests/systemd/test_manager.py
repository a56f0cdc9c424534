"""The daemon under a service manager that keeps its descriptors: restarts and upgrades are a pause, never an error.

The manager is a small true one (`manager.py`), so these tests are quick; `test_systemd.py` has systemd itself.
"""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from proto import snapshots_pb2
from snapshotter.rpc import call
from tests.snapshotter.daemon import (
    BOOTSEER,
    Daemon,
    Layer,
    drop_caches,
    expected,
    make_layer,
    origin,
    reader,
    write_index,
)
from tests.snapshotter.rangeserver import Hold
from tests.systemd.managed import Managed

pytestmark = pytest.mark.system

_NO_STREAM = "[fetch]\nbackground = false\nspan_growth_kib = 256\n"
_PATIENCE_S = 60.0
_CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=32, size=256 << 10)


@pytest.fixture
def toml(tmp_path: Path, layer: Layer) -> str:
    """A configuration with the layer's index: a layer that is read by and by."""
    write_index(tmp_path / "indexes", layer)
    return f'[index]\nurl = "{tmp_path}/indexes"\n{_NO_STREAM}'


class Gate:
    """A registry's behaviour: nothing comes before `open`."""

    def __init__(self) -> None:
        self.open = threading.Event()

    def __call__(self, request: object) -> Hold:
        return Hold(after=-1, until=self.open)


@pytest.mark.parametrize(("number", "way"), [(signal.SIGTERM, "loop"), (signal.SIGKILL, "file")])
def test_readers_wait_while_the_daemon_is_started_again(
    tmp_path: Path, layer: Layer, toml: str, number: int, way: str
) -> None:
    """One reader waits for the registry, another begins while no daemon runs; both get their bytes from the next."""
    gate = Gate()
    toml = f'{toml}[mount]\nattach = "{way}"\n'
    with origin(layer, behaviour=gate) as registry, Managed(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        first = reader("read", mount / "f0001", mount / "f0002")
        _until(lambda: daemon.status()["requests_in_flight"] > 0)
        kept = dict(daemon.manager.stored)
        what = ["device", "doorbell", "mount", "passed", "ring", "socket-containerd"]
        assert sorted(name.partition(".")[0] for name in kept) == what
        daemon.manager.stop(number)
        second = reader("mmap", mount / "f0020")
        gate.open.set()
        time.sleep(0.2)
        assert first.poll() is None and second.poll() is None, "it did not wait"
        daemon.manager.start()
        daemon.manager.until("READY=1")
        assert _digests(first) == expected(layer, "f0001", "f0002")
        assert _digests(second) == expected(layer, "f0020")
        assert daemon.manager.stored == kept, "the same connection"
        assert "connection.taken" in daemon.manager.log and "attach.healed" not in daemon.manager.log
        assert daemon.status()["layers"][0]["mount"] == str(mount)


@pytest.mark.parametrize("gone", ["service", "daemon, killed", "daemon, ended"])
def test_calls_wait_while_nobody_serves(tmp_path: Path, toml: str, gone: str) -> None:
    """Who connects to containerd's socket meanwhile is not refused: whoever serves next answers."""
    with origin() as registry, Managed(tmp_path, registry, toml) as daemon, ThreadPoolExecutor(1) as pool:
        supervisor, service = daemon.pid("supervisor"), daemon.pid("service")
        if gone == "service":
            os.kill(supervisor, signal.SIGSTOP)
            os.kill(service, signal.SIGKILL)
            _until(lambda: _state(service) == "Z")
        else:
            daemon.manager.stop(signal.SIGKILL if "killed" in gone else signal.SIGTERM)
        asked = pool.submit(_list, daemon)
        _until(lambda: _waiting(daemon.run / "bootseer.sock") == 1)
        assert not asked.done()
        if gone == "service":
            os.kill(supervisor, signal.SIGCONT)
        else:
            daemon.manager.start()
        assert asked.result(_PATIENCE_S) == []
        daemon.manager.until("READY=1")


def test_another_socket_comes_into_force_with_a_reload(tmp_path: Path, toml: str) -> None:
    with origin() as registry, Managed(tmp_path, registry, toml) as daemon:
        before = os.fstat(daemon.manager.stored["socket-containerd"]).st_ino
        config = tmp_path / "config.toml"
        config.write_text(f'socket = "{tmp_path}/elsewhere"\n{config.read_text()}')
        assert daemon.reload().returncode == 0, daemon.manager.log[-4000:]
        (daemon.run / "bootseer.sock").unlink()
        (tmp_path / "elsewhere").rename(daemon.run / "bootseer.sock")
        assert _list(daemon) == []
        assert os.fstat(daemon.manager.stored["socket-containerd"]).st_ino != before


def test_a_recorded_container_goes_on(tmp_path: Path, layer: Layer, toml: str) -> None:
    """Its private mount, on which it was about to start, is answered by the next daemon, and its recording goes on."""
    gate = Gate()
    with origin(layer, behaviour=gate) as registry, Managed(tmp_path, registry, toml) as daemon:
        daemon.prepare(layer)
        name = "sha256:" + hashlib.sha256(layer.digest.encode()).hexdigest()
        with daemon.snapshots() as snapshots:
            snapshots.Prepare(snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key="default/9/box", parent=name))
        [private] = (daemon.root / "m").glob("*.??")
        reading = reader("read", private / "f0000", private / "f0001")
        _until(lambda: daemon.status()["requests_in_flight"] > 0)
        daemon.manager.restart(signal.SIGKILL)
        gate.open.set()
        assert _digests(reading) == expected(layer, "f0000", "f0001")
        daemon.manager.until("READY=1")
        recordings = daemon.status()["recordings"]
        assert len(recordings["open"]) == 1 and not recordings["discarded"], recordings


def test_one_restart_after_the_other_under_readers(tmp_path: Path, layer: Layer, toml: str) -> None:
    """Restarts, kills of the daemon and of its workers, and reloads in turn, while all is read again and again."""
    with origin(layer) as registry, Managed(tmp_path, registry, toml) as daemon:
        paths = [daemon.prepare(layer) / name for name in sorted(layer.contents)]
        for turn in range(3):
            drop_caches()
            reading = reader("read" if turn % 2 else "mmap", *paths)
            if turn == 0:
                daemon.manager.restart(signal.SIGKILL)
            elif turn == 1:
                daemon.manager.restart()
            else:
                assert daemon.reload().returncode == 0
            daemon.manager.until("READY=1")
            daemon.kill("block")
            assert _digests(reading) == expected(layer, *sorted(layer.contents))


def test_a_connection_that_was_aborted_is_not_stored_any_more(tmp_path: Path, layer: Layer, toml: str) -> None:
    with origin(layer) as registry, Managed(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        before = _connection(daemon)
        assert (mount / "f0001").read_bytes() == layer.contents["f0001"]
        _abort(tmp_path, daemon)
        _until(lambda: len(_connection(daemon)) == 4 and not before & _connection(daemon))
        daemon.manager.until("READY=1", 2)
        assert (mount / "f0009").read_bytes() == layer.contents["f0009"]
        daemon.manager.restart()
        daemon.manager.until("READY=1")
        assert (mount / "f0010").read_bytes() == layer.contents["f0010"]


def test_half_of_what_was_stored_is_of_no_use(tmp_path: Path, layer: Layer, toml: str) -> None:
    """As when FileDescriptorStoreMax is too small: a new connection, under the same mounts. (That nothing is stored is
    in `test_systemd.py`, after a stop.)"""
    with origin(layer) as registry, Managed(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        with (mount / "f0003").open("rb") as held:
            assert held.read(4096) == layer.contents["f0003"][:4096]
            daemon.manager.stop()
            [ring] = [name for name in daemon.manager.stored if name.startswith("ring.")]
            os.close(daemon.manager.stored.pop(ring))
            before = _connection(daemon)
            daemon.manager.start()
            daemon.manager.until("READY=1")
            assert held.read() == layer.contents["f0003"][4096:]
        assert len(_connection(daemon)) == 4 and not before & _connection(daemon)
        assert "attach.healed" in daemon.manager.log


def test_a_ring_of_another_version_is_not_gone_on_with(tmp_path: Path, layer: Layer, toml: str) -> None:
    with origin(layer) as registry, Managed(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        [ring] = [fd for name, fd in daemon.manager.stored.items() if name.startswith("ring.")]
        os.pwrite(ring, b"\xff\xff\xff\xff", 16)
        done = daemon.reload()
        assert done.returncode == 1 and "nothing has changed" in done.stderr
        assert "that needs a restart" in daemon.manager.log
        daemon.manager.restart()
        daemon.manager.until("READY=1")
        assert (mount / "f0004").read_bytes() == layer.contents["f0004"]


def test_a_reload_keeps_the_process_and_replaces_the_workers(tmp_path: Path, layer: Layer, toml: str) -> None:
    """With its configuration: what is new in it holds afterwards."""
    gate = Gate()
    with origin(layer, behaviour=gate) as registry, Managed(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        waiting = reader("read", mount / "f0005")
        _until(lambda: daemon.status()["requests_in_flight"] > 0)
        before = {row["name"]: row["pid"] for row in daemon.status()["processes"]}
        config = tmp_path / "config.toml"
        config.write_text(config.read_text() + '[log]\nformat = "json"\n')
        done = daemon.reload()
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        daemon.manager.until("READY=1", 2)
        assert any(text.startswith("RELOADING=1\nMONOTONIC_USEC=") for text in daemon.manager.messages)
        after = {row["name"]: row for row in daemon.status()["processes"]}
        assert after["supervisor"]["pid"] == before["supervisor"] == daemon.manager.process.pid
        assert not {after[name]["pid"] for name in ("block", "fetch", "service")} & set(before.values())
        assert {row["restarts"] for row in after.values()} == {0}, "that was no death"
        assert '"message": "upgrade.done' in daemon.manager.log
        gate.open.set()
        assert _digests(waiting) == expected(layer, "f0005")


def test_a_configuration_that_does_not_work_is_refused(tmp_path: Path, layer: Layer, toml: str) -> None:
    with origin(layer) as registry, Managed(tmp_path, registry, toml) as daemon:
        mount = daemon.prepare(layer)
        before = [row["pid"] for row in daemon.status()["processes"]]
        config = tmp_path / "config.toml"
        good = config.read_text()
        (tmp_path / "good.toml").write_text(good)  # for the command, which would otherwise see the mistake itself
        for wrong in ("rot = 1\n" + good, good.replace(f'root = "{tmp_path}/root"', f'root = "{tmp_path}/other"')):
            config.write_text(wrong)
            words = [BOOTSEER, "reload", "--config", str(tmp_path / "good.toml")]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            assert done.returncode == 1 and "cannot take over" in done.stderr and "Traceback" not in done.stderr
        assert "bootseer: " in daemon.manager.log and "rot" in daemon.manager.log
        assert "`root` was another directory" in daemon.manager.log
        assert [row["pid"] for row in daemon.status()["processes"]] == before
        assert (mount / "f0006").read_bytes() == layer.contents["f0006"]


_LOADED = """
import sys
from snapshotter.config import Config
from snapshotter.daemon import _load_block, _load_fetch, _load_service
_load_block(), _load_fetch(Config()), _load_service()
print(*{name.partition(".")[0] for name in sys.modules})
"""


@pytest.fixture(scope="module")
def needed() -> list[Path]:
    """What a daemon has loaded that is not Python's own: files and directories."""
    names = subprocess.run([sys.executable, "-c", _LOADED], capture_output=True, text=True, check=True).stdout.split()
    site = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    found = [path for name in names for path in (site / name, *site.glob(f"{name}.*")) if path.exists()]
    own = [_CHECKOUT / name for name in ("blockindex", "proto", "snapshotter")]
    return [*own, *found, *site.glob("bootseer-*"), *site.glob("*.libs")]


def _install(needed: list[Path], target: Path) -> Path:
    """Put a copy of all that into a directory of its own, as pip would: the program."""
    for source in needed:
        if source.is_dir():
            shutil.copytree(source, target / source.name, copy_function=_link)
        else:
            _link(str(source), str(target / source.name))
    program = target / "bootseer"
    standard = [path for path in sys.path if path.startswith(sys.base_prefix) and "site-packages" not in path]
    lines = f"#!{sys.executable} -I\nimport sys\nsys.path = [{str(target)!r}, *{standard!r}]\n"
    program.write_text(f"{lines}from snapshotter.cli import entry\nentry()\n")
    program.chmod(0o755)
    return program


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _ruin(directory: Path) -> None:
    """Every file of the installation is replaced by one that is neither Python nor a library."""
    for path in list(directory.rglob("*")):
        if path.is_file():
            mode = path.stat().st_mode
            path.unlink()
            path.write_bytes(b"\x00\x01 this is no program \xff\n")
            path.chmod(mode)


def test_what_is_put_on_disk_does_not_reach_a_running_daemon_before_a_reload(
    tmp_path: Path, layer: Layer, toml: str, needed: list[Path]
) -> None:
    """Ruin every file of the version that runs, then kill each worker: their successors are of the code that was
    loaded. A reload is refused. Once `current` leads to another version, as after deploy/install, it is taken up."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        _install(needed, tmp_path / name)
    version = tmp_path / "new" / "snapshotter" / "version.py"
    text = version.read_text().replace("VERSION = _loaded()", 'VERSION = "the next one"')
    version.unlink()  # it is a link to ours
    version.write_text(text)
    current = tmp_path / "current"
    current.symlink_to("old")
    other = make_layer(files=4, size=64 << 10, seed=7)
    with origin(layer, other) as registry, Managed(tmp_path, registry, toml, f"{current}/bootseer") as daemon:
        mount = daemon.prepare(layer)
        loaded = daemon.status()["version"]
        _ruin(tmp_path / "old")
        for worker in ("block", "fetch", "service"):
            daemon.kill(worker)
        daemon.manager.until("READY=1", 2)
        second = daemon.prepare(other)  # has no index: streamed, and indexed on the way
        paths = [mount / name for name in sorted(layer.contents)]
        assert _digests(reader("read", *paths)) == expected(layer, *sorted(layer.contents))
        assert (second / "f0001").read_bytes() == other.contents["f0001"]
        assert daemon.status()["version"] == loaded
        assert len(call(daemon.run / "control.sock", "cache", 30)) == 2
        assert "ModuleNotFoundError" not in daemon.manager.log and "ImportError" not in daemon.manager.log
        refused = daemon.reload()
        assert refused.returncode == 1 and "nothing has changed" in refused.stderr, refused.stderr
        drop_caches()
        reading = reader("read", *paths)
        current.unlink()
        current.symlink_to("new")
        assert daemon.reload().returncode == 0, daemon.manager.log[-4000:]
        assert daemon.status()["version"] == "the next one"
        assert _digests(reading) == expected(layer, *sorted(layer.contents))


def test_without_a_daemon_reload_says_so(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}/run"\n')
    words = [BOOTSEER, "reload", "--config", str(tmp_path / "c.toml")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "no daemon runs" in done.stderr


def test_check_looks_only(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}/run"\n')
    words = [BOOTSEER, "serve", "--check", "--config", str(tmp_path / "c.toml")]
    assert subprocess.run(words, check=False).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.toml"]
    (tmp_path / "c.toml").write_text("rot = 1\n")
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "rot" in done.stderr


def _digests(reading: subprocess.Popen[str]) -> list[str]:
    """What a reader has printed when it is through; it must not fail."""
    digests, _ = reading.communicate(timeout=120)
    assert reading.returncode == 0, "a reader got an error"
    return digests.split()


def _abort(directory: Path, daemon: Daemon) -> None:
    """Have the kernel end the daemon's connection."""
    control = directory / "connections"
    control.mkdir()
    subprocess.run(["mount", "-t", "fusectl", "none", str(control)], check=True)
    try:
        fds = Path(f"/proc/{daemon.pid('service')}/fd")
        minors = {os.minor(fd.stat().st_dev) for fd in fds.iterdir() if fd.is_symlink() and os.readlink(fd) == "/"}
        [minor] = minors
        (control / str(minor) / "abort").write_text("1")
    finally:
        subprocess.run(["umount", str(control)], check=True)


def _list(daemon: Daemon) -> list[object]:
    """What List answers to somebody who connects now."""
    with daemon.snapshots() as snapshots:
        return list(snapshots.List(snapshots_pb2.ListSnapshotsRequest(snapshotter="b"), timeout=_PATIENCE_S))


def _waiting(path: Path) -> int:
    """Connections that wait in the backlog of the socket: they are connected, and have no inode yet."""
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sum(row[6:] == ["0", str(path)] for row in rows)


def _state(pid: int) -> str:
    """Of a process, as ps shows it."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _connection(daemon: Managed) -> set[str]:
    """What is stored of the FUSE connection."""
    return {name for name in daemon.manager.stored if name.partition(".")[2]}


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
