"""Layers for the tests: archives, all the ways to compress them, and a reference made with the ordinary tools."""

import gzip
import hashlib
import io
import random
import struct
import subprocess
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import zstandard
from isal import isal_zlib

from blockindex.builder import LayerBuilder
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK

SIZES = (0, 1, 511, 4095, 4096, 4097, 8192, 30_000, 12, 5, 140_000, 1, 70_000)


def content(rng: random.Random, size: int) -> bytes:
    """Text, noise or zeros, or one after the other, so that deflate makes blocks of every kind."""
    words = [rng.randbytes(rng.randint(2, 9)) for _ in range(200)]
    out = bytearray()
    while len(out) < size:
        kind = rng.random()
        length = rng.randint(1, 30_000)
        if kind < 0.6:
            out += b" ".join(rng.choice(words) for _ in range(length // 6))
        elif kind < 0.9:
            out += rng.randbytes(length)
        else:
            out += bytes(length)
        out += b"\n"
    return bytes(out[:size])


def archive(seed: int = 1, files: int = 40, tar_format: int = tarfile.PAX_FORMAT) -> bytes:
    """A tar of files of all kinds and sizes."""
    rng = random.Random(seed)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as tar:
        for number in range(files):
            info = tarfile.TarInfo(f"dir{number % 5}/file-{number}")
            info.mtime = 1_700_000_000 + number
            if number % 11 == 3:
                info.type, info.linkname = tarfile.SYMTYPE, "file-0"
                tar.addfile(info)
            elif number % 11 == 5:
                info.type, info.linkname = tarfile.LNKTYPE, "dir0/file-0"
                tar.addfile(info)
            else:
                data = content(rng, rng.choice(SIZES) if number else 5000)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def sparse_archive(directory: Path, tar_format: str) -> bytes:
    """A tar by GNU tar of files with holes: before, between, after the data, and larger than many pieces."""
    rng = random.Random(5)
    plans = {
        "leading": (3_000_000, [(1_000_000, 5000), (1_400_000, 70_000)]),
        "plain": (9000, [(0, 9000)]),
        "scattered": (2_000_000, [(place, 4096) for place in range(0, 2_000_000, 200_704)]),
        "trailing": (1_500_000, [(0, 300), (8192, 700_000)]),
        "empty": (500_000, []),
        "last": (10, [(0, 10)]),
    }
    for name, (size, parts) in plans.items():
        with open(directory / name, "wb") as file:
            for offset, length in parts:
                file.seek(offset)
                file.write(rng.randbytes(length))
            file.truncate(size)
    command = ["tar", "-c", "--sparse", f"--format={tar_format}", "--sort=name", "-C", str(directory), *plans]
    return subprocess.run(command, check=True, capture_output=True).stdout


def data_region(tar: bytes) -> bytes:
    """What the data region of the layer must hold, by Python's tarfile."""
    out = bytearray()
    with tarfile.open(fileobj=io.BytesIO(tar)) as reader:
        for member in reader:
            if member.isfile() and member.size:
                file = reader.extractfile(member)
                assert file is not None
                data = file.read()
                out += data + bytes(-len(data) % BLOCK)
    return bytes(out)


def members(data: bytes, sizes: Iterable[int], level: int = 6) -> bytes:
    """`data` as gzip members of the given sizes, the last one for the rest."""
    out, start = [], 0
    for size in sizes:
        out.append(gzip.compress(data[start : start + size], level, mtime=0))
        start += size
    return b"".join((*out, gzip.compress(data[start:], level, mtime=0)))


def strategy(data: bytes, kind: int, level: int = 6, memory: int = 8) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, 31, memory, kind)
    return compressor.compress(data) + compressor.flush()


def flushed(data: bytes, mode: int, every: int) -> bytes:
    """One member with flushes in it: empty stored blocks, byte aligned blocks."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, 31)
    out = bytearray()
    for start in range(0, len(data), every):
        out += compressor.compress(data[start : start + every]) + compressor.flush(mode)
    return bytes(out + compressor.flush())


def full_header(data: bytes) -> bytes:
    """A member with every optional header field."""
    fields = struct.pack("<H", 300) + bytes(300) + b"name\0" + b"a comment\0"
    head = b"\x1f\x8b\x08" + bytes((0x1E,)) + struct.pack("<IBB", 7, 0, 3) + fields
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF)
    raw = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = raw.compress(data) + raw.flush()
    return head + body + struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def isal_gzip(data: bytes, level: int) -> bytes:
    compressor = isal_zlib.compressobj(level, isal_zlib.DEFLATED, 31)
    return compressor.compress(data) + compressor.flush()


def tool(*command: str) -> Callable[[bytes], bytes]:
    return lambda data: subprocess.run(command, input=data, check=True, capture_output=True).stdout


def frames(data: bytes, every: int) -> bytes:
    """zstd frames, with a skippable frame after each."""
    skippable = b"\x5f\x2a\x4d\x18" + struct.pack("<I", 3) + b"abc"
    return b"".join(zstandard.compress(data[i : i + every]) + skippable for i in range(0, len(data), every))


GZIP: dict[str, Callable[[bytes], bytes]] = {
    **{f"gzip-{level}": lambda data, level=level: gzip.compress(data, level, mtime=0) for level in range(10)},
    "fixed": lambda data: strategy(data, zlib.Z_FIXED),
    "huffman": lambda data: strategy(data, zlib.Z_HUFFMAN_ONLY),
    "small-blocks": lambda data: strategy(data, zlib.Z_DEFAULT_STRATEGY, memory=1),
    "sync-flush": lambda data: flushed(data, zlib.Z_SYNC_FLUSH, 9000),
    "full-flush": lambda data: flushed(data, zlib.Z_FULL_FLUSH, 50_000),
    "isal-0": lambda data: isal_gzip(data, 0),
    "isal-3": lambda data: isal_gzip(data, 3),
    "gnu-gzip": tool("gzip", "-6"),
    "pigz": tool("pigz", "-p2", "-b", "128"),
    "pigz-independent": tool("pigz", "-i", "-p2", "-b", "128"),
    "members": lambda data: members(data, (10, 0, 3000, 100_000, 1, 60_000)),
    "tiny-members": lambda data: members(data, [700] * (len(data) // 700)),
    "stored-members": lambda data: members(data, [70_000] * 3, level=0),
    "full-header": full_header,
    "padded": lambda data: gzip.compress(data, mtime=0) + bytes(1000),
    "garbage": lambda data: gzip.compress(data, mtime=0) + b"garbage \x1f\x8b",
    "cut-magic": lambda data: gzip.compress(data, mtime=0) + b"\x1f",
}
BLOBS: dict[str, Callable[[bytes], bytes]] = {
    **GZIP,
    "tar": lambda data: data,
    "zstd": lambda data: zstandard.compress(data, 3),
    "zstd-frames": lambda data: frames(data, 100_000),
    "zstd-skippable-first": lambda data: b"\x50\x2a\x4d\x18" + struct.pack("<I", 1) + b"x" + zstandard.compress(data),
}


def digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def chunks(data: bytes, size: int | random.Random) -> Iterator[bytes]:
    """`data` in parts of `size`, or of random sizes."""
    start = 0
    while start < len(data):
        step = size if isinstance(size, int) else size.choice((1, 2, 7, 100, 5000, 66_000))
        yield data[start : start + step]
        start += step


def build(blob: bytes, span_size: int = 30_000, chunk: int | random.Random = 1 << 16) -> tuple[LayerIndex, bytes]:
    """The index, and the data region that the builder's writes make."""
    builder = LayerBuilder(digest(blob), span_size)
    region = bytearray()
    end = 0
    for part in chunks(blob, chunk):
        for offset, data in builder.feed(part):
            assert offset >= end and data, "writes come in data order"
            end = offset + len(data)
            region += bytes(max(end - len(region), 0))
            region[offset:end] = data
    index = builder.finish()
    region += bytes(index.data_size - len(region))
    return index, bytes(region)
