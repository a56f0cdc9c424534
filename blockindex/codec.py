"""The layer index as a file: encode, decode, check. `docs/format.md` describes the bytes for other readers.

    prologue | head (protobuf, everything needed to mount) | windows (needed to decode gzip spans)

Knows the encoding; must not know files, HTTP or how an index is made.

Invariant: what `decode_index` returns is sound as a whole: digests of head and windows match, every table is monotone
and in bounds, the counts agree, and the EROFS metadata is valid. Everything else raises Corrupt, in bounded memory.
The judgement of the metadata takes most of the time; `decode_unjudged` leaves it to a later `judge`, for whoever knows
the writer.
"""

from array import array
from dataclasses import replace
from hashlib import sha256
from itertools import accumulate, pairwise

from google.protobuf.message import DecodeError

from blockindex.columns import MAX_ROWS, compress, decompress, pack, unpack
from blockindex.erofs import validate_directories, validate_metadata
from blockindex.errors import Corrupt, Unsupported
from blockindex.filetable import FileTable
from blockindex.layerindex import DIGEST_SIZE, LayerIndex
from blockindex.model import BLOCK, Compression, block_ceil
from blockindex.prologue import PROLOGUE_SIZE, Prologue
from blockindex.spantable import SpanColumns, SpanTable
from proto import layerindex_pb2 as pb

__all__ = [
    "FORMAT_VERSION",
    "PROLOGUE_SIZE",
    "decode_head",
    "decode_index",
    "decode_stored",
    "decode_unjudged",
    "encode_index",
    "head_end",
    "index_name",
    "index_parts",
    "judge",
    "with_windows",
]

FORMAT_VERSION = 1
_PROLOGUE = Prologue("layer index", b"\x89BSIDX\r\n", FORMAT_VERSION)
_MAX_HEAD = 1 << 29
_MAX_METADATA = 1 << 28  # five times the metadata of a layer of 500,000 files
_COMPRESSIONS = {
    Compression.TAR: pb.COMPRESSION_TAR,
    Compression.GZIP: pb.COMPRESSION_GZIP,
    Compression.ZSTD: pb.COMPRESSION_ZSTD,
}
_DIGEST_PREFIX = "sha256:"
_MAX_OFFSET = (1 << 63) - 1


def index_name(blob_digest: str) -> str:
    """Where the index of a layer lies below an index directory, on disk and over HTTP: `sha256/<hex>.bsi`."""
    return f"sha256/{_digest_bytes(blob_digest).hex()}.bsi"


def encode_index(index: LayerIndex) -> bytes:
    """The whole index file. Unsupported when `decode_index` would not accept its size."""
    return b"".join(index_parts(index))


def index_parts(index: LayerIndex) -> tuple[bytes, bytes, bytes | bytearray]:
    """The index file in parts, to be written one after the other: the windows, most of a huge layer's index, are not
    copied. Unsupported as `encode_index`."""
    spans = index.spans
    if max(len(index.files), len(spans)) > MAX_ROWS or len(index.metadata) > _MAX_METADATA:
        raise Unsupported(
            f"the layer is too large to index: {len(index.files)} extents (up to {MAX_ROWS}), "
            f"{len(index.metadata)} bytes of metadata (up to {_MAX_METADATA})"
        )
    assert spans.windows is not None, "an index without its windows cannot be encoded"
    head = pb.LayerIndexHead(
        blob_digest=_digest_bytes(index.blob_digest),
        blob_size=index.blob_size,
        diff_id=_digest_bytes(index.diff_id),
        tar_size=index.tar_size,
        compression=_COMPRESSIONS[index.compression],
        metadata_size=len(index.metadata),
        metadata_zstd=compress(index.metadata),
        data_size=index.data_size,
        files=pb.Columns(rows=len(index.files), zstd=pack(_file_columns(index.files))),
        spans=pb.Columns(rows=len(spans), zstd=pack(_span_columns(spans.columns))),
        piece_digests=index.piece_digests,
        windows_size=spans.windows_size,
        windows_digest=spans.windows_digest,
        implied_dirs=index.implied_dirs,
    ).SerializeToString(deterministic=True)
    return _PROLOGUE.encode(head), head, spans.windows


