"""Fuzz targets: everything in blockindex that reads bytes of strangers. `tests.fuzzing` runs them.

`tar` (a layer's tar), `layer` (a compressed blob), `index` (an index file), `metadata` (EROFS metadata), `hotset` (a
hot set or hot pack, and its head in pieces). Whatever the input: BlockIndexError, or a result that agrees with itself.
"""

import hashlib
import io
import random
import struct
from array import array
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError

from blockindex.codec import PROLOGUE_SIZE, decode_index, encode_index
from blockindex.columns import compress, decompress, pack, unpack
from blockindex.decoder import SpanDecoder
from blockindex.erofs import FilePlaces, build_metadata, validate_metadata, walk
from blockindex.erofs.ondisk import checksum
from blockindex.errors import BlockIndexError, Corrupt
from blockindex.hotpack import Codec, HeadReader, decode_frame, decode_pack, encode_hotset, write_pack
from blockindex.hotset import coalesced, merge, without
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK
from blockindex.summary import cost_of, summarise
from blockindex.tar import TarReader
from proto import hotset_pb2
from proto import layerindex_pb2 as pb
from tests.blockindex.hotsets import hotset, read_blocks
from tests.blockindex.layers import BLOBS, archive, build, chunks
from tests.blockindex.test_tar import CASES
from tests.fuzzing import NUMBERS, Target, blind

__all__ = ["TARGETS"]

HERE = Path(__file__).parent
_JUNK = random.Random(0).randbytes(1 << 16)


# --- tar


def _tar_seeds() -> Iterator[bytes]:
    for tar, _ in CASES.values():
        yield tar
    yield archive(seed=2, files=8)


def _tar_mutate(data: bytearray, rng: random.Random) -> bytes:
    """Right checksums, mostly: a header with a wrong one is not read any further."""
    if rng.random() < 0.9:
        for start in range(0, len(data) - 511, 512):
            if data[start + 257 : start + 262] == b"ustar" or rng.random() < 0.02:
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    return bytes(data)


def _tar_run(data: bytes) -> object:
    ends = []
    for size in (len(data) or 1, 700):
        reader = TarReader()
        extents = [extent for part in chunks(data, size) for extent in reader.feed(part)]
        tree = reader.finish()
        metadata = build_metadata(tree, reader.data_size, bytes(16))
        validate_metadata(metadata, reader.data_size)
        ends.append((extents, metadata))
    assert ends[0] == ends[1], "what comes out depends on how the bytes came in"
    return _log2(len(ends[0][0])), _log2(sum(1 for _ in walk(ends[0][1])))


# --- compressed layers


def _layer_seeds() -> Iterator[bytes]:
    for kind, compress_ in BLOBS.items():
        if kind in ("tar", "zstd", "zstd-frames", "gzip-6", "fixed", "stored-members", "full-header", "small-blocks"):
            yield compress_(archive(seed=9, files=5))


