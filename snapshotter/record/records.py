"""What is kept of recordings: the last of each workload, and the hot sets that are made of them.

    <root>/records/<hex of the image key>/<workload>/<time>.bsh   a recording, as a hot set without bytes; the name is
                                                                  when it ended, in ns since 1970, 20 digits
    <root>/records/<hex of the image key>/<workload>/stale        the share of its blocks that a start of the workload
                                                                  had to fetch on demand: it is to be recorded anew
    <root>/records/<hex of the image key>/mixed                   size and time of the `default` that was made of them,
                                                                  and of the one before; a line each

Each recording makes two sets in the node's store of hot sets anew (`workload.mixing`): that of its workload,
and the image's `default`. A `default` that somebody imported, or recorded by a command, stays as it is: `mixed` tells.
Recordings whose set was removed from the store do not count any more, and are deleted with the next one.

Order of things: a recording is there before the sets are made of it, and `mixed` names both the `default` that there
is, if it was made here, and the one to come before that takes its place. So a killed service leaves sets that lack the
last recording until the next one, never a `default` that passes for somebody's own.

Nothing is synced here: a recording that a power cut damages is passed over.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from blockindex.errors import BlockIndexError
from blockindex.hotpack import encode_hotset
from blockindex.hotset import DEFAULT_WORKLOAD, HotSet, fitted
from blockindex.model import BLOCK
from snapshotter.config import WorkloadConfig
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore, read_head
from snapshotter.killpoints import reach
from snapshotter.workload.mixing import default_set, own_set

__all__ = ["Kept", "Records"]

_log = logging.getLogger(__name__)

_STALE, _MIXED, _UNFINISHED = "stale", "mixed", ".new"


@dataclass(frozen=True, slots=True)
class Kept:
    """What a recording has become part of: the workload's set, and its file."""

    hotset: HotSet
    path: Path


class Records:
    """See the module. Thread-safe; the service alone writes here."""

    def __init__(self, root: Path, hotsets: HotStore, config: WorkloadConfig) -> None:
        """`hotsets`: where the sets go."""
        self.hotsets = hotsets
        self._root = root / "records"
        self._config = config
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Records {self._root}: {sum(1 for _ in self._root.glob('*/*/*.bsh'))}>"

    def keep(self, record: HotSet, commanded: bool) -> Kept:
        """Take in a recording, and make the sets anew. One that was `commanded` takes the place of all that there was
        of its workload. SnapshotterError, BlockIndexError or OSError when that fails."""
        key, workload = record.image_key, record.workload
        with self._lock:
            self._prune(key)
            if commanded:
                self._delete(key, workload)
            self._add(fitted(record))
            reach("service.record-added")
            records = self.of(key)
            if workload == DEFAULT_WORKLOAD and not commanded:
                return self._mix(key, records)
            hotset = own_set(records[workload])
            kept = Kept(hotset, self.hotsets.save(hotset))
            if workload != DEFAULT_WORKLOAD and self._may_mix(key):
                try:
                    self._mix(key, records)
                except (SnapshotterError, BlockIndexError, OSError) as error:  # the workload has its set all the same
                    _log.warning("record.no_default image_key=%s error=%r", key, str(error))
            return kept

    def of(self, key: str) -> dict[str, list[HotSet]]:
        """The image's recordings by workload, the newest first."""
        found = {path.name: self.of_workload(key, path.name) for path in sorted(self._image(key).glob("*/"))}
        return {workload: records for workload, records in found.items() if records}

    def of_workload(self, key: str, workload: str) -> list[HotSet]:
        """The recordings of one workload, the newest first."""
        found: list[HotSet] = []
        for path in sorted((self._image(key) / workload).glob("*.bsh"), reverse=True):
            try:
                found.append(read_head(path).hotset)
            except (BlockIndexError, OSError) as error:
                _log.warning("record.damaged path=%s error=%r", path, str(error))
        return found

    def mixture(self, records: Mapping[str, list[HotSet]]) -> HotSet:
        """The `default` that these recordings by workload would make; there is at least one."""
        config = self._config
        most_blocks = (config.default_mib << 20) // BLOCK
        return default_set(records, config.records, most_blocks, config.default_share)

    def mixes_default(self, key: str) -> bool:
        """Whether the image's `default` here is one that was made of recordings of its workloads."""
        with contextlib.suppress(OSError):
            return _stamp(self._default(key)) in (self._image(key) / _MIXED).read_text().splitlines()
        return False

    def _may_mix(self, key: str) -> bool:
        """Whether nobody has chosen the image's `default`; one that was carried over from another image is a guess."""
        default = self.hotsets.load(key, DEFAULT_WORKLOAD)
        return default is None or bool(default.hotset.carried_from) or self.mixes_default(key)

    def stale(self, key: str, workload: str) -> float | None:
        """The share of blocks that a start of this workload had to fetch on demand, where it was too large, and the
        workload has not been recorded since."""
        with contextlib.suppress(OSError, ValueError):
            return float((self._image(key) / workload / _STALE).read_text())
        return None

    def mark_stale(self, key: str, workload: str, share: float) -> None:
        """Have the next container of the workload recorded. OSError when the disk refuses."""
        path = self._image(key) / workload / _STALE
        with self._lock:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_text(f"{share:.3f}")

    def _image(self, key: str) -> Path:
        return self._root / key.removeprefix("sha256:")

    def _default(self, key: str) -> Path:
        return self.hotsets.path(key, DEFAULT_WORKLOAD)

    def _add(self, record: HotSet) -> None:
        """Write it, and delete what it makes too many, and the mark that asked for it."""
        directory = self._image(record.image_key) / record.workload
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = directory / f"{time.time_ns():020}.bsh"
        temporary = directory / _UNFINISHED
        temporary.write_bytes(encode_hotset(record))
        temporary.rename(path)
        for old in [*sorted(directory.glob("*.bsh"))[: -self._config.records], directory / _STALE]:
            old.unlink(missing_ok=True)

    def _mix(self, key: str, records: Mapping[str, list[HotSet]]) -> Kept:
        hotset = self.mixture(records)
        before = _stamp(self._default(key)) if self.mixes_default(key) else ""

        def note(file: Path) -> None:
            temporary = self._image(key) / _UNFINISHED
            temporary.write_text(f"{before}\n{_stamp(file)}\n")
            temporary.rename(self._image(key) / _MIXED)
            reach("service.default-stamped")

        return Kept(hotset, self.hotsets.save(hotset, note))

    def _prune(self, key: str) -> None:
        """Delete the recordings of sets that were removed."""
        for directory in self._image(key).glob("*/"):
            if any(directory.glob("*.bsh")) and not self.hotsets.path(key, directory.name).exists():
                self._delete(key, directory.name)

    def _delete(self, key: str, workload: str) -> None:
        shutil.rmtree(self._image(key) / workload, ignore_errors=True)


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"
