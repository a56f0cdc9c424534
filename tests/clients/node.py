"""A node for real clients: containerd of a chosen version, our daemon, and a registry, on a loopback of their own.

It lives in a network and a mount namespace, with private directories below a workspace; `close` ends all of it. The
test drives it by command lines only. Blobs, mounts and snapshots that an image leaves behind are what `leftovers` and
`layer_blobs` tell.
"""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.rig.errors import RigError
from scripts.rig.link import CHECKOUT
from scripts.rig.namespace import inside_network, mount_namespace, network_namespace
from scripts.rig.process import end, kill_tree, marked, run, spawn, tail, wait_for, wait_for_socket
from scripts.rig.snapshotcalls import SnapshotCalls
from scripts.rig.workspace import Workspace, mounts_below

__all__ = ["REGISTRY", "Containerd", "Node"]

REGISTRY = "127.0.0.1:5000"
NAMESPACES = ("default", "k8s.io")
CGROUPS = Path("/sys/fs/cgroup")
BOOTSEER = CHECKOUT / ".venv" / "bin" / "bootseer"

_CONTAINERD = """\
version = {version}
root = "{home}/c"
state = "{home}/s"
disabled_plugins = {disabled}
[grpc]
address = "{home}/c.sock"
"""
_REGISTRY = {"version": 0.1, "log": {"accesslog": {"disabled": True}, "level": "error"}}
_DAEMON = """\
root = "{home}/b"
run = "{home}/r"
[index]
url = "{indexes}"
[containerd]
address = "{home}/c.sock"
[registry]
plain_http = ["{registry}"]
"""
_NERDCTL = (
    'data_root = "{home}/n"\naddress = "{home}/c.sock"\ncgroup_manager = "cgroupfs"\ncni_netconfpath = "{home}/cni"\n'
)
_UNUSED = [
    "io.containerd.internal.v1.opt",
    "io.containerd.nri.v1.nri",
    *(f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "zfs")),
]
_CRI = ["io.containerd.grpc.v1.cri"]


@dataclass(frozen=True, slots=True)
class Containerd:
    """A containerd to test with: its programs are found in `programs` before PATH."""

    name: str
    config_version: int
    programs: Path | None = None

    @property
    def path(self) -> str:
        """PATH with its programs first."""
        return os.pathsep.join([*([str(self.programs)] if self.programs else []), os.environ["PATH"]])


