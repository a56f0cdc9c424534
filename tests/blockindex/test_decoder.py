"""Build, then decode: every way to compress a layer, every span alone, runs of spans, damaged blobs."""

import gzip
import io
import random
import tarfile
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex.codec import decode_head, encode_index, head_end
from blockindex.decoder import SpanDecoder
from blockindex.errors import BlockIndexError, Corrupt
from blockindex.gzipspans import GzipRun
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK, Compression, Piece
from tests.blockindex.layers import BLOBS, archive, build, chunks, data_region, digest, sparse_archive

TAR = archive()
REGION = data_region(TAR)


def decode(index: LayerIndex, blob: bytes, first: int, last: int, chunk: int | random.Random = 1 << 16) -> list[Piece]:
    """Decode a run from exactly the bytes it asks for."""
    decoder = SpanDecoder(index, first, last)
    pieces: list[Piece] = []
    for part in chunks(blob[decoder.blob_start : decoder.blob_end], chunk):
        pieces += decoder.feed(part)
    assert decoder.done
    assert decoder.feed(b"more") == []
    return pieces


def check_pieces(index: LayerIndex, region: bytes, pieces: list[Piece], first: int, last: int) -> None:
    """The pieces are those of the spans, with the region's bytes."""
    expected = [piece for span in range(first, last) for piece in index.pieces(span)]
    assert [(p.block_start, p.block_end) for p in pieces] == [(p.block_start, p.block_end) for p in expected]
    for piece, wanted in zip(pieces, expected, strict=True):
        assert piece.data == region[piece.block_start * BLOCK : piece.block_end * BLOCK]
        assert index.verify_piece(wanted, piece.data)


def check_layer(index: LayerIndex, blob: bytes, region: bytes) -> None:
    """Every block is a hole or comes out of exactly the span that owns it, each span decoded alone."""
    seen: set[int] = set()
    for span in range(len(index.spans)):
        pieces = decode(index, blob, span, span + 1)
        check_pieces(index, region, pieces, span, span + 1)
        for piece in pieces:
            blocks = range(piece.block_start, piece.block_end)
            assert not all(map(index.is_hole, blocks)), "a run of holes costs no digests"
            for block in range(piece.block_start, piece.block_end):
                assert block not in seen
                seen.add(block)
                assert index.span_of_block(block) in (span, None)
    for run in index.hole_blocks():
        assert not any(region[run.start * BLOCK : run.stop * BLOCK])
        seen.update(run)
    assert seen == set(range(index.block_count))


@pytest.mark.parametrize("kind", BLOBS)
def test_every_span_alone_yields_the_blocks_it_owns(kind: str) -> None:
    blob = BLOBS[kind](TAR)
    index, region = build(blob, span_size=10_000)
    assert region == REGION
    assert index.diff_id == digest(TAR) and index.tar_size == len(TAR) and index.blob_size == len(blob)
    if kind not in ("zstd", "zstd-skippable-first", "isal-0", "isal-3"):
        assert len(index.spans) > 5, "the test is worth nothing with one span"
    check_layer(index, blob, REGION)


@pytest.mark.parametrize("kind", ["gzip-6", "members", "fixed", "gzip-0", "tar", "zstd-frames", "cut-magic"])
@pytest.mark.parametrize("chunk", [1, 4096, 10**9, "random"])
def test_chunk_sizes_change_nothing(kind: str, chunk: int | str) -> None:
    tar = archive(seed=3, files=4 if chunk == 1 else 12)
    blob = BLOBS[kind](tar)
    size = chunk if isinstance(chunk, int) else random.Random(2)
    whole, _ = build(blob, span_size=2000)
    index, region = build(blob, span_size=2000, chunk=size)
    assert index == whole
    assert region == data_region(tar)
    pieces = decode(index, blob, 0, len(index.spans), size)
    check_pieces(index, region, pieces, 0, len(index.spans))


@pytest.mark.parametrize("kind", ["gzip-6", "tiny-members", "gzip-0", "tar", "zstd-frames"])
@pytest.mark.parametrize("span_size", [1, 600, 5000])
def test_spans_smaller_than_blocks_and_files(kind: str, span_size: int) -> None:
    tar = archive(seed=4, files=8)
    blob = BLOBS[kind](tar)
    index, region = build(blob, max(span_size, 50) if kind == "tar" else span_size)
    assert region == data_region(tar)
    check_layer(index, blob, region)


