"""Hot set files: round trips, streaming, every cut, every flipped byte, every field that lies, frames of others."""

import io
import random
import struct
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import lz4.block
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex import hotpack
from blockindex.columns import pack as pack_columns
from blockindex.errors import Corrupt, Unsupported
from blockindex.hotpack import (
    FORMAT_VERSION,
    MAX_FRAME_BYTES,
    MAX_HEAD,
    PROLOGUE_SIZE,
    Codec,
    Frame,
    HeadReader,
    HotPack,
    decode_frame,
    decode_pack,
    encode_hotset,
    write_pack,
)
from blockindex.hotset import HotExtent, HotSet
from blockindex.model import BLOCK
from proto import hotset_pb2 as pb
from tests.blockindex.hotsets import block_content, hotset, hotsets, layer_digest, read_blocks

SET = hotset(
    (400, 90),
    (0, 10, 14, 0),
    (1, 0, 1, 3),
    (0, 100, 300, 20),
    (1, 50, 80, 21),
    (0, 0, 3, 900),
    manifest=layer_digest(7),
)
CODECS = [Codec.ZSTD, Codec.LZ4]


def written(
    it: HotSet, codec: Codec, *, level: int | None = None, first_frame: int = 32 << 10, frame: int = 512 << 10
) -> tuple[bytes, HotPack]:
    out = io.BytesIO()
    made = write_pack(it, read_blocks, codec, out, level=level, first_frame=first_frame, frame=frame)
    return out.getvalue(), made


def contents(data: bytes, made: HotPack) -> dict[tuple[int, int], bytes]:
    """Every block of every frame."""
    found: dict[tuple[int, int], bytes] = {}
    for frame in made.frames:
        for extent, view in decode_frame(made, frame, data[frame.offset : frame.offset + frame.size]):
            for number, block in enumerate(range(extent.start, extent.end)):
                found[extent.layer, block] = bytes(view[number * BLOCK : (number + 1) * BLOCK])
    return found


def blocks_of(it: HotSet) -> list[tuple[int, int]]:
    return [(extent.layer, block) for extent in it.extents for block in range(extent.start, extent.end)]


def opened(data: bytes) -> tuple[pb.HotSetHead, bytes]:
    """Head and frames of a file."""
    end = PROLOGUE_SIZE + int.from_bytes(data[16:24], "little")
    return pb.HotSetHead.FromString(data[PROLOGUE_SIZE:end]), data[end:]


def sealed(head: pb.HotSetHead, frames: bytes = b"") -> bytes:
    """A file with this head, its digest right."""
    raw = head.SerializeToString()
    return struct.pack("<8sIIQ32s", b"\x89BSHOT\r\n", FORMAT_VERSION, 0, len(raw), sha256(raw).digest()) + raw + frames


def test_a_set_without_bytes_comes_back() -> None:
    data = encode_hotset(SET)
    made = decode_pack(data)
    assert (made.hotset, made.codec, made.frames) == (SET, Codec.NONE, ())
    assert made.head_size == made.size == len(data)


@settings(deadline=None, max_examples=60)
@given(hotsets())
def test_any_set_comes_back(it: HotSet) -> None:
    assert decode_pack(encode_hotset(it)).hotset == it


@pytest.mark.parametrize("codec", CODECS)
@settings(deadline=None, max_examples=60)
@given(it=hotsets(), first=st.sampled_from([1, 2, 5]), most=st.sampled_from([5, 16]))
def test_any_pack_comes_back(codec: Codec, it: HotSet, first: int, most: int) -> None:
    data, made = written(it, codec, level=1, first_frame=first * BLOCK, frame=most * BLOCK)
    if not it.extents:
        assert made.codec is Codec.NONE
    assert decode_pack(data) == made
    assert blocks_of(made.hotset) == blocks_of(it)
    assert contents(data, made) == {place: block_content(*place) for place in blocks_of(it)}


@pytest.mark.parametrize("codec", CODECS)
def test_frames_grow_and_lie_one_after_the_other(codec: Codec) -> None:
    it = hotset((3000,), (0, 0, 3, 0), (0, 100, 2100, 5), (0, 2500, 2501, 9))
    data, made = written(it, codec, level=1)
    assert [frame.raw_size >> 10 for frame in made.frames] == [32, 64, 128, 256, *[512] * 14, 368]
    places = [made.head_size]
    for frame in made.frames:
        assert frame.offset == places[-1]
        places.append(frame.offset + frame.size)
        assert sha256(data[frame.offset : places[-1]]).digest() == frame.digest
    assert places[-1] == made.size == len(data)
    assert [frame.first for frame in made.frames[1:]] == [frame.last for frame in made.frames[:-1]]
    assert {e.time_ms for e in made.hotset.extents if 100 <= e.start < 2100} == {5}


