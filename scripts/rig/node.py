"""A node on the near side: an own containerd, and on wish our daemon as its snapshotter, in a mount namespace.

A `Node` is always cold: fresh roots, fresh processes, page cache dropped. The product is driven by its commands only
(`bootseer serve`, `bootseer unmount`). `close` stops everything by pid and ends the mount namespace; what was still
mounted then is kept in `left_mounted`, because a clean stop leaves nothing.
"""

import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.link import CHECKOUT
from scripts.rig.namespace import Ends, Namespace, mount_namespace
from scripts.rig.peer import Peer
from scripts.rig.process import accepts, end, kill_tree, marked, run, spawn, tail, wait_for
from scripts.rig.registry import ADDRESS
from scripts.rig.servicemanager import Manager
from scripts.rig.workspace import Workspace, mounts_below

__all__ = ["BOOTSEER", "SNAPSHOTTER", "Node"]

SNAPSHOTTER = "bootseer"
BOOTSEER = CHECKOUT / ".venv" / "bin" / "bootseer"

_CONTAINERD = """\
version = 2
root = "{root}"
state = "{state}"
disabled_plugins = [
    "io.containerd.grpc.v1.cri",
    "io.containerd.internal.v1.opt",
    "io.containerd.snapshotter.v1.aufs",
    "io.containerd.snapshotter.v1.btrfs",
    "io.containerd.snapshotter.v1.devmapper",
    "io.containerd.snapshotter.v1.zfs",
]
[grpc]
address = "{socket}"
"""
_PROXY = """
[proxy_plugins.{name}]
type = "snapshot"
address = "{socket}"
"""
_DAEMON = """\
root = "{root}"
run = "{run}"

[index]
url = "{index}"

[registry]
plain_http = ["{registry}"]

[containerd]
address = "{containerd}"
"""
_START_S = 20.0
_TOOLS = ("containerd", "containerd-shim-runc-v2", "runc", "ctr", "ctr-remote", "nsenter", "setpriv")


