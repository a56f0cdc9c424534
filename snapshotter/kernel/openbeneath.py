"""Opening a file by a path of somebody else's making: openat2(2), by ctypes.

The number is the same on every architecture (include/uapi/asm-generic/unistd.h); Linux 5.6 has it.
"""

import ctypes
import os
import struct

__all__ = ["open_beneath"]

_SYS_OPENAT2 = 437
_HOW = struct.Struct("=QQQ")  # flags, mode, resolve
_NO_XDEV, _NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 1, 2, 4, 8

_libc = ctypes.CDLL(None, use_errno=True)


def open_beneath(directory: int, path: bytes) -> int:
    """The file `path` below the open `directory`, for reading; caller owns the descriptor (close-on-exec). No symbolic
    link is followed, no mount point crossed, and nothing outside of the directory reached: OSError instead."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    how = _HOW.pack(flags, 0, _NO_XDEV | _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH)
    fd = int(_libc.syscall(_SYS_OPENAT2, directory, path, how, len(how)))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(path))
    return fd
