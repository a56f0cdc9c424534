"""The credentials that came with pulls, in memory that outlives every process of the daemon.

A memfd, of which the supervisor and the service manager hold copies: it is in no file system, so nothing of it is on a
disk, and no other user can open it. The service writes it; the fetch process, and each successor of either, reads it.
Two halves, each

    0   serial, 8 bytes; the half with the higher one counts
    8   length of the text, 8 bytes
    16  sha256 of the 16 bytes before and of the text
    48  the text: the rows of `registry.passed`, JSON

The new table is written into the other half, whole, before its head says so; then the old half is zeroed, so that what
was forgotten is nowhere. A writer that is killed at any moment leaves a half that is right. The size is sealed: no copy
of it can be cut off under a reader. Only one process writes; it is the caller's to see to that.
"""

import ctypes
import fcntl
import hashlib
import json
import logging
import os
import struct
from collections.abc import Mapping, Sequence

from snapshotter.log import fields

__all__ = ["PassedMemory"]

_log = logging.getLogger(__name__)

Row = Mapping[str, str]

_HALF = 16 << 20  # twice what `registry.passed` may hold; memory is taken as it is written
_HEAD = struct.Struct("<QQ32s")
_COUNT = struct.Struct("<QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LOOKS = 10
_PUNCH_HOLE_KEEP_SIZE = 3
_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


class PassedMemory:
    """The table behind a descriptor, which is the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __repr__(self) -> str:
        return f"<PassedMemory {self._fd}>"

    @staticmethod
    def create() -> int:
        """An empty one: its memfd (close-on-exec; the caller owns it)."""
        fd = os.memfd_create("bootseer-passed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 2 * _HALF)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return fd

    @staticmethod
    def taken_from(fd: int) -> int:
        """The descriptor, if it is one of such a memory; else -1."""
        try:
            fits = fcntl.fcntl(fd, fcntl.F_GET_SEALS) == _SEALS and os.fstat(fd).st_size == 2 * _HALF
        except (OSError, ValueError):
            return -1
        return fd if fits else -1

    def read(self) -> Sequence[Row]:
        """The rows that were written last; none at first."""
        for _ in range(_LOOKS):  # while we look a writer may go on to the half that we have seen, at most once or so
            halves = [self._half(half) for half in (0, 1)]
            found = [half for half in halves if half is not None]
            if found:
                rows: Sequence[Row] = json.loads(max(found)[1])
                return rows
            if not self._heads():
                return []
        _log.error("credentials.not_read")
        return []

    def write(self, rows: Sequence[Row]) -> None:
        """Have these rows, and nothing else."""
        text = json.dumps(rows).encode()
        if len(text) > _HALF - _HEAD.size:
            _log.error("credentials.not_kept %s", fields(bytes=len(text), limit=_HALF - _HEAD.size))
            return
        serials = [half[0] if half else 0 for half in map(self._half, (0, 1))]
        old = serials.index(max(serials))
        count = _COUNT.pack(max(serials) + 1, len(text))
        new = (1 - old) * _HALF
        self._clear(new)  # what a writer that was killed has left
        os.pwrite(self._fd, text, new + _HEAD.size)
        os.pwrite(self._fd, count + hashlib.sha256(count + text).digest(), new)
        self._clear(old * _HALF)

    def _clear(self, offset: int) -> None:
        """Give the memory of a half back; it reads as zeros."""
        if _fallocate(self._fd, _PUNCH_HOLE_KEEP_SIZE, offset, _HALF):
            raise OSError(ctypes.get_errno(), "cannot clear the memory of credentials")

    def _half(self, half: int) -> tuple[int, bytes] | None:
        """Serial and text of a half, if it is whole."""
        serial, size, digest = _HEAD.unpack(os.pread(self._fd, _HEAD.size, half * _HALF))
        if not serial or size > _HALF - _HEAD.size:
            return None
        text = os.pread(self._fd, size, half * _HALF + _HEAD.size)
        whole = hashlib.sha256(_COUNT.pack(serial, size) + text).digest() == digest
        return (serial, text) if whole else None

    def _heads(self) -> bool:
        """Whether anything was ever written."""
        return any(any(os.pread(self._fd, _HEAD.size, half * _HALF)) for half in (0, 1))