def test_the_frames_are_what_the_tools_read() -> None:
    for codec in CODECS:
        data, made = written(SET, codec)
        raw = b"".join(read_blocks(extent) for extent in SET.extents)
        parts = [data[frame.offset : frame.offset + frame.size] for frame in made.frames]
        if codec is Codec.ZSTD:
            assert b"".join(zstandard.decompress(part) for part in parts) == raw
        else:
            sizes = [frame.raw_size for frame in made.frames]
            pairs = zip(parts, sizes, strict=True)
            assert b"".join(lz4.block.decompress(part, uncompressed_size=size) for part, size in pairs) == raw


def test_no_codec_no_frames_and_no_reading() -> None:
    out = io.BytesIO()
    made = write_pack(SET, lambda extent: pytest.fail("read"), Codec.NONE, out)
    assert out.getvalue() == encode_hotset(SET) and made == decode_pack(out.getvalue())


def test_frames_that_do_not_compress(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a frame's size lets through what the codecs make of noise."""
    noise = random.Random(1).randbytes(300 * BLOCK)
    for codec in CODECS:
        out = io.BytesIO()
        it = hotset((300,), (0, 0, 300, 0))
        made = write_pack(it, lambda e: noise[e.start * BLOCK : e.end * BLOCK], codec, out, level=1, first_frame=BLOCK)
        assert decode_pack(out.getvalue()) == made and made.size > len(noise)


@pytest.mark.parametrize("codec", CODECS)
def test_frames_may_be_compressed_elsewhere(codec: Codec) -> None:
    """By whoever works as `map` does: here two threads, which are given every frame at once."""
    out = io.BytesIO()
    with ThreadPoolExecutor(2) as pool:
        made = write_pack(SET, read_blocks, codec, out, mapper=pool.map)
    assert (out.getvalue(), made) == written(SET, codec)


def test_an_error_of_read_goes_through() -> None:
    def read(extent: HotExtent) -> bytes:
        raise KeyError("not here")

    with pytest.raises(KeyError):
        write_pack(SET, read, Codec.ZSTD, io.BytesIO())


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize("step", [1, 7, 50, 1 << 20])
def test_the_head_is_known_as_soon_as_it_is_there(codec: Codec, step: int) -> None:
    data, made = written(SET, codec)
    reader = HeadReader()
    for start in range(0, len(data), step):
        found = reader.feed(memoryview(data)[start : start + step])
        assert (found is None) == (start + step < made.head_size)
        if found is not None:
            assert found == made
            assert (
                data.startswith(reader.rest, made.head_size)
                and len(reader.rest) == min(start + step, len(data)) - made.head_size
            )
            return
    pytest.fail("no head")


def test_a_stranger_is_refused_at_once() -> None:
    with pytest.raises(Corrupt, match="magic"):
        HeadReader().feed(b"<!DOCTYPE html>" + b" " * 100)
    huge = encode_hotset(SET)[:16] + struct.pack("<Q", MAX_HEAD + 1) + bytes(32)
    with pytest.raises(Corrupt, match="states a head of"):
        HeadReader().feed(huge)
    for version, problem in ((2, "version 2.*upgrade"), (0, "impossible version")):
        with pytest.raises((Unsupported, Corrupt), match=problem):
            HeadReader().feed(encode_hotset(SET)[:8] + struct.pack("<I", version) + encode_hotset(SET)[12:])


@pytest.mark.parametrize("codec", Codec)
def test_every_cut_is_noticed(codec: Codec) -> None:
    data, made = written(SET, codec)
    for cut in (*range(made.head_size + 300), *range(made.head_size + 300, len(data), 97), len(data) - 1):
        cut = min(cut, len(data) - 1)
        with pytest.raises(Corrupt):
            decode_pack(data[:cut])
        reader = HeadReader()
        assert (reader.feed(data[:cut]) is None) == (cut < made.head_size)
    with pytest.raises(Corrupt, match="head speaks of"):
        decode_pack(data + b"\0")


@pytest.mark.parametrize("codec", Codec)
def test_every_flipped_byte_is_noticed(codec: Codec) -> None:
    """Each of the head, which is taken apart; of the frames, each of which one digest covers, some."""
    data, made = written(SET, codec)
    for place in (*range(made.head_size), *range(made.head_size, len(data), 41), len(data) - 1):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        with pytest.raises((Corrupt, Unsupported)):
            found = decode_pack(bytes(damaged))
            contents(bytes(damaged), found)


def test_unknown_fields_of_the_head_are_ignored() -> None:
    data, made = written(SET, Codec.ZSTD)
    head, frames = opened(data)
    head.MergeFromString(b"\xfa\x07\x03new")
    found = decode_pack(sealed(head, frames))
    assert found.hotset == made.hotset and found.head_size == made.head_size + 6


Change = Callable[[pb.HotSetHead], None]


def put(name: str, value: object) -> Change:
    return lambda head: setattr(head, name, value)


def columns(*numbers: tuple[int, ...], rows: int | None = None) -> Change:
    """Other extents: their four columns."""

    def change(head: pb.HotSetHead) -> None:
        head.extents.rows = len(numbers[0]) if rows is None else rows
        head.extents.zstd = pack_columns([array("Q", column) for column in numbers])

    return change


def item(name: str, number: int, value: int) -> Change:
    def change(head: pb.HotSetHead) -> None:
        getattr(head, name)[number] = value

    return change


def fewer(name: str) -> Change:
    return lambda head: getattr(head, name).pop()


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("image_key", put("image_key", b"")),
        ("image_key", put("image_key", bytes(32))),
        ("manifest", put("manifest", b"12")),
        ("workload", put("workload", "")),
        ("workload", put("workload", "../../etc")),
        ("records", put("records", 0)),
        ("records", put("records", 2**32 - 1)),
        ("layer_digests", put("layer_digests", b"")),
        ("layer_digests", put("layer_digests", bytes(63))),
        ("layers", put("layer_digests", bytes(64))),
        ("layer_layouts", put("layer_layouts", b"")),
        ("layer_layouts", put("layer_layouts", bytes(65))),
        ("layers", item("layer_blocks", 0, HUGE)),
        ("layer_digests", fewer("layer_blocks")),
        ("extents", item("layer_blocks", 0, 299)),
        ("extents", columns((0,), (0,), (0,), (0,))),
        ("extents", columns((0,), (0,), (401,), (0,))),
        ("extents", columns((0,), (HUGE,), (1,), (0,))),
        ("extents", columns((0,), (HUGE - 1,), (1,), (0,))),
        ("extents", columns((0,), (0,), (HUGE,), (0,))),
        ("extents", columns((0,), (1,), (1,), (0,))),  # -1
        ("extents", columns((0, 0), (0, 1), (5, 1), (0, 0))),  # goes back by one, into the first
        ("extents.layer", columns((2,), (0,), (1,), (0,))),
        ("extents.layer", columns((HUGE,), (0,), (1,), (0,))),
        ("extents.time", columns((0,), (0,), (1,), (1 << 32,))),
        ("extents.time", columns((0, 0), (0, 0), (1, 1), (1 << 31, 1 << 31))),
        ("extents", columns((0,), (0,), (1,), (0,), rows=2)),
        ("extents", columns((0,), (0,), (1,), (0,), rows=0)),
        ("frame_extents", columns((0,), (0,), (1,), (0,))),
        ("carried_from", put("carried_from", b"12")),
        ("codec", put("codec", pb.CODEC_NONE)),
        ("frame_extents", item("frame_extents", 0, 0)),
        ("frame_extents", item("frame_extents", 0, 2**32 - 1)),
        ("frames", fewer("frame_extents")),
        ("frames", fewer("frame_sizes")),
        ("frames", put("frame_digests", b"")),
        ("frame_sizes", item("frame_sizes", 0, 0)),
        ("frame_sizes", item("frame_sizes", 0, 2**32 - 1)),
        ("frames", item("frame_sizes", 1, 77)),  # the file is longer or shorter then
    ],
)
def test_a_head_that_lies(field: str, change: Change) -> None:
    head, frames = opened(written(SET, Codec.ZSTD)[0])
    assert decode_pack(sealed(head, frames)).hotset.layers == SET.layers
    change(head)
    with pytest.raises(Corrupt) as caught:
        decode_pack(sealed(head, frames))
    assert caught.value.field == field