def _layer_mutate(data: bytearray, rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return bytes(data)
    tar = _tar_mutate(bytearray(blind(archive(seed=rng.choice((3, 4, 5, 9)), files=4), rng)), rng)
    return rng.choice([BLOBS["gzip-1"], BLOBS["zstd"], BLOBS["small-blocks"], BLOBS["stored-members"]])(tar)


def _layer_run(data: bytes) -> object:
    index, region = build(data, span_size=2000, chunk=5000)
    decoded = decode_index(encode_index(index))
    assert decoded == index
    for span in range(len(decoded.spans)):
        decoder = SpanDecoder(decoded, span, span + 1)
        for piece in decoder.feed(data[decoder.blob_start : decoder.blob_end]):
            assert piece.data == region[piece.block_start * BLOCK : piece.block_end * BLOCK]
        assert decoder.done
    return index.compression, _log2(len(index.spans)), _log2(len(index.files))


# --- index files


def _index_seeds() -> Iterator[bytes]:
    yield (HERE / "golden-v1.bsi").read_bytes()
    for kind in ("tar", "zstd-frames", "gzip-6", "stored-members"):
        yield encode_index(build(BLOBS[kind](archive(seed=2, files=8)), span_size=5000)[0])


def _index_mutate(data: bytearray, rng: random.Random) -> bytes:
    """Blind damage first; then, mostly, numbers inside the compressed tables, bytes inside the compressed metadata."""
    end = PROLOGUE_SIZE + int.from_bytes(data[16:24], "little")
    try:
        head = pb.LayerIndexHead.FromString(bytes(data[PROLOGUE_SIZE:end]))
        if rng.random() < 0.7:
            _damage_tables(head, rng)
        raw = head.SerializeToString()
    except (DecodeError, BlockIndexError, ValueError):
        raw = bytes(data[PROLOGUE_SIZE:end])
    return bytes(data[:16]) + struct.pack("<Q32s", len(raw), hashlib.sha256(raw).digest()) + raw + bytes(data[end:])


def _damage_tables(head: pb.LayerIndexHead, rng: random.Random) -> None:
    match rng.randrange(5):
        case 0 | 1 | 2:
            message, count = rng.choice(((head.files, 3), (head.spans, 5)))
            columns = [array("Q", column) for column in unpack(message.zstd, message.rows, count, "fuzz")]
            for _ in range(rng.randint(1, 3)):
                if message.rows:
                    column, row = rng.choice(columns), rng.randrange(message.rows)
                    column[row] = (rng.choice((column[row], 0)) + rng.choice((*NUMBERS, rng.randrange(9000)))) % 2**64
            message.zstd = pack(columns)
        case 3:
            metadata = bytearray(decompress(head.metadata_zstd, head.metadata_size, 1 << 24, "fuzz"))
            head.metadata_zstd = compress(_metadata_mutate(metadata, rng))
        case _:
            name = rng.choice(("blob_size", "tar_size", "metadata_size", "data_size", "windows_size", "compression"))
            setattr(head, name, rng.choice(NUMBERS) % (4 if name == "compression" else 2**64))


def _index_run(data: bytes) -> object:
    index = decode_index(data)
    assert decode_index(encode_index(index)) == index
    list(index.spans)
    summarise(index)
    _use(index)
    return index.compression, _log2(len(index.spans)), _log2(len(index.files)), len(index.implied_dirs)


def _use(index: LayerIndex) -> None:
    """What the daemon does with an index whose layer may be another: read here, and decode junk."""
    for block in range(0, min(index.block_count, 5000), 7):
        span, piece = index.span_of_block(block), index.piece_of_block(block)
        assert (span is None) == index.is_hole(block)
        assert span is None or piece is not None
        cost_of(index, block * BLOCK, block * BLOCK + 1)
    for span in range(min(len(index.spans), 50)):
        decoder = SpanDecoder(index, span, span + 1)
        size = min(decoder.blob_end - decoder.blob_start, 1 << 16)
        try:
            assert not decoder.feed(_JUNK[:size]), "junk has matched a digest"
        except BlockIndexError:
            continue


# --- EROFS metadata


def _metadata_seeds() -> Iterator[bytes]:
    for seed in _index_seeds():
        yield decode_index(seed).metadata


def _metadata_mutate(data: bytearray, rng: random.Random) -> bytes:
    """Changes whole fields, then makes the superblock right."""
    for _ in range(rng.randint(0, 3)):
        size = rng.choice((1, 2, 4, 8))
        if len(data) >= 1152:
            # Inodes and names, not the zeros between: 32-byte slots that hold something.
            place = rng.randrange(1024, len(data) - 8) // size * size
            old = int.from_bytes(data[place : place + size], "little")
            new = rng.choice((old + 1, old - 1, old ^ 1 << rng.randrange(8 * size), rng.choice(NUMBERS)))
            data[place : place + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    if len(data) >= BLOCK and rng.random() < 0.9:
        data[1028:1032] = checksum(bytes(data[:BLOCK])).to_bytes(4, "little")
    return bytes(data)


def _metadata_run(data: bytes) -> object:
    (blocks,) = struct.unpack_from("<I", data.ljust(BLOCK, b"\0"), 1024 + 36)
    data_size = max(blocks * BLOCK - len(data), 0)
    places = None
    with suppress(Corrupt):  # asked for before they are judged
        places = FilePlaces(data)
        list(places.parts([(0, 1 << 20)]))
    validate_metadata(data, data_size)
    assert places is not None, "what is valid has places"
    entries = list(walk(data))
    assert entries[0].path == b"/" and len({entry.path for entry in entries}) == len(entries)
    for entry in entries:
        assert entry.data_offset is None or 0 <= entry.data_offset <= data_size - entry.size
    return _log2(len(entries))


# --- hot sets


def _hotset_seeds() -> Iterator[bytes]:
    yield from (path.read_bytes() for path in sorted(HERE.glob("golden-v1-*.bsh")))
    small = hotset((60, 0, 9), (0, 5, 40, 0), (2, 0, 1, 3), (0, 41, 42, 3), (0, 0, 5, 80), (2, 3, 9, 1000))
    yield encode_hotset(small)
    for codec in (Codec.ZSTD, Codec.LZ4):
        out = io.BytesIO()
        write_pack(small, read_blocks, codec, out, level=1, first_frame=BLOCK, frame=8 * BLOCK)
        yield out.getvalue()


def _hotset_mutate(data: bytearray, rng: random.Random) -> bytes:
    """Blind damage first; then, mostly, numbers of the head; its digest, and often those of the frames, made right."""
    end = PROLOGUE_SIZE + int.from_bytes(data[16:24], "little")
    frames = bytes(data[end:])
    try:
        head = hotset_pb2.HotSetHead.FromString(bytes(data[PROLOGUE_SIZE:end]))
        if rng.random() < 0.8:
            _damage_hotset(head, rng)
        if rng.random() < 0.7:
            head.frame_digests = _frame_digests(head, frames)
        raw = head.SerializeToString()
    except (DecodeError, BlockIndexError, ValueError):
        raw = bytes(data[PROLOGUE_SIZE:end])
    return bytes(data[:16]) + struct.pack("<Q32s", len(raw), hashlib.sha256(raw).digest()) + raw + frames


def _damage_hotset(head: hotset_pb2.HotSetHead, rng: random.Random) -> None:
    match rng.randrange(4):
        case 0 | 1:
            columns = [array("Q", column) for column in unpack(head.extents.zstd, head.extents.rows, 4, "fuzz")]
            for _ in range(rng.randint(1, 3)):
                if head.extents.rows:
                    column, row = rng.choice(columns), rng.randrange(head.extents.rows)
                    column[row] = (rng.choice((column[row], 0)) + rng.choice((*NUMBERS, rng.randrange(90)))) % 2**64
            head.extents.zstd = pack(columns)
        case 2:
            field = rng.choice((head.layer_blocks, head.frame_extents, head.frame_sizes))
            if field:
                place = rng.randrange(len(field))
                limit = 2**64 if field is head.layer_blocks else 2**32
                field[place] = (rng.choice((field[place], 0)) + rng.choice((*NUMBERS, 2**64 - 1))) % limit
        case _:
            name = rng.choice(("records", "codec"))
            setattr(head, name, rng.choice(NUMBERS) % (4 if name == "codec" else 2**32))


def _frame_digests(head: hotset_pb2.HotSetHead, frames: bytes) -> bytes:
    digests, place = b"", 0
    for size in head.frame_sizes:
        digests += hashlib.sha256(frames[place : place + size]).digest()
        place += size
    return digests


def _hotset_run(data: bytes) -> object:
    pack_ = decode_pack(data)
    reader = HeadReader()
    assert [reader.feed(part) for part in chunks(data[: pack_.head_size], 100)][-1] == pack_
    it = pack_.hotset
    assert decode_pack(encode_hotset(it)).hotset == it
    joined = coalesced(it, 2)
    joined.validate()
    assert merge([it, it]).block_count == it.block_count <= joined.block_count
    known = 4096  # blocks of each layer of which we say that they are there
    left = without(it, [b"\1" * known for _ in it.layers])
    assert left.block_count == sum(max(e.end, known) - max(e.start, known) for e in it.extents)
    decoded = 0
    for frame in pack_.frames:
        try:
            parts = decode_frame(pack_, frame, data[frame.offset : frame.offset + frame.size])
        except BlockIndexError:
            continue
        assert [extent for extent, _ in parts] == list(it.extents[frame.first : frame.last])
        assert all(len(view) == (extent.end - extent.start) * BLOCK for extent, view in parts)
        decoded += 1
    return pack_.codec, _log2(len(it.extents)), _log2(len(pack_.frames)), _log2(decoded)


TARGETS = {
    "tar": Target(HERE, BlockIndexError, _tar_seeds, _tar_mutate, _tar_run),
    "layer": Target(HERE, BlockIndexError, _layer_seeds, _layer_mutate, _layer_run),
    "index": Target(HERE, BlockIndexError, _index_seeds, _index_mutate, _index_run),
    "metadata": Target(HERE, BlockIndexError, _metadata_seeds, _metadata_mutate, _metadata_run),
    "hotset": Target(HERE, BlockIndexError, _hotset_seeds, _hotset_mutate, _hotset_run),
}


def _log2(count: int) -> int:
    return count.bit_length()
