"""What a layer index says, in numbers: for `index show` and for measurements.

Knows the index as a value; must not know where it came from or how numbers are shown.
"""

import stat
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from blockindex.erofs import walk
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK

__all__ = ["Cost", "Summary", "cost_of", "summarise"]


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts and bytes of one index. `files` to `others` count inodes, `links` names beyond an inode's first; the spans
    are those that own blocks, their blob bytes what a miss in one of them fetches, their tar bytes what it decodes."""

    blob_digest: str
    diff_id: str
    compression: str
    blob_bytes: int
    tar_bytes: int
    metadata_bytes: int
    data_bytes: int
    windows_bytes: int
    files: int
    directories: int
    symlinks: int
    whiteouts: int
    others: int
    links: int
    implied_directories: int
    extents: int
    hole_blocks: int
    pieces: int
    spans: int
    span_blob_bytes_median: int
    span_blob_bytes_max: int
    span_tar_bytes_median: int
    span_tar_bytes_max: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What reading some blocks takes when none is on the node: `spans` decoded, the blob bytes
    `[blob_start, blob_end)` fetched, `tar_bytes` decoded up to the end of the last span."""

    spans: int
    blob_start: int
    blob_end: int
    tar_bytes: int


def summarise(index: LayerIndex) -> Summary:
    """All numbers; walks the metadata once."""
    kinds, links = _kinds(index.metadata)
    columns = index.spans.columns
    tar_ends = [*columns.tar_starts[1:], index.tar_size]
    owners = [n for n in range(len(index.spans)) if index.spans.block_starts[n] < index.spans.block_ends[n]]
    fetched = [columns.blob_ends[n] - columns.blob_starts[n] for n in owners] or [0]
    decoded = [tar_ends[n] - columns.tar_starts[n] for n in owners] or [0]
    return Summary(
        blob_digest=index.blob_digest,
        diff_id=index.diff_id,
        compression=index.compression.value,
        blob_bytes=index.blob_size,
        tar_bytes=index.tar_size,
        metadata_bytes=len(index.metadata),
        data_bytes=index.data_size,
        windows_bytes=index.spans.windows_size,
        files=kinds["files"],
        directories=kinds["directories"],
        symlinks=kinds["symlinks"],
        whiteouts=kinds["whiteouts"],
        others=kinds["others"],
        links=links,
        implied_directories=len(index.implied_dirs),
        extents=len(index.files),
        hole_blocks=sum(map(len, index.hole_blocks())),
        pieces=index.piece_count,
        spans=len(owners),
        span_blob_bytes_median=int(median(fetched)),
        span_blob_bytes_max=max(fetched),
        span_tar_bytes_median=int(median(decoded)),
        span_tar_bytes_max=max(decoded),
    )


def cost_of(index: LayerIndex, data_start: int, data_end: int) -> Cost:
    """What the data-region bytes `[data_start, data_end)` cost."""
    blocks = range(data_start // BLOCK, -(-data_end // BLOCK))
    table, columns = index.spans, index.spans.columns
    wanted = [
        span
        for span in range(len(table))
        if max(table.block_starts[span], blocks.start) < min(table.block_ends[span], blocks.stop)
    ]
    wanted = [span for span in wanted if any(_meets(blocks, p.block_start, p.block_end) for p in index.pieces(span))]
    if not wanted:
        return Cost(0, 0, 0, 0)
    tar_ends = [end for _, end in pairwise((*columns.tar_starts, index.tar_size))]
    return Cost(
        spans=len(wanted),
        blob_start=columns.blob_starts[wanted[0]],
        blob_end=max(columns.blob_ends[span] for span in wanted),
        tar_bytes=tar_ends[wanted[-1]] - columns.tar_starts[wanted[0]],
    )


def _meets(blocks: range, start: int, end: int) -> bool:
    return max(blocks.start, start) < min(blocks.stop, end)


def _kinds(metadata: bytes) -> tuple[Counter[str], int]:
    """How many inodes of each kind there are, and how many names beyond the first they have."""
    kinds: Counter[str] = Counter()
    links = 0
    seen: set[int] = set()
    for entry in walk(metadata):
        if entry.nid in seen:
            links += 1
            continue
        seen.add(entry.nid)
        kind = stat.S_IFMT(entry.mode)
        if kind == stat.S_IFCHR and entry.rdev == (0, 0):
            kinds["whiteouts"] += 1
        else:
            kinds[_KINDS.get(kind, "others")] += 1
    return kinds, links


_KINDS = {stat.S_IFREG: "files", stat.S_IFDIR: "directories", stat.S_IFLNK: "symlinks"}