def head_end(prologue: bytes) -> int:
    """How many bytes of the file `decode_head` needs, from its first PROLOGUE_SIZE bytes. Unsupported for a newer
    version, Corrupt for anything that is no index."""
    return _PROLOGUE.parse(prologue, _MAX_HEAD)[0]


def decode_head(data: bytes) -> LayerIndex:
    """The index without its windows, from at least the first `head_end` bytes of the file: enough to mount the layer.
    Raises Corrupt, Unsupported."""
    index = _from_message(_head(data))
    judge(index)
    return index


def judge(index: LayerIndex) -> None:
    """Raises Corrupt unless the index's EROFS metadata is what our writer could have written."""
    validate_metadata(index.metadata, index.data_size)
    validate_directories(index.metadata, index.implied_dirs)


def with_windows(index: LayerIndex, windows: bytes) -> LayerIndex:
    """The index with its windows section (the file's bytes from `head_end` on) attached; raises Corrupt."""
    spans = index.spans
    _check_windows(windows, spans.windows_size, spans.windows_digest)
    complete = SpanTable(spans.columns, index.files, index.tar_size, windows, spans.windows_digest)
    return replace(index, spans=complete)


def _check_windows(windows: bytes, size: int, digest: bytes) -> None:
    if len(windows) != size:
        raise Corrupt("windows", f"holds {len(windows)} bytes, not {size}")
    if sha256(windows).digest() != digest:
        raise Corrupt("windows", "does not match its digest")


def decode_index(data: bytes) -> LayerIndex:
    """The index of a whole file. Raises Corrupt, naming the part that is wrong, or Unsupported. Whether it is the index
    of the layer one wants (`blob_digest`) is for the caller to compare."""
    index = decode_unjudged(data)
    judge(index)
    return index


def decode_unjudged(data: bytes) -> LayerIndex:
    """As `decode_index`, but the metadata match their digest and are not judged: `judge` does that."""
    return _from_message(_head(data), windows=data[head_end(data) :])


def decode_stored(data: bytes) -> LayerIndex:
    """As `decode_index`, for an index that it has accepted before and that is needed for decoding spans only: the
    metadata, which take most of the time and memory, are neither unpacked nor judged again; `metadata` is empty."""
    return _from_message(_head(data), with_metadata=False, windows=data[head_end(data) :])


def _head(data: bytes) -> pb.LayerIndexHead:
    """The head's message, once it matches its digest."""
    end, digest = _PROLOGUE.parse(data, _MAX_HEAD)
    if len(data) < end:
        raise Corrupt("head", f"the file ends before its head does ({end})", len(data))
    head_bytes = data[PROLOGUE_SIZE:end]
    if sha256(head_bytes).digest() != digest:
        raise Corrupt("head", "does not match its digest", PROLOGUE_SIZE)
    try:
        return pb.LayerIndexHead.FromString(head_bytes)
    except DecodeError as error:
        raise Corrupt("head", f"is not a LayerIndexHead message: {error}", PROLOGUE_SIZE) from error


def _from_message(head: pb.LayerIndexHead, with_metadata: bool = True, windows: bytes | None = None) -> LayerIndex:
    compression = next((ours for ours, theirs in _COMPRESSIONS.items() if theirs == head.compression), None)
    if compression is None:
        raise Corrupt("compression", f"unknown value {head.compression}")
    for name in ("blob_size", "tar_size", "data_size"):
        if getattr(head, name) > _MAX_OFFSET:
            raise Corrupt(name, f"{getattr(head, name)} does not fit 63 bits")
    if head.metadata_size % BLOCK or head.data_size % BLOCK:
        raise Corrupt("data_size", "or metadata_size is not a multiple of 4096")
    metadata = b""
    if with_metadata:
        metadata = decompress(head.metadata_zstd, head.metadata_size, _MAX_METADATA, "metadata")
    files = _files(head)
    columns = _spans(head)
    columns.validate(compression, head.blob_size, head.tar_size)
    if len(files) and not columns.tar_starts:
        raise Corrupt("spans", "is empty, but there are files")
    if sum(columns.window_sizes) != head.windows_size:
        raise Corrupt("windows_size", "is not the sum of the spans' windows")
    _digest_text("windows_digest", head.windows_digest)
    if windows is not None:
        _check_windows(windows, head.windows_size, head.windows_digest)
    spans = SpanTable(columns, files, head.tar_size, windows, head.windows_digest)
    for span, (start, end) in enumerate(zip(spans.block_starts, spans.block_ends, strict=True)):
        if start < end and columns.blob_starts[span] == columns.blob_ends[span]:
            raise Corrupt("spans.blob_end", f"span {span} owns blocks but has no blob bytes")
    return LayerIndex(
        blob_digest=_digest_text("blob_digest", head.blob_digest),
        blob_size=head.blob_size,
        diff_id=_digest_text("diff_id", head.diff_id),
        tar_size=head.tar_size,
        compression=compression,
        metadata=metadata,
        data_size=head.data_size,
        files=files,
        spans=spans,
        piece_digests=head.piece_digests,
        implied_dirs=tuple(head.implied_dirs),
    )