def test_what_a_newer_version_may_have_written() -> None:
    head, frames = opened(written(SET, Codec.ZSTD)[0])
    for change, problem in (
        (put("codec", 9), "unknown codec 9"),
        (put("codec", 0), "unknown codec 0"),
        (columns((0,), (0,), (1,), (0,), rows=1 << 18), "262144 extents"),
        (lambda it: it.layer_blocks.extend([0] * 2000), "2002 layers"),
    ):
        fresh = pb.HotSetHead.FromString(head.SerializeToString())
        change(fresh)
        with pytest.raises(Unsupported, match=problem):
            decode_pack(sealed(fresh, frames))


def test_text_that_is_none() -> None:
    head, _ = opened(encode_hotset(SET))
    raw = head.SerializeToString().replace(b"default", b"defau\xff\xfe")
    start = struct.pack("<8sIIQ32s", b"\x89BSHOT\r\n", FORMAT_VERSION, 0, len(raw), sha256(raw).digest())
    with pytest.raises(Corrupt, match="head"):
        decode_pack(start + raw)


def test_a_table_that_is_a_bomb() -> None:
    """A few bytes that would decompress to a gigabyte are refused by what they state."""
    head, _ = opened(encode_hotset(SET))
    head.extents.zstd = zstandard.compress(bytes(1 << 26))
    with pytest.raises(Corrupt, match=r"extents: its zstd frame states 67108864 bytes"):
        decode_pack(sealed(head))


