"""Contents of generated layers: pseudo-random, the same on every machine, at the speed of copying.

A file is a sequence of chunks of 1 MiB, each cut from one pool of random bytes at a place that depends on the file's
path and the chunk's number. So chunks repeat bytes of each other, but far beyond deflate's window of 32 KiB and at
other places within their 4 KiB blocks: neither gzip nor a store of equal blocks gains by it.
"""

import hashlib
import io
import tarfile
from functools import cache
from pathlib import Path
from typing import BinaryIO

from scripts.rig.image.recipes import Generated
from scripts.rig.layers import EPOCH_S, Blob, BlobWriter

__all__ = ["CHUNK", "content", "write_files", "write_generated"]

CHUNK = 1 << 20
_POOL = 64 * CHUNK


class _Content(io.RawIOBase):
    """One file's bytes, to be read once from start to end."""

    def __init__(self, path: str, size: int, bits: int) -> None:
        self._path, self._size, self._bits = path, size, bits
        self._chunk, self._at, self._offset = b"", 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # io passes a memoryview
        if self._at == len(self._chunk):
            self._chunk = _chunk(self._path, self._offset // CHUNK, min(CHUNK, self._size - self._offset), self._bits)
            self._at = 0
        count = min(len(buffer), len(self._chunk) - self._at)
        buffer[:count] = self._chunk[self._at : self._at + count]
        self._at += count
        self._offset += count
        return count


def content(path: str, size: int, bits: int) -> BinaryIO:
    """The bytes of a generated file, as a stream."""
    return io.BufferedReader(_Content(path, size, bits), CHUNK)


def write_generated(layer: Generated, out: BinaryIO) -> Blob:
    """Write a generated layer's blob: gzip by igzip at its level 1, which keeps up with the disk."""
    writer = BlobWriter(out, fast=True)
    with tarfile.open(fileobj=writer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        made: set[str] = set()
        for path, size in layer.files:
            for directory in reversed(Path(path).parents[:-1]):
                if str(directory) not in made:
                    made.add(str(directory))
                    archive.addfile(_entry(str(directory), tarfile.DIRTYPE, 0o755, 0))
            archive.addfile(_entry(path, tarfile.REGTYPE, 0o644, size), content(path, size, layer.bits))
    return writer.finish()


def write_files(layer: Generated, root: Path, wanted: set[str]) -> None:
    """Write those files of the layer that are `wanted` below the directory `root`."""
    for path, size in layer.files:
        if path in wanted:
            target = root / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with content(path, size, layer.bits) as source, target.open("wb") as out:
                while chunk := source.read(CHUNK):
                    out.write(chunk)


def _entry(path: str, kind: bytes, mode: int, size: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path)
    info.type, info.mode, info.size, info.mtime = kind, mode, size, EPOCH_S
    return info


def _chunk(path: str, number: int, size: int, bits: int) -> bytes:
    place = int.from_bytes(hashlib.sha256(f"{path} {number}".encode()).digest()[:8], "big") % (_POOL - CHUNK)
    return _pool(bits)[place : place + size]


@cache
def _pool(bits: int) -> bytes:
    random = hashlib.shake_128(b"bootseer").digest(_POOL)
    mask = (1 << bits) - 1
    return random if bits == 8 else random.translate(bytes(byte & mask for byte in range(256)))