@pytest.mark.parametrize("kind", ["gzip-6", "members", "zstd-frames", "tar"])
def test_runs_decode_across_their_inner_borders(kind: str) -> None:
    blob = BLOBS[kind](TAR)
    index, _ = build(blob, span_size=8000)
    rng = random.Random(7)
    for _ in range(12):
        first = rng.randrange(len(index.spans))
        last = rng.randint(first, len(index.spans))
        check_pieces(index, REGION, decode(index, blob, first, last, rng), first, last)


@pytest.mark.parametrize("tar_format", ["gnu", "posix", "oldgnu"])
@pytest.mark.parametrize("kind", ["gzip-6", "tar"])
@pytest.mark.parametrize("span_size", [3000, 100_000])
def test_sparse_files(tmp_path: Path, tar_format: str, kind: str, span_size: int) -> None:
    tar = sparse_archive(tmp_path, tar_format)
    blob = BLOBS[kind](tar)
    index, region = build(blob, span_size)
    assert region == data_region(tar)
    assert sum(len(run) for run in index.hole_blocks()) > 500
    check_layer(index, blob, region)


def test_pieces_come_as_soon_as_their_bytes_are_there() -> None:
    """In a plain tar it is clear which byte completes a piece: it comes with that byte, not with the next one."""
    index, _ = build(TAR, span_size=1 << 30)
    assert len(index.spans) == 1 and index.piece_count > 4
    decoder = SpanDecoder(index, 0, 1)
    start = 0
    for piece in index.pieces(0):
        complete = index.files.tar_end(piece.block_end * BLOCK)
        assert decoder.feed(TAR[start : complete - 1]) == []
        (out,) = decoder.feed(TAR[complete - 1 : complete])
        assert (out.block_start, out.block_end) == (piece.block_start, piece.block_end)
        start = complete
    assert decoder.done


def test_a_span_asks_for_little_more_than_itself() -> None:
    blob = gzip.compress(TAR, 6)
    index, _ = build(blob, span_size=20_000)
    owners = [span for span in index.spans if span.block_start < span.block_end]
    assert len(owners) > 5
    for span, following in pairwise(owners):
        assert following.blob_start <= span.blob_end <= following.blob_end
        assert span.blob_end - following.blob_start < 60_000, "one deflate block of zlib at most"


def test_spans_that_own_nothing_need_no_bytes() -> None:
    tar = archive(seed=4, files=10)
    index, _ = build(tar, span_size=512)
    empty = [i for i in range(len(index.spans)) if index.spans[i].block_start == index.spans[i].block_end]
    assert len(empty) > 20
    decoder = SpanDecoder(index, empty[0], empty[0] + 1)
    assert decoder.done and decoder.blob_start == decoder.blob_end
    assert SpanDecoder(index, 3, 3).done


def test_a_layer_without_files() -> None:
    tar = bytes(1024)
    for blob in (tar, gzip.compress(tar), zstandard.compress(tar)):
        index, region = build(blob)
        assert index.block_count == 0 and region == b"" and index.piece_count == 0
        assert SpanDecoder(index, 0, len(index.spans)).done


@pytest.mark.parametrize("kind", ["gzip-6", "gzip-0", "members", "tar", "zstd-frames", "zstd"])
def test_damaged_blob_bytes_never_make_a_wrong_piece(kind: str) -> None:
    blob = BLOBS[kind](TAR)
    index, _ = build(blob, span_size=20_000)
    rng = random.Random(11)
    refused = 0
    for _ in range(60):
        span = rng.randrange(len(index.spans))
        decoder = SpanDecoder(index, span, min(span + 2, len(index.spans)))
        if decoder.done:
            continue
        damaged = bytearray(blob[decoder.blob_start : decoder.blob_end])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        pieces: list[Piece] = []
        try:
            for part in chunks(bytes(damaged), 5000):
                pieces += decoder.feed(part)
        except Corrupt:
            refused += 1
        for piece in pieces:
            assert piece.data == REGION[piece.block_start * BLOCK : piece.block_end * BLOCK]
    assert refused > 30


