"""Hot sets as files, with or without their bytes. `docs/format.md` describes the file for other readers.

    prologue | head (protobuf: layers, extents, frames) | frames (the bytes of the extents, in their order)

A file without frames is a hot set, one with frames a *hot pack*. Frames can be fetched, checked and decoded each alone,
in any order. Knows the encoding; must not know files, HTTP, or what is done with the bytes.

Invariant: a `HotPack` that was read is sound: its head matches its digest, its hot set is valid, its frames hold all
extents and no frame can decode to more than `MAX_FRAME_BYTES`. Everything else raises Corrupt or Unsupported, in
bounded time and memory.
"""

import struct
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from hashlib import sha256
from itertools import accumulate
from typing import BinaryIO

import lz4.block
import zstandard
from google.protobuf.message import DecodeError

from blockindex import columns
from blockindex.errors import Corrupt, Unsupported
from blockindex.hotset import MAX_EXTENTS, MAX_LAYERS, HotExtent, HotLayer, HotSet
from blockindex.model import BLOCK
from proto import hotset_pb2 as pb

__all__ = [
    "FORMAT_VERSION",
    "MAX_FRAME_BYTES",
    "MAX_HEAD",
    "PROLOGUE_SIZE",
    "Codec",
    "Frame",
    "HeadReader",
    "HotPack",
    "decode_frame",
    "decode_pack",
    "encode_hotset",
    "write_pack",
]

FORMAT_VERSION = 1
_MAGIC = b"\x89BSHOT\r\n"
_PROLOGUE = struct.Struct("<8sIIQ32s")  # magic, version, 0, head size, sha256 of the head
PROLOGUE_SIZE = _PROLOGUE.size

MAX_HEAD = 8 << 20
"""A larger head is refused: MAX_EXTENTS incompressible rows are 4 MiB, their frames' digests less."""

MAX_FRAME_BYTES = 4 << 20
"""Most bytes that a frame may decode to: the memory of whoever decodes it."""

_FIRST_FRAME = 32 << 10  # the first blocks that a reader waits for should not wait for much else
_FRAME = 512 << 10
_COLUMNS = 4


class Codec(Enum):
    """How frames are compressed; NONE: there are none."""

    NONE = "none"
    ZSTD = "zstd"
    LZ4 = "lz4"


_CODECS = {Codec.NONE: pb.CODEC_NONE, Codec.ZSTD: pb.CODEC_ZSTD, Codec.LZ4: pb.CODEC_LZ4}
_LEVELS = {Codec.ZSTD: 19, Codec.LZ4: 12}  # packs are written once and read often; neither decodes slower for it


@dataclass(frozen=True, slots=True)
class Frame:
    """The extents `[first, last)` of the set in `size` bytes at `offset` of the file; `digest` is the sha256 of these
    bytes, `raw_size` what they decode to."""

    first: int
    last: int
    offset: int
    size: int
    raw_size: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class HotPack:
    """What the head of a file says. `head_size` bytes of the file come before its first frame; `size` is the whole
    file's."""

    hotset: HotSet
    codec: Codec
    frames: tuple[Frame, ...] = field(repr=False)
    head_size: int
    size: int


