"""zstd and plain layers as the tools at hand write them, and frames of every kind put together by hand."""

import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from blockindex.builder import LayerBuilder
from blockindex.decoder import SpanDecoder
from blockindex.errors import Corrupt, Unsupported
from blockindex.layerindex import LayerIndex
from blockindex.model import Compression
from tests.blockindex.layers import archive, build, chunks, data_region, digest, tool
from tests.blockindex.test_decoder import check_layer, check_pieces, decode

TAR = archive(seed=21, files=26)
REGION = data_region(TAR)
SKIPPABLE = 0x184D2A50


def skippable(data: bytes, number: int = 0) -> bytes:
    return struct.pack("<II", SKIPPABLE + number, len(data)) + data


def frame(data: bytes, level: int = 3, checksum: bool = False, sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_checksum=checksum, write_content_size=sized).compress(data)


def streamed(data: bytes, every: int) -> bytes:
    """One frame without a size, flushed every so often, so of many blocks."""
    compressor = zstandard.ZstdCompressor(level=3, write_checksum=True).compressobj()
    out = bytearray()
    for part in chunks(data, every):
        out += compressor.compress(part) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    return bytes(out + compressor.flush())


def seekable(data: bytes, every: int, checksums: bool) -> bytes:
    """zstd's seekable format: independent frames, and a skippable frame at the end with the size of each."""
    parts = list(chunks(data, every))
    frames = [frame(part) for part in parts]
    table = b"".join(
        struct.pack("<II", len(packed), len(part)) + (b"hash" if checksums else b"")
        for packed, part in zip(frames, parts, strict=True)
    )
    footer = struct.pack("<IBI", len(frames), 0x80 if checksums else 0, 0x8F92EAB1)
    return b"".join(frames) + skippable(table + footer, 0xE)


def mixed(data: bytes) -> bytes:
    """Frames of all sizes and kinds: empty ones, skippable ones of up to 70,000 bytes, levels, checksums."""
    rng = random.Random(5)
    out = [skippable(b""), frame(b"")]
    for number, part in enumerate(chunks(data, rng)):
        out.append(frame(part, 1 + number % 7, checksum=number % 2 == 0, sized=number % 3 > 0))
        if number % 4 == 0:
            out += [skippable(rng.randbytes(rng.choice((0, 1, 4096, 70_000))), number % 16), frame(b"")]
    return b"".join(out)


def zstd(*options: str) -> Callable[[bytes], bytes]:
    return tool("zstd", "-c", "-q", *options)


ZSTD: dict[str, Callable[[bytes], bytes]] = {
    **{f"level {level}": zstd(f"-{level}") for level in (1, 9, 19)},
    "fast": zstd("--fast=5"),
    "ultra": zstd("--ultra", "-22"),
    "threads": zstd("-T2", "-B64KiB"),
    "rsyncable": zstd("-T1", "--rsyncable"),
    "long": zstd("--long=27", "--no-check"),
    "small window": zstd("--zstd=wlog=10"),
    "pzstd": tool("pzstd", "-c", "-q", "-p", "3"),
    "one frame without a size": lambda data: frame(data, sized=False),
    "one frame of many blocks": lambda data: streamed(data, 3000),
    "incompressible": lambda data: frame(random.Random(1).randbytes(0) + data, level=-100),
    "seekable": lambda data: seekable(data, 50_000, checksums=False),
    "seekable with checksums": lambda data: seekable(data, 7000, checksums=True),
    "mixed": mixed,
    "concatenated": lambda data: zstd("-1")(data[:100_001]) + zstd("-9")(data[100_001:]),
}
MANY = {"seekable", "seekable with checksums", "mixed", "concatenated"}


def check(blob: bytes, span_size: int, many: bool, region: bytes = REGION) -> LayerIndex:
    """Build in odd chunks, decode every span alone and some runs."""
    index, found = build(blob, span_size, chunk=random.Random(7))
    assert (found, index.compression) == (region, Compression.ZSTD)
    assert (len(index.spans) > 1) == many
    check_layer(index, blob, region)
    rng = random.Random(8)
    for _ in range(4):
        first = rng.randrange(len(index.spans))
        last = rng.randint(first, len(index.spans))
        check_pieces(index, region, decode(index, blob, first, last, rng), first, last)
    return index


@pytest.mark.parametrize("kind", ZSTD)
def test_every_kind(kind: str) -> None:
    """A frame is a span or part of one; a single frame is streamed as a whole."""
    blob = ZSTD[kind](TAR)
    for span_size in (1, 60_000):
        check(blob, span_size, kind in MANY)
    check(blob, 1 << 30, many=False)


def skopeo(place: Path, kind: str) -> bytes:
    """The layer as skopeo compresses it: an OCI image to a directory, in `kind`."""
    if shutil.which("skopeo") is None:
        pytest.skip("skopeo is not installed: run scripts/setup")
    write = "import sys; sys.path.insert(0, 'tests/snapshotter/containerd'); from containerd_node import _write_layout"
    (place / "tar").write_bytes(TAR)
    run = f"{write}; from pathlib import Path; _write_layout(Path({str(place / 'oci')!r}), "
    run += f"[Path({str(place / 'tar')!r}).read_bytes()])"
    subprocess.run([sys.executable, "-c", run], check=True)
    command = ["skopeo", "copy", "-q", "--dest-compress", "--dest-compress-format", kind]
    subprocess.run([*command, f"oci:{place / 'oci'}:1", f"dir:{place / 'out'}"], check=True, capture_output=True)
    return max((place / "out").iterdir(), key=lambda path: path.stat().st_size).read_bytes()


