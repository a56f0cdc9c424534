"""The directory of one run of the bench, and the promise that nothing of the run outlives it.

A workspace is a directory under /var/tmp (containerd's root needs a real file system) with a lock that its process
holds: a workspace whose lock is free belongs to a dead run, and is swept by the next one. Every process started with
the workspace's environment can be found and is ended on `close`. Mounts live in mount namespaces (`namespace`), which
end with their processes.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.rig.process import MARKER, kill_tree, marked

__all__ = ["Workspace", "mounts_below", "sweep"]

PREFIX = "bootseer-rig-"
PARENT = Path("/var/tmp")


class Workspace:
    """One run's directory `root`, environment `env` for its processes, and their end."""

    def __init__(self, parent: Path = PARENT) -> None:
        sweep(parent)
        self._lock: int | None = None
        while self._lock is None:  # a sweep may take a directory away in the moment before its lock is held
            self.root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
            self._lock = _lock(self.root)
        self.env: Mapping[str, str] = {**os.environ, MARKER: str(self.root)}

    def directory(self, name: str) -> Path:
        """A new empty directory of the workspace."""
        path = self.root / name
        path.mkdir(parents=True)
        return path

    def fresh(self, prefix: str) -> Path:
        """A new empty directory of the workspace, with a name that nothing has yet."""
        return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=self.root))

    def close(self) -> None:
        """End all processes of the workspace, then remove its mounts and files. Safe to call twice."""
        _remove(self.root)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Workspace {self.root} {len(marked(str(self.root)))} processes>"


def sweep(parent: Path = PARENT) -> list[Path]:
    """Remove what dead runs left (after a SIGKILL or a power cut) and return their directories."""
    swept = []
    for root in sorted(parent.glob(f"{PREFIX}*")):
        lock = _lock(root)
        if lock is not None:
            _remove(root)
            os.close(lock)
            swept.append(root)
    return swept


def mounts_below(root: Path, pid: int | None = None) -> list[str]:
    """Mount points at or below `root`, deepest first, as the mount namespace of `pid` (default: ours) has them."""
    table = Path(f"/proc/{pid or 'self'}/mountinfo").read_text().splitlines()
    points = [line.split(" ")[4].encode().decode("unicode_escape") for line in table]
    return sorted((p for p in points if p == str(root) or p.startswith(f"{root}/")), key=len, reverse=True)


def _lock(root: Path) -> int | None:
    """The exclusive lock of a workspace as an open descriptor, or None while another process holds it."""
    try:
        lock = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _remove(root: Path) -> None:
    for pid in marked(str(root)):
        kill_tree(pid)
    for point in mounts_below(root):
        subprocess.run(["umount", "--lazy", point], check=False, stderr=subprocess.DEVNULL)
    shutil.rmtree(root, ignore_errors=True)
