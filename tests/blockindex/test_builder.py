"""What the builder refuses, and what it costs. (That it builds right is in test_decoder.)"""

import gzip
import io
import random
import tarfile
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard

from blockindex.builder import LayerBuilder
from blockindex.erofs import walk
from blockindex.errors import Corrupt, Unsupported
from blockindex.model import Compression
from blockindex.source import Spacing, detect
from tests.blockindex.layers import BLOBS, archive, build, chunks, digest, tool

TAR = archive(seed=2, files=20)


def feed(blob: bytes, expected: str | None = None, chunk: int = 1 << 16, span_size: int = 10_000) -> LayerBuilder:
    builder = LayerBuilder(expected or digest(blob), span_size)
    for part in chunks(blob, chunk):
        for _ in builder.feed(part):
            pass
    return builder


@pytest.mark.parametrize(
    ("head", "compression"),
    [
        (b"\x1f\x8b\x08\x00", Compression.GZIP),
        (b"\x28\xb5\x2f\xfd", Compression.ZSTD),
        (b"\x5a\x2a\x4d\x18", Compression.ZSTD),
        (b"\x6a\x2a\x4d\x18", Compression.TAR),
        (b"etc/", Compression.TAR),
        (bytes(4), Compression.TAR),
        (b"", Compression.TAR),
    ],
)
def test_detect(head: bytes, compression: Compression) -> None:
    assert detect(head) is compression


@pytest.mark.parametrize("kind", ["gzip-6", "tar", "zstd"])
def test_another_blob_is_refused(kind: str) -> None:
    blob = BLOBS[kind](TAR)
    builder = feed(blob, digest(b"something else"))
    with pytest.raises(Corrupt, match=f"its digest is {digest(blob)}, not {digest(b'something else')}"):
        builder.finish()


@pytest.mark.parametrize("kind", ["gzip-6", "members", "tar", "zstd", "zstd-frames"])
@pytest.mark.parametrize("part", [0.3, 0.95])
def test_a_cut_blob_is_refused(kind: str, part: float) -> None:
    blob = BLOBS[kind](TAR)
    with pytest.raises(Corrupt):
        feed(blob[: int(len(blob) * part)], digest(blob)).finish()


@pytest.mark.parametrize("kind", ["gzip-6", "members", "tar", "zstd", "zstd-frames"])
def test_a_whole_blob_of_a_cut_tar_is_refused(kind: str) -> None:
    """The last span owns a block that never comes."""
    with pytest.raises(Corrupt, match="tar stream"):
        feed(BLOBS[kind](TAR[: TAR.rindex(b"ustar") - 1300])).finish()


@pytest.mark.parametrize("blob", [b"x", b"\x1f\x8b", b"\x28\xb5\x2f", b"hello world"])
def test_what_is_no_layer_is_refused(blob: bytes) -> None:
    for chunk in (1, 100):
        with pytest.raises(Corrupt):
            feed(blob, chunk=chunk).finish()


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor(write_checksum=True).compress])
def test_damaged_compression_is_corrupt(compress: Callable[[bytes], bytes]) -> None:
    blob = bytearray(compress(TAR))
    blob[len(blob) // 2] ^= 0x55
    with pytest.raises(Corrupt, match="stream"):
        feed(bytes(blob)).finish()


def test_a_zstd_window_that_is_too_large_is_unsupported() -> None:
    blob = tool("zstd", "--long=30", "-c")(TAR)
    with pytest.raises(Unsupported, match="128 MiB"):
        feed(blob).finish()


def test_an_unfinished_iterator_is_a_bug_that_is_found() -> None:
    builder = LayerBuilder(digest(TAR))
    assert next(iter(builder.feed(TAR)))
    with pytest.raises(AssertionError, match="not exhausted"):
        next(iter(builder.feed(b"x")))
    with pytest.raises(AssertionError, match="not exhausted"):
        builder.finish()


def test_writes_keep_their_bytes() -> None:
    """What is yielded may be kept: later input does not change it."""
    blob = gzip.compress(TAR, 6)
    builder = LayerBuilder(digest(blob), 10_000)
    kept = []
    for part in chunks(blob, 3000):
        kept += [(offset, data, bytes(data)) for offset, data in builder.feed(part)]
    assert len(kept) > 20 and all(bytes(data) == copy for _, data, copy in kept)


def test_holes_are_not_written() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as writer:
        info = tarfile.TarInfo("sparse")
        payload = b"2\n0\n4096\n1000000\n4096\n".ljust(512, b"\0") + b"a" * 8192
        info.size = len(payload)
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "sparse",
            "GNU.sparse.realsize": "1200000",
        }
        writer.addfile(info, io.BytesIO(payload))
    tar = out.getvalue()
    builder = LayerBuilder(digest(tar))
    writes = [(offset, len(data)) for offset, data in builder.feed(tar)]
    assert writes == [(0, 4096), (1_000_000, 4096)]
    index = builder.finish()
    assert index.data_size == 1_200_128 and index.piece_count == 2


