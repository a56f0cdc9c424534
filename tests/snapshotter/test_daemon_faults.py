"""Registry faults under a real daemon: what its readers and its log see, and that nothing of it lasts.

Each fault meets a layer of its own, all at the same time. docs/operations.md has the table for operators.
"""

import errno
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from proto import snapshots_pb2
from snapshotter.blockstore import node_name
from tests.snapshotter.certificates import Authority
from tests.snapshotter.daemon import Daemon, Layer, expected, make_layer, origin, reader, write_index
from tests.snapshotter.rangeserver import (
    Action,
    Drip,
    Falsify,
    Hold,
    IgnoreRange,
    RangeServer,
    Request,
    Reset,
    ShortRange,
    Status,
    Truncate,
    WrongRange,
    redirect,
)

pytestmark = pytest.mark.system

PATIENCE_S = 90.0
CONFIG = """
[index]
url = "{home}/indexes"
[fetch]
background = false
demand_threads = 32
read_timeout_s = {read_timeout_s}
{more}
[hotset]
prefetch = false
[lookup]
registry = false
[registry]
connect_timeout_s = 1.0
read_timeout_s = 0.5
connections_per_host = 64
"""

ANSWERED: dict[str, tuple[Action, str]] = {
    "stall before the answer": (Hold(-1), "stalled: nothing received within the time-out"),
    "stall": (Hold(1000), "stalled: nothing received within the time-out"),
    "drip": (Drip(0.1), r"stalled: \d+ bytes in"),
    "reset": (Reset(1000), "reset"),
    "truncated": (Truncate(1000), "short body"),
    "fewer bytes than asked for": (ShortRange(1000), "short body after 1000 bytes"),
    "wrong bytes": (Falsify(5000), "do not match their digest|blob"),
    "206 with another range": (WrongRange(1), "another range"),
    "401": (Status(401), "HTTP status 401"),
    "403": (Status(403), "HTTP status 403"),
    "404": (Status(404), "HTTP status 404"),
    "416": (Status(416), "HTTP status 416"),
    "429": (Status(429, {"Retry-After": "1"}), "HTTP status 429"),
    "500": (Status(500), "HTTP status 500"),
    "503": (Status(503), "HTTP status 503"),
    "DNS gone": (redirect("http://blobs.invalid/signed"), "blobs.invalid"),
    "nobody listens": (redirect("http://127.0.0.1:1/signed"), "refused"),
}
"""Fault -> what the registry does, and what the log says of it."""
TLS = {
    "certificate": "certificate not trusted",
    "no TLS": "SSL",
    "silent TLS": "stalled: nothing received within the time-out",
}
"""The same, of hosts that the registry redirects to."""


@dataclass
class Site:
    """A registry whose layers have a fault each, by its name; `ended` when all are well again."""

    registry: RangeServer
    layers: dict[str, Layer]
    actions: dict[str, Callable[[Request], Action | None]]
    ended: bool = False
    asked: dict[str, int] = field(default_factory=dict)

    def behave(self, request: Request) -> Action | None:
        fault = next((name for name, layer in self.layers.items() if request.path == layer.path), "")
        if self.ended or request.method != "GET" or fault not in self.actions:
            return None
        self.asked[fault] = self.asked.get(fault, 0) + 1
        return self.actions[fault](request)


def _always(action: Action) -> Callable[[Request], Action | None]:
    return lambda request: action


@contextmanager
def site(home: Path) -> Iterator[Site]:
    """The registry with all faults; and the hosts that it redirects to."""
    used: set[str] = set()

    def expiring(request: Request) -> Action | None:
        """A signed URL is good for one request."""
        again = request.path in used
        used.add(request.path)
        return Status(403) if again else None

    names = [*ANSWERED, "200 for a range", "expiring URL", *TLS]
    layers = {name: make_layer(files=2, size=300 << 10, seed=number) for number, name in enumerate(names)}
    signed = layers["expiring URL"].blob
    untrusted = Authority(home).server("127.0.0.1")
    with (
        origin(*layers.values()) as registry,
        RangeServer({f"/{number}": signed for number in range(100)}, expiring) as storage,
        RangeServer({"/signed": b""}, tls=untrusted) as secret,
        socket.create_server(("127.0.0.1", 0)) as mute,
    ):
        actions: dict[str, Callable[[Request], Action | None]] = {
            name: _always(action) for name, (action, _) in ANSWERED.items()
        }
        actions["200 for a range"] = lambda request: IgnoreRange()
        actions["expiring URL"] = lambda request: redirect(f"{storage.url}/{request.number}", 302)
        actions["certificate"] = lambda request: redirect(f"{secret.url}/signed")
        actions["no TLS"] = lambda request: redirect(f"https://{storage.host}/signed")
        actions["silent TLS"] = lambda request: redirect(f"https://127.0.0.1:{mute.getsockname()[1]}/signed")
        there = Site(registry, layers, actions)
        registry.behaviour = there.behave
        yield there


class Log:
    """What the daemon has said so far."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.text = ""

    def until(self, pattern: str) -> str:
        """The first line in which `pattern` is found, once there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.text += self._capfd.readouterr().err
            for line in self.text.splitlines():
                if re.search(pattern, line):
                    return line
            assert time.monotonic() < deadline, f"the log has no line with {pattern}:\n{self.text[-5000:]}"
            time.sleep(0.05)


