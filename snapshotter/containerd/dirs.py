"""The directories of ordinary snapshots and views, and what they take on disk.

    <root>/s/<id>/fs, <root>/s/<id>/work     a snapshot's own files and overlayfs' scratch space
    <root>/s/<id>/fs                         the skeleton of a lazy snapshot, where it has one
    <root>/s/new-<random>                    being made; left over only when the process died meanwhile
    <root>/s/rm-<random>                     removed, waiting to be deleted
    <root>/lost-<time>-<random>/<id>         of snapshots that nobody knows since the store was damaged: the operator's

This module does not know which snapshots exist: callers say so, and hold the store's write transaction where a step
has to be one with it (`adopt`, `discard_orphans`). A failed deletion is logged, never raised: the next one finds it.
"""

import logging
import os
import secrets
import stat
import subprocess
import threading
import time
from collections.abc import Set
from pathlib import Path

from snapshotter.containerd.model import Usage
from snapshotter.killpoints import reach

__all__ = ["SnapshotDirs", "disk_usage"]

_log = logging.getLogger(__name__)

_NEW, _TRASH = "new-", "rm-"


class SnapshotDirs:
    """The directories below `<root>/s`. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._base = root / "s"
        self._deleting = threading.Lock()
        # 0700: files of an image may be setuid or writable for all, and must not be reachable by users of the node.
        self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left_over in self._base.glob(f"{_NEW}*"):
            self._discard(left_over)

    def upper(self, snapshot_id: int) -> Path:
        """Where the snapshot's own files are."""
        return self._base / str(snapshot_id) / "fs"

    def work(self, snapshot_id: int) -> Path:
        """overlayfs' work directory beside them."""
        return self._base / str(snapshot_id) / "work"

    def make(self, like: os.stat_result | None, work: bool = True) -> Path:
        """A new pair of directories with no id yet (without `work` the upper one only); the upper one gets the owner
        and mode of its parent's root.

        The caller owns the result until `adopt` or `drop`.
        """
        new = self._base / f"{_NEW}{secrets.token_hex(8)}"
        new.mkdir(mode=0o700)
        try:
            if work:
                (new / "work").mkdir(mode=0o711)
            upper = new / "fs"
            upper.mkdir()
            if like is not None:
                os.chown(upper, like.st_uid, like.st_gid)
            # After chown, which clears setuid and setgid; explicit, because mkdir is subject to the umask.
            os.chmod(upper, stat.S_IMODE(like.st_mode) if like is not None else 0o755)
        except BaseException:
            self.drop(new)
            raise
        reach("service.dirs-made")
        return new

    def adopt(self, new: Path, snapshot_id: int) -> None:
        """Give `new` its id. To be called inside the transaction that inserts the snapshot."""
        final = self._base / str(snapshot_id)
        if final.exists():
            # An earlier process died between this rename and its commit, and the id was given again.
            self._discard(final)
        new.rename(final)
        reach("service.dirs-adopted")

    def drop(self, new: Path) -> None:
        """Delete a result of `make`, unless it was adopted."""
        if new.exists():
            _delete(new)

    def discard(self, snapshot_id: int) -> None:
        """Take the directories of a removed snapshot out of the way; `delete_discarded` deletes them."""
        self._discard(self._base / str(snapshot_id))

    def discard_orphans(self, known: Set[int]) -> None:
        """The same for every directory of an id that is not `known`. To be called inside a write transaction."""
        for entry in self._base.iterdir():
            if entry.name.isdecimal() and int(entry.name) not in known:
                _log.info("snapshot.orphan directory=%s", entry)
                self._discard(entry)

    def ids(self) -> set[int]:
        """The ids of all directories there are."""
        return {int(entry.name) for entry in self._base.iterdir() if entry.name.isdecimal()}

    def keep_unknown(self, known: Set[int]) -> None:
        """Put the directories of ids that are not `known` where nothing deletes them. Mounts that stand on them stay as
        they are."""
        unknown = sorted(self.ids() - known)
        if not unknown:
            return
        aside = self._base.parent / f"lost-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        aside.mkdir(mode=0o700)
        for number in unknown:
            (self._base / str(number)).rename(aside / str(number))
        _log.error("snapshots.lost directory=%s it holds the files of snapshots that are not known any more", aside)

    def delete_discarded(self) -> None:
        """Delete what was discarded; may take long."""
        with self._deleting:
            for entry in self._base.glob(f"{_TRASH}*"):
                _delete(entry)

    def _discard(self, directory: Path) -> None:
        try:
            directory.rename(self._base / f"{_TRASH}{secrets.token_hex(8)}")
        except FileNotFoundError:
            pass  # most lazy snapshots have none
        except OSError as error:
            _log.warning("snapshot.discard.failed directory=%s reason=%s", directory, error)

    def __repr__(self) -> str:
        return f"<SnapshotDirs {self._base}>"


def _delete(directory: Path) -> None:
    """Delete a tree. By rm(1): it copes with any depth, which Python's rmtree does not, and needs no GIL."""
    command = ["rm", "-rf", "--one-file-system", "--", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        _log.warning("snapshot.delete.failed directory=%s reason=%s", directory, done.stderr.strip()[:500])


def disk_usage(directory: Path) -> Usage:
    """What the tree takes on disk, itself included; hard links count once. Files that vanish meanwhile are skipped."""
    size = 0
    seen: set[tuple[int, int]] = set()
    pending = [os.fspath(directory)]
    while pending:
        path = pending.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                with os.scandir(path) as entries:
                    pending.extend(entry.path for entry in entries)
        except FileNotFoundError:
            continue
        except OSError as error:  # a path beyond PATH_MAX, for one: an estimate is better than no answer
            _log.debug("snapshot.usage.failed path=%s reason=%s", path, error)
            continue
        identity = (status.st_dev, status.st_ino)
        if identity not in seen:
            seen.add(identity)
            size += status.st_blocks * 512
    return Usage(size, len(seen))
