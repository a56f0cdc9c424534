"""Vocabulary and values of blockindex; after this file no synonym of these words is used.

- layer: a compressed OCI layer blob, named by its digest; diff ID: digest of its uncompressed tar.
- layer image: the virtual block device that the kernel mounts for a layer: `[EROFS metadata][data region]`, one after
  the other, both a whole number of blocks. An *image offset* counts from the device's start, a *data offset* from the
  start of the data region: image offset = metadata size + data offset.
- block: 4096 bytes of the data region. A block never holds two files.
- extent: one run of stored file bytes: where it lies in the tar and where in the data region. A plain file has one
  extent, which starts on a block boundary; a sparse file has one for each stored segment. Extents are kept in archive
  order, so tar offsets and data offsets both only grow (the map between them is monotone).
- span: the smallest piece of the blob that can be fetched and decoded alone. A span *owns* the blocks whose first
  stored byte lies in its tar range; its blob range reaches far enough to complete every block it owns. A block that
  holds no stored byte (a hole) is owned by no span and reads as zeros.
- piece: up to `PIECE_BLOCKS` consecutive blocks of one span's run, counted from the span's first block; the unit of
  verification: each piece has a sha256 over its data-region bytes (zero padding and holes included).

All offsets and sizes are bytes, all ranges half-open `[start, end)`.
"""

from dataclasses import dataclass
from enum import Enum

__all__ = ["BLOCK", "PIECE_BLOCKS", "Compression", "Extent", "Piece", "Span", "block_ceil"]

BLOCK = 4096
"""Bytes of a block: the page size, and the unit of presence, of the record and of the hot set."""

PIECE_BLOCKS = 32
"""Blocks of a full piece (128 KiB): about 3 ms of gzip at 100 Mbit/s, and 0.03 % of the image for its digest."""


def block_ceil(size: int) -> int:
    """`size` bytes rounded up to whole blocks, in bytes."""
    return -(-size // BLOCK) * BLOCK


class Compression(Enum):
    """How the layer blob holds its tar, found by content (magic bytes), never by media type."""

    TAR = "tar"
    GZIP = "gzip"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class Extent:
    """`size` stored bytes of a file: at `tar_offset` of the tar stream and at `data_offset` of the data region."""

    tar_offset: int
    data_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Span:
    """One restart point of the blob and what can be decoded from it.

    `blob_start` is the byte to start fetching from; the low `bit` bits (0-7) of that byte belong to the deflate block
    before and are to be ignored. `window` is the up to 32 KiB of tar before `tar_start` that the decoder needs as its
    dictionary; empty where none is needed (start of a gzip member, plain tar, start of a zstd frame). `raw` is true
    where decoding starts inside a deflate stream, false where a header (gzip member, zstd frame) or plain tar starts.
    The span covers the tar up to the next span's `tar_start` and owns the blocks `[block_start, block_end)` of the
    data region, less the holes among them; `blob_end` is where fetching may stop: all owned blocks are complete then.
    """

    blob_start: int
    blob_end: int
    bit: int
    raw: bool
    tar_start: int
    block_start: int
    block_end: int
    window: bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Verified bytes of the blocks `[block_start, block_end)` of the data region; `data` is as many BLOCKs long."""

    block_start: int
    block_end: int
    data: bytes
