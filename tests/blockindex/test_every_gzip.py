"""gzip as the tools at hand write it: every span of every index decodes alone and in runs to what gunzip gives."""

import gzip
import random
import shutil
import struct
import subprocess
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from blockindex.gzipspans import GzipRun, GzipSource
from blockindex.model import BLOCK, Span
from blockindex.source import Point, Window
from tests.blockindex.layers import archive, build, chunks, data_region, tool
from tests.blockindex.test_decoder import check_layer, check_pieces, decode

TAR = archive(seed=11, files=16)
REGION = data_region(TAR)

FILE = "FILE"  # stands for the archive where a tool cannot read it from a pipe

# Command, and the levels to try: what they differ in is the search, and with it distances, block sizes and kinds.
TOOLS: dict[str, tuple[list[str], str]] = {
    "gzip": (["gzip", "-c"], "19"),
    "pigz": (["pigz", "-c", "-p2", "-b128"], "019"),
    "pigz-independent": (["pigz", "-c", "-i", "-p2", "-b128"], "6"),
    "pigz-rsyncable": (["pigz", "-c", "-R", "-p2"], "6"),
    "pigz-zopfli": (["pigz", "-c", "-p2", "-I1", "-11"], ""),
    "zopfli": (["zopfli", "-c", "--i1", FILE], ""),
    "bgzip": (["bgzip", "-c", "-l"], "0159"),
    "libdeflate": (["libdeflate-gzip", "-c"], "169"),
    "libdeflate-12": (["libdeflate-gzip", "-c", "-12"], ""),
    "igzip": (["igzip", "-c"], "0123"),
    "7zip": (["7zz", "a", "-tgzip", "-si", "-so", "-bso0", "-bsp0", "-mx9", "unused.gz"], ""),
}
CASES = [
    # `system` needs no root here: the mark keeps what takes seconds out of the quick runs
    pytest.param(name, level, marks=pytest.mark.system if name == "pigz-zopfli" else ())
    for name, (_, levels) in TOOLS.items()
    for level in levels or [""]
]


def compressed(name: str, level: str, place: Path) -> bytes:
    command = TOOLS[name][0]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed: run scripts/setup")
    if level:
        command = [*command, level] if name == "bgzip" else [*command, f"-{level}"]
    (place / FILE).write_bytes(TAR)
    return subprocess.run(command, input=TAR, cwd=place, check=True, capture_output=True).stdout


@pytest.mark.parametrize(("name", "level"), CASES)
def test_every_tool(name: str, level: str, tmp_path: Path) -> None:
    """With a restart point at every deflate block, at some, and at the first only."""
    blob = compressed(name, level, tmp_path)
    assert gzip.decompress(blob) == TAR
    counts = []
    for span_size in (1, 12_000, 1 << 30):
        index, region = build(blob, span_size, chunk=random.Random(span_size))
        assert region == REGION
        check_layer(index, blob, REGION)
        counts.append(len(index.spans))
        rng = random.Random(3)
        for _ in range(4):
            first = rng.randrange(len(index.spans))
            last = rng.randint(first, len(index.spans))
            check_pieces(index, REGION, decode(index, blob, first, last, rng), first, last)
    assert counts[0] >= counts[1] >= counts[2]
    if name not in ("igzip", "bgzip"):
        assert counts[0] > 5


@pytest.mark.parametrize("level", range(10))
def test_spans_end_inside_blocks(level: int) -> None:
    """zlib's own levels: where a span ends is its decoder's matter, not the files'; the block there is its whole."""
    blob = gzip.compress(TAR, level)
    index, region = build(blob, span_size=3000)
    assert region == REGION
    inside = 0
    for span in range(1, len(index.spans)):
        start = index.spans[span].tar_start
        extent = next((row for row in index.files if row.tar_offset < start < row.tar_offset + row.size), None)
        if extent is not None and (start - extent.tar_offset) % BLOCK:
            inside += 1
            assert index.spans[span - 1].blob_end > index.spans[span].blob_start
    assert inside > 3
    check_layer(index, blob, REGION)


