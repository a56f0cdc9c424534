"""The node's own hot sets: a directory `<root>/hot/<image key hex>/<workload>.bsh`.

Any process may read and write it: a file appears whole by one rename, and is only ever replaced by another. So `<root>`
is itself such a directory as `[hotset] url` names. What a killed process has left unfinished goes an hour later, with
the next file that is written beside it. Knows files; what is in them is `blockindex.hotpack`'s.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from blockindex.errors import BlockIndexError, Corrupt
from blockindex.hotpack import HeadReader, HotPack, encode_hotset
from blockindex.hotset import HotSet, fitted, hotset_name
from snapshotter.errors import AlreadyExists, SnapshotterError
from snapshotter.killpoints import reach
from snapshotter.log import fields

__all__ = ["HotStore", "read_head"]

_CHUNK = 64 << 10
_UNFINISHED_S = 3600.0  # no file takes so long to write

log = logging.getLogger(__name__)


def read_head(path: Path) -> HotPack:
    """What the file's head says; reads no frame, but makes sure that the file is as long as its frames need. Raises
    FileNotFoundError, OSError, Corrupt, Unsupported."""
    with path.open("rb", buffering=0) as file:
        reader = HeadReader()
        while chunk := file.read(_CHUNK):
            pack = reader.feed(chunk)
            if pack is not None:
                size = os.fstat(file.fileno()).st_size
                if size != pack.size:
                    raise Corrupt("frames", f"the file has {size} bytes, its head speaks of {pack.size}")
                return pack
        raise Corrupt("head", "the file ends before its head does")


def _link(path: Path, file: Path) -> None:
    """Give the file one more name, which must be free."""
    try:
        path.hardlink_to(file)
    except FileExistsError as error:
        raise AlreadyExists(f"{path} is there already") from error


def _clear_unfinished(directory: Path) -> None:
    """Delete what killed processes have left there."""
    for file in directory.glob(".*.bsh.*"):
        with contextlib.suppress(FileNotFoundError):  # its process is alive, and was faster
            if file.stat().st_mtime < time.time() - _UNFINISHED_S:
                file.unlink()


class HotStore:
    """The hot sets below `root`. Keeps nothing in memory."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __repr__(self) -> str:
        return f"<HotStore {self._root}: {sum(1 for _ in self.entries())} hot sets>"

    def path(self, key: str, workload: str) -> Path:
        """Where a hot set is, or would be. Corrupt for what is no key or no workload's name."""
        return self._root / hotset_name(key, workload)

    def entries(self) -> Iterator[tuple[str, str, Path]]:
        """(image key, workload, file) of every hot set, in this order; other files are passed over."""
        for path in sorted((self._root / "hot").glob("*/*.bsh")):
            key, workload = f"sha256:{path.parent.name}", path.stem
            try:
                known = self.path(key, workload)
            except Corrupt:
                continue
            if known == path:
                yield key, workload, path

    def find(self, key: str) -> dict[str, Path]:
        """The files of an image's hot sets by workload; empty when there are none."""
        directory = self.path(key, "default").parent
        found = {}
        for path in sorted(directory.glob("*.bsh")):
            try:
                if self.path(key, path.stem) == path:
                    found[path.stem] = path
            except Corrupt:
                continue
        return found

    def load(self, key: str, workload: str) -> HotPack | None:
        """The head of a hot set; None when there is none, or (said as a warning) when it cannot be used."""
        path = self.path(key, workload)
        try:
            pack = read_head(path)
            if (pack.hotset.image_key, pack.hotset.workload) != (key, workload):
                raise Corrupt("image_key", "is of another image or workload than the file's name")
            return pack
        except FileNotFoundError:
            return None
        except (BlockIndexError, OSError) as error:
            log.warning("hotset.damaged %s", fields(path=str(path), error=str(error)))
            return None

    def save(self, hotset: HotSet, note: Callable[[Path], None] = lambda file: None) -> Path:
        """Write a set without its bytes, in place of what was there; `note` is called with the finished file just
        before. More extents than a file holds are coalesced first. SnapshotterError when the disk refuses."""
        data = encode_hotset(fitted(hotset))
        return self.put(hotset.image_key, hotset.workload, lambda file: file.write(data), note=note)

    def add(self, hotset: HotSet) -> bool:
        """As `save`, unless there is one of the image and workload already, which stays; whether it was saved."""
        data = encode_hotset(fitted(hotset))
        try:
            self.put(hotset.image_key, hotset.workload, lambda file: file.write(data), replace=False)
        except AlreadyExists:
            return False
        return True

    def put(
        self,
        key: str,
        workload: str,
        write: Callable[[BinaryIO], object],
        replace: bool = True,
        note: Callable[[Path], None] = lambda file: None,
    ) -> Path:
        """Have `write` write a file, call `note` with it, then give it its name. If one raises, nothing has changed;
        SnapshotterError when the disk refuses; AlreadyExists when there is one that `replace` does not let go."""
        path = self.path(key, workload)
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _clear_unfinished(path.parent)
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            note(temporary)
            reach("service.hotset-written")
            if replace:
                temporary.rename(path)
            else:
                _link(path, temporary)
        except OSError as error:
            raise SnapshotterError(f"{path}: cannot write the hot set: {error.strerror}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
        return path

    def remove(self, key: str, workload: str) -> bool:
        """Remove a hot set; whether there was one. Its directory stays: another process may just be writing there.
        SnapshotterError when the disk refuses."""
        path = self.path(key, workload)
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            raise SnapshotterError(f"{path}: cannot remove the hot set: {error.strerror}") from error
        return True
