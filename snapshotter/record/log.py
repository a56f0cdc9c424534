"""The logs of open recordings, in `<root>/record`: the block server appends, the service reads.

    slots       one byte a slot: CLOSED, or FAILED, or the number (1..254) of the opening of the slot's log; from byte
                256 on for each slot the number that it had last
    <slot>.log  the log of the slot (two hex digits); each record is 32 bytes, see `_RECORD`

Protocol. The service makes the log, then gives the slot's byte a number that it did not have before (`Logs.open`); to
end it sets CLOSED, reads what is there, and deletes the log. The block server looks at the byte with every read of a
private file, which costs a memory access. At a number that it has not seen it opens the log, to append; at CLOSED or
FAILED it notes nothing. A note is one write(2) of a whole record to an O_APPEND descriptor, made before the read is
served: a block server that is killed has noted all that it served, and whoever succeeds it appends behind that. (A
request that it had noted and not answered is noted twice: only the first touch of a block counts.) A record never
crosses a page, so the kernel writes it whole or not at all.

Whatever goes wrong with a log (disk full, log full at `LIMIT`, log gone) the block server sets FAILED and goes on: no
reader ever notices, and the service throws the recording away. The bytes are read through a mapping, and written by
write(2): where the disk is full, a store through the mapping could be SIGBUS (see `blockstore`).
"""

import contextlib
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from snapshotter.killpoints import reach

__all__ = ["CLOSED", "FAILED", "LIMIT", "SLOTS", "LogReader", "Logs", "Notes", "Touch", "create", "directory"]

_log = logging.getLogger(__name__)

CLOSED, FAILED = 0, 255
SLOTS = range(1, 256)
"""Slot 0 is the layer's shared file."""
LIMIT = 16 << 20
"""Bytes of a log: half a million reads, 8 GiB at a read-ahead of 16 KiB."""

_RECORD = struct.Struct("=QQQd")
"""FUSE node id, first block, end block, monotonic seconds."""
_MAP_BYTES = 4096
_LAST = 256


@dataclass(frozen=True, slots=True)
class Touch:
    """One read: blocks `[start, end)` of the data region of the layer with this node name, at `time_s` (monotonic)."""

    name: str
    start: int
    end: int
    time_s: float


def directory(root: Path) -> Path:
    """Where they are."""
    return root / "record"


