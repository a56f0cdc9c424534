"""Network and mount namespaces that live as long as a process of ours holds them.

A namespace is held by a sleeping child of the bench, not by a file under /run/netns: when the bench dies, by whatever
means, its holders die with it and the namespaces vanish with everything mounted or configured in them. Enter them with
`command` (nsenter). `ip netns exec` is not used: it mounts a new /sys, which hides the cgroups from runc.
"""

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from scripts.rig.errors import RigError
from scripts.rig.process import end, spawn, wait_for

__all__ = ["Ends", "Namespace", "enter_network", "inside_network", "mount_namespace", "network_namespace"]

T = TypeVar("T")
_FLAG = {"net": "net", "mnt": "mount"}
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

# containerd 1.x keeps shim sockets and FIFOs below /run/containerd whatever its configuration says.
_PRIVATE_RUN = "mkdir -p /run/containerd && mount -t tmpfs tmpfs /run/containerd && exec sleep infinity"


class Namespace:
    """The namespaces `kinds` ("net", "mnt") of the process `holder`."""

    def __init__(self, holder: subprocess.Popen[bytes], kinds: Sequence[str]) -> None:
        self._holder = holder
        self._kinds = tuple(kinds)

    @property
    def pid(self) -> int:
        """The process that holds the namespaces."""
        return self._holder.pid

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv`, run inside; with a mount namespace the working directory becomes `/`."""
        return ["nsenter", *(f"--{_FLAG[kind]}=/proc/{self.pid}/ns/{kind}" for kind in self._kinds), *argv]

    def close(self) -> None:
        """Let go: the namespaces end with their last process."""
        end(self._holder, grace_s=0)

    def __repr__(self) -> str:
        return f"<Namespace {'+'.join(self._kinds)} held by {self.pid}>"


class Ends(Protocol):
    """The two sides of a bench: the network namespace of the node, and that of the servers it talks to."""

    @property
    def near(self) -> Namespace:
        """Where the node is."""

    @property
    def far(self) -> Namespace:
        """Where the registry is."""


def network_namespace(env: Mapping[str, str]) -> Namespace:
    """A new network namespace with nothing but a downed loopback device."""
    return _open(["unshare", "--net", "sleep", "infinity"], env, ("net",))


def mount_namespace(network: Namespace, env: Mapping[str, str]) -> Namespace:
    """A new mount namespace, from which no mount gets out, within the network namespace `network`."""
    inner = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _PRIVATE_RUN]
    return _open(network.command(inner), env, ("net", "mnt"))


def enter_network(pid: int) -> None:
    """Move the calling thread into the network namespace of `pid`; its sockets stay there for good."""
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _LIBC.setns(descriptor, _CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise RigError(f"cannot enter the network namespace of process {pid}: {os.strerror(number)}")
    finally:
        os.close(descriptor)


def inside_network(pid: int, action: Callable[[], T]) -> T:
    """The result of `action`, run by a thread in the network namespace of `pid`; what it raises is raised here."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            enter_network(pid)
            results.append(action())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _open(argv: Sequence[str], env: Mapping[str, str], kinds: Sequence[str]) -> Namespace:
    holder = spawn(argv, env)
    comm = Path(f"/proc/{holder.pid}/comm")
    try:
        wait_for(lambda: comm.read_text() == "sleep\n", "opening a namespace (needs root)", holder, 10)
    except BaseException:
        end(holder, grace_s=0)
        raise
    return Namespace(holder, kinds)
