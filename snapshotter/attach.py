"""Mounting layers: FUSE file -> loop device (or nothing) -> EROFS at `<root>/m/<node name>`.

Beside this mount, which all containers share, a layer can have private ones at `<root>/m/<node name>.<slot>`, each for
one container whose reads are recorded: a FUSE file, a loop device and a page cache of its own. Their read-ahead is
that of a cold layer while they are recorded, so that the record holds what was asked for and little more.

Two ways, chosen by config and kernel:
  loop  a read-only loop device with direct I/O and 4096-byte sectors on the FUSE file. Works on every kernel.
  file  EROFS straight on the FUSE file with `directio`: only on kernels that are known fixed (see `file_backed_ok`).
Never a buffered file-backed mount: kernels zero-fill its pages after a killed reader or a short reply.

This runs in the service process, never in the block server or the fetch process: a process that mounts on, or reads
through, the connection that it itself serves can no longer be killed once it waits for itself. A layer whose mount was
left by an earlier daemon stands on a dead connection; `attach` puts the new FUSE file under its loop device, so that
containers that still use it go on. A service that is killed leaves a mount point without a mount, which its successor
takes away, or a loop device without one, which frees itself with the killed process's descriptor.
"""

import contextlib
import errno
import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from .blockstore import LayerRecord, node_name, private_name
from .errors import Precondition
from .fuse.device import open_file
from .kernel import loop
from .kernel.mountapi import MountEntry, mount, mounts, umount
from .killpoints import reach
from .model import Digest

__all__ = ["Attacher", "Capabilities", "file_backed_ok", "unmount_all", "unmount_dead"]

_log = logging.getLogger(__name__)

_PREFAULT = 1 << 20


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What this kernel can do, injected so that other kernels' paths can be tested on one."""

    release: tuple[int, int, int]
    erofs: bool
    loop: bool

    @staticmethod
    def probe() -> "Capabilities":
        """Ask the running kernel."""
        numbers = [int(number) for number in re.findall(r"\d+", os.uname().release)[:3]] + [0, 0, 0]
        with open("/proc/filesystems", encoding="ascii") as table:
            erofs = any(line.split()[-1] == "erofs" for line in table)
        erofs = erofs or any(Path(f"/lib/modules/{os.uname().release}").rglob("erofs.ko*"))
        return Capabilities((numbers[0], numbers[1], numbers[2]), erofs, os.path.exists("/dev/loop-control"))


def file_backed_ok(release: tuple[int, int, int]) -> bool:
    """Whether a file-backed EROFS mount with direct I/O is safe: it is where CVE-2026-23224 is fixed
    (6.12.72, 6.18.11, 6.19.1, 7.0 and later in each line)."""
    major, minor, patch = release
    fixed = {(6, 12): 72, (6, 18): 11, (6, 19): 1}
    return major >= 7 or patch >= fixed.get((major, minor), 1 << 30)


