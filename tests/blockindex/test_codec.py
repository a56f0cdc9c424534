"""The index file: round trips, every flipped byte, every field that lies, and a golden file."""

import gzip
import io
import random
import struct
import tarfile
import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from blockindex import codec
from blockindex import columns as table
from blockindex.builder import image_uuid
from blockindex.codec import (
    FORMAT_VERSION,
    PROLOGUE_SIZE,
    decode_head,
    decode_index,
    decode_stored,
    decode_unjudged,
    encode_index,
    head_end,
    index_name,
    judge,
    with_windows,
)
from blockindex.columns import pack, unpack
from blockindex.decoder import SpanDecoder
from blockindex.errors import BlockIndexError, Corrupt, Unsupported
from blockindex.filetable import FileTable
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK
from blockindex.spantable import SpanTable
from proto import layerindex_pb2 as pb
from tests.blockindex.layers import BLOBS, archive, build, digest, sparse_archive, strategy

GOLDEN = Path(__file__).parent / "golden-v1.bsi"
GOLDEN_LAYER = Path(__file__).parent / "golden-v1.tar.gz"
SPAN_SIZE = 2500


def small_layer(level: int = 6) -> bytes:
    """A gzip layer of a few files with spans inside files, which refer to their windows."""
    rng = random.Random(5)
    words = [rng.randbytes(6) for _ in range(40)]
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as writer:
        for name, size in (("a", 5000), ("b", 0), ("c", 180_000), ("d", 4096), ("e", 1)):
            info = tarfile.TarInfo(name)
            text = b"".join(rng.choice(words) + bytes(rng.randrange(200)) for _ in range(size // 90 + 1))[:size]
            info.size = len(text)
            writer.addfile(info, io.BytesIO(text))
    return strategy(out.getvalue(), zlib.Z_DEFAULT_STRATEGY, level, memory=1)


def prologue(head: bytes) -> bytes:
    return struct.pack("<8sIIQ32s", b"\x89BSIDX\r\n", FORMAT_VERSION, 0, len(head), sha256(head).digest())


def sealed(head: pb.LayerIndexHead, windows: bytes) -> bytes:
    """An index file with this head, its digest right."""
    data = head.SerializeToString()
    return prologue(data) + data + windows


def opened(data: bytes) -> tuple[pb.LayerIndexHead, bytes]:
    end = head_end(data)
    return pb.LayerIndexHead.FromString(data[PROLOGUE_SIZE:end]), data[end:]


@pytest.fixture(scope="module")
def small() -> bytes:
    """The file of a layer with a few raw spans."""
    index, _ = build(small_layer(), SPAN_SIZE)
    assert any(index.spans.columns.window_sizes)
    return encode_index(index)


@pytest.mark.parametrize("kind", ["gzip-6", "members", "tar", "zstd", "zstd-frames"])
def test_round_trip(kind: str) -> None:
    index, _ = build(BLOBS[kind](archive()), span_size=20_000)
    data = encode_index(index)
    assert decode_index(data) == index
    assert encode_index(decode_index(data)) == data
    assert list(decode_index(data).spans) == list(index.spans)


@pytest.mark.parametrize("tar_format", ["gnu", "posix"])
def test_round_trip_of_sparse_files(tmp_path: Path, tar_format: str) -> None:
    index, _ = build(gzip.compress(sparse_archive(tmp_path, tar_format)), span_size=20_000)
    decoded = decode_index(encode_index(index))
    assert decoded == index
    assert list(decoded.hole_blocks()) == list(index.hole_blocks())
    for span in range(len(index.spans)):
        assert decoded.pieces(span) == index.pieces(span)


def test_the_head_alone_is_enough_to_mount(small: bytes) -> None:
    end = head_end(small[:PROLOGUE_SIZE])
    index = decode_head(small[:end])
    whole = decode_index(small)
    assert index.metadata == whole.metadata and index.files == whole.files
    assert index.image_size == whole.image_size and not index.has_windows
    assert with_windows(index, small[end:]) == whole
    with pytest.raises(Corrupt, match="windows"):
        with_windows(index, small[end:-1])
    with pytest.raises(Corrupt, match="windows: does not match"):
        with_windows(index, bytes(len(small) - end))
    with pytest.raises(Corrupt, match="ends before its head"):
        decode_head(small[: end - 1])


def test_every_flipped_byte_is_noticed(small: bytes) -> None:
    """Each of the head, which is taken apart; of the windows, which one digest covers, some."""
    end = head_end(small)
    for place in (*range(end), *range(end, len(small), 17), len(small) - 1):
        damaged = bytearray(small)
        damaged[place] ^= 1 << place % 8
        with pytest.raises((Corrupt, Unsupported)):
            decode_index(bytes(damaged))


def test_a_stored_index_decodes_without_its_metadata(small: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decode_index(small)

    def refuse(*_: object) -> None:
        raise AssertionError("the metadata are looked at")

    monkeypatch.setattr(codec, "decompress", refuse)
    monkeypatch.setattr(codec, "validate_metadata", refuse)
    stored = decode_stored(small)
    assert stored == replace(whole, metadata=b"")
    assert [stored.pieces(span) for span in range(len(stored.spans))] == [
        whole.pieces(span) for span in range(len(whole.spans))
    ]
    for place in range(0, len(small), 7):
        with pytest.raises(BlockIndexError):
            decode_stored(small[:place] + bytes([small[place] ^ 0x10]) + small[place + 1 :])


@pytest.mark.parametrize("cut", [0, 7, PROLOGUE_SIZE - 1, PROLOGUE_SIZE, PROLOGUE_SIZE + 10, -1])
def test_a_cut_file_is_noticed(small: bytes, cut: int) -> None:
    with pytest.raises(Corrupt):
        decode_index(small[:cut])


def test_bytes_after_the_end_are_noticed(small: bytes) -> None:
    with pytest.raises(Corrupt, match="windows"):
        decode_index(small + b"\0")


def test_a_layer_that_could_not_be_read_back_is_not_written(small: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    index = decode_index(small)
    monkeypatch.setattr(codec, "MAX_ROWS", 3)
    with pytest.raises(Unsupported, match="too large"):
        encode_index(index)


def test_a_newer_version_says_what_to_do(small: bytes) -> None:
    newer = small[:8] + struct.pack("<I", FORMAT_VERSION + 1) + small[12:]
    with pytest.raises(Unsupported, match=r"version 2.*upgrade bootseer"):
        decode_index(newer)
    with pytest.raises(Unsupported):
        head_end(newer[:PROLOGUE_SIZE])


def test_unknown_fields_of_the_head_are_ignored(small: bytes) -> None:
    head, windows = opened(small)
    head.MergeFromString(b"\xfa\x07\x03new")  # field 127
    assert decode_index(sealed(head, windows)) == decode_index(small)


def columns(count: int, change: Callable[[list[list[int]]], None]) -> Callable[[pb.Columns], None]:
    """A change to the numbers of a table."""

    def apply(message: pb.Columns) -> None:
        numbers = [list(column) for column in unpack(message.zstd, message.rows, count, "test")]
        change(numbers)
        message.rows = len(numbers[0])
        message.zstd = pack([array("Q", column) for column in numbers])

    return apply


def put(column: int, row: int, value: int) -> Callable[[list[list[int]]], None]:
    def change(numbers: list[list[int]]) -> None:
        numbers[column][row] = value

    return change


def drop_rows(numbers: list[list[int]]) -> None:
    for column in numbers:
        column.clear()


HUGE = 2**64 - 1


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("files", put(0, 0, HUGE)),
        ("files", put(0, 1, 2**40)),
        ("files", put(1, 1, 0)),
        ("files", put(1, 1, HUGE)),
        ("files", put(2, 1, HUGE - 4000)),
        ("files", put(2, 0, HUGE)),
        ("files", put(2, 2, 2**63 - 1)),
        ("piece_digests", drop_rows),
    ],
)
def test_a_file_table_that_lies(small: bytes, field: str, change: Callable[[list[list[int]]], None]) -> None:
    head, windows = opened(small)
    columns(3, change)(head.files)
    with pytest.raises(Corrupt) as error:
        decode_index(sealed(head, windows))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("spans", put(0, 1, HUGE)),
        ("spans", put(3, 1, HUGE)),
        ("spans.blob", put(0, 1, 2**62)),
        ("spans.blob", put(1, 1, 2**40)),
        ("spans.blob_start", put(0, 1, 0)),
        ("spans.blob_end", put(1, 1, 0)),
        ("spans.tar_start", put(3, 1, 0)),
        ("spans.tar_start", put(3, 0, 1)),
        ("spans.tar_start", put(3, 1, 2**40)),
        ("spans.flags", put(2, 1, 16)),
        ("spans.flags", put(2, 1, 7)),
        ("spans.flags", put(2, 0, 8)),
        ("spans.window_size", put(4, 0, 1)),
        ("windows_size", put(4, 1, 2**62)),
        ("spans", drop_rows),
    ],
)
def test_a_span_table_that_lies(small: bytes, field: str, change: Callable[[list[list[int]]], None]) -> None:
    head, windows = opened(small)
    columns(5, change)(head.spans)
    with pytest.raises(Corrupt) as error:
        decode_index(sealed(head, windows))
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("compression", lambda head: setattr(head, "compression", 0)),
        ("compression", lambda head: setattr(head, "compression", 77)),
        ("spans.flags", lambda head: setattr(head, "compression", pb.COMPRESSION_TAR)),
        ("spans.flags", lambda head: setattr(head, "compression", pb.COMPRESSION_ZSTD)),
        ("blob_digest", lambda head: setattr(head, "blob_digest", b"short")),
        ("diff_id", lambda head: setattr(head, "diff_id", b"")),
        ("windows_digest", lambda head: setattr(head, "windows_digest", b"")),
        ("blob_size", lambda head: setattr(head, "blob_size", 2**63)),
        ("spans.blob", lambda head: setattr(head, "blob_size", 10)),
        ("files", lambda head: setattr(head, "tar_size", 10_000)),
        ("data_size", lambda head: setattr(head, "data_size", head.data_size + 1)),
        ("files", lambda head: setattr(head, "data_size", 4096)),
        ("data_size", lambda head: setattr(head, "metadata_size", 5)),
        ("metadata", lambda head: setattr(head, "metadata_size", head.metadata_size + 4096)),
        ("metadata", lambda head: setattr(head, "metadata_size", 2**40 * 4096)),
        ("metadata", lambda head: setattr(head, "metadata_zstd", b"no zstd")),
        ("piece_digests", lambda head: setattr(head, "piece_digests", head.piece_digests[:-32])),
        ("piece_digests", lambda head: setattr(head, "piece_digests", head.piece_digests + b"x")),
        ("files", lambda head: setattr(head.files, "rows", 2**40)),
        ("files", lambda head: setattr(head.files, "rows", head.files.rows + 1)),
        ("spans", lambda head: setattr(head.spans, "rows", 0)),
        ("windows_size", lambda head: setattr(head, "windows_size", 1)),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"/")),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"d")),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"/d")),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"/a")),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"/no/such")),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"//")),
        ("implied_dirs", lambda head: head.implied_dirs.append(b"/.")),
        ("implied_dirs", lambda head: head.implied_dirs.insert(0, b"")),
    ],
)
def test_a_head_that_lies(small: bytes, field: str, change: Callable[[pb.LayerIndexHead], None]) -> None:
    head, windows = opened(small)
    change(head)
    with pytest.raises(Corrupt) as error:
        decode_index(sealed(head, windows))
    assert error.value.field == field