class HeadReader:
    """Reads the head of a file out of its first bytes, as they arrive. `rest` are the bytes fed beyond the head."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = PROLOGUE_SIZE
        self._digest = b""
        self.rest = b""

    def feed(self, chunk: bytes | memoryview) -> HotPack | None:
        """The pack as soon as its head is whole; nothing may be fed after that. Raises Corrupt, Unsupported; keeps
        at most MAX_HEAD bytes and this chunk."""
        self._buffer += chunk
        if not self._digest and len(self._buffer) >= PROLOGUE_SIZE:
            self._needed, self._digest = _parse_prologue(self._buffer)
        if not self._digest or len(self._buffer) < self._needed:
            return None
        head = bytes(self._buffer[PROLOGUE_SIZE : self._needed])
        self.rest = bytes(self._buffer[self._needed :])
        self._buffer.clear()
        if sha256(head).digest() != self._digest:
            raise Corrupt("head", "does not match its digest", PROLOGUE_SIZE)
        try:
            return _from_message(pb.HotSetHead.FromString(head), self._needed)
        except DecodeError as error:
            raise Corrupt("head", f"is not a HotSetHead message: {error}", PROLOGUE_SIZE) from error


def encode_hotset(hotset: HotSet) -> bytes:
    """A file without frames. Corrupt or Unsupported for a set that `validate` refuses."""
    head = _head(hotset, Codec.NONE, []).SerializeToString(deterministic=True)
    return _prologue(head) + head


def decode_pack(data: bytes) -> HotPack:
    """What a whole file says; its frames are not decoded. Raises Corrupt, Unsupported."""
    reader = HeadReader()
    pack = reader.feed(data)
    if pack is None:
        raise Corrupt("head", "the file ends before its head does", len(data))
    if len(data) != pack.size:
        raise Corrupt("frames", f"the file has {len(data)} bytes, its head speaks of {pack.size}")
    return pack


def write_pack(
    hotset: HotSet,
    read: Callable[[HotExtent], bytes],
    codec: Codec,
    out: BinaryIO,
    *,
    level: int | None = None,
    first_frame: int = _FIRST_FRAME,
    frame: int = _FRAME,
) -> HotPack:
    """Write a hot pack at the beginning of `out`, which must be empty and seekable; returns what was written.

    `read` gives the bytes of an extent; the extents are asked for in their order, each once, but long ones in parts:
    frames hold `first_frame` bytes, each the double of the one before, up to `frame` bytes (before compression).
    A set without extents has no frames, whatever `codec` says. Holds one frame in memory. What `read` raises ends the
    writing, and `out` is then no pack.
    """
    assert BLOCK <= first_frame <= frame <= MAX_FRAME_BYTES
    if codec is Codec.NONE or not hotset.extents:
        data = encode_hotset(hotset)
        out.write(data)
        return decode_pack(data)
    hotset, counts = _cut(hotset, first_frame, frame)
    draft = [(count, 0, bytes(32)) for count in counts]
    head_size = PROLOGUE_SIZE + _head(hotset, codec, draft).ByteSize()
    if head_size > MAX_HEAD:
        raise Unsupported(f"a hot pack of {len(counts)} frames is too large: its head would take {head_size} bytes")
    out.seek(head_size)  # sizes and digests have fixed widths, so the head is as long when they are known
    compress = _compressor(codec, level)
    written: list[tuple[int, int, bytes]] = []
    row = 0
    for count in counts:
        data = compress(b"".join(_read_exactly(read, extent) for extent in hotset.extents[row : row + count]))
        out.write(data)
        written.append((count, len(data), sha256(data).digest()))
        row += count
    head = _head(hotset, codec, written).SerializeToString(deterministic=True)
    assert PROLOGUE_SIZE + len(head) == head_size
    out.seek(0)
    out.write(_prologue(head) + head)
    pack = HeadReader().feed(_prologue(head) + head)
    assert pack is not None
    out.seek(pack.size)
    return pack


def decode_frame(
    pack: HotPack, frame: Frame, data: bytes | bytearray | memoryview
) -> list[tuple[HotExtent, memoryview]]:
    """The extents of a frame with their bytes, out of the frame's bytes in the file. Corrupt if these do not match
    its digest, or do not decode to as many bytes as the extents have."""
    where = f"frame at {frame.offset}"
    if len(data) != frame.size or sha256(data).digest() != frame.digest:
        raise Corrupt(where, f"{len(data)} bytes do not match its digest and size ({frame.size})")
    view = memoryview(_decompress(pack.codec, data, frame.raw_size, where))
    found, place = [], 0
    for extent in pack.hotset.extents[frame.first : frame.last]:
        size = (extent.end - extent.start) * BLOCK
        found.append((extent, view[place : place + size]))
        place += size
    return found


def _decompress(codec: Codec, data: bytes | bytearray | memoryview, size: int, where: str) -> bytes:
    if codec is Codec.ZSTD:
        return columns.decompress(bytes(data), size, MAX_FRAME_BYTES, where)
    assert codec is Codec.LZ4, "a pack without frames has nothing to decode"
    try:
        out: bytes = lz4.block.decompress(data, uncompressed_size=size)
    except lz4.block.LZ4BlockError as error:
        raise Corrupt(where, f"does not decompress: {error}") from error
    if len(out) != size:
        raise Corrupt(where, f"decompresses to {len(out)} bytes, not {size}")
    return out


def _compressor(codec: Codec, level: int | None) -> Callable[[bytes], bytes]:
    chosen = _LEVELS[codec] if level is None else level
    if codec is Codec.ZSTD:
        return zstandard.ZstdCompressor(level=chosen, write_content_size=True).compress

    def compress(data: bytes) -> bytes:
        out: bytes = lz4.block.compress(data, mode="high_compression", compression=chosen, store_size=False)
        return out

    return compress


def _cut(hotset: HotSet, first_frame: int, frame: int) -> tuple[HotSet, list[int]]:
    """The set with extents split where a frame is full, and how many extents each frame holds."""
    extents: list[HotExtent] = []
    counts: list[int] = []
    size, room, count = first_frame // BLOCK, first_frame // BLOCK, 0
    for extent in hotset.extents:
        start = extent.start
        while start < extent.end:
            end = min(extent.end, start + room)
            extents.append(replace(extent, start=start, end=end))
            room, count, start = room - (end - start), count + 1, end
            if not room:
                counts.append(count)
                size = min(2 * size, frame // BLOCK)
                room, count = size, 0
    if count:
        counts.append(count)
    return replace(hotset, extents=tuple(extents)), counts


def _read_exactly(read: Callable[[HotExtent], bytes], extent: HotExtent) -> bytes:
    data = read(extent)
    assert len(data) == (extent.end - extent.start) * BLOCK
    return data


def _prologue(head: bytes) -> bytes:
    return _PROLOGUE.pack(_MAGIC, FORMAT_VERSION, 0, len(head), sha256(head).digest())


def _parse_prologue(data: bytearray) -> tuple[int, bytes]:
    """Where the head ends, and its digest."""
    magic, version, reserved, head_size, digest = _PROLOGUE.unpack_from(data)
    if magic != _MAGIC:
        raise Corrupt("prologue", "not a hot set (wrong magic)", 0)
    if version > FORMAT_VERSION:
        raise Unsupported(
            f"hot set of format version {version}; this version reads up to {FORMAT_VERSION}: upgrade bootseer, or "
            "build it again with this one"
        )
    if version != FORMAT_VERSION or reserved:
        raise Corrupt("prologue", f"impossible version {version}.{reserved}", len(_MAGIC))
    if head_size > MAX_HEAD:
        raise Corrupt("prologue", f"states a head of {head_size} bytes, more than {MAX_HEAD}")
    return PROLOGUE_SIZE + head_size, digest


def _head(hotset: HotSet, codec: Codec, frames: list[tuple[int, int, bytes]]) -> pb.HotSetHead:
    """`frames` are (extents, bytes, digest)."""
    hotset.validate()
    return pb.HotSetHead(
        image_key=_digest_bytes(hotset.image_key),
        manifest=_digest_bytes(hotset.manifest) if hotset.manifest else b"",
        workload=hotset.workload,
        records=hotset.records,
        layer_digests=b"".join(_digest_bytes(layer.digest) for layer in hotset.layers),
        layer_layouts=b"".join(_digest_bytes(layer.layout) for layer in hotset.layers),
        layer_blocks=[layer.blocks for layer in hotset.layers],
        extents={"rows": len(hotset.extents), "zstd": columns.pack(_extent_columns(hotset))},
        codec=_CODECS[codec],
        frame_extents=[count for count, _, _ in frames],
        frame_sizes=[size for _, size, _ in frames],
        frame_digests=b"".join(digest for _, _, digest in frames),
    )


def _from_message(head: pb.HotSetHead, head_size: int) -> HotPack:
    codec = next((ours for ours, theirs in _CODECS.items() if theirs == head.codec), None)
    if codec is None:
        raise Unsupported(f"hot set with frames of unknown codec {head.codec}: upgrade bootseer")
    hotset = HotSet(
        image_key=_digest_text("image_key", head.image_key),
        manifest=_digest_text("manifest", head.manifest) if head.manifest else "",
        workload=head.workload,
        layers=_layers(head),
        extents=tuple(_extents(head)),
        records=head.records,
    )
    hotset.validate()
    if (codec is Codec.NONE) != (not head.frame_extents):
        raise Corrupt("codec", f"is {codec.value}, but there are {len(head.frame_extents)} frames")
    frames = _frames(head, hotset, head_size)
    size = frames[-1].offset + frames[-1].size if frames else head_size
    return HotPack(hotset, codec, frames, head_size, size)


def _layers(head: pb.HotSetHead) -> tuple[HotLayer, ...]:
    count = len(head.layer_blocks)
    if count > MAX_LAYERS:
        raise Unsupported(f"hot set of an image of {count} layers; up to {MAX_LAYERS} are read")
    digests = _digests("layer_digests", head.layer_digests, count)
    layouts = _digests("layer_layouts", head.layer_layouts, count)
    return tuple(HotLayer(*row) for row in zip(digests, head.layer_blocks, layouts, strict=True))


def _frames(head: pb.HotSetHead, hotset: HotSet, head_size: int) -> tuple[Frame, ...]:
    counts, sizes, digests = head.frame_extents, head.frame_sizes, head.frame_digests
    if len(sizes) != len(counts) or len(digests) != 32 * len(counts):
        raise Corrupt("frames", f"{len(counts)} counts, {len(sizes)} sizes, {len(digests)} bytes of digests")
    if not all(counts) or (counts and sum(counts) != len(hotset.extents)):
        raise Corrupt("frame_extents", f"do not cut {len(hotset.extents)} extents into frames")
    blocks = [0, *accumulate(extent.end - extent.start for extent in hotset.extents)]
    frames: list[Frame] = []
    first, offset = 0, head_size
    for number, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        raw_size = (blocks[first + count] - blocks[first]) * BLOCK
        if raw_size > MAX_FRAME_BYTES:
            raise Corrupt("frames", f"frame {number} would decode to {raw_size} bytes, more than {MAX_FRAME_BYTES}")
        if not 0 < size <= _most(raw_size):
            raise Corrupt("frame_sizes", f"frame {number} of {raw_size} bytes takes {size}")
        frames.append(Frame(first, first + count, offset, size, raw_size, digests[32 * number : 32 * number + 32]))
        first, offset = first + count, offset + size
    return tuple(frames)


def _most(raw_size: int) -> int:
    """More than either codec makes of `raw_size` incompressible bytes (lz4: 1/255 more, zstd: 1/256)."""
    return raw_size + raw_size // 128 + 512


def _extent_columns(hotset: HotSet) -> list["array[int]"]:
    layers, jumps, sizes, gaps = array("Q"), array("Q"), array("Q"), array("Q")
    ends = [0] * len(hotset.layers)
    time_ms = 0
    for extent in hotset.extents:
        jump = extent.start - ends[extent.layer]
        layers.append(extent.layer)
        jumps.append(2 * jump if jump >= 0 else -2 * jump - 1)
        sizes.append(extent.end - extent.start)
        gaps.append(extent.time_ms - time_ms)
        ends[extent.layer] = extent.end
        time_ms = extent.time_ms
    return [layers, jumps, sizes, gaps]


def _extents(head: pb.HotSetHead) -> Iterator[HotExtent]:
    """The rows as they are; whether they make sense is for `HotSet.validate` to say."""
    if head.extents.rows > MAX_EXTENTS:
        raise Unsupported(f"hot set of {head.extents.rows} extents; up to {MAX_EXTENTS} are read")
    ends = [0] * len(head.layer_blocks)
    time_ms = 0
    table = columns.unpack(head.extents.zstd, head.extents.rows, _COLUMNS, "extents")
    for row, (layer, jump, size, gap) in enumerate(zip(*table, strict=True)):
        if layer >= len(ends):
            raise Corrupt("extents.layer", f"row {row} names layer {layer} of {len(ends)}")
        start = ends[layer] + (jump // 2 if jump % 2 == 0 else -(jump + 1) // 2)
        ends[layer] = start + size
        time_ms += gap
        yield HotExtent(layer, start, start + size, time_ms)


def _digest_bytes(digest: str) -> bytes:
    return bytes.fromhex(digest.removeprefix("sha256:"))


def _digests(field: str, digests: bytes, count: int) -> list[str]:
    if len(digests) != 32 * count:
        raise Corrupt(field, f"has {len(digests)} bytes for {count} layers")
    return [_digest_text(field, digests[start : start + 32]) for start in range(0, 32 * count, 32)]


def _digest_text(field: str, digest: bytes) -> str:
    if len(digest) != 32:
        raise Corrupt(field, f"is {len(digest)} bytes long, not 32")
    return "sha256:" + digest.hex()
