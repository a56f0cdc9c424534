"""The head of a hot set file: the protobuf message, and the values that it stands for.

Knows the message (`proto/hotset.proto`); must not know the file around it, nor how frames are compressed.

Invariant: what `pack_of` returns is sound: the hot set is valid, the frames hold all of its extents in order, and none
of them can decode to more than `MAX_FRAME_BYTES`.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate

from google.protobuf.message import DecodeError

from blockindex import columns
from blockindex.errors import Corrupt, Unsupported
from blockindex.hotset import MAX_EXTENTS, MAX_LAYERS, HotExtent, HotLayer, HotSet
from blockindex.model import BLOCK
from proto import hotset_pb2 as pb

__all__ = ["MAX_FRAME_BYTES", "Codec", "Frame", "HotPack", "head_message", "pack_of"]

MAX_FRAME_BYTES = 4 << 20
"""Most bytes that a frame may decode to: the memory of whoever decodes it."""

_COLUMNS = 4


class Codec(Enum):
    """How frames are compressed; NONE: there are none."""

    NONE = "none"
    ZSTD = "zstd"
    LZ4 = "lz4"


_CODECS = {Codec.NONE: pb.CODEC_NONE, Codec.ZSTD: pb.CODEC_ZSTD, Codec.LZ4: pb.CODEC_LZ4}


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
    file's. `digest`: the sha256 of those `head_size` bytes, which names the file with all its frames."""

    hotset: HotSet
    codec: Codec
    frames: tuple[Frame, ...] = field(repr=False)
    head_size: int
    size: int
    digest: str = ""


def head_message(hotset: HotSet, codec: Codec, frames: Sequence[tuple[int, int, bytes]]) -> pb.HotSetHead:
    """The head; `frames` are (extents, bytes in the file, digest). Corrupt or Unsupported for an invalid set."""
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
        carried_from=_digest_bytes(hotset.carried_from) if hotset.carried_from else b"",
        argv_digests=b"".join(map(_digest_bytes, hotset.argvs)),
    )


def pack_of(data: bytes, head_size: int) -> HotPack:
    """What the head's bytes say; `head_size` is where frames begin. Raises Corrupt, Unsupported."""
    try:
        head = pb.HotSetHead.FromString(data)
    except DecodeError as error:
        raise Corrupt("head", f"is not a HotSetHead message: {error}") from error
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
        carried_from=_digest_text("carried_from", head.carried_from) if head.carried_from else "",
        argvs=tuple(_digests("argv_digests", head.argv_digests, len(head.argv_digests) // 32)),
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
        raise Corrupt(field, f"has {len(digests)} bytes for {count} digests")
    return [_digest_text(field, digests[start : start + 32]) for start in range(0, 32 * count, 32)]


def _digest_text(field: str, digest: bytes) -> str:
    if len(digest) != 32:
        raise Corrupt(field, f"is {len(digest)} bytes long, not 32")
    return "sha256:" + digest.hex()
