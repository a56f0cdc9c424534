"""Restart points of gzip blobs: every point restarts exactly, windows hold what is needed and no more."""

import gzip
import random
import zlib
from itertools import pairwise

import pytest

from blockindex.deflate import WINDOW_SIZE
from blockindex.errors import Corrupt
from blockindex.gzipframe import check_trailer
from blockindex.gzipspans import GzipRun, GzipSource
from blockindex.model import Span
from blockindex.source import Boundary, Event, Point, Window
from tests.blockindex.layers import GZIP, chunks, content, members
from tests.blockindex.test_deflate import stored_at_every_bit

DATA = content(random.Random(3), 900_000)


def events(blob: bytes, span_size: int, chunk: int = 1 << 16) -> tuple[list[Event], int]:
    source = GzipSource(span_size)
    found = [event for part in chunks(blob, chunk) for event in source.feed(part)]
    return found, source.finish()


def tar_of(found: list[Event]) -> bytes:
    return b"".join(event for event in found if isinstance(event, memoryview))


def spans_of(found: list[Event], end: int) -> list[Span]:
    """The points as spans that reach to the first boundary at or past 4095 bytes beyond the next point."""
    points = [event for event in found if isinstance(event, Point)]
    windows = iter([event.data for event in found if isinstance(event, Window)])
    boundaries = [event for event in found if isinstance(event, Boundary)]
    tar_size = len(tar_of(found))
    spans = []
    for point, following in pairwise((*points, None)):
        need = min(following.tar_start + 4095, tar_size) if following else tar_size
        blob_end = next((place.blob_end for place in boundaries if place.tar_end >= need), end)
        window = next(windows) if point.raw else b""
        spans.append(Span(point.blob_start, blob_end, point.bit, point.raw, point.tar_start, 0, 0, window))
    assert next(windows, None) is None
    return spans


@pytest.mark.parametrize("kind", GZIP)
def test_every_point_restarts_exactly(kind: str) -> None:
    blob = GZIP[kind](DATA)
    found, end = events(blob, 5000)
    assert tar_of(found) == DATA
    assert end <= len(blob)
    spans = spans_of(found, end)
    for span, following in pairwise((*spans, None)):
        need = min(following.tar_start + 4095, len(DATA)) if following else len(DATA)
        out = b"".join(GzipRun(span).feed(blob[span.blob_start : span.blob_end]))
        assert out[: need - span.tar_start] == DATA[span.tar_start : need]


def test_points_come_at_every_bit() -> None:
    found, end = events(GZIP["small-blocks"](DATA[:150_000]), 1)
    assert {span.bit for span in spans_of(found, end)} == set(range(8))


def test_stored_blocks_right_after_a_point_at_every_bit() -> None:
    raw, places, output = stored_at_every_bit()
    trailer = zlib.crc32(output).to_bytes(4, "little") + len(output).to_bytes(4, "little")
    blob = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff" + raw + trailer
    found, end = events(blob, 1)
    spans = spans_of(found, end)
    starts = {8 * (span.blob_start - 10) + span.bit for span in spans if span.raw}
    assert {place for place, before in places if before} <= starts
    for span in spans:
        assert b"".join(GzipRun(span).feed(blob[span.blob_start :])) == output[span.tar_start :]


def test_windows_are_trimmed_to_what_is_referred_to() -> None:
    """Noise before the point, of which the point's first output repeats one stretch: only that is kept."""
    rng = random.Random(4)
    noise = rng.randbytes(60_000)
    compressor = zlib.compressobj(9, zlib.DEFLATED, 31)
    blob = compressor.compress(noise) + compressor.flush(zlib.Z_SYNC_FLUSH)
    blob += compressor.compress(noise[-20_000:-19_000] + b"fresh" + bytes(50_000)) + compressor.flush()
    found, end = events(blob, 1)
    span = next(span for span in spans_of(found, end) if span.raw and span.tar_start == len(noise))
    assert len(span.window) == 20_000, "leading bytes that nothing refers to are cut off"
    assert span.window == noise[-20_000:-19_000] + bytes(19_000)
    others = [other for other in spans_of(found, end) if other.raw and other.tar_start < len(noise)]
    assert others and not any(any(other.window) for other in others if other.tar_start < len(noise) - WINDOW_SIZE)


