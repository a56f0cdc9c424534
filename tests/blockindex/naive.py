"""A second reader of layer indexes and hot sets, written from docs/format.md and docs/format-erofs.md alone.

It shares no line with blockindex, checks next to nothing and is slow on purpose: plain lists, an inflate that goes bit
by bit, protobuf by hand. Whatever it cannot read, the documents do not say.
"""

import hashlib
import struct
from dataclasses import dataclass, field

import zstandard

BLOCK = 4096


# --- the index file


@dataclass
class Index:
    """Everything the file says, tables unrolled."""

    head: dict[int, list[bytes | int]]
    metadata: bytes
    data_size: int
    tar_size: int
    compression: int
    files: list[tuple[int, int, int]]  # tar offset, data offset, size
    spans: list["Span"]
    digests: list[bytes]


@dataclass
class Span:
    """A row of the span table; `pieces` are (first block, end block)."""

    blob_start: int
    blob_size: int
    bit: int
    raw: bool
    tar_start: int
    window: bytes
    blocks: list[int] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)


def read_index(data: bytes) -> Index:
    """Decode a whole file."""
    magic, version, zero, head_size, digest = struct.unpack("<8sIIQ32s", data[:56])
    assert (magic, version, zero) == (bytes.fromhex("894253494458 0d0a"), 1, 0)
    raw_head, windows = data[56 : 56 + head_size], data[56 + head_size :]
    assert hashlib.sha256(raw_head).digest() == digest
    head = message(raw_head)
    assert len(windows) == number(head, 12) and hashlib.sha256(windows).digest() == octets(head, 13)
    metadata = zstandard.decompress(octets(head, 7))
    assert len(metadata) == number(head, 6)
    digests = octets(head, 11)
    index = Index(
        head=head,
        metadata=metadata,
        data_size=number(head, 8),
        tar_size=number(head, 4),
        compression=number(head, 5),
        files=file_table(table(octets(head, 9), 3)),
        spans=span_table(table(octets(head, 10), 5), windows),
        digests=[digests[i : i + 32] for i in range(0, len(digests), 32)],
    )
    own_blocks(index)
    return index


def message(data: bytes) -> dict[int, list[bytes | int]]:
    """A protobuf message as field number -> values: only varints and length-delimited fields occur."""
    found: dict[int, list[bytes | int]] = {}
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = varint()
        value: bytes | int = varint()
        if key & 7 == 2:
            assert isinstance(value, int)
            position, value = position + value, data[position : position + value]
        else:
            assert key & 7 == 0
        found.setdefault(key >> 3, []).append(value)
    return found


def number(head: dict[int, list[bytes | int]], key: int) -> int:
    value = head.get(key, [0])[0]
    assert isinstance(value, int)
    return value


def octets(head: dict[int, list[bytes | int]], key: int) -> bytes:
    value = head.get(key, [b""])[0]
    assert isinstance(value, bytes)
    return value


def table(columns: bytes, count: int) -> list[list[int]]:
    """The rows of a `Columns` message."""
    inner = message(columns)
    rows = number(inner, 1)
    data = zstandard.decompress(octets(inner, 2)) if rows else b""
    assert len(data) == 8 * count * rows
    return [
        [sum(data[(column * 8 + byte) * rows + row] << 8 * byte for byte in range(8)) for column in range(count)]
        for row in range(rows)
    ]


def file_table(rows: list[list[int]]) -> list[tuple[int, int, int]]:
    files, tar_end, data_end = [], 0, 0
    for tar_gap, size, data_gap in rows:
        if data_gap >= 1 << 63:
            data_gap -= 1 << 64
        tar, data = tar_end + tar_gap, (data_end + BLOCK - 1) // BLOCK * BLOCK + data_gap
        files.append((tar, data, size))
        tar_end, data_end = tar + size, data + size
    return files


