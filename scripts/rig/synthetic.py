"""Gzip layers made up for measurements, as large as one likes at next to no cost.

A layer's blob is a list of *parts*: files on disk, each so many times in a row. A part is a piece of a raw deflate
stream that ends at a byte and refers to nothing before itself, so that it may stand many times in one stream, and in
many layers. `blobserver` serves such a blob without ever writing it out. Contents repeat, but every layer has its own
digest, and to a decoder each part is new.
"""

import hashlib
import io
import random
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Contents", "Part", "SyntheticLayer", "contents", "layer_of_contents", "layer_of_files"]

_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_RECORD = 512
_MTIME = 1_700_000_000
_FILES_PER_DIRECTORY = 100
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """The bytes of `path`, `count` times."""

    path: Path
    count: int


@dataclass(frozen=True, slots=True)
class SyntheticLayer:
    """A layer's blob: its digest, its bytes, the bytes of its tar, what it is put together from."""

    digest: str
    size: int
    tar_size: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Contents:
    """A piece of file contents, whole tar records long, and where its deflate stream is."""

    path: Path
    data: bytes
    deflated: bytes


def contents(directory: Path, name: str, size: int, noise: float, seed: int = 0) -> Contents:
    """`size` bytes (a multiple of 512), of which the share `noise` is random; the rest repeats what stands up to 32 KiB
    before, so that a decoder that starts in the middle needs its window."""
    source = random.Random(seed)
    data = bytearray(source.randbytes(min(size, 4096)))
    while len(data) < size:
        run = source.randrange(16, 200)
        back = source.randrange(run, min(len(data), 32000))
        data += data[len(data) - back : len(data) - back + run]
        data += source.randbytes(int(run * noise / max(1 - noise, 0.001)))
    del data[size:]
    deflated = _deflate(bytes(data))
    path = directory / name
    path.write_bytes(deflated)
    return Contents(path, bytes(data), deflated)


def layer_of_contents(
    directory: Path, name: str, piece: Contents, files: int, repeats: int, small: int = 0
) -> SyntheticLayer:
    """A layer of `files` files, each with the piece `repeats` times, and of `small` files of 600 bytes."""
    writer = _Writer(directory, name)
    writer.own(_header(f"{name}/", 0))
    for chunk in _small_files(name, small, bytes(600)):
        writer.own(chunk)
    for number in range(files):
        writer.own(_header(f"{name}/{number}", len(piece.data) * repeats))
        writer.add(piece, repeats)
    return writer.finish()


def layer_of_files(directory: Path, name: str, count: int, size: int = 600) -> SyntheticLayer:
    """A layer of `count` files of `size` bytes each, a hundred to a directory."""
    writer = _Writer(directory, name)
    writer.own(_header(f"{name}/", 0))
    source = random.Random(count)
    for chunk in _small_files(name, count, source.randbytes(size)):
        writer.own(chunk)
    return writer.finish()


def _small_files(name: str, count: int, body: bytes) -> Iterator[bytes]:
    padded = body + bytes(-len(body) % _RECORD)
    chunk = bytearray()
    for number in range(count):
        directory, file = divmod(number, _FILES_PER_DIRECTORY)
        if not file:
            chunk += _header(f"{name}/d{directory:04}/", 0)
        chunk += _header(f"{name}/d{directory:04}/f{file:02}", len(body)) + padded
        if len(chunk) >= _CHUNK:
            yield bytes(chunk)
            chunk.clear()
    if chunk:
        yield bytes(chunk)


def _header(path: str, size: int) -> bytes:
    """A tar header: of a directory if the path ends with a slash, else of a file of `size` bytes."""
    info = tarfile.TarInfo(path)
    info.size, info.mtime, info.mode = size, _MTIME, 0o644
    if path.endswith("/"):
        info.type, info.mode = tarfile.DIRTYPE, 0o755
    return info.tobuf(tarfile.GNU_FORMAT)


def _deflate(data: bytes, last: bool = False) -> bytes:
    """A piece of a raw deflate stream that ends at a byte."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


class _Writer:
    """Puts a layer together. Bytes of its own go to one file, `directory/name`, and are cut out of it into parts."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name
        self._parts: list[Part] = []
        self._digest = hashlib.sha256()
        self._size = self._tar_size = self._crc = 0
        self._own = io.BytesIO(_GZIP_HEAD)
        self._own.seek(0, io.SEEK_END)

    def own(self, tar: bytes) -> None:
        """Add bytes of the tar that only this layer has."""
        self._own.write(_deflate(tar))
        self._count(tar)

    def add(self, piece: Contents, count: int) -> None:
        """Add a piece `count` times."""
        self._flush()
        self._parts.append(Part(piece.path, count))
        self._size += len(piece.deflated) * count
        for _ in range(count):
            self._digest.update(piece.deflated)
            self._count(piece.data)

    def finish(self) -> SyntheticLayer:
        """The end of tar and gzip."""
        end = bytes(2 * _RECORD)
        self._own.write(_deflate(end, last=True))
        self._count(end)
        self._own.write(self._crc.to_bytes(4, "little") + (self._tar_size % (1 << 32)).to_bytes(4, "little"))
        self._flush()
        return SyntheticLayer(f"sha256:{self._digest.hexdigest()}", self._size, self._tar_size, tuple(self._parts))

    def _count(self, tar: bytes) -> None:
        self._crc = zlib.crc32(tar, self._crc)
        self._tar_size += len(tar)

    def _flush(self) -> None:
        data = self._own.getvalue()
        if not data:
            return
        path = self._directory / f"{self._name}.{len(self._parts)}"
        path.write_bytes(data)
        self._parts.append(Part(path, 1))
        self._digest.update(data)
        self._size += len(data)
        self._own = io.BytesIO()
