"""The unit under real systemd: readers go on through restart, kill and reload, with the right bytes and no error."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blockindex.codec import index_name
from tests.snapshotter.daemon import Daemon, encoded_index
from tests.systemd.machine import Machine
from tests.systemd.registry import served_layer

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]  # the first time a Debian is put together

_CHECKOUT = Path(__file__).resolve().parents[2]
_NEWER = ("FileDescriptorStorePreserve", "RestartSteps", "RestartMaxDelaySec")
"""What systemd knows from 254 on."""


class Node(Daemon):
    """The daemon of a machine, seen from here."""

    def __init__(self, machine: Machine, registry: "Registry") -> None:
        self.machine, self.registry, self.layer = machine, registry, registry.layer  # type: ignore[assignment]
        self.root, self.run = Path("/var/lib/bootseer"), machine.root / "run/bootseer"
        self.mount = Path()
        self._serial = 0

    def names(self, *numbers: int) -> list[Path]:
        """Files of the layer, as the machine sees them."""
        return [self.mount / f"f{number:04}" for number in numbers]

    def waits(self) -> None:
        """Come back when a reader waits for the registry."""
        self.machine.until(lambda: self.status()["requests_in_flight"] > 0)

    def right(self, reading: subprocess.Popen[str], *numbers: int) -> None:
        """The reader is through, and has seen the right bytes."""
        printed, wrong = reading.communicate(timeout=120)
        assert reading.returncode == 0, wrong
        contents = [self.layer.contents[f"f{number:04}"] for number in numbers]
        assert [line.split()[0] for line in printed.splitlines()] == [hashlib.sha256(it).hexdigest() for it in contents]

    def pids(self) -> dict[str, int]:
        """Of the daemon's processes, in the machine."""
        return {row["name"]: row["pid"] for row in self.status()["processes"]}