def test_metadata_describes_the_tar() -> None:
    index, _ = build(gzip.compress(TAR))
    paths = {entry.path for entry in walk(index.metadata)}
    with tarfile.open(fileobj=io.BytesIO(TAR)) as reader:
        assert {f"/{member.name}".encode() for member in reader} <= {b"/" + path.lstrip(b"/") for path in paths}


def test_memory_does_not_grow_with_the_layer() -> None:
    """30 MB of tar pass through in a few megabytes (the index of it is 20 kB)."""
    rng = random.Random(1)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as writer:
        block = rng.randbytes(100_000)
        for number in range(30):
            info = tarfile.TarInfo(f"f{number}")
            info.size = 1_000_000
            writer.addfile(info, io.BytesIO(block * 10))
    compressor = zlib.compressobj(1, zlib.DEFLATED, 31)
    blob = compressor.compress(out.getvalue()) + compressor.flush()
    del out
    tracemalloc.start()
    try:
        feed(blob, span_size=1 << 19).finish()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000


def test_spacing_bounds_the_number_of_spans() -> None:
    spacing = Spacing(1 << 19)
    points = 0
    for blob in range(0, 40 << 30, 1 << 18):
        if spacing.due(blob, 3 * blob, free=False):
            spacing.mark(blob, 3 * blob)
            points += 1
    assert 16_384 < points < 50_000


def test_spacing_limits_the_tar_of_a_span() -> None:
    spacing = Spacing(1000)
    assert spacing.due(0, 0, free=False)
    spacing.mark(0, 0)
    assert not spacing.due(10, 7999, free=False)
    assert spacing.due(10, 8000, free=False)
    assert spacing.due(250, 500, free=True) and not spacing.due(250, 500, free=False)
    with pytest.raises(ValueError):
        Spacing(0)


def test_windows_that_do_not_compress_make_spans_longer() -> None:
    """Memory and index are bounded whatever the layer holds: 24 MiB of windows, then spans of twice the size."""
    spacing = Spacing(1 << 19)
    spacing.mark(0, 0)
    for _ in range(Spacing._WINDOWS // (1 << 15) - 1):
        spacing.spent(bytes(range(1, 256)) * 128 + bytes(128))
        spacing.spent(bytes(1 << 15))  # trimmed to nothing
    assert spacing.due(1 << 19, 1, free=False)
    for _ in range(10):
        spacing.spent(b"x" * (1 << 15))
    assert not spacing.due(1 << 19, 1, free=False)
    assert spacing.due(1 << 20, 1, free=False)


def test_zstd_frames_of_one_layer_are_spans() -> None:
    blob = b"".join(zstandard.compress(TAR[i : i + 50_000]) for i in range(0, len(TAR), 50_000))
    index, _ = build(blob, span_size=1)
    assert len(index.spans) == -(-len(TAR) // 50_000)
    index, _ = build(zstandard.compress(TAR), span_size=1)
    assert len(index.spans) == 1
