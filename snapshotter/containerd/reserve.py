"""A little room on the disk that is held for a start while the disk is full.

SQLite cannot open a store that keeps a log without 32 KiB for the index of the log, which it makes anew at each first
opening. Without this a daemon that is restarted on a full disk could not serve, and so could not make room either. The
file holds nothing; it is given up when it is needed, and taken again when there is room.
"""

import contextlib
import os
from pathlib import Path

__all__ = ["Reserve"]

_SIZE = 256 << 10  # the index of the log, and as much again for what is written into the log first


class Reserve:
    """The file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def give_up(self) -> bool:
        """Make its room free; whether there was any."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True

    def take(self) -> None:
        """Have it, or nothing of it if the disk has no room for it now."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size == _SIZE:
                return
        try:
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(descriptor, 0, _SIZE)
            finally:
                os.close(descriptor)
        except OSError:
            self._path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"<Reserve {self._path}>"
