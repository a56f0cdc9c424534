"""The late check: what a hot pack brought is compared with the layer as soon as it can be.

A layer's index has digests of pieces, a pack brings blocks. So a pack's bytes are proven in one of three ways:
1. The frame covers a whole piece: its digest is checked before a block is marked present. A piece that does not match
   is refused unserved.
2. The frame covers part of a piece. Its blocks are served, and noted as *unproven* (`snapshotter.unproven`) before they
   are written. When blocks of other frames make the piece whole, it is checked on disk.
3. A flight brings the piece from the layer, for a reader or in the background: what is there of it is compared with it.
An unproven block thus lies in a piece that is not whole, whose span lacks blocks: the background fetches it as it
fetches everything, no request is made for the check alone, and a layer that is complete is proven.

If anything differs, and before it is written over:
- an alarm is raised that names layer, images, blocks, files, pack and key, and lasts until it is acknowledged
  (`snapshotter.alarms`); the pack goes into quarantine, and nothing more is taken from it;
- its other unproven blocks, in all layers, are in doubt from now on, as after a power cut: none of them is served again
  before the layer has proven it;
- the kernel drops what it has of both in its page cache, which it may have read before any program asked (`landed`,
  `hotpages`), unless a program has it mapped;
- the layer's own bytes go into the store. Programs that run may have used the wrong ones, and what they have mapped
  stays: the operator is told to restart them, and nothing is changed under them in silence.

A pack writes only blocks that may not be read yet: it never changes a byte that somebody can have seen. After a reboot
an unproven block is in doubt twice; one that is all zeros then, where the layer has none, is a write that a power cut
lost, and no finding. A successor of a killed process finds the notes on disk, and checks what has become whole.

Locking: `_lock` guards the notes and all writes of blocks, so that bytes are compared, written and marked as one step.
It may be taken while nothing else is held, and nothing but the alarms' own lock is taken under it.
"""

import contextlib
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from threading import Lock

from blockindex.erofs import walk
from blockindex.errors import BlockIndexError, Corrupt
from blockindex.layerindex import LayerIndex, PieceRange
from blockindex.model import BLOCK
from snapshotter.alarms import Alarms
from snapshotter.blockstore import ABSENT, PRESENT, UNVERIFIED, LayerFiles
from snapshotter.killpoints import reach
from snapshotter.unproven import Pack, Unproven

from .landed import Landed

__all__ = ["LateCheck"]

_log = logging.getLogger(__name__)

_MISSING = re.compile(b"[^%c]+" % PRESENT, re.DOTALL)

Run = tuple[int, int]


