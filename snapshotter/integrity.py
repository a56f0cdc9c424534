"""Whether what is stored is still what was written: layers against their digests, hot sets against theirs.

What a process reads back is trusted while the machine runs: hashing each read would cost more than the read. So damage
that a disk does meanwhile is found here: a layer's metadata and index by their seal before each mount (`restore_seal`),
everything on command (`bootseer verify`). What is found wrong is never served again: blocks are marked to be checked
before the next read, which fetches them anew (`blockstore`); metadata come back out of the index, which holds them too;
a layer whose index is damaged is dropped.

Reads files; changes nothing but the metadata file. Any process may look while others write: a block is looked at only
if it was present before.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blockindex.codec import decode_index
from blockindex.errors import BlockIndexError, Corrupt
from blockindex.hotpack import decode_frame
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK

from .blockstore import LayerFiles, LayerRecord, seal_of, write_all
from .errors import Damaged, SnapshotterError
from .hotstore import read_head

__all__ = ["LayerCheck", "check_hotset", "check_layer", "restore_seal"]


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """`checked_blocks` were present and have been read; `damaged` are the runs of blocks that do not match their
    digest; `problems` say what else is wrong, in one line each; `metadata`: it is wrong, and the index has it."""

    digest: str
    name: str
    checked_blocks: int
    damaged: tuple[tuple[int, int], ...]
    problems: tuple[str, ...]
    metadata: bool = False

    @property
    def damaged_blocks(self) -> int:
        """Blocks of all damaged runs."""
        return sum(end - start for start, end in self.damaged)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.damaged or self.problems or self.metadata)


def restore_seal(directory: Path) -> bool:
    """Make sure that a layer's metadata and index are what was sealed. Metadata that are not are written again out of
    the index; whether that was so. Damaged when the index is not either, or a file cannot be read."""
    try:
        record = LayerRecord.load(directory)
        metadata, encoded = (directory / "meta").read_bytes(), (directory / "index").read_bytes()
        if seal_of(metadata, encoded) == record.seal:
            return False
        good = _sealed_metadata(record, encoded)
        if good is None:
            raise Damaged(f"{directory}: the index is not what was written")
        with (directory / "meta").open("r+b") as file:  # in place: the block server has it open
            write_all(file.fileno(), good, 0)
            file.truncate(len(good))
            os.fsync(file.fileno())
        return True
    except OSError as error:
        raise Damaged(f"{directory}: {error.strerror}") from error


def _sealed_metadata(record: LayerRecord, encoded: bytes) -> bytes | None:
    """The metadata that are sealed together with this encoded index; None when the index is damaged itself."""
    with contextlib.suppress(BlockIndexError):
        metadata = decode_index(encoded).metadata
        if seal_of(metadata, encoded) == record.seal:
            return metadata
    return None


def check_layer(directory: Path, progress: Callable[[int], None] = lambda size: None) -> LayerCheck:
    """Check all that is there of a layer. `progress` is told of each run of bytes that has been read."""
    try:
        record = LayerRecord.load(directory)
        encoded = (directory / "index").read_bytes()
        index = decode_index(encoded)
        sealed = seal_of((directory / "meta").read_bytes(), encoded) == record.seal
        if not sealed and _sealed_metadata(record, encoded) is None:
            raise Damaged("the index is not what was written")
        problems = tuple(_contradictions(record, index))
        with contextlib.closing(LayerFiles(directory)) as files:
            blocks, damaged = _check_blocks(files, index, progress)
    except (SnapshotterError, BlockIndexError, OSError) as error:
        return LayerCheck("", directory.name, 0, (), (f"cannot be checked, it has to be fetched again: {error}",))
    return LayerCheck(record.digest, directory.name, blocks, damaged, problems, not sealed)


def _contradictions(record: LayerRecord, index: LayerIndex) -> Iterator[str]:
    """What layer.json says other than the index."""
    for name, here, there in (
        ("digest", record.digest, index.blob_digest),
        ("blob_size", record.blob_size, index.blob_size),
        ("meta_size", record.meta_size, len(index.metadata)),
        ("data_size", record.data_size, index.data_size),
        ("layout", record.layout, index.layout()),
        ("implied_dirs", record.implied_dirs, index.implied_dirs),
    ):
        if here != there:
            yield f"layer.json has a {name} that is not the index's"


def _check_blocks(
    files: LayerFiles, index: LayerIndex, progress: Callable[[int], None]
) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Number of blocks in pieces that are present whole, and the runs of those that do not match their digest. Parts of
    a piece cannot be checked: what came in a hot pack is, when the rest comes."""
    checked, damaged = 0, list[tuple[int, int]]()
    for span in range(len(index.spans)):
        for piece in index.pieces(span):
            start, end = piece.block_start, piece.block_end
            if not files.has(start, end):
                continue
            size = (end - start) * BLOCK
            try:
                data = os.pread(files.data_fd, size, start * BLOCK)
            except OSError:  # a sector that cannot be read any more
                data = b""
            checked += end - start
            progress(size)
            if len(data) == size and index.verify_piece(piece, data):
                continue
            if not files.has(start, end):  # it has been doubted or lost since we looked
                continue
            if damaged and damaged[-1][1] == start:
                damaged[-1] = damaged[-1][0], end
            else:
                damaged.append((start, end))
    return checked, tuple(damaged)


def check_hotset(path: Path) -> str:
    """What is wrong with a hot set's file, empty where nothing is."""
    try:
        pack = read_head(path)
        with path.open("rb") as file:
            for frame in pack.frames:
                file.seek(frame.offset)
                decode_frame(pack, frame, file.read(frame.size))
    except Corrupt as error:
        return str(error)
    except (BlockIndexError, OSError) as error:
        return f"cannot be read: {error}"
    return ""