def test_metadata_is_validated(small: bytes) -> None:
    head, windows = opened(small)
    metadata = bytearray(zstandard.decompress(head.metadata_zstd))
    metadata[1024] ^= 1
    head.metadata_zstd = table.compress(bytes(metadata))
    with pytest.raises(Corrupt):
        decode_index(sealed(head, windows))
    with pytest.raises(Corrupt):
        judge(decode_unjudged(sealed(head, windows)))
    assert decode_unjudged(small) == decode_index(small)


def test_a_head_that_is_no_message_is_corrupt() -> None:
    junk = b"\xff" * 50
    with pytest.raises(Corrupt, match="LayerIndexHead"):
        decode_index(prologue(junk) + junk)


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_random_heads_raise_nothing_else(seed: int) -> None:
    """Heads with damage inside but the right digest: refused, or (a different digest, say) decoded and usable."""
    rng = random.Random(seed)
    head, windows = opened(FUZZ)
    data = bytearray(head.SerializeToString())
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    try:
        index = decode_index(prologue(bytes(data)) + bytes(data) + windows)
    except BlockIndexError:
        return
    check_usable(index)


def check_usable(index: LayerIndex) -> None:
    for span in range(len(index.spans)):
        index.pieces(span)
    for block in range(index.block_count):
        index.span_of_block(block)


