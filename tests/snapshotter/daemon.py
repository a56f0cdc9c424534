"""A real daemon for tests: `bootseer serve` as a process, a range server as its registry, our gRPC calls as containerd.

with Origin(layers) as origin, Daemon(tmp_path, origin, extra_toml) as daemon:
    mount = daemon.prepare(layer)            # what containerd does for one layer of a pull
"""

import contextlib
import gzip
import hashlib
import io
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from blockindex.builder import LayerBuilder
from blockindex.codec import encode_index, index_name
from proto import snapshots_pb2, snapshots_pb2_grpc
from snapshotter.attach import unmount_all
from snapshotter.blockstore import node_name
from snapshotter.model import Digest
from snapshotter.rpc import Unanswered, call
from tests.snapshotter.rangeserver import Behaviour, RangeServer

BOOTSEER = str(Path(sys.executable).parent / "bootseer")


@dataclass(frozen=True)
class Layer:
    """A gzip layer made up for a test; `contents` maps its file names to their bytes."""

    blob: bytes
    contents: dict[str, bytes]
    digest: Digest

    @property
    def path(self) -> str:
        """Where its registry serves it."""
        return f"/v2/app/blobs/{self.digest}"


def make_layer(files: int, size: int, seed: int = 0) -> Layer:
    """`files` files of `size` bytes that hardly compress, so that blob offsets follow tar offsets."""
    source = random.Random(seed)
    contents = {f"f{number:04}": source.randbytes(size) for number in range(files)}
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in contents.items():
            entry = tarfile.TarInfo(name)
            entry.size = size
            tar.addfile(entry, io.BytesIO(data))
    blob = gzip.compress(stream.getvalue(), 1, mtime=0)
    return Layer(blob, contents, Digest("sha256:" + hashlib.sha256(blob).hexdigest()))


def encoded_index(layer: Layer, span_size: int = 1 << 18) -> bytes:
    """The layer's index, as it lies in a directory of indexes."""
    builder = LayerBuilder(layer.digest, span_size)
    for start in range(0, len(layer.blob), 1 << 20):
        for _ in builder.feed(layer.blob[start : start + (1 << 20)]):
            pass
    return encode_index(builder.finish())


def write_index(directory: Path, layer: Layer, span_size: int = 1 << 18) -> None:
    """Put the layer's index where `index.url` can point to."""
    path = directory / index_name(layer.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded_index(layer, span_size))


@contextlib.contextmanager
def origin(*layers: Layer, behaviour: Behaviour | None = None) -> Iterator[RangeServer]:
    """A registry that holds the layers."""
    with RangeServer({layer.path: layer.blob for layer in layers}, behaviour) as server:
        yield server


class Daemon:
    """One daemon with private directories below `home`."""

    def __init__(self, home: Path, registry: RangeServer, toml: str = "", program: Sequence[str] = (BOOTSEER,)) -> None:
        self.home = home
        self._program = program
        self.root, self.run = home / "root", home / "run"
        self.registry = registry
        self._config = home / "config.toml"
        self._config.write_text(f'root = "{self.root}"\nrun = "{self.run}"\n{toml}')
        self._process: subprocess.Popen[bytes] | None = None
        self._serial = 0

    def __enter__(self) -> "Daemon":
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for process in _readers:
            process.kill()  # dies once the daemon has ended at the latest
        self.stop()
        for process in _readers:
            process.communicate(timeout=30)
        _readers.clear()
        unmount_all(self.root)

    def start(self) -> None:
        """Start it and wait until it serves."""
        self._process = subprocess.Popen([*self._program, "serve", "--config", str(self._config)])
        deadline = time.monotonic() + 30
        while True:
            try:
                self.status()
                with self.snapshots() as snapshots:  # answered when what was mounted before is mounted again
                    list(snapshots.List(snapshots_pb2.ListSnapshotsRequest(snapshotter="b"), timeout=30))
                return
            except (Unanswered, grpc.RpcError):
                pass
            assert self._process.poll() is None, "the daemon ended at its start"
            assert time.monotonic() < deadline, "the daemon does not serve"
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it; layers stay mounted."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(30)
            self._process = None

    def status(self) -> dict[str, Any]:
        """What `bootseer status --json` shows."""
        status: dict[str, Any] = call(self.run / "control.sock", "status", 30)
        return status

    def pid(self, worker: str) -> int:
        """The process id of a worker now."""
        return next(row["pid"] for row in self.status()["processes"] if row["name"] == worker)

    def kill(self, worker: str) -> None:
        """SIGKILL a worker, and return when its successor has been started."""
        old = self.pid(worker)
        os.kill(old, signal.SIGKILL)
        while True:
            with contextlib.suppress(Unanswered):
                if self.pid(worker) not in (0, old):
                    return
            time.sleep(0.005)

    def prepare(self, *layers: Layer) -> Path:
        """What containerd's unpacker does for an image of these layers, the lowest first; returns the mount point of
        the last one."""
        parent = ""
        digests = [layer.digest for layer in layers]
        with self.snapshots() as snapshots:
            for number, layer in enumerate(layers):
                name = "sha256:" + hashlib.sha256(f"{parent}{layer.digest}".encode()).hexdigest()
                labels = {
                    "containerd.io/snapshot.ref": name,
                    "containerd.io/snapshot/cri.image-ref": f"{self.registry.host}/app:1",
                    "containerd.io/snapshot/cri.layer-digest": layer.digest,
                    "containerd.io/snapshot/cri.image-layers": ",".join(digests[number:]),
                }
                self._serial += 1
                key = f"default/{self._serial}/extract {name}"
                try:
                    snapshots.Prepare(
                        snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=key, parent=parent, labels=labels)
                    )
                    raise AssertionError("the layer fell back to ordinary unpacking: see the daemon's log")
                except grpc.RpcError as error:
                    assert error.code() is grpc.StatusCode.ALREADY_EXISTS, error  # type: ignore[attr-defined]
                parent = name
        return self.root / "m" / node_name(layers[-1].digest)

    @contextlib.contextmanager
    def snapshots(self) -> Iterator[snapshots_pb2_grpc.SnapshotsStub]:
        """containerd's client."""
        with grpc.insecure_channel(f"unix://{self.run}/bootseer.sock") as channel:
            yield snapshots_pb2_grpc.SnapshotsStub(channel)


def drop_caches() -> None:
    """Have every later read ask the block server again."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


READER = """
import hashlib, mmap, os, sys
how, *paths = sys.argv[1:]
for path in paths:
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    if how == "mmap":
        with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as view:
            digest = hashlib.sha256(view).hexdigest()
    else:
        hasher = hashlib.sha256()
        while chunk := os.read(fd, 1 << 17):
            hasher.update(chunk)
        digest = hasher.hexdigest()
    os.close(fd)
    print(digest, flush=True)
"""


_readers: list[subprocess.Popen[str]] = []
"""Those that were started with the running daemon; it ends them with itself."""


def reader(how: str, *paths: Path) -> subprocess.Popen[str]:
    """A process that reads the files whole, by "read" or by "mmap", and prints the sha256 of each."""
    words = [sys.executable, "-c", READER, how, *map(str, paths)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    _readers.append(process)
    return process


def expected(layer: Layer, *names: str) -> list[str]:
    """What `reader` prints for these files of the layer."""
    return [hashlib.sha256(layer.contents[name]).hexdigest() for name in names]
