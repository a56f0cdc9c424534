"""A node for tests: an own containerd with a private root, an own registry, and a small image that can run."""

import gzip
import hashlib
import io
import json
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from snapshotter.model import Digest
from tests.snapshotter.containerd.fake_provider import FakeProvider

SNAPSHOTTER = "bootseer-test"
_FORMAT = "oci"  # whose media types images are pushed with: also v2s2, Docker's
NEEDED = ("containerd", "ctr", "ctr-remote", "runc", "docker-registry", "skopeo")

_CONTAINERD_CONFIG = """
version = 2
root = "{root}/c/root"
state = "{root}/c/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = "{root}/c.sock"
[proxy_plugins.{name}]
  type = "snapshot"
  address = "{snapshotter}"
"""

_REGISTRY_CONFIG = """
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage: {{filesystem: {{rootdirectory: {root}/registry}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


class Node:
    """Starts with `start`, ends with `stop`; everything it makes is below `root`, which has to be short."""

    def __init__(self, root: Path, snapshotter_socket: Path) -> None:
        self.root = root
        self._snapshotter_socket = snapshotter_socket
        self._processes: list[subprocess.Popen[bytes]] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port: int = probe.getsockname()[1]
        self.image = f"127.0.0.1:{self._port}/app:1"

    def start(self) -> None:
        """Run the registry and containerd until both answer."""
        self.start_registry()
        self.start_containerd()

    def start_containerd(self) -> None:
        """Run containerd only; `image` may be one of another registry."""
        config = _CONTAINERD_CONFIG.format(root=self.root, name=SNAPSHOTTER, snapshotter=self._snapshotter_socket)
        (self.root / "containerd.toml").write_text(config)
        self._start_containerd()

    def _start_containerd(self) -> None:
        self._spawn("containerd", ["containerd", "-c", str(self.root / "containerd.toml")])
        self._until(lambda: self._command(["ctr", "-a", f"{self.root}/c.sock", "version"]).returncode == 0)

    def restart_containerd(self, number: int = signal.SIGTERM) -> None:
        """End containerd and start it again. Its shims, and so the containers, live on."""
        containerd = self._processes.pop()
        containerd.send_signal(number)
        containerd.wait(30)
        self._start_containerd()

    def start_registry(self) -> None:
        """Run the registry only."""
        (self.root / "registry.yml").write_text(_REGISTRY_CONFIG.format(root=self.root, port=self._port))
        self._spawn("registry", ["docker-registry", "serve", str(self.root / "registry.yml")])

        def listening() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self._port)) == 0

        self._until(listening)

    def stop(self) -> None:
        """End both, and unmount whatever containerd left below `root`."""
        for process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            mount_point = line.split()[1]
            if mount_point.startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", mount_point], check=False)

    def ctr(self, *arguments: str) -> str:
        """Output of `ctr`; fails the test when it fails."""
        return self._checked(["ctr", "-a", f"{self.root}/c.sock", *arguments])

    def wait_for_snapshotter(self) -> None:
        """containerd fails calls for up to some seconds after a refused connection: its gRPC client pauses."""
        command = ["ctr", "-a", f"{self.root}/c.sock", "snapshots", "--snapshotter", SNAPSHOTTER, "usage"]
        self._until(lambda: self._command(command).returncode == 0)

    def rpull(self, namespace: str = "default") -> str:
        """Pull the image lazily."""
        command = ["ctr-remote", "-a", f"{self.root}/c.sock", "-n", namespace, "images", "rpull", "--plain-http"]
        return self._checked([*command, "--snapshotter", SNAPSHOTTER, self.image])

    def run(self, container: str, shell: str) -> str:
        """Output of a shell command in a new container, which is removed afterwards."""
        common = ["run", "--rm", "--snapshotter", SNAPSHOTTER, self.image, container]
        return self.ctr(*common, "/bin/sh", "-c", shell)

    def push(self, layers: Sequence[bytes]) -> None:
        """Push an image of these tars, gzipped."""
        layout = self.root / "oci"
        shutil.rmtree(layout, ignore_errors=True)
        _write_layout(layout, layers)
        places = [f"oci:{layout}:1", f"docker://{self.image}"]
        self._checked(["skopeo", "copy", "-q", "--format", _FORMAT, "--dest-tls-verify=false", *places])

    def snapshots(self) -> list[str]:
        """Names of the snapshots containerd knows of."""
        listed = self.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "ls")
        return [line.split()[0] for line in listed.splitlines()[1:]]

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes.append(subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _command(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)

    def _checked(self, command: list[str]) -> str:
        done = self._command(command)
        log = self.root / "containerd.log"
        tail = log.read_text()[-3000:] if log.exists() else ""
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n--- containerd:\n{tail}"
        return done.stdout

    def _until(self, ready: Callable[[], bool], limit_s: float = 30) -> None:
        end = time.monotonic() + limit_s
        while not ready():
            assert time.monotonic() < end, f"{self.root}: not up within {limit_s} s"
            assert all(process.poll() is None for process in self._processes), f"{self.root}: a process ended"
            time.sleep(0.05)


def runnable_layer(*more: Path) -> bytes:
    """A tar of /bin/sh, /bin/cat and `more` with the libraries they need, from this machine."""
    programs = [Path("/bin/sh"), Path("/bin/cat"), *more]
    listed = "".join(subprocess.run(["ldd", program], capture_output=True, text=True).stdout for program in programs)
    libraries = {Path(found) for found in re.findall(r"(/\S+) \(0x", listed)}
    return tar_of({str(path)[1:]: path.read_bytes() for path in [*programs, *sorted(libraries)]})


def tar_of(files: dict[str, bytes]) -> bytes:
    """A tar of these files, executable."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.size = 0o755, len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def layer_digest(tar: bytes) -> Digest:
    """Digest of the layer that `push` makes of this tar."""
    return Digest(f"sha256:{hashlib.sha256(_compress(tar)).hexdigest()}")


def serve_layers(provider: FakeProvider, layers: Sequence[bytes]) -> None:
    """Have the provider serve what these tars hold."""
    for tar in layers:
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            files = {member.name: archive.extractfile(member) for member in archive}
            if layer_digest(tar) not in provider.sources:
                provider.add(layer_digest(tar), {name: file.read() for name, file in files.items() if file})
        for path in provider.sources[layer_digest(tar)].rglob("*"):
            path.chmod(0o755)


def _compress(tar: bytes) -> bytes:
    return gzip.compress(tar, mtime=0)


def _write_layout(layout: Path, layers: Sequence[bytes]) -> None:
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(content: bytes, media_type: str) -> dict[str, object]:
        name = hashlib.sha256(content).hexdigest()
        (blobs / name).write_bytes(content)
        return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(content)}

    prefix = "application/vnd.oci.image"
    diff_ids = [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in layers]
    config = {"architecture": "amd64", "os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": f"{prefix}.manifest.v1+json",
        "config": put(json.dumps(config).encode(), f"{prefix}.config.v1+json"),
        "layers": [put(_compress(tar), f"{prefix}.layer.v1.tar+gzip") for tar in layers],
    }
    entry = put(json.dumps(manifest).encode(), f"{prefix}.manifest.v1+json")
    entry["annotations"] = {"org.opencontainers.image.ref.name": "1"}
    (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