class LateCheck:
    """One layer's. All of its blocks are written here. Thread-safe."""

    def __init__(self, files: LayerFiles, index: LayerIndex, alarms: Alarms, landed: Landed) -> None:
        """`landed` hears of blocks of a pack that are in doubt: the kernel may have them in its page cache."""
        self._files = files
        self._landed = landed
        self._index = index
        self._alarms = alarms
        self._lock = Lock()
        self._unproven = Unproven(files.directory, files.record.blocks, writable=True)
        self._names: tuple[list[int], list[tuple[int, str]]] | None = None
        with self._lock:
            # after a reboot: what is in doubt may be a write that was lost
            self._may_lack_writes = any(UNVERIFIED in files.present[start:end] for start, end in self._unproven.runs())
            for pack in self._unproven.packs:
                if self.is_refuted(pack.digest):
                    self._doubt(pack.digest)
            self._prove(self._pieces(self._unproven.runs()))

    def __repr__(self) -> str:
        return f"<LateCheck {self._unproven!r}>"

    def close(self) -> None:
        """Close the notes."""
        self._unproven.close()

    def is_refuted(self, digest: str) -> bool:
        """Whether nothing is taken from this pack."""
        return self._alarms.is_refuted(digest)

    # -- the layer's own bytes ---------------------------------------------------------------------------------------

    def store(self, start: int, end: int, data: bytes | memoryview) -> None:
        """Verified bytes of the layer have come: compare them with what a pack brought, then write them. OSError when
        the disk refuses them; what turned out wrong is not served then."""
        with self._lock:
            marks = self._unproven.marks(start, end)
            marked = bool(marks.strip(b"\0"))
            if marked:
                self._compare(start, marks, memoryview(data))
            self._files.fill(start, end, data)
            if marked:
                reach("fetch.compared")
                self._unproven.mark(start, end, 0)

    def recheck(self, piece: PieceRange) -> bool:
        """Trust a piece in doubt if its bytes on disk match its digest; whether it may be read now. Where the disk has
        no room to note that (btrfs) it may not, and is fetched as what cannot be stored."""
        with self._lock:
            if not self._matches(piece):
                return False
            try:
                self._unproven.mark(piece.block_start, piece.block_end, 0)
                self._files.trust(piece.block_start, piece.block_end)
            except OSError as error:
                _log.debug("layer.not_noted file=%r block=%d error=%r", self._files, piece.block_start, str(error))
                return False
            return True

    def _compare(self, start: int, marks: bytes, data: memoryview) -> None:
        """Find out which unproven blocks differ from the layer's bytes."""
        states = self._files.present[start : start + len(marks)]
        wrong: dict[int, list[int]] = {}
        for place, number in enumerate(marks):
            if number and states[place] != ABSENT:
                here = self._read(start + place, start + place + 1)
                lost = self._may_lack_writes and states[place] == UNVERIFIED and not here.strip(b"\0")
                if here != data[place * BLOCK : (place + 1) * BLOCK] and here and not lost:
                    wrong.setdefault(number, []).append(start + place)
        for number, blocks in wrong.items():
            self._refute(self._unproven.pack(number), _runs(blocks), served=True)

    # -- a pack's bytes ----------------------------------------------------------------------------------------------

    def store_hot(self, start: int, end: int, data: memoryview, pack: Pack) -> None:
        """Bytes of the blocks `[start, end)` have come in a pack: write what is not there yet. Corrupt when they are
        refuted, or the pack is in quarantine; OSError when the disk refuses them."""
        if self.is_refuted(pack.digest):
            raise Corrupt("pack", f"{pack.where} is in quarantine: it has brought wrong bytes")
        proven = list(self._proven_before(start, end, data, pack))
        with self._lock:
            missing = [
                (start + it.start(), start + it.end()) for it in _MISSING.finditer(self._files.present[start:end])
            ]
            unproven = list(_without(missing, proven))
            number = self._unproven.number(pack) if unproven else 0
            if unproven and not number:  # more packs than there are numbers: readers get these blocks from the layer
                missing, unproven = list(_without(missing, unproven)), []
            for first, last in missing:
                self._unproven.mark(first, last, 0)
            for first, last in unproven:
                self._unproven.mark(first, last, number)
            reach("fetch.pack-noted")
            for first, last in missing:
                self._files.fill(first, last, data[(first - start) * BLOCK : (last - start) * BLOCK])
            reach("fetch.pack-stored")
            self._prove(self._pieces(unproven))

    def _proven_before(self, start: int, end: int, data: memoryview, pack: Pack) -> Iterator[Run]:
        """The pieces that the bytes cover whole, and match; Corrupt if they do not match one."""
        for piece in self._pieces([(start, end)]):
            first, last = piece.block_start, piece.block_end
            if start <= first and last <= end:
                if not self._index.verify_piece(piece, data[(first - start) * BLOCK : (last - start) * BLOCK]):
                    with self._lock:
                        self._refute(pack, [(first, last)], served=False)
                    raise Corrupt("pack", f"{pack.where}: blocks {first}-{last} are not those of the layer")
                yield first, last

    def _prove(self, pieces: Iterable[PieceRange]) -> None:
        """Check the pieces that have become whole."""
        for piece in pieces:
            first, last = piece.block_start, piece.block_end
            marks = self._unproven.marks(first, last)
            if not marks.strip(b"\0") or not self._files.has(first, last):
                continue
            if self._matches(piece):
                with contextlib.suppress(OSError):  # a full disk: it counts as unproven, and is right
                    self._unproven.mark(first, last, 0)
                continue
            for number in set(marks) - {0}:
                blocks = [first + place for place, mark in enumerate(marks) if mark == number]
                self._refute(self._unproven.pack(number), _runs(blocks), served=True)

    def doubt(self, digest: str) -> None:
        """Serve no unproven block of this pack any more."""
        with self._lock:
            self._doubt(digest)

    def distrust(self, runs: Iterable[Run]) -> None:
        """Serve none of these blocks before it has been checked."""
        with self._lock:
            for first, last in runs:
                self._files.distrust(first, last)

    def _doubt(self, digest: str) -> None:
        numbers = {number for number, pack in enumerate(self._unproven.packs, 1) if pack.digest == digest}
        for start, end in self._unproven.runs() if numbers else ():
            marks = self._unproven.marks(start, end)
            for first, last in _runs(start + place for place, mark in enumerate(marks) if mark in numbers):
                self._distrust(first, last)

    def _distrust(self, first: int, last: int) -> None:
        self._files.distrust(first, last)
        self._landed.doubt(self._files.name, first, last)

    def _refute(self, pack: Pack, runs: list[Run], served: bool) -> None:
        """The pack is wrong there."""
        for first, last in runs if served else ():
            self._distrust(first, last)
        self._doubt(pack.digest)
        reach("fetch.doubted")
        record = self._files.record
        names = list(dict.fromkeys(name for run in runs for name in self._files_of(*run)))
        self._alarms.raise_(record.digest, self._files.name, record.images, pack, runs, names, served)

    # -- places ------------------------------------------------------------------------------------------------------

    def _pieces(self, runs: Iterable[Run]) -> Iterator[PieceRange]:
        """The pieces that hold blocks of the runs, each once if the runs ascend."""
        done = 0
        for start, end in runs:
            block = max(start, done)
            while block < end:
                piece = self._index.piece_of_block(block)
                if piece is not None:
                    yield piece
                block = done = block + 1 if piece is None else piece.block_end

    def _matches(self, piece: PieceRange) -> bool:
        data = self._read(piece.block_start, piece.block_end)
        return bool(data) and self._index.verify_piece(piece, data)

    def _read(self, start: int, end: int) -> bytes:
        """What the disk has there; empty when it cannot be read back."""
        size = (end - start) * BLOCK
        try:
            data = os.pread(self._files.data_fd, size, start * BLOCK)
        except OSError as error:  # it is fetched and written again
            _log.warning("layer.unreadable file=%r block=%d error=%r", self._files, start, str(error))
            return b""
        return data if len(data) == size else b""

    def _files_of(self, start: int, end: int) -> Iterator[str]:
        """Paths of the files that have blocks in `[start, end)`; of hard links the first name."""
        if self._names is None:  # only ever needed for an alarm
            self._names = self._read_names()
        starts, ends = self._names
        for place in range(max(bisect_right(starts, start) - 1, 0), bisect_right(starts, end - 1)):
            last, name = ends[place]
            if last > start:
                yield name

    def _read_names(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Of each file its first block, the block after its last, and its path. The index in memory has no metadata."""
        try:
            metadata = os.pread(self._files.meta_fd, self._files.meta_size, 0)
            entries = [it for it in walk(metadata) if it.data_offset is not None]
        except (OSError, BlockIndexError) as error:  # an alarm without names is better than none
            _log.warning("layer.no_names file=%r error=%r", self._files, str(error))
            return [], []
        rows = sorted(((it.data_offset or 0) // BLOCK, it.size, os.fsdecode(it.path)) for it in entries)
        return [first for first, _, _ in rows], [(first + -(-size // BLOCK), path) for first, size, path in rows]


def _runs(blocks: Iterable[int]) -> list[Run]:
    """Ascending blocks as runs."""
    runs: list[Run] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = runs[-1][0], block + 1
        else:
            runs.append((block, block + 1))
    return runs


def _without(runs: Iterable[Run], others: list[Run]) -> Iterator[Run]:
    """The runs less the blocks of others; both ascend."""
    for start, end in runs:
        for first, last in others:
            if first < end and start < last:
                if start < first:
                    yield start, first
                start = last
        if start < end:
            yield start, end