FUZZ = encode_index(build(small_layer(), SPAN_SIZE)[0])


def test_zstd_bombs_are_not_inflated() -> None:
    bomb = zstandard.compress(bytes(1 << 24))
    with pytest.raises(Corrupt, match="states 16777216 bytes, not 80"):
        unpack(bomb, 10, 1, "files")
    unstated = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(Corrupt):
        table.decompress(unstated, 100, 100, "metadata")
    lying = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(70_000)))
    lying[lying.index(struct.pack("<I", 70_000))] ^= 1
    with pytest.raises(Corrupt):
        table.decompress(bytes(lying), 70_001, 1 << 20, "metadata")


def test_windows_are_never_larger_than_deflate_allows(small: bytes) -> None:
    spans = decode_index(small).spans
    span = next(number for number, size in enumerate(spans.columns.window_sizes) if size)
    for frame in (zstandard.compress(bytes(40_000)), b"junk", zstandard.compress(b"")):
        sizes = array("Q", (len(frame) if number == span else 0 for number in range(len(spans))))
        table_ = SpanTable(replace(spans.columns, window_sizes=sizes), FileTable(), 1 << 30, frame, b"")
        with pytest.raises(Corrupt, match=f"window of span {span}"):
            table_[span]


@given(st.lists(st.tuples(*[st.integers(0, 2**64 - 1)] * 3), max_size=50))
def test_columns_round_trip(rows: list[tuple[int, int, int]]) -> None:

    packed = [array("Q", (row[i] for row in rows)) for i in range(3)]
    assert unpack(pack(packed), len(rows), 3, "test") == packed


