"""Which blocks of a layer came from a hot pack and have not been proven by the layer itself yet; kept on disk.

Two files in the layer's directory, made when the first such block comes:
  unproven  one byte a block: 0, or the number of the pack that the block came from
  packs     a JSON object a line: the packs, number 1 first (see `Pack`)
A line is there before a block says its number, and a block says it before its bytes are written. So neither a killed
process nor a reboot makes a block pass for proven: without an entry here a block is PRESENT by the layer's own bytes,
or, after a power cut, in doubt (see `blockstore`). One process, the fetch process, writes; others may look.
"""

import contextlib
import json
import mmap
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .blockstore import write_all
from .killpoints import reach

__all__ = ["Pack", "Unproven"]

_MOST = 255
_RUN = re.compile(rb"[^\0]+", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Pack:
    """Where a block came from. `digest`: of the file's head, which names all its bytes; `where` it was found; `key`:
    the name of the trusted key that signed it, empty for one of a configured directory."""

    digest: str
    where: str
    key: str
    image_key: str


_UNKNOWN = Pack("", "a pack whose name a power cut lost", "", "")


class Unproven:
    """One layer's. Not thread-safe: `fetch.latecheck` has the lock."""

    def __init__(self, directory: Path, blocks: int, writable: bool = False) -> None:
        self._directory = directory
        self._blocks = blocks
        self._writable = writable
        self._fd = -1  # written to: a store through the mapping would be SIGBUS where the disk is full (see blockstore)
        self._map: mmap.mmap | None = None
        self._packs = list(self.packs_of(directory))
        if (directory / "unproven").exists():
            self._open()

    def __repr__(self) -> str:
        return f"<Unproven {sum(end - start for start, end in self.runs())} of {self._blocks} blocks>"

    def __del__(self) -> None:
        self.close()  # with the last reference to a layer that was removed, as its `LayerFiles`

    def close(self) -> None:
        """Close the files; more than once is harmless."""
        if self._map is not None:
            self._map.close()
            os.close(self._fd)
            self._map = None

    @property
    def packs(self) -> tuple[Pack, ...]:
        """The packs that blocks have come from, number 1 first."""
        return tuple(self._packs)

    def marks(self, start: int, end: int) -> bytes:
        """One byte a block of `[start, end)`: the number of its pack, or 0."""
        return self._map[start:end] if self._map is not None else bytes(end - start)

    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs of blocks that are not proven."""
        if self._map is not None:
            for match in _RUN.finditer(self._map[: self._blocks]):
                yield match.span()

    def pack(self, number: int) -> Pack:
        """The pack of this number."""
        return self._packs[number - 1] if 0 < number <= len(self._packs) else _UNKNOWN

    def number(self, pack: Pack) -> int:
        """The pack's number, a new one if it has none; 0 when there is none left. OSError when the disk refuses."""
        if pack in self._packs:
            return self._packs.index(pack) + 1
        if len(self._packs) >= _MOST:
            return 0
        line = json.dumps(asdict(pack)) + "\n"
        with (self._directory / "packs").open("a", encoding="utf-8") as file:
            file.write(line)
        reach("fetch.pack-named")
        self._packs.append(pack)
        if self._map is None:
            self._open()
        return len(self._packs)

    def mark(self, start: int, end: int, number: int) -> None:
        """The blocks come from this pack; 0: the layer itself has proven them. OSError when the disk refuses."""
        marks = bytes([number]) * (end - start)
        if self._map is not None and self._map[start:end] != marks:  # mostly 0 is what they say already
            write_all(self._fd, marks, start)

    def _open(self) -> None:
        path, size = self._directory / "unproven", max(self._blocks, 1)
        fd = os.open(path, (os.O_RDWR | os.O_CREAT if self._writable else os.O_RDONLY) | os.O_CLOEXEC, 0o600)
        with contextlib.ExitStack() as unless_mapped:
            unless_mapped.callback(os.close, fd)
            if self._writable:
                os.posix_fallocate(fd, 0, size)
            if os.fstat(fd).st_size >= size:
                self._map, self._fd = mmap.mmap(fd, size, access=mmap.ACCESS_READ), fd
                unless_mapped.pop_all()

    @staticmethod
    def packs_of(directory: Path) -> Iterator[Pack]:
        """The packs of a layer's directory, number 1 first; a line that a power cut left broken keeps its number."""
        with contextlib.suppress(FileNotFoundError):
            for line in (directory / "packs").read_text(encoding="utf-8", errors="replace").splitlines():
                try:
                    yield Pack(**json.loads(line))
                except (ValueError, TypeError):
                    yield _UNKNOWN