def test_each_fault_is_named_and_leaves_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with site(tmp_path) as there:
        for layer in there.layers.values():
            write_index(tmp_path / "indexes", layer, 1 << 17)
        log = Log(capfd)
        toml = CONFIG.format(home=tmp_path, read_timeout_s=PATIENCE_S, more="")
        with Daemon(tmp_path, there.registry, toml) as daemon:
            daemon.prepare(*there.layers.values())
            mounts = {name: daemon.root / "m" / node_name(layer.digest) for name, layer in there.layers.items()}
            readers = {name: reader("read", mount / "f0000") for name, mount in mounts.items()}
            failing = {name: words for name, (_, words) in ANSWERED.items()}
            failing |= TLS
            for name, words in failing.items():
                line = log.until(f"fetch.failed layer={there.layers[name].digest} .*attempt=2 ")
                form = rf"spans=\d+-\d+ bytes=\d+-\d+ lane=demand attempt=2 error=.*({words})"
                assert re.search(form, line), f"{name}: {line}"
            there.ended = True
            for name, process in readers.items():
                assert process.communicate(timeout=PATIENCE_S)[0].split() == expected(there.layers[name], "f0000"), name
                assert (mounts[name] / "f0001").read_bytes() == there.layers[name].contents["f0001"], name
            tallies = {row["digest"]: row for row in daemon.status()["layers"]}
            for name in ("200 for a range", "expiring URL"):
                assert tallies[there.layers[name].digest]["failures"] == 0, name
            assert there.asked["expiring URL"] > 1, "a new one was asked for when the old was refused"
            assert all(tallies[there.layers[name].digest]["failures"] >= 2 for name in failing)
            assert "read.timed_out" not in log.text


def test_a_reader_gets_an_error_after_the_stated_time_and_the_next_one_the_bytes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = make_layer(files=1, size=300 << 10)
    write_index(tmp_path / "indexes", layer)
    log = Log(capfd)
    with origin(layer) as registry:
        toml = CONFIG.format(home=tmp_path, read_timeout_s=1, more="")
        with Daemon(tmp_path, registry, toml) as daemon:
            mount = daemon.prepare(layer)
            registry.behaviour = lambda request: Status(503)
            started = time.monotonic()
            with pytest.raises(OSError) as caught:
                (mount / "f0000").read_bytes()
            assert caught.value.errno == errno.EIO and time.monotonic() - started >= 1
            line = log.until(f"read.timed_out layer={layer.digest} ")
            assert re.search(r"offset=\d+ size=\d+ attempts=\d+ last_failure=.*HTTP status 503.* answered=EIO", line)
            registry.behaviour = None
            assert (mount / "f0000").read_bytes() == layer.contents["f0000"]


def test_a_registry_that_hangs_does_not_stop_the_pulls_of_others(tmp_path: Path) -> None:
    """Places for pulls are bounded per registry; whoever gets none is answered at once, the ordinary way."""
    hung_layers = [make_layer(files=1, size=4096, seed=number) for number in range(4)]
    fine, other = make_layer(files=1, size=4096, seed=10), make_layer(files=1, size=4096, seed=11)
    hang = [True]

    def hanging(request: Request) -> Action | None:
        return Hold(-1) if hang[0] else Status(404)

    with origin(*hung_layers, behaviour=hanging) as hung, origin(fine, other) as registry:
        toml = CONFIG.format(home=tmp_path, read_timeout_s=60, more="waiting_pulls = 3")
        toml = toml.replace("\nread_timeout_s = 0.5", "\nread_timeout_s = 600")
        with Daemon(tmp_path, registry, toml) as daemon, daemon.snapshots() as snapshots:
            calls = [
                snapshots.Prepare.future(_request(hung.host, layer, number)) for number, layer in enumerate(hung_layers)
            ]
            answered = _first(calls)
            assert len(answered.result().mounts) == 1, "refused a place: ordinary mounts"
            assert sum(not call.done() for call in calls) == 3
            mount = daemon.prepare(fine)
            assert (mount / "f0000").read_bytes() == fine.contents["f0000"]
            names = [row["reason"] for row in daemon.status()["ordinary"]]
            assert names == ["failed"]
            snapshots.Remove(snapshots_pb2.RemoveSnapshotRequest(key=f"hung/{calls.index(answered)}/extract x"))
            hang[0] = False
            hung.drop_connections()
            for call in calls:
                assert len(call.result(timeout=PATIENCE_S).mounts) == 1


def _request(host: str, layer: Layer, number: int) -> snapshots_pb2.PrepareSnapshotRequest:
    labels = {
        "containerd.io/snapshot.ref": f"sha256:{number:064}",
        "containerd.io/snapshot/cri.image-ref": f"{host}/app:1",
        "containerd.io/snapshot/cri.layer-digest": layer.digest,
        "containerd.io/snapshot/cri.image-layers": layer.digest,
    }
    return snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=f"hung/{number}/extract x", labels=labels)


def _first(calls: list[Any]) -> Any:  # grpc has no types
    """The call that is answered first."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        for call in calls:
            if call.done():
                return call
        assert time.monotonic() < deadline, "no call is answered"
        time.sleep(0.01)
