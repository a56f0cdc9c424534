"""The node as far as it is ours: the root directory, the running daemon, and the pulls that were not lazy."""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import AF_UNIX
from socket import socket as unix_socket
from typing import Any

from snapshotter.kernel.mountapi import mounts

from .model import Check, fail, ok, warn

__all__ = ["START", "RootFacts", "check_cri", "check_daemon", "check_ordinary", "check_root"]

_REMOTE = ("nfs", "cifs", "smb", "ceph", "glusterfs", "lustre", "afs", "9p", "fuse.", "virtiofs", "gfs2", "ocfs2")
_LOW_BYTES = 1 << 30
_LOW_SHARE = 0.05
_PRIVATE = ("layers", "m", "s")

START = "start `bootseer serve`, and keep it running by a service manager"

_ORDINARY_FIXES = {
    "no-target": "pull with `bootseer pull REF` or `ctr-remote images rpull`, or with containerd 2 without `--local`:"
    " `ctr images pull` of containerd 1.x and `--local` download all, then unpack by themselves",
    "no-labels": "pull with a client that passes image labels: for containerd's own see the labels-* lines; or have the"
    " image found without: `address` in [containerd], and registries with a port in `plain_http` or `hosts_dir`, then"
    " bootseer reload",
    "bad-labels": "the client passed image labels that are not understood: see layer.fallback in the daemon's log",
    "switched-off": "bootseer lazy on",
    "excluded": "change exclude in [lazy], if that image is to be lazy, then bootseer reload",
    "not-included": "change include in [lazy], if that image is to be lazy, then bootseer reload",
    "failed": "see layer.fallback in the daemon's log, then pull again",
}


@dataclass(frozen=True, slots=True)
class RootFacts:
    """Where the root is, or would be made (`exists` false: the facts are of the nearest directory above). `modes`:
    those of the directories below it that must be root's alone."""

    path: Path
    exists: bool
    fstype: str
    free_bytes: int
    size_bytes: int
    uid: int
    mode: int
    modes: Mapping[str, int]

    @staticmethod
    def probe(root: Path) -> "RootFacts":
        """Look at the disk."""
        at = root
        while not at.exists():
            at = at.parent
        real, disk, status = os.path.realpath(at), os.statvfs(at), at.stat()
        below = {name: stat.S_IMODE((root / name).stat().st_mode) for name in _PRIVATE if _is_there(root / name)}
        return RootFacts(
            path=root,
            exists=at == root,
            fstype=_fstype(real),
            free_bytes=disk.f_bavail * disk.f_frsize,
            size_bytes=disk.f_blocks * disk.f_frsize,
            uid=status.st_uid,
            mode=stat.S_IMODE(status.st_mode),
            modes=below,
        )


def check_root(facts: RootFacts) -> list[Check]:
    """Whether the block store is in good hands."""
    what = f"{facts.path} on {facts.fstype}"
    move = "set `root` to a directory on a local disk (ext4, xfs, btrfs), stop the containers, restart the daemon"
    checks = [ok("root", what)]
    if facts.fstype == "overlay":
        checks = [fail("root", what, "overlayfs refuses upper directories on overlayfs: no container starts", move)]
    elif facts.fstype.startswith(_REMOTE):
        checks = [
            fail("root", what, "every hit would go over the network, and SQLite's locks are not safe there", move)
        ]
    elif facts.fstype in ("tmpfs", "ramfs"):
        checks = [warn("root", what, "layers take memory and are gone at a reboot", move)]
    checks.append(_space(facts))
    checks.append(_modes(facts))
    return checks


def _space(facts: RootFacts) -> Check:
    what = f"{facts.free_bytes / 1e9:.1f} of {facts.size_bytes / 1e9:.1f} GB free"
    if facts.free_bytes < max(_LOW_BYTES, facts.size_bytes * _LOW_SHARE):
        why = "on a full disk missing blocks cannot be stored, and readers get I/O errors"
        level = fail if facts.free_bytes < _LOW_BYTES // 8 else warn
        return level("root-space", what, why, "bootseer cache gc --max-size SIZE")
    return ok("root-space", what)


