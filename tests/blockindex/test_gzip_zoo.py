"""Layers compressed by tools that Python has not: kept as files, and formats made by hand.

gzips/*.gz hold one tar each, whose files repeat themselves at distances up to the full 32,768 bytes; zlib's own
compressor never looks that far back.
"""

import gzip
import random
import struct
import zlib
from pathlib import Path

import pytest
from isal import isal_zlib

from tests.blockindex.layers import archive, build, data_region
from tests.blockindex.test_decoder import check_layer

GZIPS = sorted((Path(__file__).parent / "gzips").glob("*.gz"))


@pytest.mark.parametrize("span_size", [1500, 20_000])
@pytest.mark.parametrize("path", GZIPS, ids=lambda path: path.stem)
def test_other_compressors(path: Path, span_size: int) -> None:
    blob = path.read_bytes()
    index, region = build(blob, span_size)
    assert region == data_region(gzip.decompress(blob))
    assert len(index.spans) > 4 and any(index.spans.columns.window_sizes)
    check_layer(index, blob, region)


def bgzip(data: bytes, every: int = 0xFF00) -> bytes:
    """Blocked gzip as HTSlib writes it: members that state their size in an extra field, an empty one at the end."""
    out = bytearray()
    for start in (*range(0, len(data), every), len(data)):
        part = data[start : start + every]
        raw = zlib.compressobj(6, zlib.DEFLATED, -15)
        body = raw.compress(part) + raw.flush()
        extra = struct.pack("<BBHH", ord("B"), ord("C"), 2, len(body) + 25)
        out += b"\x1f\x8b\x08\x04" + bytes(4) + b"\0\xff" + struct.pack("<H", len(extra)) + extra
        out += body + struct.pack("<II", zlib.crc32(part), len(part))
    return bytes(out)


def test_bgzip() -> None:
    tar = archive(seed=6, files=9)
    blob = bgzip(tar)
    assert gzip.decompress(blob) == tar
    index, region = build(blob, span_size=40_000)
    assert region == data_region(tar)
    assert not any(index.spans.columns.window_sizes), "each span begins at a member, which needs no window"
    assert len(index.spans) > 3
    check_layer(index, blob, region)


@pytest.mark.parametrize("distance", [32_768, 32_767, 32_506, 258, 3])
def test_windows_reach_back_as_far_as_deflate_does(distance: int) -> None:
    """Content that repeats after `distance` bytes, by a compressor that uses such distances."""
    rng = random.Random(distance)
    unit = bytes(rng.choice(b"abcdefgh") for _ in range(distance))
    tar = gzip.decompress((Path(__file__).parent / "gzips" / "zopfli.gz").read_bytes())
    data = tar[: tar.rindex(b"ustar") - 257]  # all but the last entry
    entry = bytearray(tar[len(data) : len(data) + 512])
    content = (unit * (200_000 // distance + 1))[:200_000]
    entry[124:136] = b"%011o\0" % len(content)
    entry[148:156] = b" " * 8
    entry[148:156] = b"%06o\0 " % sum(entry)
    whole = data + bytes(entry) + content + bytes(-len(content) % 512 + 1024)
    compressor = isal_zlib.compressobj(3, isal_zlib.DEFLATED, 31)
    blob = b"".join((compressor.compress(whole), compressor.flush()))
    index, region = build(blob, span_size=1500)
    assert region == data_region(whole)
    check_layer(index, blob, region)