class Node:
    """A running node; `configuration` is appended to containerd's, `cri` says whether it has CRI in it."""

    def __init__(
        self, workspace: Workspace, containerd: Containerd, configuration: str, indexes: Path, cri: bool
    ) -> None:
        self.home = workspace.directory("n")
        self._workspace = workspace
        self._env = {
            **workspace.env,
            "PATH": containerd.path,
            "CONTAINERD_ADDRESS": f"{self.home}/c.sock",
            "CONTAINER_RUNTIME_ENDPOINT": f"unix://{self.home}/c.sock",
            "IMAGE_SERVICE_ENDPOINT": f"unix://{self.home}/c.sock",
            "NERDCTL_TOML": f"{self.home}/nerdctl.toml",
        }
        self.cgroup = f"bootseer-test-{os.getpid()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closing = ExitStack()
        self._closing.callback(self._remove_cgroups)
        try:
            network = network_namespace(workspace.env)
            self._closing.callback(network.close)
            run(network.command(["ip", "link", "set", "lo", "up"]), workspace.env, "setting the loopback device up")
            self._namespace = mount_namespace(network, workspace.env)
            self._closing.callback(self._namespace.close)
            self._start_registry()
            (self.home / "b.toml").write_text(_DAEMON.format(home=self.home, indexes=indexes, registry=REGISTRY))
            (self.home / "nerdctl.toml").write_text(_NERDCTL.format(home=self.home))
            self._closing.callback(self._unmount_layers)
            self._start("bootseer")
            self._start_containerd(containerd, configuration, cri)
        except BaseException:
            self.close()
            raise

    def run(self, *argv: str, timeout_s: float = 120) -> str:
        """What a command prints on the node; RigError with the logs when it fails."""
        try:
            return run(self._namespace.command(argv), self._env, f"running {argv[0]}", timeout_s)
        except RigError as error:
            raise RigError(f"{error}\n{self.logs()}") from None

    def type(self, command: str) -> str:
        """What a command of the documents prints; our registry has no TLS, and containers get a cgroup of ours."""
        command = command.removeprefix("sudo ").replace("registry.example", REGISTRY)
        if command.startswith("bootseer"):
            where = f"--config {self.home}/b.toml --containerd-address {self.home}/c.sock"
            command = f"{command.replace('bootseer', str(BOOTSEER), 1)} {where}"
        if command.startswith("ctr"):
            command = re.sub(r" (pull|rpull|push) ", lambda found: f"{found[0]}--plain-http ", command)
        return self.run(*command.replace(" run ", f" run --cgroup-parent {self.cgroup} ").split())

    def push(self, layout: Path, name: str) -> None:
        """Push the image of an OCI layout."""
        options = ["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
        self.run("skopeo", *options, f"oci:{layout}", f"docker://{REGISTRY}/{name}")

    def status(self) -> dict[str, Any]:
        """What `bootseer status --json` says."""
        status: dict[str, Any] = json.loads(
            self.run(str(BOOTSEER), "status", "--json", "--config", f"{self.home}/b.toml")
        )
        return status

    def blobs(self) -> set[str]:
        """Digests in containerd's content store."""
        return {word for name in NAMESPACES for word in self.run("ctr", "-n", name, "content", "ls", "-q").split()}

    def snapshots(self, plugin: str) -> list[str]:
        """Names of the snapshots that containerd knows in its two usual namespaces."""
        listed = [self.run("ctr", "-n", name, "snapshots", "--snapshotter", plugin, "ls") for name in NAMESPACES]
        return [line.split()[0] for text in listed for line in text.splitlines()[1:]]

    def leftovers(self) -> list[str]:
        """Snapshot directories, and mounts of layers and containers."""
        directories = [str(path) for path in (self.home / "b" / "s").iterdir()]
        mounts = mounts_below(self.home, self._namespace.pid)
        return directories + [point for point in mounts if "/b/m/" in point or "rootfs" in point]

    def restart(self, name: str) -> None:
        """End "bootseer" or "containerd" with SIGTERM and start it again; containers keep running."""
        end(self._processes[name], grace_s=15)
        self._start(name)

    def kill(self, worker: str) -> None:
        """SIGKILL a process of the daemon, and return when a successor answers."""
        before = self._pid(worker)
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self._pid(worker) in (0, before):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        SnapshotCalls(self.home / "r" / "bootseer.sock").close()

    def _pid(self, worker: str) -> int:
        """0 while it does not answer."""
        with suppress(RigError):
            status = self.status()
            if "problem" not in status:
                return int(next(row["pid"] for row in status["processes"] if row["name"] == worker))
        return 0

    def logs(self) -> str:
        """The ends of the logs of daemon and containerd."""
        return "\n".join(
            f"--- {log.name}\n{tail(log)}" for log in (self.home / "bootseer.log", self.home / "containerd.log")
        )

    def close(self) -> None:
        """Stop containers, containerd, daemon and registry, and end the namespaces. Safe to call twice."""
        self._closing.close()

    def _start_registry(self) -> None:
        storage = {"filesystem": {"rootdirectory": f"{self.home}/registry"}}
        config = {**_REGISTRY, "storage": storage, "http": {"addr": REGISTRY}}
        (self.home / "registry.json").write_text(json.dumps(config))
        process = self._spawn("registry", ["docker-registry", "serve", f"{self.home}/registry.json"])
        host, port = REGISTRY.split(":")

        def accepts() -> bool:
            try:
                inside_network(
                    self._namespace.pid, lambda: socket.create_connection((host, int(port)), timeout=1)
                ).close()
            except OSError:
                return False
            return True

        wait_for(accepts, "starting docker-registry", process, timeout_s=20)

    def _start_containerd(self, containerd: Containerd, configuration: str, cri: bool) -> None:
        disabled = json.dumps(_UNUSED + ([] if cri else _CRI))
        text = _CONTAINERD.format(version=containerd.config_version, home=self.home, disabled=disabled)
        for there, here in (("/run/bootseer/", f"{self.home}/r/"), ("/var/lib/bootseer", f"{self.home}/b")):
            configuration = configuration.replace(there, here)
        (self.home / "c.toml").write_text(text + configuration)
        self._start("containerd")
        self._closing.callback(self._end_containers)
        self.run("ctr", "version")

    def _start(self, name: str) -> None:
        argv, socket_name = {
            "bootseer": ([str(BOOTSEER), "serve", "--config", f"{self.home}/b.toml"], "r/bootseer.sock"),
            "containerd": (["containerd", "--config", f"{self.home}/c.toml"], "c.sock"),
        }[name]
        self._processes[name] = self._spawn(name, argv)
        try:
            wait_for_socket(self.home / socket_name, self._processes[name], f"starting {name}")
            if name == "bootseer":  # whose sockets are there before anybody serves them
                SnapshotCalls(self.home / socket_name).close()
        except RigError as error:
            raise RigError(f"{error}\n{self.logs()}") from None

    def _spawn(self, name: str, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            process = spawn(self._namespace.command(argv), self._env, stdout=log, stderr=log)
        self._closing.callback(end, process, 15)
        return process

    def _unmount_layers(self) -> None:
        self.run(str(BOOTSEER), "unmount", "--config", f"{self.home}/b.toml")

    def _end_containers(self) -> None:
        """Kill the shims with their containers, before the containerd that would start new ones."""
        for pid in marked(str(self._workspace.root)):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"containerd-shim" in words[0]:
                    kill_tree(pid)

    def _remove_cgroups(self) -> None:
        """Remove the parent groups of containers, which no runtime removes."""
        for parent in (CGROUPS, *CGROUPS.iterdir()):
            for group in sorted((parent / self.cgroup).rglob("."), reverse=True):
                with suppress(OSError):
                    group.rmdir()