@pytest.mark.parametrize("kind", ["gzip-6", "members", "tar", "zstd-frames"])
def test_bytes_that_are_not_the_blob_are_refused(kind: str) -> None:
    blob = BLOBS[kind](TAR)
    index, _ = build(blob, span_size=20_000)
    decoder = SpanDecoder(index, 1, 2)
    with pytest.raises(Corrupt, match="blob"):
        decoder.feed(bytes(decoder.blob_end - decoder.blob_start))


def test_a_wrong_window_is_noticed() -> None:
    """The window is the index's, not the blob's: a bad one must not get through either."""
    blob = gzip.compress(TAR, 6)
    index, _ = build(blob, span_size=20_000)
    span = next(i for i in range(1, len(index.spans)) if any(index.spans[i].window))
    windows = list(index.spans)[span].window
    good = GzipWindow(index, span, windows)
    assert good.decodes(blob)
    assert not GzipWindow(index, span, bytes(byte ^ 1 for byte in windows)).decodes(blob)


class GzipWindow:
    """A decoder of one span that starts with another window."""

    def __init__(self, index: LayerIndex, span: int, window: bytes) -> None:
        self.decoder = SpanDecoder(index, span, span + 1)
        self.decoder._decode = GzipRun(replace(index.spans[span], window=window))

    def decodes(self, blob: bytes) -> bool:
        try:
            self.decoder.feed(blob[self.decoder.blob_start : self.decoder.blob_end])
        except Corrupt:
            return False
        return self.decoder.done


def test_spans_without_window_decode_before_the_windows_have_arrived() -> None:
    blob = BLOBS["members"](TAR)
    whole, _ = build(blob, span_size=20_000)
    data = encode_index(whole)
    index = decode_head(data[: head_end(data)])
    assert not index.has_windows
    check_pieces(index, REGION, decode(index, blob, 0, 1), 0, 1)
    raw = next(i for i in range(len(whole.spans)) if whole.spans.columns.window_sizes[i])
    with pytest.raises(AssertionError, match="attached"):
        SpanDecoder(index, raw, raw + 1)


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 30_000), min_size=1, max_size=25),
    seed=st.integers(0, 2**32),
    span_size=st.integers(1, 20_000),
    kind=st.sampled_from(sorted(BLOBS)),
    tar_format=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]),
)
def test_round_trip(sizes: list[int], seed: int, span_size: int, kind: str, tar_format: int) -> None:
    rng = random.Random(seed)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tar_format) as writer:
        for number, size in enumerate(sizes):
            info = tarfile.TarInfo(f"f{number}")
            info.size = size
            writer.addfile(info, io.BytesIO(rng.randbytes(size) if rng.random() < 0.5 else bytes(size)))
    tar = out.getvalue()
    blob = BLOBS[kind](tar)
    index, region = build(blob, span_size, rng)
    assert region == data_region(tar)
    first = rng.randrange(len(index.spans))
    check_pieces(index, region, decode(index, blob, first, len(index.spans), rng), first, len(index.spans))
    span = rng.randrange(len(index.spans))
    check_pieces(index, region, decode(index, blob, span, span + 1), span, span + 1)


def test_a_bomb_is_decoded_in_small_steps() -> None:
    """64 KiB of gzip that become 60 MB pass through the decoder a megabyte at a time."""
    bomb = zlib.compressobj(9, zlib.DEFLATED, 31)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as writer:
        info = tarfile.TarInfo("zeros")
        info.size = 60_000_000
        writer.addfile(info, io.BytesIO(bytes(info.size)))
    blob = bomb.compress(out.getvalue()) + bomb.flush()
    assert len(blob) < 1 << 16
    index, _ = build(blob, span_size=1 << 12)
    assert index.compression is Compression.GZIP and len(index.spans) > 5
    # a deflate block of zlib holds up to 4.2 MB of zeros, and points lie between blocks
    assert all(span.tar_start - previous.tar_start < 10_000_000 for previous, span in pairwise(index.spans))
    sizes = [len(part) for part in SpanDecoder(index, 0, len(index.spans))._decode.feed(blob)]
    assert max(sizes) <= 1 << 20 and sum(sizes) == index.tar_size


def test_errors_share_one_root() -> None:
    assert issubclass(Corrupt, BlockIndexError)