class Node:
    """A cold node named `name`; with `daemon`, a pair (index URL, registry address), our snapshotter is on it, with
    `toml` as further sections of its configuration; with `peer`, that snapshotter of others. With `disk_mib` the
    daemon's root is a disk of that size, and a service manager (`manager`) runs it and keeps its descriptors."""

    def __init__(
        self,
        workspace: Workspace,
        link: Ends,
        name: str,
        daemon: tuple[str, str] | None = None,
        toml: str = "",
        peer: Peer | None = None,
        disk_mib: int = 0,
    ) -> None:
        self.manager: Manager | None = None
        self.left_mounted: list[str] = []
        self._workspace = workspace
        self._directory = workspace.directory(f"nodes/{name}")
        self._containerd_socket = self._directory / "containerd.sock"
        self._containerd_config = self._directory / "containerd.toml"
        self._config = self._directory / "bootseer.toml"
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._namespace: Namespace | None = mount_namespace(link.near, workspace.env)
        try:
            _drop_caches()
            if daemon is not None:
                self._configure_daemon(*daemon, toml)
                self._start_daemon(disk_mib)
            if peer is not None:
                self._start_peer(peer)
            proxies = {SNAPSHOTTER: self.daemon_socket} if daemon is not None else {}
            if peer is not None:
                proxies[peer.name] = self._directory / "peer.sock"
            self._start_containerd(proxies)
        except BaseException:
            self.close()
            raise

    def command(self, argv: Sequence[str | Path]) -> list[str]:
        """`argv`, run on the node."""
        assert self._namespace is not None
        return self._namespace.command([str(part) for part in argv])

    def ctr(self, *arguments: str, tool: str = "ctr") -> list[str]:
        """The command line of containerd's client (or of `ctr-remote`) for this node."""
        return self.command([tool, "--address", str(self._containerd_socket), *arguments])

    def bootseer(self, *arguments: str) -> list[str]:
        """The command line of one of our commands for this node's daemon."""
        return self.command([BOOTSEER, *arguments, "--config", self._config])

    @property
    def daemon_socket(self) -> Path:
        """Where our daemon serves containerd's API."""
        return self.run_directory / "bootseer.sock"

    @property
    def daemon_root(self) -> Path:
        """What our daemon keeps."""
        return self._directory / "bootseer"

    @property
    def daemon_log(self) -> Path:
        """What our daemon has written."""
        return self._directory / "bootseer.log"

    @property
    def run_directory(self) -> Path:
        """Where our daemon's sockets are."""
        return self._directory / "run"

    @property
    def pid(self) -> int:
        """A process in the node's namespaces."""
        assert self._namespace is not None
        return self._namespace.pid

    def logs(self) -> str:
        """The ends of the node's logs, for error messages."""
        logs = sorted(self._directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{tail(log)}" for log in logs)

    def keep_logs(self, directory: Path) -> None:
        """Copy the node's logs into `directory`, which is made."""
        directory.mkdir(parents=True, exist_ok=True)
        for log in self._directory.glob("*.log"):
            shutil.copyfile(log, directory / log.name)

    def close(self) -> None:
        """Stop containers, containerd and daemon, unmount the layers, end the namespace. Safe to call twice."""
        if self._namespace is None:
            return
        namespace, self._namespace = self._namespace, None
        try:
            self.end_containers()
            while self._processes:
                name, process = self._processes.pop()
                end(process, grace_s=10)
                if name == "bootseer":
                    self._unmount_layers(namespace)
            if self.manager is not None:
                self.manager.__exit__()
                self._unmount_layers(namespace)
                run(namespace.command(["umount", str(self.daemon_root)]), self._workspace.env, "taking the disk away")
            self.left_mounted = mounts_below(self._directory, namespace.pid)
        finally:
            namespace.close()
            shutil.rmtree(self._directory, ignore_errors=True)

    def _configure_daemon(self, index_url: str, registry: str, toml: str) -> None:
        root, run_directory = self.daemon_root, self.run_directory
        root.mkdir()
        run_directory.mkdir()
        socket = self._containerd_socket
        text = _DAEMON.format(root=root, run=run_directory, index=index_url, registry=registry, containerd=socket)
        self._config.write_text(f"{text}\n{toml}")

    def _start_daemon(self, disk_mib: int) -> None:
        argv: list[str | Path] = [BOOTSEER, "serve", "--config", self._config]
        if not disk_mib:
            # Its sockets are there before anybody serves them.
            self._start("bootseer", argv, lambda: b" service.ready " in self.daemon_log.read_bytes())
            return
        disk: list[str | Path] = ["mount", "-t", "tmpfs", "-o", f"size={disk_mib}m", "tmpfs", self.daemon_root]
        run(self.command(disk), self._workspace.env, "making a small disk")
        self.manager = Manager(self.command(argv), self.daemon_log, self._workspace.env)
        self.manager.__enter__()
        self.manager.until("READY=1")

    def restart_containerd(self, number: int) -> None:
        """End containerd by this signal and start it again; containers live on. It ends with the calling thread."""
        at = next(at for at, (name, _) in enumerate(self._processes) if name == "containerd")
        _, process = self._processes.pop(at)
        process.send_signal(number)
        process.wait(30)
        self._run_containerd()

    def _start_peer(self, peer: Peer) -> None:
        config, root, socket = (self._directory / f"peer{end}" for end in (".toml", "", ".sock"))
        root.mkdir()
        config.write_text(peer.config.format(registry=ADDRESS))
        self._start("peer", peer.serve(socket, root, config), lambda: accepts(socket))

    def _start_containerd(self, proxies: Mapping[str, Path]) -> None:
        root, state = self._directory / "containerd", self._directory / "state"
        text = _CONTAINERD.format(root=root, state=state, socket=self._containerd_socket)
        text += "".join(_PROXY.format(name=name, socket=socket) for name, socket in proxies.items())
        self._containerd_config.write_text(text)
        self._run_containerd()
        # The first call waits until all plugins serve, and has the client in memory, as on a node in use.
        run(self.ctr("version"), self._workspace.env, "asking containerd for its version")

    def _run_containerd(self) -> None:
        argv: list[str | Path] = ["containerd", "--config", self._containerd_config]
        self._start("containerd", argv, lambda: accepts(self._containerd_socket))

    def _start(self, name: str, argv: Sequence[str | Path], ready: Callable[[], bool]) -> None:
        log = self._directory / f"{name}.log"
        with log.open("ab") as out:
            process = spawn(self.command(argv), self._workspace.env, stdout=out, stderr=out)
        self._processes.append((name, process))
        try:
            wait_for(ready, f"starting {name}", process, _START_S)
        except RigError as error:
            raise RigError(f"{error}\n{tail(log)}") from None

    def end_containers(self) -> None:
        """Kill the shims with their containers, also those that a killed containerd has lost sight of, and take away
        the mounts that they leave."""
        for pid in marked(str(self._workspace.root)):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"containerd-shim" in words[0] and str(self._containerd_socket).encode() in words:
                kill_tree(pid)
        if self._namespace is not None:
            for point in mounts_below(self._directory / "state", self._namespace.pid):
                run(self.command(["umount", "--lazy", point]), self._workspace.env, "unmounting a container")

    def _unmount_layers(self, namespace: Namespace) -> None:
        argv = namespace.command([str(BOOTSEER), "unmount", "--config", str(self._config)])
        run(argv, self._workspace.env, "unmounting the node's layers", timeout_s=30)

    def __repr__(self) -> str:
        names = ", ".join(f"{name} {process.pid}" for name, process in self._processes)
        return f"<Node {self._directory.name} {names or 'stopped'}>"


def _drop_caches() -> None:
    """Empty the machine's page cache, then read the tools that any node in use has in memory."""
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    for tool in _TOOLS:
        path = shutil.which(tool)
        if path is not None:
            Path(path).read_bytes()
