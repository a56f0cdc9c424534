"""A fresh machine for the guides: their files and commands are used there as printed, with no path or name changed.

It is a network and a mount namespace. On /etc, /opt, /root, /srv and /usr/local lies an overlay that takes all changes,
/run and /var/lib are new, and `registry.example` is a registry on loopback, with TLS by an authority of its own. Three
things are not as on a machine of its own: `sudo` does nothing, for we are root; `systemctl` starts and stops what the
unit's ExecStart says, for there is no systemd; what needs package servers (`deploy/install`) has the real network.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.link import CHECKOUT
from scripts.rig.namespace import inside_network, mount_namespace, network_namespace
from scripts.rig.process import end, kill_tree, marked, run, spawn, tail, wait_for, wait_for_socket
from scripts.rig.snapshotcalls import SnapshotCalls
from scripts.rig.workspace import Workspace
from tests.clients.guide import Step
from tests.clients.node import Containerd
from tests.snapshotter.certificates import Authority

__all__ = ["PASSWORD", "Machine"]

PASSWORD = "s3cr:t"
_HTPASSWD = "me:$2b$04$O/ZPZHr8qdVim0iVNP7auOuetfCC8TPWnv0KCuIdC2aJB45eTYM4m\n"
_OVERLAID = ("/etc", "/opt", "/root", "/srv", "/usr/local")
_SOCKETS = {"bootseer": "bootseer/bootseer.sock", "containerd": "containerd/containerd.sock"}
_CGROUPS = ("default", "k8s.io")  # parents of containers' groups, named after containerd's namespaces
_NEEDS_NETWORK = re.compile(r"deploy/install")
_PACKAGES = ("blockindex", "deploy", "proto", "snapshotter", "pyproject.toml", "README.md")


class Machine:
    """The machine, with a checkout as working directory and `containerd` installed but not configured for us."""

    def __init__(self, workspace: Workspace, containerd: Containerd) -> None:
        self.home = workspace.directory("m")
        self.checkout = workspace.directory("bootseer")
        self._workspace = workspace
        self._closing = ExitStack()
        self.followed: list[Step] = []
        self._units: dict[str, subprocess.Popen[bytes]] = {}
        programs = self._programs()
        self._outside = {**workspace.env, "PATH": f"{programs}{os.pathsep}{containerd.path}", "HOME": "/root"}
        self._env = {name: text for name, text in self._outside.items() if "proxy" not in name.lower()}
        self._cgroups = _groups()
        self._closing.callback(self._remove_cgroups)
        for name in _PACKAGES:
            source, target = CHECKOUT / name, self.checkout / name
            _ = shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        try:
            network = network_namespace(workspace.env)
            self._closing.callback(network.close)
            run(network.command(["ip", "link", "set", "lo", "up"]), workspace.env, "setting the loopback device up")
            self._namespace = mount_namespace(network, workspace.env)
            self._closing.callback(self._namespace.close)
            self._closing.callback(self._stop_all)
            self._overlay()
            self._registries()
            self.write("/etc/hosts", "127.0.0.1 localhost registry.example\n127.0.0.2 private.example\n")
            self.write("/etc/systemd/system/containerd.service", "[Service]\nExecStart=containerd\n")
            self.shell("sudo systemctl start containerd")
        except BaseException:
            self.close()
            raise

    def follow(self, *steps: Step) -> dict[str, str]:
        """Do what a guide says; returns what its commands print."""
        printed = {}
        for step in steps:
            self.followed.append(step)
            if step.path:
                self.write(step.path, step.text)
            else:
                printed[step.text] = self.shell(step.text)
        return printed

    def write(self, path: str, text: str) -> None:
        """Write a file; a relative path is below the checkout."""
        self._sh('mkdir -p "$(dirname "$1")"; printf %s "$2" >"$1"', path, text)

    def shell(self, command: str) -> str:
        """What a command prints, to both outputs; RigError with the logs when it fails."""
        words = command.removeprefix("sudo ").split()
        if words[0] == "systemctl":
            return self._systemctl(*words[1:])
        return self._sh(command, outside=bool(_NEEDS_NETWORK.search(command)))

    def restart(self, unit: str) -> None:
        """As `systemctl restart`."""
        self._systemctl("restart", unit)

    def push(self, layout: Path, name: str) -> None:
        """Push the image of an OCI layout to registry.example; private.example:5000 has it too."""
        copy = "skopeo copy --insecure-policy --quiet --preserve-digests --dest-tls-verify=false"
        self._sh(f"{copy} oci:{layout} docker://registry.example/{name}")

    def close(self) -> None:
        """Stop containers, services and registries, and end the namespaces. Safe to call twice."""
        self._closing.close()

    def _sh(self, script: str, *arguments: str, outside: bool = False) -> str:
        inner = ["sh", "-c", f'cd "$0" || exit\nset -e\n{script}', str(self.checkout), *arguments]
        argv = self._namespace.command(["sh", "-c", 'exec "$@" 2>&1', "sh", *inner])
        if outside:
            argv = [word for word in argv if not word.startswith("--net=")]
        try:
            return run(argv, self._outside if outside else self._env, f"`{script}`", 300)
        except RigError as error:
            raise RigError(f"{error}\n{self._logs()}") from None

    def _programs(self) -> Path:
        """`sudo`, and as `python3` the one that we are."""
        programs = self._workspace.directory("bin")
        (programs / "sudo").write_text('#!/bin/sh\nexec "$@"\n')
        (programs / "sudo").chmod(0o755)
        (programs / "python3").symlink_to(Path(sys.base_prefix) / "bin" / "python3")
        return programs

    def _overlay(self) -> None:
        lines = ["set -e"]
        for place in _OVERLAID:
            upper, work = (self._workspace.directory(f"{kind}{place}") for kind in ("changed", "work"))
            lines.append(f"mount -t overlay overlay -o lowerdir={place},upperdir={upper},workdir={work} {place}")
        # Not an overlay: it could not hold those of containers.
        lines.append(f"mount --bind {self._workspace.directory('var-lib')} /var/lib")
        lines += ["mount -t tmpfs tmpfs /run", "rm -rf /etc/containerd /etc/cni /etc/nerdctl /root/.docker"]
        run(self._namespace.command(["sh", "-c", "\n".join(lines)]), self._env, "covering the machine's directories")

    def _registries(self) -> None:
        """Two registries over one store; private.example:5000 asks for a password."""
        authority = Authority(self.home)
        authority.server("registry.example", "private.example")
        self.write("/etc/ssl/private-ca.crt", authority.ca.read_text())
        (self.home / "htpasswd").write_text(_HTPASSWD)
        tls = {"certificate": f"{self.home}/server.cert", "key": f"{self.home}/server.key"}
        auth = {"htpasswd": {"realm": "private", "path": f"{self.home}/htpasswd"}}
        for name, address, more in (
            ("registry", ("127.0.0.1", 443), {}),
            ("private", ("127.0.0.2", 5000), {"auth": auth}),
        ):
            storage = {"filesystem": {"rootdirectory": f"{self.home}/store"}}
            config = {"version": 0.1, "log": {"level": "error"}, "storage": storage, **more}
            config["http"] = {"addr": f"{address[0]}:{address[1]}", "tls": tls}
            (self.home / f"{name}.json").write_text(json.dumps(config))
            process = self._spawn(name, ["docker-registry", "serve", f"{self.home}/{name}.json"])

            def accepts(address: tuple[str, int] = address) -> bool:
                try:
                    inside_network(self._namespace.pid, lambda: socket.create_connection(address, timeout=1)).close()
                except OSError:
                    return False
                return True

            wait_for(accepts, "starting docker-registry", process, timeout_s=20)

    def _systemctl(self, verb: str, *words: str) -> str:
        """daemon-reload; start, stop, restart; enable and disable, with --now."""
        unit = words[-1] if words else ""
        if (verb in ("stop", "restart") or (verb == "disable" and "--now" in words)) and unit in self._units:
            assert end(self._units.pop(unit), grace_s=15), f"{unit} does not stop"
        if verb in ("start", "restart") or (verb == "enable" and "--now" in words):
            assert unit not in self._units
            text = self._sh('cat "$1"', f"/etc/systemd/system/{unit}.service")
            found = re.search(r"^ExecStart=(.*)$", text, re.MULTILINE)
            assert found
            process = self._spawn(unit, found[1].split())
            self._units[unit] = process
            path = Path(f"/proc/{self._namespace.pid}/root/run/{_SOCKETS[unit]}")
            try:
                wait_for_socket(path, process, f"starting {unit}")
                if unit == "bootseer":  # whose sockets are there before anybody serves them
                    SnapshotCalls(path).close()
            except RigError as error:
                raise RigError(f"{error}\n{self._logs()}") from None
        assert verb in ("start", "stop", "restart", "enable", "disable", "daemon-reload"), verb
        return ""

    def _spawn(self, name: str, argv: list[str]) -> subprocess.Popen[bytes]:
        with (self.home / f"{name}.log").open("ab") as log:
            process = spawn(self._namespace.command(argv), self._env, stdout=log, stderr=log)
        self._closing.callback(end, process, 15)
        return process

    def _stop_all(self) -> None:
        """Shims with their containers first, then containerd; the layers when nothing uses them any more."""
        for pid in marked(str(self._workspace.root)):
            with suppress(OSError):
                if b"containerd-shim" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]:
                    kill_tree(pid)
        for unit in ("containerd", "bootseer"):
            if unit in self._units:
                end(self._units.pop(unit), grace_s=15)
        with suppress(RigError):  # it may not be installed, or be gone again
            self._sh("bootseer unmount")

    def _remove_cgroups(self) -> None:
        """Remove what killed containers leave, and the parents that no runtime removes; none with a process in it."""
        deadline = time.monotonic() + 5
        while (left := _groups() - self._cgroups) and time.monotonic() < deadline:
            for group in sorted(left, reverse=True):
                with suppress(OSError):
                    group.rmdir()
            time.sleep(0.02)

    def _logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{tail(log)}" for log in sorted(self.home.glob("*.log")))


def _groups() -> set[Path]:
    """The control groups of containers, and their parents, in all hierarchies."""
    root = Path("/sys/fs/cgroup")
    parents = (place / name for place in (root, *root.iterdir()) for name in _CGROUPS)
    return {group for parent in parents if parent.is_dir() for group in (parent, *parent.iterdir()) if group.is_dir()}