class Attacher:
    """Mounts layers below `<root>/m` from the FUSE mount `mount_fd`. Thread-safe; one lock a layer."""

    def __init__(self, root: Path, mount_fd: int, way: str, cold_kib: int, warm_kib: int, can: Capabilities) -> None:
        """`way` is "loop" or "file"; `cold_kib`/`warm_kib`: read-ahead of a layer that is not, or is, complete."""
        if not can.erofs:
            raise Precondition("this kernel has no EROFS: layers cannot be mounted lazily (modprobe erofs)")
        if way == "file" and not file_backed_ok(can.release):
            _log.warning("attach.file_backed_unsafe release=%s using=loop", ".".join(map(str, can.release)))
            way = "loop"
        if way == "loop" and not can.loop:
            raise Precondition("this kernel has no loop devices: layers cannot be mounted lazily (modprobe loop)")
        self.mounts_dir = root.resolve() / "m"  # as the kernel's table of mounts names it
        # nobody but root comes by here: images hold set-user-ID programs
        self.mounts_dir.mkdir(parents=True, exist_ok=True)
        self.mounts_dir.chmod(0o700)
        self._mount_fd = mount_fd
        self._device = os.fstat(mount_fd).st_dev
        self._way = way
        self._cold_kib, self._warm_kib = cold_kib, warm_kib
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        mounted = self._targets()
        for left in self.mounts_dir.iterdir():
            if left not in mounted:
                with contextlib.suppress(OSError):  # nothing of ours
                    left.rmdir()

    def path(self, digest: Digest, slot: int = 0) -> Path:
        """Where the layer is or would be mounted, privately for a slot other than 0."""
        return self.mounts_dir / private_name(node_name(digest), slot)

    def mounted(self) -> dict[str, str]:
        """Node name -> mount point of what is mounted now for all containers."""
        return {path.name: str(path) for path in self._targets() if "." not in path.name}

    def mounts_of(self, name: str) -> list[Path]:
        """Where the layer of this node name is mounted, privately too."""
        return [target for target in self._targets() if target.name.partition(".")[0] == name]

    def private(self) -> list[str]:
        """Names (`<node name>.<slot>`) of the private mounts there are now, and of mount points without one, which a
        killed service has left."""
        return sorted(path.name for path in self.mounts_dir.glob("*.??"))

    def attach(self, record: LayerRecord, slot: int = 0) -> Path:
        """Have the layer mounted from this daemon's connection; returns the mount point. If it raises, what was
        mounted before is as it was."""
        target = self.path(record.digest, slot)
        with self._locks[target.name]:
            entry = _entry(target)
            if entry is None:
                target.mkdir(mode=0o755, exist_ok=True)
                self._mount(target, record.meta_size)
                reach("service.attached")
            elif entry.source.startswith("/dev/loop"):
                self._heal(entry)
            # a file-backed mount is ours: `unmount_dead` took away those of earlier daemons
        return target

    def holders(self, pattern: str) -> list[str]:
        """Loop devices that still stand on files of this connection whose names match the shell pattern: of a container
        that outlives the mount, or one that is about to free itself. Looks at every loop device: 40 us each."""
        return [device for device, _ in self._held(pattern)]

    def held_slots(self) -> set[int]:
        """Slots of private files on which loop devices stand."""
        return {int(name.partition(".")[2], 16) for _, name in self._held("*.??")}

    def _held(self, pattern: str) -> Iterator[tuple[str, str]]:
        """(loop device, file name)."""
        for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
            path = f"/dev/{backing.parts[3]}"
            try:
                file = backing.read_text(encoding="utf-8", errors="replace").strip()
                if not fnmatchcase(file, f"/{pattern}"):
                    continue
                device = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # detached between the listing and the reading
                continue
            try:
                if loop.status(device).device == self._device:
                    yield path, file[1:]
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
            finally:
                os.close(device)

    def detach(self, digest: Digest) -> None:
        """Unmount the layer; running containers that still hold it keep it (their overlay has its own reference)."""
        self._detach(self.path(digest))

    def detach_private(self, pattern: str) -> None:
        """The same for the private mounts whose names (`<node name>.<slot>`) match the shell pattern."""
        for name in self.private():
            if fnmatchcase(name, pattern):
                self._detach(self.mounts_dir / name)

    def _targets(self) -> list[Path]:
        found = [Path(entry.target) for entry in mounts(f"{self.mounts_dir}/")]
        return [target for target in found if target.parent == self.mounts_dir]

    def _detach(self, target: Path) -> None:
        with self._locks[target.name]:
            while _entry(target) is not None:  # twice mounted by one that was killed and by its successor
                umount(str(target), lazy=True)
            reach("service.unmounted")
            with contextlib.suppress(FileNotFoundError):  # never mounted since the machine booted
                target.rmdir()

    def warm(self, digest: Digest, slot: int = 0) -> None:
        """The layer is complete: read far ahead. Of a private mount: its recording is over, too."""
        entry = _entry(self.path(digest, slot))
        if entry is not None and entry.source.startswith("/dev/loop"):
            loop.set_read_ahead(entry.major, entry.minor, self._warm_kib)

    def _mount(self, target: Path, meta_size: int) -> None:
        if self._way == "file":
            mount(f"/proc/self/fd/{self._mount_fd}/{target.name}", str(target), "erofs", "directio")
            return
        file = open_file(self._mount_fd, target.name)
        try:
            device = loop.attach(file, target.name)
        finally:
            os.close(file)
        try:
            reach("service.loop-attached")
            minor = os.minor(os.fstat(device).st_rdev)
            loop.set_read_ahead(os.major(os.fstat(device).st_rdev), minor, self._cold_kib)
            # EROFS reads metadata synchronously and unkillably: have it in the page cache before anyone can wait for
            # it. Not a byte further: read-ahead would put the first missing blocks into one folio with the last
            # metadata, and every look-up would wait for the network.
            os.posix_fadvise(device, 0, 0, os.POSIX_FADV_RANDOM)
            for offset in range(0, meta_size, _PREFAULT):
                os.pread(device, min(_PREFAULT, meta_size - offset), offset)
            mount(loop.device_path(minor), str(target), "erofs")
        finally:
            os.close(device)

    def _heal(self, entry: MountEntry) -> None:
        device = os.open(entry.source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            stands = loop.status(device)
            if stands.device == self._device and stands.direct_io:
                return
            if stands.device != self._device:
                file = open_file(self._mount_fd, Path(entry.target).name)
                try:
                    loop.change_file(device, file)
                finally:
                    os.close(file)
                reach("service.loop-changed")
            loop.set_direct_io(device)  # also for a service that was killed between these two
            _log.info("attach.healed mount=%s device=%s", entry.target, entry.source)
        finally:
            os.close(device)


def _entry(target: Path) -> MountEntry | None:
    """The topmost mount on `target`."""
    found = None
    for entry in mounts(str(target)):
        if entry.target == str(target):
            found = entry
    return found


def unmount_dead(root: Path) -> None:
    """At the start of the daemon: take away the file-backed mounts of an earlier one. They stand on its connection and
    cannot be given another (a loop device can, `attach` does it); containers that use one keep what they have."""
    mounts_dir = root.resolve() / "m"
    for entry in list(mounts(f"{mounts_dir}/")):
        if Path(entry.target).parent == mounts_dir and not entry.source.startswith("/dev/loop"):
            umount(entry.target, lazy=True)
            _log.info("attach.unmounted_dead mount=%s", entry.target)


def unmount_all(root: Path) -> list[str]:
    """Unmount every layer below `<root>/m`, after the daemon has stopped; returns the mount points. OSError EBUSY when
    a container still uses one: stop it first."""
    prefix = f"{root.resolve() / 'm'}/"
    targets = [entry.target for entry in mounts(prefix)]
    for target in reversed(targets):
        try:
            umount(target)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            raise Precondition(f"{target} is in use: stop the containers of its image first") from error
        Path(target).rmdir()
    return targets
