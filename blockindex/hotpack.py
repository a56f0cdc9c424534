"""Hot sets as files, with or without their bytes. `docs/format.md` describes the file for other readers.

    prologue | head (protobuf: layers, extents, frames) | frames (the bytes of the extents, in their order)

A file without frames is a hot set, one with frames a *hot pack*. Frames can be fetched, checked and decoded each alone,
in any order. Knows the encoding; must not know files, HTTP, or what is done with the bytes.

Invariant: a `HotPack` that was read is sound: its head matches its digest, its hot set is valid, its frames hold all
extents and no frame can decode to more than `MAX_FRAME_BYTES`. Everything else raises Corrupt or Unsupported, in
bounded time and memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from typing import BinaryIO

import lz4.block
import zstandard

from blockindex import columns
from blockindex.errors import Corrupt, Unsupported
from blockindex.hothead import MAX_FRAME_BYTES, Codec, Frame, HotPack, head_message, pack_of
from blockindex.hotset import HotExtent, HotSet
from blockindex.model import BLOCK
from blockindex.prologue import PROLOGUE_SIZE, Prologue

__all__ = [
    "FORMAT_VERSION",
    "MAX_FRAME_BYTES",
    "MAX_HEAD",
    "PROLOGUE_SIZE",
    "Codec",
    "Frame",
    "HeadReader",
    "HotPack",
    "Mapper",
    "decode_frame",
    "decode_pack",
    "encode_hotset",
    "write_pack",
]

FORMAT_VERSION = 1
_PROLOGUE = Prologue("hot set", b"\x89BSHOT\r\n", FORMAT_VERSION)

MAX_HEAD = 8 << 20
"""A larger head is refused: MAX_EXTENTS incompressible rows are 4 MiB, their frames' digests less."""

_FIRST_FRAME = 32 << 10  # the first blocks that a reader waits for should not wait for much else
_FRAME = 512 << 10


Mapper = Callable[[Callable[[bytes], bytes], Iterator[bytes]], Iterable[bytes]]
"""Calls a function with each item and gives the results in order."""

_LEVELS = {Codec.ZSTD: 19, Codec.LZ4: 12}  # packs are written once and read often; neither decodes slower for it


class HeadReader:
    """Reads the head of a file out of its first bytes, as they arrive. `rest` are the bytes fed beyond the head."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = PROLOGUE_SIZE
        self._digest = b""
        self.rest = b""

    def feed(self, chunk: bytes | memoryview) -> HotPack | None:
        """The pack as soon as its head is whole; nothing may be fed after that. Raises Corrupt, Unsupported; keeps
        at most MAX_HEAD bytes."""
        view = memoryview(chunk)
        view = self._take(view)
        if not self._digest and len(self._buffer) == PROLOGUE_SIZE:
            self._needed, self._digest = _PROLOGUE.parse(self._buffer, MAX_HEAD)
            view = self._take(view)
        if not self._digest or len(self._buffer) < self._needed:
            return None
        digest = sha256(self._buffer).hexdigest()
        head = bytes(self._buffer[PROLOGUE_SIZE:])
        self.rest = bytes(view)
        self._buffer.clear()
        if sha256(head).digest() != self._digest:
            raise Corrupt("head", "does not match its digest", PROLOGUE_SIZE)
        return replace(pack_of(head, self._needed), digest=f"sha256:{digest}")

    def _take(self, view: memoryview) -> memoryview:
        """Move what is needed of `view` into the buffer; returns the rest."""
        missing = self._needed - len(self._buffer)
        self._buffer += view[:missing]
        return view[missing:]


def encode_hotset(hotset: HotSet) -> bytes:
    """A file without frames. Corrupt or Unsupported for a set that `validate` refuses."""
    head = head_message(hotset, Codec.NONE, []).SerializeToString(deterministic=True)
    return _PROLOGUE.encode(head) + head


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
    mapper: Mapper = map,
) -> HotPack:
    """Write a hot pack at the beginning of `out`, which must be empty and seekable; returns what was written.

    `read` gives the bytes of an extent; the extents are asked for in their order, each once, but long ones in parts:
    frames hold `first_frame` bytes, each the double of the one before, up to `frame` bytes (before compression).
    A set without extents has no frames, whatever `codec` says. Memory is that of the frames that `mapper` (which works
    as `map` does, and may use threads) has in hand. What `read` raises ends the writing, and `out` is then no pack.
    """
    assert BLOCK <= first_frame <= frame <= MAX_FRAME_BYTES
    if codec is Codec.NONE or not hotset.extents:
        data = encode_hotset(hotset)
        out.write(data)
        return decode_pack(data)
    hotset, counts = _cut(hotset, first_frame, frame)
    draft = [(count, 0, bytes(32)) for count in counts]
    head_size = PROLOGUE_SIZE + head_message(hotset, codec, draft).ByteSize()
    if head_size > MAX_HEAD:
        raise Unsupported(f"a hot pack of {len(counts)} frames is too large: its head would take {head_size} bytes")
    out.seek(head_size)  # sizes and digests have fixed widths, so the head is as long when they are known
    written: list[tuple[int, int, bytes]] = []
    frames = mapper(_compressor(codec, level), _raw_frames(hotset, counts, read))
    for count, data in zip(counts, frames, strict=True):
        out.write(data)
        written.append((count, len(data), sha256(data).digest()))
    head = head_message(hotset, codec, written).SerializeToString(deterministic=True)
    assert PROLOGUE_SIZE + len(head) == head_size
    out.seek(0)
    out.write(_PROLOGUE.encode(head) + head)
    pack = HeadReader().feed(_PROLOGUE.encode(head) + head)
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
    """A function that many threads may call at once."""
    chosen = _LEVELS[codec] if level is None else level

    def zstd(data: bytes) -> bytes:
        return zstandard.ZstdCompressor(level=chosen, write_content_size=True).compress(data)

    def lz4_block(data: bytes) -> bytes:
        out: bytes = lz4.block.compress(data, mode="high_compression", compression=chosen, store_size=False)
        return out

    return zstd if codec is Codec.ZSTD else lz4_block


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


def _raw_frames(hotset: HotSet, counts: list[int], read: Callable[[HotExtent], bytes]) -> Iterator[bytes]:
    """The bytes of each frame, read when they are asked for."""
    row = 0
    for count in counts:
        extents = hotset.extents[row : row + count]
        data = b"".join(map(read, extents))
        assert len(data) == sum(extent.end - extent.start for extent in extents) * BLOCK
        yield data
        row += count
