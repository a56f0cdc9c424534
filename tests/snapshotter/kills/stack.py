"""A daemon under a service manager, armed with kill points, and what containerd does to it, call by call.

    stack.arm("fetch.written")
    stack.read(layer)             # all of it, right
    stack.require("fetch.written")

Calls are made again until they succeed, as containerd's clients do: a process that dies under one fails it, or its
answer is lost. `left` is what there is of layers, mounts, loop devices, snapshots, slots and open files; nothing, when
everything has been taken away.
"""

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc

from proto import snapshots_pb2, snapshots_pb2_grpc
from snapshotter.blockstore import node_name
from snapshotter.errors import NotFound, SnapshotterError
from snapshotter.fuse.ring import FREE, OWNED, Ring
from snapshotter.kernel.mountapi import mounts
from snapshotter.killpoints import VARIABLE, KillPoints
from snapshotter.rpc import Unanswered, call
from tests.snapshotter.daemon import Layer, expected, reader
from tests.snapshotter.rangeserver import RangeServer
from tests.systemd.managed import Managed

PATIENCE_S = 40.0
_RESTLESS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL)


class Stack:
    """See the module."""

    def __init__(self, home: Path, registry: RangeServer, toml: str) -> None:
        self.armed = home / "points"
        self.armed.mkdir(mode=0o700)
        self.points = KillPoints(self.armed)
        self.daemon = Managed(home, registry, toml)
        self.image = "app:1"
        self._serial = 0

    @contextlib.contextmanager
    def running(self, dies: bool = False) -> Iterator["Stack"]:
        """Started, and ended with the block; one that `dies` at its start is not waited for."""
        before = os.environ.get(VARIABLE)  # that of a stack that several tests share
        os.environ[VARIABLE] = str(self.armed)
        try:
            try:
                if dies:
                    self.daemon.manager.__enter__()
                else:
                    self.daemon.start()
                yield self
            finally:
                self.daemon.__exit__()
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before

    def await_death(self, point: str) -> None:
        """The supervisor has died at the point, or does soon."""
        self.require(point)
        assert self.daemon.manager.process.wait(PATIENCE_S) == -signal.SIGKILL

    def start_after_death(self, point: str) -> None:
        """The same; the manager starts it again."""
        self.await_death(point)
        self.daemon.manager.start()
        self.daemon.manager.until("READY=1")

    # -- points ------------------------------------------------------------------------------------------------------

    def arm(self, point: str, times: int = 1) -> None:
        self.points.arm(point, times)

    def require(self, point: str) -> None:
        """Somebody has died there, or does soon; and nobody will any more."""
        until(lambda: self.points.was_reached(point), f"nobody came to {point}")
        assert self.points.disarm(point)

    def die(self, worker: str) -> None:
        """SIGKILL, without waiting for the successor."""
        os.kill(self.pids()[worker], signal.SIGKILL)

    def status(self) -> dict[str, Any]:
        """What `bootseer status --json` shows, as soon as all processes answer."""
        found: dict[str, Any] = {}

        def is_known() -> bool:
            with contextlib.suppress(SnapshotterError):  # of a process that is just ending
                found.update(self.daemon.status())
            return bool(found) and all(row["pid"] for row in found["processes"]) and not found.pop("problem", "")

        until(is_known, "the service does not answer")
        return found

    def pids(self) -> dict[str, int]:
        """Process ids now, by name."""
        return {row["name"]: row["pid"] for row in self.status()["processes"]}

    # -- containerd --------------------------------------------------------------------------------------------------

    def prepare(self, *layers: Layer) -> Path:
        """A pull of the image with these layers; the mount point of the last one."""
        name = ""
        digests = [layer.digest for layer in layers]
        for number, layer in enumerate(layers):
            parent, name = name, "sha256:" + hashlib.sha256(f"{name}{layer.digest}".encode()).hexdigest()
            labels = {
                "containerd.io/snapshot.ref": name,
                "containerd.io/snapshot/cri.image-ref": f"{self.daemon.registry.host}/{self.image}",
                "containerd.io/snapshot/cri.layer-digest": layer.digest,
                "containerd.io/snapshot/cri.image-layers": ",".join(digests[number:]),
            }
            self._serial += 1
            request = snapshots_pb2.PrepareSnapshotRequest(
                snapshotter="b", key=f"default/{self._serial}/extract {name}", parent=parent, labels=labels
            )
            code = self._insist(lambda stub, request=request: stub.Prepare(request))  # type: ignore[misc]
            assert code is grpc.StatusCode.ALREADY_EXISTS, f"{code}: it is no lazy layer"
        return self.mount(layers[-1])

    def box(self, *layers: Layer) -> str:
        """A container on the image: the key of its snapshot. As a client, that asks for the mounts where the snapshot
        turns out to be there."""
        self._serial += 1
        key = f"default/{self._serial}/box"
        request = snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=key, parent=name_of(*layers))
        code = self._insist(lambda stub: stub.Prepare(request))
        assert code in (None, grpc.StatusCode.ALREADY_EXISTS), code
        return key

    def lowers(self, key: str) -> list[Path]:
        """The directories that a container stands on, the topmost first."""
        found: list[Path] = []

        def ask(stub: snapshots_pb2_grpc.SnapshotsStub) -> None:
            answer = stub.Mounts(snapshots_pb2.MountsRequest(snapshotter="b", key=key))
            [mount] = answer.mounts
            [lower] = [it for it in mount.options if it.startswith("lowerdir=")]
            found[:] = map(Path, lower.removeprefix("lowerdir=").split(":"))

        assert self._insist(ask) is None
        return found

    def remove(self, *keys: str) -> None:
        """Remove snapshots, then collect garbage."""
        for key in keys:
            request = snapshots_pb2.RemoveSnapshotRequest(snapshotter="b", key=key)
            code = self._insist(lambda stub, request=request: stub.Remove(request))  # type: ignore[misc]
            assert code in (None, grpc.StatusCode.NOT_FOUND), code
        assert self._insist(lambda stub: stub.Cleanup(snapshots_pb2.CleanupRequest(snapshotter="b"))) is None

    def forget(self, *layers: Layer) -> None:
        """Remove the image's snapshots, and its layers from the store."""
        self.remove(*(name_of(*layers[:count]) for count in range(len(layers), 0, -1)))
        for layer in layers:
            self.drop(layer)

    def drop(self, layer: Layer) -> None:
        """`bootseer cache rm`."""
        with contextlib.suppress(NotFound):
            self.control("cache-remove", name=node_name(layer.digest))

    def control(self, op: str, **fields: object) -> object:
        """One of our commands; its answer."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call(self.daemon.run / "control.sock", op, PATIENCE_S, **fields)
            except Unanswered:
                assert time.monotonic() < give_up, "the service does not answer"
                time.sleep(0.02)

    def _insist(self, work: Callable[[snapshots_pb2_grpc.SnapshotsStub], object]) -> grpc.StatusCode | None:
        """The status of the call that was answered, None for success."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.daemon.snapshots() as stub:
                    work(stub)
                return None
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()  # type: ignore[attr-defined]
                if code not in _RESTLESS:
                    return code
                assert time.monotonic() < give_up, error
                time.sleep(0.02)

    # -- readers -----------------------------------------------------------------------------------------------------

    def mount(self, layer: Layer) -> Path:
        return self.daemon.root / "m" / node_name(layer.digest)

    def read(self, layer: Layer, below: Path | None = None) -> None:
        """A process reads the whole layer, and it is right."""
        assert self.is_right(layer, below)

    def is_right(self, layer: Layer, below: Path | None = None) -> bool:
        """Whether a process that reads the whole layer gets the right bytes; an error is never right."""
        names = sorted(layer.contents)
        process = reader("read", *((below or self.mount(layer)) / name for name in names))
        digests, _ = process.communicate(timeout=2 * PATIENCE_S)
        assert process.returncode == 0, "a reader got an error"
        return digests.split() == expected(layer, *names)

    # -- what is left ------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """See the module."""
        root = self.daemon.root
        found = [f"mount {entry.target}" for entry in mounts() if entry.target.startswith(f"{root}/m/")]
        for pattern in ("m/*", "layers/*", "layers/.*", "s/*", "record/*.*", "record/.*", "alarms/.*", "records/**/.*"):
            found += [f"file {path.relative_to(root)}" for path in root.glob(pattern)]
        found += [f"file {path.name}" for path in root.iterdir() if path.name.endswith((".new", ".copy-new"))]
        found += self._held() + self._slots()
        return found

    def _held(self) -> list[str]:
        """Files of layers, also deleted ones, and loop devices that workers have open."""
        found = []
        for name, pid in self.pids().items():
            with contextlib.suppress(FileNotFoundError):
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        target = os.readlink(f"/proc/{pid}/fd/{number}")
                        if target.startswith(("/dev/loop", f"{self.daemon.root}/layers")):
                            found.append(f"{name} holds {target}")
        return found

    def _slots(self) -> list[str]:
        """Slots of the ring that are in use, but for the one into which the next request is read."""
        [descriptor] = [fd for name, fd in self.daemon.manager.stored.items() if name.startswith("ring.")]
        ring = Ring(descriptor)
        try:
            states = bytes(ring.memory[4096 : 4096 + 65536])
        finally:
            ring.close()
        taken = len(states) - states.count(FREE)
        return [] if taken - states.count(OWNED) == 0 and states.count(OWNED) <= 1 else [f"{taken} slots"]

    def require_clean(self) -> None:
        """Nothing is left."""
        until(lambda: not self.left(), lambda: f"left behind: {self.left()}", 15.0)


def name_of(*layers: Layer) -> str:
    """The name of the snapshot of the last of these layers."""
    name = ""
    for layer in layers:
        name = "sha256:" + hashlib.sha256(f"{name}{layer.digest}".encode()).hexdigest()
    return name


def until(holds: Callable[[], bool], what: str | Callable[[], str], patience_s: float = PATIENCE_S) -> None:
    """Wait until it holds."""
    give_up = time.monotonic() + patience_s
    while not holds():
        assert time.monotonic() < give_up, what if isinstance(what, str) else what()
        time.sleep(0.01)