def _file_columns(files: FileTable) -> list["array[int]"]:
    tar_gaps, data_gaps = array("Q"), array("q")
    tar_end = data_end = 0
    for tar_offset, data_offset, size in zip(files.tar_offsets, files.data_offsets, files.sizes, strict=True):
        tar_gaps.append(tar_offset - tar_end)
        data_gaps.append(data_offset - block_ceil(data_end))
        tar_end = tar_offset + size
        data_end = data_offset + size
    return [tar_gaps, files.sizes, data_gaps]


def _files(head: pb.LayerIndexHead) -> FileTable:
    tar_gaps, sizes, data_gaps = unpack(head.files.zstd, head.files.rows, 3, "files")
    signed = array("q", data_gaps.tobytes())
    tar_offsets, data_offsets = array("Q"), array("Q")
    tar_end = data_end = 0
    try:
        for tar_gap, size, data_gap in zip(tar_gaps, sizes, signed, strict=True):
            tar_offset = tar_end + tar_gap
            data_offset = -(-data_end // BLOCK) * BLOCK + data_gap
            tar_offsets.append(tar_offset)
            data_offsets.append(data_offset)
            tar_end = tar_offset + size
            data_end = data_offset + size
    except OverflowError as error:
        raise Corrupt("files", f"row {len(data_offsets)} lies outside 0 to 2^64") from error
    files = FileTable.from_columns(tar_offsets, data_offsets, sizes)
    files.validate(head.tar_size, head.data_size)
    return files


def _span_columns(spans: SpanColumns) -> list["array[int]"]:
    sizes = array("Q", (end - start for start, end in zip(spans.blob_starts, spans.blob_ends, strict=True)))
    return [_gaps(spans.blob_starts), sizes, spans.flags, _gaps(spans.tar_starts), spans.window_sizes]


def _spans(head: pb.LayerIndexHead) -> SpanColumns:
    blob_gaps, sizes, flags, tar_gaps, window_sizes = unpack(head.spans.zstd, head.spans.rows, 5, "spans")
    try:
        blob_starts = array("Q", accumulate(blob_gaps))
        blob_ends = array("Q", (start + size for start, size in zip(blob_starts, sizes, strict=True)))
        tar_starts = array("Q", accumulate(tar_gaps))
    except OverflowError as error:
        raise Corrupt("spans", "holds offsets beyond 2^64") from error
    return SpanColumns(blob_starts, blob_ends, flags, tar_starts, window_sizes)


def _gaps(column: "array[int]") -> "array[int]":
    """The first number, then the difference of each to the one above."""
    gaps = array("Q", column[:1])
    gaps.extend(right - left for left, right in pairwise(column))
    return gaps


def _digest_bytes(digest: str) -> bytes:
    """The 32 bytes of a `sha256:<hex>` digest; ValueError for anything else."""
    if not digest.startswith(_DIGEST_PREFIX) or len(digest) != len(_DIGEST_PREFIX) + 2 * DIGEST_SIZE:
        raise ValueError(f"not a sha256 digest: {digest!r}")
    return bytes.fromhex(digest.removeprefix(_DIGEST_PREFIX))


def _digest_text(field: str, digest: bytes) -> str:
    if len(digest) != DIGEST_SIZE:
        raise Corrupt(field, f"is {len(digest)} bytes long, not {DIGEST_SIZE}")
    return _DIGEST_PREFIX + digest.hex()
