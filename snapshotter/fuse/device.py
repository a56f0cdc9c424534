"""The node's FUSE connection: `/dev/fuse` and the mount that hangs on it, on no path.

A mount on a path would make `df`, `stat` and `umount` hang for everyone while no process reads the connection; the
layers' files are reached as `/proc/self/fd/<mount>/<name>` instead, by us alone.
"""

import os
from dataclasses import dataclass

from snapshotter.kernel.mountapi import detached_mount

__all__ = ["Connection", "connect", "open_file"]

_MAX_READ = 1 << 20


@dataclass(frozen=True, slots=True)
class Connection:
    """`device`: requests come and replies go here, non-blocking. `mount`: root directory of the mount. Both are
    descriptors, close-on-exec; the connection ends when the last copy of `device` is closed."""

    device: int
    mount: int


def connect() -> Connection:
    """Open a new connection; needs root and the fuse module. The caller owns both descriptors."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        strings = {
            "source": "bootseer",
            "fd": str(device),
            "rootmode": "40000",
            "user_id": "0",
            "group_id": "0",
            "max_read": str(_MAX_READ),
        }
        return Connection(device, detached_mount("fuse", strings, ("allow_other", "default_permissions")))
    except BaseException:
        os.close(device)
        raise


def open_file(mount_fd: int, name: str) -> int:
    """The FUSE file `name`, read-only, for direct I/O; blocks until a block server answers."""
    return os.open(name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC, dir_fd=mount_fd)