def _modes(facts: RootFacts) -> Check:
    if not facts.exists:
        return ok("root-modes", "not made yet: the daemon does so")
    if facts.uid != 0 or facts.mode & 0o022:
        why = "whoever can write there decides what containers run"
        fix = f"chown root:root {facts.path}; chmod 0711 {facts.path}"
        return fail("root-modes", f"{facts.path} belongs to uid {facts.uid}, mode {facts.mode:04o}", why, fix)
    open_ones = sorted(name for name, mode in facts.modes.items() if mode & 0o077)
    if open_ones:
        paths = " ".join(str(facts.path / name) for name in open_ones)
        why = "images hold set-user-ID programs, which users of the node must not reach"
        return fail("root-modes", f"{paths}: open to others than root", why, f"chmod 0700 {paths}")
    return ok("root-modes", "root's alone")


def check_daemon(status: Mapping[str, Any] | None, problem: str, version: str, fix: str = START) -> list[Check]:
    """What the daemon says of itself; `status` is None when it says nothing, with the reason in `problem`, and what to
    do in `fix`."""
    if status is None:
        return [fail("daemon", problem, "without it no pull is lazy, and reads of mounted layers fail", fix)]
    checks = [ok("daemon", f"version {status.get('version')}, pid {status.get('pid')}")]
    if status.get("version") != version:
        why = f"this command is of version {version}"
        fix = "bootseer reload: the daemon takes up what is installed where it was started from; readers do not notice"
        checks = [warn("daemon", f"version {status.get('version')} runs", why, fix)]
    restarts = {row["name"]: row["restarts"] for row in status.get("processes", []) if row.get("restarts")}
    if restarts:
        what = "restarted: " + ", ".join(f"{name} {count} times" for name, count in restarts.items())
        why = "a process of the daemon died; readers only waited"
        checks.append(warn("workers", what, why, "look for worker.died and worker.failed in the daemon's log"))
    else:
        checks.append(ok("workers", "none was restarted"))
    if trouble := status.get("problem"):
        checks.append(fail("fetch", str(trouble), "missing blocks cannot be fetched", "see the daemon's log"))
    broken = [str(row.get("name")) for row in status.get("layers", []) if row.get("state") == "broken"]
    if broken:
        why = "they cannot be read, and are in the way of a new pull"
        checks.append(fail("layers", f"broken: {', '.join(broken)}", why, f"bootseer cache rm {' '.join(broken)}"))
    return checks


def check_ordinary(status: Mapping[str, Any]) -> list[Check]:
    """Whether pulls were full ones, and why."""
    checks = []
    since = status.get("lazy_off_since")
    if since:
        why = f"new pulls are ordinary ones since {since}"
        checks.append(warn("lazy", "the kill switch is on", why, "bootseer lazy on"))
    rows = status.get("ordinary", [])
    if not rows and "ordinary" in status:
        checks.append(ok("full-pulls", "none since the service started"))
    for row in rows:
        reason, image = str(row.get("reason")), row.get("image")
        what = f"{row.get('layers')} layers were left to containerd: {reason}" + (f", last of {image}" if image else "")
        fix = _ORDINARY_FIXES.get(reason, "see the daemon's log")
        checks.append(warn("full-pulls", what, str(row.get("detail", "")), fix))
    return checks


def check_cri(socket: Path) -> Check:
    """Whether the kubelet's image service is served, where it is to be."""
    with unix_socket(AF_UNIX) as probe:
        try:
            probe.connect(os.fspath(socket))
        except OSError as error:
            why = "the kubelet cannot pull, nor see images, if it is set to this socket"
            fix = (
                "start the daemon; bootseer reload, if it runs, and [cri] was enabled since it started; else look for"
                " cri.not_served in its log"
            )
            return fail("cri", f"nobody serves {socket}: {error.strerror or error}", why, fix)
    return ok("cri", f"the kubelet's image service is at {socket}: imageServiceEndpoint is to be unix://{socket}")


def _is_there(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError:
        return False


def _fstype(path: str) -> str:
    """The file system type at an absolute path without symbolic links."""
    best, found = -1, "unknown"
    for entry in mounts():
        target = entry.target.rstrip("/")
        if (path == target or path.startswith(f"{target}/")) and len(target) >= best:
            best, found = len(target), entry.fstype
    return found
