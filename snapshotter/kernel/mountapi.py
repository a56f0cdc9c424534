"""mount(2), umount2(2) and the file-descriptor mount API (fsopen, fsconfig, fsmount), by ctypes.

Every function raises OSError with the failing call in its text. It knows nothing of layers; callers own what they open.
The new calls have one number on every architecture that Linux added them to (include/uapi/asm-generic/unistd.h).
"""

import ctypes
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["MountEntry", "detached_mount", "mount", "mounts", "umount"]

_SYS_FSOPEN, _SYS_FSCONFIG, _SYS_FSMOUNT = 430, 431, 432
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_MNT_DETACH = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def mount(source: str, target: str, fstype: str, options: str = "", read_only: bool = True) -> None:
    """mount(2); `options` is the file system's own option string. If it raises, `target` is as it was."""
    flags = _MS_RDONLY if read_only else 0
    result = _libc.mount(source.encode(), os.fsencode(target), fstype.encode(), flags, options.encode())
    _check(result, f"mount -t {fstype} -o {options or '-'} {source} {target}")


def umount(target: str, lazy: bool = False) -> None:
    """umount2(2); `lazy` detaches now and lets the last user finish (MNT_DETACH)."""
    _check(_libc.umount2(os.fsencode(target), _MNT_DETACH if lazy else 0), f"umount {target}")


def detached_mount(fstype: str, strings: Mapping[str, str], flags: tuple[str, ...] = ()) -> int:
    """A new mount that hangs on no path: its descriptor (close-on-exec, caller owns it), usable as
    `/proc/self/fd/N/<file>`. It lives as long as the descriptor or anything opened below it."""
    context = _check(_libc.syscall(_SYS_FSOPEN, fstype.encode(), _FSOPEN_CLOEXEC), f"fsopen {fstype}")
    try:
        for key, value in strings.items():
            result = _libc.syscall(_SYS_FSCONFIG, context, _SET_STRING, key.encode(), value.encode(), 0)
            _check(result, f"fsconfig {fstype} {key}={value}")
        for flag in flags:
            _check(_libc.syscall(_SYS_FSCONFIG, context, _SET_FLAG, flag.encode(), None, 0), f"fsconfig {flag}")
        _check(_libc.syscall(_SYS_FSCONFIG, context, _CMD_CREATE, None, None, 0), f"fsconfig create {fstype}")
        attributes = _MS_NOSUID | _MS_NODEV  # MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV: same values
        return _check(_libc.syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes), f"fsmount {fstype}")
    finally:
        os.close(context)


@dataclass(frozen=True, slots=True)
class MountEntry:
    """One line of mountinfo: device numbers, mount point, file system type and source."""

    major: int
    minor: int
    target: str
    fstype: str
    source: str


def mounts(prefix: str = "") -> Iterator[MountEntry]:
    """The mounts of this namespace whose mount points begin with `prefix`, oldest first. Reads the kernel's table only:
    never blocks on a dead server. A node in use has hundreds; taking the lines of others apart is not paid for."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split(" ", 5)
            target = fields[4]
            if "\\" in target:
                target = target.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
            if target.startswith(prefix):
                major, _, minor = fields[2].partition(":")
                tail = fields[5].partition(" - ")[2].split(" ")
                yield MountEntry(int(major), int(minor), target, tail[0], tail[1])