class Registry:
    """`tests.systemd.registry` as a process."""

    def __init__(self) -> None:
        self.layer = served_layer()
        words = [sys.executable, "-m", "tests.systemd.registry"]
        self._process = subprocess.Popen(words, cwd=_CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.host = self._process.stdout.readline().strip()

    def open(self) -> None:
        """Answer from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """A machine whose daemon runs and has mounted a layer of which nothing has come yet."""
    with closing(Registry()) as registry, closing(Machine(tmp_path_factory.mktemp("machine"))) as machine:
        index = machine.root / "srv/indexes" / index_name(registry.layer.digest)
        index.parent.mkdir(parents=True)
        index.write_bytes(encoded_index(registry.layer))
        toml = '[index]\nurl = "/srv/indexes"\n[fetch]\nbackground = false\nspan_growth_kib = 256\n'
        (machine.root / "etc/bootseer/config.toml").write_text(toml)
        machine.systemctl("enable", "--now", "bootseer")
        made = Node(machine, registry)
        try:
            made.mount = made.prepare(registry.layer)
        except AssertionError:
            print(machine.journal())
            raise
        yield made


def test_it_is_ready_when_containerd_can_connect(node: Node) -> None:
    assert node.machine.show("ActiveState") == "active" and node.machine.show("SubState") == "running"
    assert node.machine.show("NFileDescriptorStore") == "6"
    assert "containerd.service" in node.machine.show("Before").split()
    assert int(node.machine.show("MainPID")) == node.pids()["supervisor"]
    complaints = [line for line in node.machine.journal().splitlines() if "bootseer.service:" in line]
    assert all(any(word in line for word in _NEWER) for line in complaints), complaints


def test_readers_wait_through_a_restart(node: Node) -> None:
    """One waits for the registry already; one begins meanwhile. The mount is the same one, on the same connection."""
    reading = node.machine.reader(*node.names(0, 1))
    node.waits()
    before = node.pids()
    restarting = threading.Thread(target=node.machine.systemctl, args=("restart", "bootseer"))
    restarting.start()
    other = node.machine.reader(*node.names(2))
    restarting.join()
    assert not set(before.values()) & set(node.pids().values())
    node.registry.open()
    node.right(reading, 0, 1)
    node.right(other, 2)
    assert node.machine.show("NFileDescriptorStore") == "6"
    assert "connection.taken" in node.machine.journal() and "attach.healed" not in node.machine.journal()


def test_readers_wait_when_all_processes_are_killed(node: Node) -> None:
    for kills in range(1, 4):
        reading = node.machine.reader(*node.names(*range(4 * kills, 4 * kills + 4)))
        pid = node.machine.show("MainPID")
        node.machine.systemctl("kill", "--signal", "KILL", "bootseer")
        node.machine.until(lambda kills=kills: int(node.machine.show("NRestarts")) >= kills)
        node.machine.until(lambda: node.machine.show("ActiveState") == "active")
        assert node.machine.show("MainPID") != pid
        node.right(reading, *range(4 * kills, 4 * kills + 4))


def test_a_reload_keeps_the_process(node: Node) -> None:
    before = node.pids()
    reading = node.machine.reader(*node.names(*range(16, 24)))
    node.machine.systemctl("reload", "bootseer")
    after = node.pids()
    assert after["supervisor"] == before["supervisor"] == int(node.machine.show("MainPID"))
    assert not {after[name] for name in ("block", "fetch", "service")} & set(before.values())
    node.right(reading, *range(16, 24))
    assert node.machine.show("ActiveState") == "active"


def test_a_version_that_does_not_work_is_refused(node: Node) -> None:
    """The link leads to nothing that runs: the reload fails, the daemon goes on; back again, and it works."""
    program = node.machine.root / "opt/bootseer/two/bin/bootseer"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\n[ "$1" != serve ] && exec /opt/bootseer/one/bin/bootseer "$@"\nexit 1\n')
    program.chmod(0o755)
    current = node.machine.root / "opt/bootseer/current"
    before = node.pids()
    current.unlink()
    current.symlink_to("two")
    with pytest.raises(AssertionError, match="systemctl reload bootseer"):
        node.machine.systemctl("reload", "bootseer")
    assert node.machine.show("ActiveState") == "active" and node.pids() == before
    current.unlink()
    current.symlink_to("one")
    node.machine.systemctl("reload", "bootseer")
    assert node.machine.show("ActiveState") == "active"
    node.right(node.machine.reader(*node.names(24)), 24)


def test_stopped_and_started(node: Node) -> None:
    """From 254 on systemd keeps the descriptors of a stopped service, too: readers wait for its start. Before, it
    closes them: reads fail while no daemon runs, and the same mounts work again when one does."""
    kept = node.machine.version() >= 254
    node.machine.systemctl("stop", "bootseer")
    reading = node.machine.reader(*node.names(25))
    if kept:
        assert node.machine.show("NFileDescriptorStore") == "6"
    else:
        _, wrong = reading.communicate(timeout=120)
        assert reading.returncode == 1 and "Input/output error" in wrong
    node.machine.systemctl("start", "bootseer")
    if kept:
        node.right(reading, 25)
    node.right(node.machine.reader(*node.names(25, 26, 27)), 25, 26, 27)
    assert node.machine.show("NFileDescriptorStore") == "6"
    assert ("attach.healed" in node.machine.journal()) is not kept


def test_the_unit_is_understood() -> None:
    """By the systemd of this machine; an older one than 254 passes over what it does not know."""
    words = ["systemd-analyze", "verify", _CHECKOUT / "deploy" / "bootseer.service"]
    environment = {**os.environ, "SYSTEMD_LOG_LEVEL": "warning"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    known = (*_NEWER, "/opt/bootseer/current/bin/bootseer")
    about_ours = [line for line in done.stderr.splitlines() if "bootseer.service" in line]
    assert all(any(word in line for word in known) for line in about_ours), done.stderr