@pytest.mark.parametrize("kind", ["zstd", "zstd:chunked"])
def test_layers_by_skopeo(kind: str, tmp_path: Path) -> None:
    """zstd:chunked has a frame for each file, then skippable frames with a manifest, which is no part of the tar."""
    blob = skopeo(tmp_path, kind)
    index = check(blob, 4000, many=kind == "zstd:chunked")
    tar = tool("zstd", "-dc")(blob)
    assert TAR.startswith(tar.rstrip(b"\0"))  # skopeo 1.9 leaves out some of a zstd:chunked layer's last padding
    assert (index.diff_id, index.tar_size) == (digest(tar), len(tar))
    if kind == "zstd:chunked":
        assert blob[-8:] == b"GnUlInUx" and len(index.spans) > 5


@pytest.mark.parametrize("place", [0.1, 0.5, 0.999])
def test_checksums_are_checked(place: float) -> None:
    blob = bytearray(frame(TAR, checksum=True))
    blob[int(len(blob) * place)] ^= 1
    with pytest.raises(Corrupt):
        build(bytes(blob))


def test_the_checksum_itself() -> None:
    blob = bytearray(frame(TAR, checksum=True))
    blob[-1] ^= 1
    with pytest.raises(Corrupt, match="zstd"):
        build(bytes(blob))


def test_windows() -> None:
    """Up to 128 MiB, which every decoder has to accept that reads `--long`; more is Unsupported, not out of memory."""
    for log in (10, 20, 27):
        parameters = zstandard.ZstdCompressionParameters(window_log=log)
        compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        blob = compressor.compress(TAR) + compressor.flush()
        assert zstandard.get_frame_parameters(blob).window_size == 1 << log
        check(blob, 10_000, many=False)
    for log in (28, 31):
        header = b"\x28\xb5\x2f\xfd\0" + bytes(((log - 10) << 3,))
        assert zstandard.get_frame_parameters(header + bytes(8)).window_size == 1 << log
        with pytest.raises(Unsupported, match="128 MiB"):
            build(header + bytes(1000))


def test_a_dictionary_is_unsupported() -> None:
    samples = [b"sample %d of many" % number * 20 for number in range(500)]
    compressor = zstandard.ZstdCompressor(dict_data=zstandard.train_dictionary(4096, samples))
    with pytest.raises(Unsupported, match="dictionary"):
        build(compressor.compress(TAR))
    with pytest.raises(Unsupported, match="dictionary"):
        build(frame(TAR[:5000]) + compressor.compress(TAR[5000:]))


@pytest.mark.parametrize("tail", [b"\0" * 100, b"rubbish", b"\x1f\x8b\x08\0", b"\x28\xb5\x2f"])
def test_rubbish_behind_the_last_frame_is_refused(tail: bytes) -> None:
    """As by zstd itself and by containerd."""
    with pytest.raises(Corrupt):
        build(frame(TAR) + tail)


@pytest.mark.parametrize("cut", [5, 100, -200, -9, -1])
def test_a_cut_seek_table_or_frame_is_refused(cut: int) -> None:
    with pytest.raises(Corrupt):
        build(seekable(TAR, 50_000, checksums=False)[:cut])


def test_skippable_frames_alone_are_an_empty_layer() -> None:
    index, region = build(skippable(b"x" * 5000) + skippable(b""))
    assert (region, index.tar_size, index.piece_count) == (b"", 0, 0)


@pytest.mark.parametrize("span_size", [700, 30_000, 1 << 30])
def test_plain_tars(span_size: int) -> None:
    index, region = build(TAR, span_size, chunk=random.Random(2))
    assert (region, index.compression) == (REGION, Compression.TAR)
    check_layer(index, TAR, REGION)


@pytest.mark.parametrize(
    ("compress", "compression"),
    [
        (lambda data: data, Compression.TAR),
        (frame, Compression.ZSTD),
        (lambda data: skippable(b"x", 5) + frame(data), Compression.ZSTD),
        (tool("gzip", "-c"), Compression.GZIP),
    ],
)
@pytest.mark.parametrize("chunk", [1, 3, 1 << 20])
def test_content_says_what_a_layer_is(compress: Callable[[bytes], bytes], compression: Compression, chunk: int) -> None:
    """No media type gets here at all, so none can disagree; the first bytes may come one by one."""
    tar = archive(seed=22, files=2)
    index, region = build(compress(tar), chunk=chunk)
    assert (index.compression, region) == (compression, data_region(tar))


def test_a_tar_whose_first_name_begins_like_gzip() -> None:
    """Two bytes are no proof; as for containerd, deflate's number belongs to it."""
    out = bytearray(archive(seed=22, files=2))
    out[:2] = b"\x1f\x8b"
    out[148:156] = b" " * 8
    out[148:156] = b"%06o\0 " % sum(out[:512])
    index, _ = build(bytes(out))
    assert index.compression is Compression.TAR


def test_a_single_frame_is_streamed_once() -> None:
    """One span: pieces come on the way, so nothing waits for the frame's end."""
    blob = frame(TAR, level=9)
    index, _ = build(blob)
    decoder = SpanDecoder(index, 0, 1)
    first = next(number for number, part in enumerate(chunks(blob, 4096)) if decoder.feed(part))
    assert first < len(blob) // 4096 // 2
    builder = LayerBuilder(digest(blob))
    seen = [number for number, part in enumerate(chunks(blob, 4096)) for _ in builder.feed(part)]
    assert seen[0] < len(blob) // 4096 // 2
    assert builder.finish() == index