def test_names_and_digests() -> None:
    assert index_name("sha256:" + "ab" * 32) == f"sha256/{'ab' * 32}.bsi"
    for wrong in (
        "ab" * 32,
        "sha512:" + "ab" * 32,
        "sha256:" + "ab" * 31,
        "sha256:" + "zz" * 32,
        "sha256:../" + "a" * 61,
    ):
        with pytest.raises(ValueError):
            index_name(wrong)


def test_the_uuid_follows_the_content() -> None:
    uuid = image_uuid("sha256:" + "00" * 32)
    assert uuid == image_uuid("sha256:" + "00" * 32) != image_uuid("sha256:" + "01" * 32)
    assert len(uuid) == 16 and uuid[6] >> 4 == 8 and uuid[8] >> 6 == 2


def test_golden() -> None:
    """A change of the format, of what is cut where or of the metadata must be made on purpose: raise FORMAT_VERSION if
    old readers would get it wrong, and write the file anew (`python -m tests.blockindex.test_codec`)."""
    data = GOLDEN.read_bytes()
    assert (data[:8], data[8:16]) == (b"\x89BSIDX\r\n", b"\1\0\0\0\0\0\0\0")
    layer = GOLDEN_LAYER.read_bytes()
    index, region = build(layer, SPAN_SIZE)
    golden = decode_index(data)
    assert golden.blob_digest == digest(layer) and golden.diff_id == digest(gzip.decompress(layer))
    assert len(golden.spans) > 3 and any(span.window for span in golden.spans)
    assert replace(golden, spans=index.spans) == index and list(golden.spans) == list(index.spans)
    decoder = SpanDecoder(golden, 1, 3)
    for piece in decoder.feed(layer[decoder.blob_start : decoder.blob_end]):
        assert piece.data == region[piece.block_start * BLOCK : piece.block_end * BLOCK]
    head, _ = opened(data)
    fresh, _ = opened(encode_index(index))
    for message in (head, fresh):  # other versions of zstd may compress differently
        for field in ("metadata_zstd", "files", "spans", "windows_size", "windows_digest"):
            message.ClearField(field)
    assert head.SerializeToString(deterministic=True) == fresh.SerializeToString(deterministic=True)


if __name__ == "__main__":
    GOLDEN.write_bytes(encode_index(build(GOLDEN_LAYER.read_bytes(), SPAN_SIZE)[0]))