def span_table(rows: list[list[int]], windows: bytes) -> list[Span]:
    spans: list[Span] = []
    blob = tar = place = 0
    for blob_gap, blob_size, flags, tar_gap, window_size in rows:
        blob, tar = blob + blob_gap, tar + tar_gap
        frame = windows[place : place + window_size]
        place += window_size
        window = zstandard.decompress(frame) if frame else b""
        spans.append(Span(blob, blob_size, flags & 7, bool(flags & 8), tar, window))
    assert place == len(windows)
    return spans


def own_blocks(index: Index) -> None:
    """Which blocks each span owns, and how they are cut into pieces."""
    first: dict[int, int] = {}  # block -> tar offset of its first stored byte
    for tar, data, size in index.files:
        for block in range(data // BLOCK, (data + size - 1) // BLOCK + 1):
            first.setdefault(block, tar + max(block * BLOCK - data, 0))
    ends = [span.tar_start for span in index.spans[1:]] + [index.tar_size]
    for span, tar_end in zip(index.spans, ends, strict=True):
        span.blocks = sorted(block for block, tar in first.items() if span.tar_start <= tar < tar_end)
        if span.blocks:
            begin, end = span.blocks[0], span.blocks[-1] + 1
            cuts = [(cut, min(cut + 32, end)) for cut in range(begin, end, 32)]
            span.pieces = [cut for cut in cuts if any(block in first for block in range(*cut))]


def read_span(index: Index, span: Span, blob: bytes) -> dict[int, bytes]:
    """The blocks that a span owns, from its part of the blob only."""
    part = blob[span.blob_start : span.blob_start + span.blob_size]
    tar = part if index.compression == 1 else gunzip(part, span.bit, span.raw, span.window)
    wanted = {block: bytearray(BLOCK) for block in span.blocks}
    for tar_offset, data_offset, size in index.files:
        for byte in range(max(tar_offset, span.tar_start), min(tar_offset + size, span.tar_start + len(tar))):
            place = data_offset + byte - tar_offset
            if place // BLOCK in wanted:
                wanted[place // BLOCK][place % BLOCK] = tar[byte - span.tar_start]
    return {block: bytes(data) for block, data in wanted.items()}


# --- the hot set file


@dataclass
class HotSet:
    """Everything a `.bsh` file says; `blocks` are those of all frames, by (layer, block)."""

    head: dict[int, list[bytes | int]]
    layers: list[tuple[bytes, bytes, int]]  # digest of the blob, layout, blocks
    extents: list[tuple[int, int, int, int]]  # layer, first block, end block, ms
    blocks: dict[tuple[int, int], bytes]


def read_hotset(data: bytes) -> HotSet:
    """Decode a whole file."""
    magic, version, zero, head_size, digest = struct.unpack("<8sIIQ32s", data[:56])
    assert (magic, version, zero) == (bytes.fromhex("8942 5348 4f54 0d0a"), 1, 0)
    raw_head = data[56 : 56 + head_size]
    assert hashlib.sha256(raw_head).digest() == digest
    head = message(raw_head)
    layouts, digests = octets(head, 6), octets(head, 5)
    layers = [
        (digests[32 * i : 32 * i + 32], layouts[32 * i : 32 * i + 32], blocks)
        for i, blocks in enumerate(varints(octets(head, 7)))
    ]
    text = "\n".join("sha256:" + layer[0].hex() for layer in layers)
    assert octets(head, 1) == hashlib.sha256(text.encode()).digest()
    found = HotSet(head, layers, hot_extents(table(octets(head, 8), 4)), {})
    place, row = 56 + head_size, 0
    sizes = struct.unpack(f"<{len(octets(head, 11)) // 4}I", octets(head, 11))
    for number_, (count, size) in enumerate(zip(varints(octets(head, 10)), sizes, strict=True)):
        frame = data[place : place + size]
        assert hashlib.sha256(frame).digest() == octets(head, 12)[32 * number_ : 32 * number_ + 32]
        raw = zstandard.decompress(frame) if number(head, 9) == 2 else unlz4(frame)
        for layer, start, end, _ in found.extents[row : row + count]:
            for block in range(start, end):
                found.blocks[layer, block], raw = raw[:BLOCK], raw[BLOCK:]
        assert not raw
        place, row = place + size, row + count
    assert place == len(data)
    return found


def hot_extents(rows: list[list[int]]) -> list[tuple[int, int, int, int]]:
    ends: dict[int, int] = {}
    extents, time_ms = [], 0
    for layer, jump, size, gap in rows:
        start = ends.get(layer, 0) + (-(jump + 1) // 2 if jump & 1 else jump // 2)
        ends[layer] = start + size
        time_ms += gap
        extents.append((layer, start, start + size, time_ms))
    return extents


def varints(data: bytes) -> list[int]:
    """A packed repeated field."""
    values, value, shift = [], 0, 0
    for byte in data:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            values.append(value)
            value = shift = 0
    return values


def unlz4(data: bytes) -> bytes:
    """One LZ4 block: sequences of literals and a match; the last one has no match."""
    out, place = bytearray(), 0

    def length(start: int) -> int:
        nonlocal place
        total = start
        while start == 15:
            total, place = total + data[place], place + 1
            start = 15 if data[place - 1] == 255 else 0
        return total

    while True:
        token = data[place]
        place += 1
        literals = length(token >> 4)
        out += data[place : place + literals]
        place += literals
        if place == len(data):
            return bytes(out)
        distance = data[place] | data[place + 1] << 8
        place += 2
        for _ in range(length(token & 15) + 4):
            out.append(out[-distance])


# --- deflate


class Bits:
    """A bit stream, lowest bit of each byte first."""

    def __init__(self, data: bytes, skip: int) -> None:
        self.data = data
        self.position = skip

    def take(self, count: int) -> int:
        value = 0
        for shift in range(count):
            value |= (self.data[self.position >> 3] >> (self.position & 7) & 1) << shift
            self.position += 1
        return value

    def symbol(self, codes: dict[tuple[int, int], int]) -> int:
        code = length = 0
        while (length, code) not in codes:
            code = code << 1 | self.take(1)
            length += 1
        return codes[length, code]


def huffman(lengths: list[int]) -> dict[tuple[int, int], int]:
    codes, code = {}, 0
    for length in range(1, 16):
        for symbol, wanted in enumerate(lengths):
            if wanted == length:
                codes[length, code] = symbol
                code += 1
        code <<= 1
    return codes


LENGTHS = [*range(3, 11), *(11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227), 258]
LENGTH_BITS = [*[0] * 8, *[n for n in (1, 2, 3, 4, 5) for _ in range(4)], 0]
DISTANCES = [1, 2, 3, 4, *[(2 + half << extra) + 1 for extra in range(1, 14) for half in (0, 1)]]
DISTANCE_BITS = [0, 0, 0, 0, *[extra for extra in range(1, 14) for _ in (0, 1)]]
ORDER = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15]


def gunzip(part: bytes, bit: int, raw: bool, window: bytes) -> bytes:
    """What a run of gzip members yields, as far as `part` goes; `raw`: it begins inside the first one's deflate."""
    bits, out = Bits(part, bit), bytearray(window)
    start = len(window)
    try:
        while True:
            if not raw:
                if part[bits.position // 8 :][:2] != b"\x1f\x8b":
                    break
                skip_header(bits)
            raw = False
            while not inflate_block(bits, out):
                pass
            bits.position = (bits.position + 7) // 8 * 8 + 64  # checksum and size
    except IndexError:
        pass  # the part ends inside a block: nothing behind it is wanted
    return bytes(out[start:])


def skip_header(bits: Bits) -> None:
    flags = bits.data[bits.position // 8 + 3]
    bits.position += 80
    if flags & 4:
        size = bits.take(16)
        bits.position += 8 * size
    for flag in (8, 16):
        while flags & flag and bits.take(8):
            pass
    bits.position += 16 if flags & 2 else 0


def inflate_block(bits: Bits, out: bytearray) -> bool:
    """One block; whether it was the last."""
    last, kind = bits.take(1), bits.take(2)
    if kind == 0:
        bits.position = (bits.position + 7) // 8 * 8
        size = bits.take(32) & 0xFFFF
        for _ in range(size):
            out.append(bits.take(8))
        return bool(last)
    literals, distances = dynamic(bits) if kind == 2 else (huffman([8] * 144 + [9] * 112 + [7] * 24 + [8] * 8), {})
    distances = distances or huffman([5] * 30)
    while (symbol := bits.symbol(literals)) != 256:
        if symbol < 256:
            out.append(symbol)
            continue
        length = LENGTHS[symbol - 257] + bits.take(LENGTH_BITS[symbol - 257])
        code = bits.symbol(distances)
        distance = DISTANCES[code] + bits.take(DISTANCE_BITS[code])
        for _ in range(length):
            out.append(out[-distance])
    return bool(last)


def dynamic(bits: Bits) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    literals, distances, count = bits.take(5) + 257, bits.take(5) + 1, bits.take(4) + 4
    lengths = [0] * 19
    for place in ORDER[:count]:
        lengths[place] = bits.take(3)
    codes = huffman(lengths)
    found: list[int] = []
    while len(found) < literals + distances:
        symbol = bits.symbol(codes)
        if symbol < 16:
            found.append(symbol)
        elif symbol == 16:
            found += [found[-1]] * (3 + bits.take(2))
        else:
            found += [0] * (3 + bits.take(3) if symbol == 17 else 11 + bits.take(7))
    return huffman(found[:literals]), huffman(found[literals:])


# --- EROFS metadata


@dataclass
class Inode:
    """An inode as docs/format-erofs.md lays it out."""

    nid: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    nlink: int
    size: int
    start: int
    xattrs: dict[bytes, bytes]
    data: bytes  # of directories and symlinks


PREFIXES = {1: b"user.", 2: b"system.posix_acl_access", 3: b"system.posix_acl_default", 4: b"trusted.", 6: b"security."}


def read_tree(metadata: bytes) -> dict[bytes, Inode]:
    """Path (the root: `/`) to inode."""
    assert struct.unpack_from("<I", metadata, 1024) == (0xE0F5E1E2,)
    (root,) = struct.unpack_from("<H", metadata, 1024 + 14)
    found: dict[bytes, Inode] = {}
    todo = [(b"", root)]
    while todo:
        path, nid = todo.pop()
        inode = found[path or b"/"] = read_inode(metadata, nid)
        if inode.mode >> 12 == 4:
            todo += [(path + b"/" + name, child) for name, child in read_names(inode.data) if name not in (b".", b"..")]
    return found


def read_inode(metadata: bytes, nid: int) -> Inode:
    place = nid * 32
    layout, count, mode = struct.unpack_from("<HHH", metadata, place)
    size, start, _, uid, gid, seconds, nanoseconds, nlink = struct.unpack_from("<QIIIIqII", metadata, place + 8)
    end = place + 64
    xattrs: dict[bytes, bytes] = {}
    if count:
        position, end = end + 12, end + 12 + 4 * (count - 1)
        while position < end:
            name_size, prefix, value_size = struct.unpack_from("<BBH", metadata, position)
            name = metadata[position + 4 : position + 4 + name_size]
            value = position + 4 + name_size
            xattrs[PREFIXES[prefix] + name] = metadata[value : value + value_size]
            position = (value + value_size + 3) // 4 * 4
    data = b""
    if mode >> 12 in (4, 10):
        whole = size // BLOCK * BLOCK if layout == 5 else size
        data = metadata[start * BLOCK : start * BLOCK + whole] + metadata[end : end + size - whole]
    return Inode(nid, mode, uid, gid, seconds * 10**9 + nanoseconds, nlink, size, start, xattrs, data)


def read_names(data: bytes) -> list[tuple[bytes, int]]:
    names: list[tuple[bytes, int]] = []
    for begin in range(0, len(data), BLOCK):
        block = data[begin : begin + BLOCK]
        count = struct.unpack_from("<H", block, 8)[0] // 12
        dirents = [struct.unpack_from("<QHBB", block, 12 * i) for i in range(count)]
        ends = [dirent[1] for dirent in dirents[1:]] + [len(block)]
        names += [(block[d[1] : end].rstrip(b"\0"), d[0]) for d, end in zip(dirents, ends, strict=True)]
    return names