def create(directory: Path) -> None:
    """Make the directory, and its `slots` with all slots CLOSED, where they are not there yet."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    slots = directory / "slots"
    if not slots.exists() or slots.stat().st_size != _MAP_BYTES:
        temporary = directory / "slots.new"
        temporary.write_bytes(bytes(_MAP_BYTES))
        temporary.rename(slots)


class _Slots:
    """The file of bytes."""

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / "slots", os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(self._fd, _MAP_BYTES, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(self._fd)
            raise

    def __getitem__(self, place: int) -> int:
        return self._map[place]

    def __setitem__(self, place: int, value: int) -> None:
        """OSError when the disk refuses."""
        os.pwrite(self._fd, bytes([value]), place)

    def close(self) -> None:
        """Close the file."""
        self._map.close()
        os.close(self._fd)


def _path(directory: Path, slot: int) -> Path:
    return directory / f"{slot:02x}.log"


class Notes:
    """The block server's side."""

    def __init__(self, directory: Path) -> None:
        """`create` has made the directory."""
        self._directory = directory
        self._slots = _Slots(directory)
        self._broken: dict[int, int] = {}  # slot -> the opening whose log fails, where the disk takes no FAILED yet
        self._open: dict[int, tuple[int, int, int]] = {}  # slot -> (number of the opening, descriptor, bytes left)

    def close(self) -> None:
        """Close every log; what is noted stays."""
        for slot in tuple(self._open):
            self._drop(slot)
        self._slots.close()

    def note(self, node: int, start: int, end: int) -> None:
        """Note a read of blocks `[start, end)` of a private file, unless its slot's log is closed. Never raises."""
        slot = node & 0xFF
        number = self._slots[slot]
        if number in (CLOSED, FAILED):
            if slot in self._open:
                self._drop(slot)
            return
        try:
            if self._broken.get(slot) == number:
                raise OSError("reads are missing")
            opened, log, left = self._open.get(slot, (CLOSED, -1, 0))
            if opened != number:
                log, left = self._reopened(slot, number)
            if left < _RECORD.size:
                raise OSError("it is full")
            record = _RECORD.pack(node, start, end, time.monotonic())
            if os.write(log, record) != len(record):
                raise OSError("it took a part of a record only")
            self._open[slot] = (number, log, left - len(record))
        except OSError as error:
            self._fail(slot, number, error)

    def _fail(self, slot: int, number: int, error: OSError) -> None:
        self._drop(slot)
        if self._broken.get(slot) != number:
            _log.error("record.log_failed slot=%02x error=%r", slot, str(error))
        try:
            self._slots[slot] = FAILED
        except OSError:  # it is said with a later read
            self._broken[slot] = number
        else:
            self._broken.pop(slot, None)

    def forget(self, node: int) -> None:
        """A private file is not in use any more: close the log of its slot if the service has. Never raises."""
        slot = node & 0xFF
        if slot in self._open and self._slots[slot] in (CLOSED, FAILED):
            self._drop(slot)

    def _reopened(self, slot: int, number: int) -> tuple[int, int]:
        self._drop(slot)
        log = os.open(_path(self._directory, slot), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        left = LIMIT - os.fstat(log).st_size
        self._open[slot] = (number, log, left)
        return log, left

    def _drop(self, slot: int) -> None:
        if slot in self._open:
            os.close(self._open.pop(slot)[1])


class LogReader:
    """Reads one log as it grows. Another process may append meanwhile."""

    def __init__(self, path: Path) -> None:
        """OSError when there is no log."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._offset = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self) -> Iterator[Touch]:
        """What has been appended since the last call."""
        while chunk := os.pread(self._file, _RECORD.size << 12, self._offset):
            whole = len(chunk) - len(chunk) % _RECORD.size
            if not whole:
                return
            self._offset += whole
            for node, start, end, time_s in _RECORD.iter_unpack(chunk[:whole]):
                yield Touch(f"{node >> 8:014x}", start, end, time_s)


class Logs:
    """The service's side. One user at a time for each slot."""

    def __init__(self, directory: Path) -> None:
        """`create` has made the directory."""
        self._directory = directory
        self._slots = _Slots(directory)

    def close(self) -> None:
        """Let go of the map; logs stay as they are."""
        self._slots.close()

    def open(self, slot: int) -> None:
        """Have the block server note reads of the slot's files from now on, in an empty log. OSError when the disk
        refuses."""
        path = _path(self._directory, slot)
        path.unlink(missing_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        reach("service.log-made")
        self._slots[_LAST + slot] = self._slots[_LAST + slot] % (FAILED - 1) + 1
        self._slots[slot] = self._slots[_LAST + slot]

    def reader(self, slot: int) -> LogReader:
        """Read the slot's log from its beginning. OSError when there is none."""
        return LogReader(_path(self._directory, slot))

    def failed(self, slot: int) -> bool:
        """Whether reads are missing from the log."""
        return self._slots[slot] == FAILED

    def is_open(self, slot: int) -> bool:
        """Whether reads are noted."""
        return self._slots[slot] not in (CLOSED, FAILED)

    def stop(self, slot: int) -> None:
        """Have no more noted. A note that is just being made may still come; and where the disk refuses a byte, all
        that come until the slot is opened again, into a log that is deleted, up to `LIMIT`."""
        with contextlib.suppress(OSError):
            self._slots[slot] = CLOSED

    def delete(self, slot: int) -> None:
        """Delete the log; its space is free at once, also where the block server still has it open."""
        with contextlib.suppress(FileNotFoundError):
            path = _path(self._directory, slot)
            os.truncate(path, 0)
            path.unlink()