def test_windows_end_with_their_member() -> None:
    """A point near the end of a member: nothing of the next member counts, and the window is that member's."""
    text = content(random.Random(8), 50_000)
    blob = members(text * 4, [50_000] * 3)
    found, end = events(blob, 1)
    for span in spans_of(found, end):
        assert len(span.window) <= span.tar_start % 50_000
        assert b"".join(GzipRun(span).feed(blob[span.blob_start :])) == (text * 4)[span.tar_start :]


def test_member_starts_are_preferred_to_windows() -> None:
    blob = members(DATA, [100_000] * 8)
    found, _ = events(blob, 50_000)
    points = [event for event in found if isinstance(event, Point)]
    assert sum(not point.raw for point in points) > len(points) // 2


@pytest.mark.parametrize("cut", [1, 5, 12, 1000, -9, -8, -1])
def test_a_cut_blob_is_refused(cut: int) -> None:
    blob = gzip.compress(DATA[:100_000], mtime=0)[:cut]
    if cut == 1:
        found, end = events(blob, 1000)
        assert (found, end) == ([], 0)  # not even a magic: the builder never gets here
    else:
        with pytest.raises(Corrupt, match="cut short"):
            events(blob, 1000)


def test_a_second_member_that_is_cut_is_refused() -> None:
    blob = members(DATA[:9000], [4000])
    with pytest.raises(Corrupt, match="cut short"):
        events(blob[:-3], 1000)


def test_a_second_member_that_is_damaged_is_refused() -> None:
    first = gzip.compress(DATA[:4000], mtime=0)
    with pytest.raises(Corrupt, match="gzip"):
        events(first + b"\x1f\x8b\x09" + bytes(20), 1000)


DAMAGES = {"crc": -6, "size": -2, "body": 60, "method": 2, "reserved flag": 3, "header crc": 14}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_a_damaged_member_is_refused_where_it_is(damage: str, chunk: int) -> None:
    """Behind a sound one. Nothing of the trailer is taken on trust, though the blob has a digest too."""
    head = b"\x1f\x8b\x08\x0a\0\0\0\0\0\xffab\0"
    head += (zlib.crc32(head) & 0xFFFF).to_bytes(2, "little")
    sound = head + gzip.compress(DATA[:3000], mtime=0)[10:]
    assert gzip.decompress(sound * 2) == DATA[:3000] * 2
    assert tar_of(events(sound * 2, 1000, chunk)[0]) == DATA[:3000] * 2
    broken = bytearray(sound)
    broken[DAMAGES[damage]] ^= 0xE0
    with pytest.raises(Corrupt, match="not a valid gzip stream"):
        events(sound + broken, 1000, chunk)


def test_a_size_beyond_32_bits_counts_modulo_2_to_the_32() -> None:
    trailer = (7).to_bytes(4, "little") + (5).to_bytes(4, "little")
    check_trailer(trailer, 7, 5 + (1 << 32))
    with pytest.raises(Corrupt, match="size"):
        check_trailer(trailer, 7, 6 + (1 << 32))


def test_a_header_without_end_is_refused_in_time() -> None:
    """A name of 1 MiB, in small chunks; and many empty members in one chunk."""
    source = GzipSource(1000)
    with pytest.raises(Corrupt, match="header is longer"):
        for part in chunks(b"\x1f\x8b\x08\x08" + b"n" * (1 << 21), 1 << 12):
            list(source.feed(part))
    found, end = events(gzip.compress(b"", mtime=0) * 20_000, 1000, 1 << 20)
    assert end == 20 * 20_000 and len(found) == 1


@pytest.mark.parametrize("tail", [b"\0" * 5000, b"junk", b"\x1f", b"\x1f\x8c", b"\0\x1f\x8b\x08"])
@pytest.mark.parametrize("chunk", [1, 1 << 20])
def test_what_follows_the_last_member_is_ignored(tail: bytes, chunk: int) -> None:
    blob = gzip.compress(DATA[:20_000], mtime=0)
    found, end = events(blob + tail, 1000, chunk)
    assert tar_of(found) == DATA[:20_000]
    assert end == len(blob)
