"""Loop devices: attach a file read-only with direct I/O, swap the file under a live device, find and read one back.

Direct I/O matters: without it one missing block stalls the whole device (the loop then has one request outstanding).
Structures and numbers: include/uapi/linux/loop.h.
"""

import errno
import fcntl
import os
import struct
import time
from dataclasses import dataclass

__all__ = ["LoopStatus", "attach", "change_file", "device_path", "set_direct_io", "set_read_ahead", "status"]

_LOOP_CHANGE_FD, _LOOP_GET_STATUS64 = 0x4C06, 0x4C05
_LOOP_SET_DIRECT_IO, _LOOP_CONFIGURE = 0x4C08, 0x4C0A
_LOOP_CTL_GET_FREE = 0x4C82
_READ_ONLY, _AUTOCLEAR, _DIRECT_IO = 1, 4, 16
_SECTOR = 4096
# struct loop_info64: device, inode, rdevice, offset, sizelimit; number, encrypt_type, encrypt_key_size, flags;
# file_name[64], crypt_name[64], encrypt_key[32], init[2]
_INFO = struct.Struct("=5Q4I64s64s32s2Q")
# struct loop_config: fd, block_size, info, reserved[8]
_CONFIG_HEAD = struct.Struct("=II")


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """What a bound loop device stands on: the backing file's device and inode numbers, and the loop flags."""

    device: int
    inode: int
    direct_io: bool


def device_path(minor: int) -> str:
    """`/dev/loopN`; loop minors are counted without partitions since Linux 5.11 when max_part is 0 (the default)."""
    return f"/dev/loop{minor}"


def attach(file_fd: int, name: str) -> int:
    """Bind a free loop device to `file_fd`; returns the device's open descriptor (caller closes it once it is mounted:
    the device then frees itself at the last unmount). `name` (<= 63 bytes) is what losetup shows."""
    with open("/dev/loop-control", "rb", buffering=0) as control:
        for attempt in range(200):
            number = fcntl.ioctl(control, _LOOP_CTL_GET_FREE)
            try:
                device = os.open(device_path(number), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                time.sleep(0.005)  # devtmpfs has not made the node yet
                continue
            try:
                _configure(device, file_fd, name)
                return device
            except OSError as error:
                os.close(device)
                if error.errno != errno.EBUSY:  # EBUSY: somebody else took it between the two calls
                    raise
                time.sleep(0.001 * min(attempt, 10))
    raise OSError(errno.EBUSY, "no free loop device after 200 attempts: see losetup -a and the loop module's max_loop")


def _configure(device: int, file_fd: int, name: str) -> None:
    flags = _READ_ONLY | _AUTOCLEAR | _DIRECT_IO
    info = _INFO.pack(0, 0, 0, 0, 0, 0, 0, 0, flags, name.encode()[:63], b"", b"", 0, 0)
    fcntl.ioctl(device, _LOOP_CONFIGURE, _CONFIG_HEAD.pack(file_fd, _SECTOR) + info + bytes(64))


def status(device: int) -> LoopStatus:
    """What the open loop device stands on; OSError ENXIO when it is not bound."""
    fields = _INFO.unpack(fcntl.ioctl(device, _LOOP_GET_STATUS64, bytes(_INFO.size)))
    return LoopStatus(device=fields[0], inode=fields[1], direct_io=bool(fields[8] & _DIRECT_IO))


def change_file(device: int, file_fd: int) -> None:
    """Put another file of the same size under a live read-only device: running readers see a pause at most. The
    kernel drops direct I/O on the way: `set_direct_io` has to follow."""
    fcntl.ioctl(device, _LOOP_CHANGE_FD, file_fd)


def set_direct_io(device: int) -> None:
    """Read the file under the device past its page cache."""
    fcntl.ioctl(device, _LOOP_SET_DIRECT_IO, 1)


def set_read_ahead(major: int, minor: int, kib: int) -> None:
    """Read-ahead of a block device; files already open keep the old value."""
    with open(f"/sys/dev/block/{major}:{minor}/queue/read_ahead_kb", "w", encoding="ascii") as knob:
        knob.write(str(kib))