def test_a_frame_that_is_too_large_for_memory() -> None:
    many = MAX_FRAME_BYTES // BLOCK + 1
    it = hotset((many,), (0, 0, many, 0))
    head, _ = opened(encode_hotset(it))
    head.codec = pb.CODEC_ZSTD
    head.frame_extents[:], head.frame_sizes[:], head.frame_digests = [1], [9], bytes(32)
    with pytest.raises(Corrupt, match="frame 0 would decode to"):
        decode_pack(sealed(head, bytes(9)))


def one_frame(codec: Codec, data: bytes) -> HotPack:
    """A pack of one frame of two blocks, whose bytes, digest right, are `data`."""
    made = written(hotset((2,), (0, 0, 2, 0)), codec)[1]
    frame = replace(made.frames[0], size=len(data), digest=sha256(data).digest())
    return replace(made, frames=(frame,))


@pytest.mark.parametrize(
    ("codec", "data"),
    [
        (Codec.ZSTD, b""),
        (Codec.ZSTD, b"no frame at all"),
        (Codec.ZSTD, zstandard.compress(bytes(2 * BLOCK - 1))),
        (Codec.ZSTD, zstandard.compress(bytes(1 << 26))),
        (Codec.ZSTD, zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2 * BLOCK))),
        (Codec.ZSTD, zstandard.compress(bytes(2 * BLOCK)) + b"more"),
        (Codec.ZSTD, zstandard.compress(bytes(2 * BLOCK))[:-1]),
        (Codec.LZ4, b""),
        (Codec.LZ4, b"\xff" * 100),
        (Codec.LZ4, lz4.block.compress(bytes(2 * BLOCK - 1), store_size=False)),
        (Codec.LZ4, lz4.block.compress(bytes(2 * BLOCK + 1), store_size=False)),
        (Codec.LZ4, lz4.block.compress(bytes(1 << 26), store_size=False)),
        (Codec.LZ4, lz4.block.compress(bytes(2 * BLOCK), store_size=False)[:-1]),
        (Codec.LZ4, lz4.block.compress(bytes(2 * BLOCK))),
    ],
)
def test_frames_that_decode_to_something_else(codec: Codec, data: bytes) -> None:
    made = one_frame(codec, data)
    with pytest.raises(Corrupt, match=f"^frame at {made.frames[0].offset}: "):
        decode_frame(made, made.frames[0], data)


@pytest.mark.parametrize("codec", CODECS)
def test_the_digest_is_looked_at_before_anything_is_decoded(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    data, made = written(SET, codec)
    frame: Frame = made.frames[0]
    monkeypatch.setattr(hotpack, "_decompress", lambda *rest: pytest.fail("decoded"))
    for wrong in (b"", data[frame.offset : frame.offset + frame.size - 1], bytes(frame.size)):
        with pytest.raises(Corrupt, match="digest"):
            decode_frame(made, frame, wrong)


def test_what_could_not_be_read_back_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Corrupt):
        encode_hotset(replace(SET, records=0))
    monkeypatch.setattr(hotpack, "MAX_HEAD", 100)
    with pytest.raises(Unsupported, match="too large"):
        write_pack(SET, read_blocks, Codec.LZ4, io.BytesIO())


def test_a_head_of_thousands_of_extents_is_small() -> None:
    """3000 extents, as a start of a large program has, in a few packets."""
    rng = random.Random(3)
    starts = sorted(rng.sample(range(0, 60_000, 7), 3000))
    rng.shuffle(starts)
    it = hotset(
        (60_000,), *((0, start, start + rng.choice((1, 1, 2, 4, 6)), row // 2) for row, start in enumerate(starts))
    )
    assert len(encode_hotset(it)) < 3000 * 4
