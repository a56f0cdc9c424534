"""The supervisor dies, and the whole daemon with it: while it stores its descriptors, forks, is upgraded. See `stack`.

A service manager starts it again, with what it had stored by then. Each test has a daemon of its own: what dies here is
the process that the others share. What dies at a start only is here, too.
"""

import contextlib
import signal
import sqlite3
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from snapshotter.blockstore import node_name
from tests.snapshotter.daemon import expected, make_layer, origin, reader, write_index
from tests.snapshotter.kills.stack import Stack, until
from tests.snapshotter.rangeserver import Hold
from tests.systemd.test_manager import _abort

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]

LAYER = make_layer(files=6, size=48 << 10, seed=77)
CONNECTION = (
    ("supervisor.listening", 1),
    ("supervisor.storing", 1),
    ("supervisor.storing", 3),
    ("supervisor.stored", 1),
)
FIRST_REQUEST = (("block.agreed", 1),)
RUNNING = (
    "supervisor.taken",
    "supervisor.forked",
    "supervisor.trying",
    "supervisor.executing",
    "supervisor.executed",
    "supervisor.replacing",
)
ABORT = ("supervisor.forgetting",)
NOTHING_STORED = ("service.loop-changed",)
SALVAGE = ("service.salvaging", "service.salvaged")


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """One that does not run yet; its registry answers once `gate` is open."""
    write_index(tmp_path / "indexes", LAYER, 1 << 14)
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n[fetch]\nbackground = false\n[containerd]\naddress = ""\n'
    with origin(LAYER) as server:
        yield Stack(tmp_path, server, toml)


def _require_whole(stack: Stack) -> None:
    """One connection is stored, and no other."""
    names = [name.partition(".")[::2] for name in stack.daemon.manager.stored]
    ours = [(what, tag) for what, tag in names if what in ("device", "mount", "ring", "doorbell")]
    assert len(ours) == 4 and len({tag for _, tag in ours}) == 1


def _pull_read_and_forget(stack: Stack) -> None:
    stack.prepare(LAYER)
    stack.read(LAYER)
    stack.forget(LAYER)
    stack.require_clean()


def test_one_first_start_after_the_other(stack: Stack) -> None:
    """A connection of which not all is stored is closed, and another one opened. The last one dies with the first
    request of the kernel, which its successor answers."""
    stack.arm(CONNECTION[0][0], CONNECTION[0][1])
    with stack.running(dies=True):
        for (point, _), (later, times) in pairwise((*CONNECTION, *FIRST_REQUEST)):
            stack.await_death(point)
            stack.arm(later, times)
            stack.daemon.manager.start()
        stack.require(later)
        stack.daemon.manager.until("READY=1")
        _require_whole(stack)
        _pull_read_and_forget(stack)


def test_a_daemon_in_use(stack: Stack) -> None:
    """A reader waits for the registry all the while, and gets its bytes from the last of many daemons."""
    gate = threading.Event()
    stack.daemon.registry.behaviour = lambda request: Hold(after=-1, until=gate)
    with stack.running():
        mount = stack.prepare(LAYER)
        names = sorted(LAYER.contents)
        process = reader("read", *(mount / name for name in names))
        until(lambda: stack.status()["requests_in_flight"] > 0, "nobody reads")
        manager = stack.daemon.manager
        for point in RUNNING:
            stack.arm(point)
            if point == "supervisor.taken":
                manager.restart(signal.SIGKILL)
            elif point == "supervisor.forked":
                stack.die("fetch")
            else:
                manager.process.send_signal(signal.SIGHUP)
            stack.start_after_death(point)
            _require_whole(stack)
            assert process.poll() is None, f"it did not wait over a death at {point}"
        gate.set()
        digests, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and digests.split() == expected(LAYER, *names)
        stack.forget(LAYER)
        stack.require_clean()


@pytest.mark.parametrize("point", ABORT)
def test_an_aborted_connection(stack: Stack, tmp_path: Path, point: str) -> None:
    with stack.running():
        stack.prepare(LAYER)
        stack.read(LAYER)
        stack.arm(point, 2)
        _abort(tmp_path, stack.daemon)
        stack.start_after_death(point)
        _require_whole(stack)
        until(lambda: _is_readable(stack.mount(LAYER)), "the mount does not come back")
        stack.read(LAYER)
        stack.forget(LAYER)
        stack.require_clean()


@pytest.mark.parametrize("point", NOTHING_STORED)
def test_a_mount_gets_the_file_of_a_new_connection(stack: Stack, point: str) -> None:
    """One that is killed before it has asked for direct I/O again leaves that to its successor. (Linux 6.18 keeps it by
    itself; that a successor asks for it is in `test_attach`.)"""
    with stack.running():
        mount = stack.prepare(LAYER)
        manager = stack.daemon.manager
        with (mount / min(LAYER.contents)).open("rb"):
            manager.stop(signal.SIGKILL)
            manager.drop()
            stack.arm(point)
            manager.start()
            stack.require(point)
            manager.until("READY=1")
            [device] = [
                path.parent
                for path in Path("/sys/block").glob("loop*/loop/backing_file")
                if path.read_text().strip() == f"/{node_name(LAYER.digest)}"
            ]
            assert (device / "dio").read_text().strip() == "1"
            stack.read(LAYER)
        stack.forget(LAYER)
        stack.require_clean()


@pytest.mark.parametrize("point", SALVAGE)
def test_a_damaged_store(stack: Stack, point: str) -> None:
    """A service dies while it makes the store of snapshots anew: no row is lost, nothing is made anew twice."""
    with stack.running():
        stack.prepare(LAYER)
        manager = stack.daemon.manager
        manager.stop(signal.SIGKILL)
        store = stack.daemon.root / "metadata.db"
        store.with_name("metadata.db.copy").unlink(missing_ok=True)
        with contextlib.closing(sqlite3.connect(store)) as database:
            [(page,)] = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'snapshots_layer'")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        with store.open("r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(bytes(4096))
        stack.arm(point)
        manager.start()
        stack.require(point)
        manager.until("READY=1")
        aside = [path.name for path in stack.daemon.root.glob("metadata.db.damaged-*")]
        assert len([name for name in aside if not name.endswith(("-wal", "-shm"))]) == 1
        assert not store.with_name("metadata.db.rebuilt").exists()
        stack.read(LAYER)
        requests = len(stack.daemon.registry.requests)
        stack.prepare(LAYER)
        assert len(stack.daemon.registry.requests) == requests, "its snapshot was known"
        assert stack.status()["prepares"]["reused"] == 1
        stack.forget(LAYER)
        stack.require_clean()


def _is_readable(mount: Path) -> bool:
    try:
        return (mount / min(LAYER.contents)).read_bytes() == LAYER.contents[min(LAYER.contents)]
    except OSError:
        return False