@pytest.mark.parametrize(
    "fields", list(product((False, True), repeat=5)), ids=lambda fields: "".join("01"[f] for f in fields)
)
def test_every_header(fields: tuple[bool, ...]) -> None:
    """Each set of optional header fields, on the first member and on a later one, cut everywhere."""
    text, checksum, extra, name, comment = fields
    flags = text | checksum << 1 | extra << 2 | name << 3 | comment << 4
    head = b"\x1f\x8b\x08" + bytes((flags,)) + b"\1\2\3\4\0\xff"
    head += b"\5\0a\0\x1f\x8b\x08" if extra else b""
    head += b"n\x1f\x8bme\0" if name else b""
    head += b"comment \xff\0" if comment else b""
    if checksum:
        head += (zlib.crc32(head) & 0xFFFF).to_bytes(2, "little")
    tar = archive(seed=12, files=2)
    half = len(tar) // 2
    blob = b"".join(head + gzip.compress(part, mtime=0)[10:] for part in (tar[:half], tar[half:]))
    assert gzip.decompress(blob) == tar
    index, region = build(blob, span_size=1, chunk=7)
    assert region == data_region(tar)
    check_layer(index, blob, region)
    for chunk in (1, 4096):
        check_pieces(index, region, decode(index, blob, 0, len(index.spans), chunk), 0, len(index.spans))


JOINS: dict[str, Callable[[list[bytes]], bytes]] = {
    "plain": lambda parts: b"".join(gzip.compress(part) for part in parts),
    "empty members between": lambda parts: b"".join(gzip.compress(part) + gzip.compress(b"") * 3 for part in parts),
    "levels mixed": lambda parts: b"".join(gzip.compress(part, level % 10) for level, part in enumerate(parts)),
    "stored": lambda parts: b"".join(gzip.compress(part, 0) for part in parts),
    "tools mixed": lambda parts: b"".join(
        tool(*(("gzip", "-c"), ("pigz", "-c", "-p1"))[number % 2])(part) for number, part in enumerate(parts)
    ),
}
TAILS = {
    "nothing": b"",
    "zeros": bytes(70_000),
    "rubbish": b"rubbish" * 9,
    "half a magic": b"\x1f",
    "zstd": b"\x28\xb5\x2f\xfd",
}


@pytest.mark.parametrize("join", JOINS)
@pytest.mark.parametrize("tail", TAILS)
def test_members_and_what_follows_the_last(join: str, tail: str) -> None:
    parts = list(chunks(TAR, len(TAR) // 6))
    blob = JOINS[join](parts) + TAILS[tail]
    index, region = build(blob, span_size=20_000)
    assert region == REGION and index.tar_size == len(TAR)
    assert max(index.spans.columns.blob_ends) <= len(blob) - len(TAILS[tail])
    check_layer(index, blob, REGION)


def match(distance: int) -> bytes:
    """A last deflate block with fixed codes: one match of length 3, then the end; whole bytes."""
    code, base, extra = next((c, b, e) for c, b, e in ((29, 24577, 13), (28, 16385, 13), (0, 1, 0)) if distance >= b)
    fields = [("1", ""), ("", "10"), ("0000001", ""), (f"{code:05b}", "")]  # final, type 1, length 3, distance
    fields += [("", f"{distance - base:0{extra}b}"[::-1] if extra else ""), ("0000000", "")]
    bits = "".join(huffman + number for huffman, number in fields)
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[start : start + 8][::-1], 2) for start in range(0, len(bits), 8))


@pytest.mark.parametrize("distance", [1, 16_385, 24_577, 32_767, 32_768])
def test_the_window_at_its_edges(distance: int) -> None:
    """A match right after a restart point, as far back as deflate can: the window's first byte, and its last."""
    data = random.Random(distance).randbytes(32_768)
    stored = b"\0" + struct.pack("<HH", 32_768, 0x7FFF) + data
    end = (data[-distance:] + data[-distance:] * 2)[:3] if distance < 3 else data[len(data) - distance :][:3]
    tar = data + end
    blob = b"\x1f\x8b\x08\0\0\0\0\0\0\xff" + stored + match(distance)
    blob += struct.pack("<II", zlib.crc32(tar), len(tar))
    assert gzip.decompress(blob) == tar
    source = GzipSource(1)
    events = [event for part in chunks(blob, 1000) for event in source.feed(part)]
    source.finish()
    point = [event for event in events if isinstance(event, Point)][-1]
    (window,) = (event.data for event in events if isinstance(event, Window))
    assert (point.raw, point.tar_start) == (True, 32_768)
    assert window == (end if distance >= 3 else end[:1]) + bytes(distance - 3 if distance >= 3 else 0)
    span = Span(point.blob_start, len(blob), point.bit, True, point.tar_start, 0, 0, window)
    assert b"".join(GzipRun(span).feed(blob[point.blob_start :])) == end
