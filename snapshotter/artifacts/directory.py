"""Indexes and hot sets as plain files: `sha256/<hex>.bsi`, `hot/<image key>/<workload>.bsh`, below a directory or URL.

That is what `url` in [index] and [hotset] reads. A URL is written through fsspec, if that is installed: any kind of
storage that it knows. Files on disk appear whole; whether those of a URL do is its storage's business, and readers
check digests in any case.

A file that begins with the same prologue and is as long is the same file: the prologue has the digest of the head, and
the head those of all that follows.
"""

import os
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from blockindex.codec import PROLOGUE_SIZE, decode_index, index_name
from blockindex.errors import BlockIndexError
from blockindex.hotset import DEFAULT_WORKLOAD, hotset_name
from snapshotter.artifacts.made import hot_artifact, read_chunks
from snapshotter.artifacts.manifest import INDEX_TYPE, INLINE_ALL_BYTES, digest_of
from snapshotter.artifacts.model import Artifact, Blob, Kind
from snapshotter.artifacts.place import Held, ImageName, OpenBlob, Placed
from snapshotter.errors import NotFound, SnapshotterError
from snapshotter.hotstore import read_head
from snapshotter.model import Digest
from snapshotter.registry.storage import check_location, shown, storage_error

__all__ = ["DirectoryPlace", "LocalFiles", "UrlFiles"]

_HOT_SUFFIX = ".bsh"


class Files(Protocol):
    """Files by names with slashes. Raises SnapshotterError."""

    def locate(self, name: str) -> str:
        """Where a file is, or would be."""

    def read(self, name: str, end: int | None = None) -> bytes | None:
        """The file's bytes up to `end`; None where there is no such file."""

    def size(self, name: str) -> int:
        """Bytes of a file; -1 where there is none."""

    def names(self, folder: str) -> list[str]:
        """Names of what is in a folder, sorted; none where there is no such folder."""

    def local(self, name: str) -> AbstractContextManager[Path]:
        """The file, on a disk of this machine. NotFound where there is none."""

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file, in place of what is there."""

    def prepare(self) -> None:
        """Make the directory."""


class DirectoryPlace:
    """A Place of plain files. What it holds is layer indexes; to tell its hot sets each has to be read (`hot_sets`)."""

    def __init__(self, name: str, files: Files) -> None:
        self.name = name
        self.signs = False
        self._files = files

    def __repr__(self) -> str:
        return f"<DirectoryPlace {self.name}>"

    def prepare(self) -> None:
        """See Place."""
        self._files.prepare()

    def held(self, image: ImageName) -> list[Held]:
        """See Place. An index that is damaged counts as missing."""
        found = tuple(filter(None, map(self._index, image.layers)))
        if not found:
            return []
        return [Held(Artifact(Kind.LAYER_INDEX, image.key, "", None, found), "", self._open)]

    def hot_sets(self, image: ImageName, workloads: Collection[str] = ()) -> Iterator[Held]:
        """The image's hot sets, of all workloads or of these, each to be used before the next is asked for. One that is
        damaged, or of another image or workload than its name says, counts as missing."""
        folder = hotset_name(image.key, DEFAULT_WORKLOAD).rpartition("/")[0]
        for name in self._files.names(folder):
            try:
                workload = name.removesuffix(_HOT_SUFFIX)
                if hotset_name(image.key, workload) != f"{folder}/{name}" or workload not in (workloads or {workload}):
                    continue
                with self._files.local(f"{folder}/{name}") as path:
                    pack = read_head(path)
                    if (pack.hotset.image_key, pack.hotset.workload) == (image.key, workload):
                        artifact = hot_artifact(path, pack, image.subject)
                        yield Held(artifact, "", lambda blob, path=path: read_chunks(path, blob.size))  # type: ignore[misc]
            except (BlockIndexError, NotFound):  # NotFound: it has just been removed
                continue

    def put(self, artifact: Artifact, open_blob: OpenBlob, *, replace: bool = False) -> Placed:
        """See Place. Plain files are not signed: nothing is displaced."""
        if artifact.kind is Kind.HOT_SET:
            files = {hotset_name(artifact.image_key, artifact.workload): artifact.blobs[-1]}
        else:
            files = {index_name(blob.layer): blob for blob in artifact.blobs}
        existed = True
        for name, blob in files.items():
            if not self._is_there(name, blob, open_blob):
                existed = False
                self._files.write(name, open_blob(blob))
        return Placed(existed, "", tuple(map(self._files.locate, files)))

    def _is_there(self, name: str, blob: Blob, open_blob: OpenBlob) -> bool:
        if self._files.size(name) != blob.size:
            return False
        ours = b""
        for chunk in open_blob(blob):
            ours += chunk
            if len(ours) >= PROLOGUE_SIZE:
                break
        return self._files.read(name, PROLOGUE_SIZE) == ours[:PROLOGUE_SIZE]

    def _index(self, layer: Digest) -> Blob | None:
        data = self._files.read(index_name(layer))
        if data is None:
            return None
        with suppress(BlockIndexError):
            if decode_index(data).blob_digest == layer:
                inline = data if len(data) <= INLINE_ALL_BYTES else b""
                return Blob(digest_of(data), len(data), INDEX_TYPE, layer, inline)
        return None

    def _open(self, blob: Blob) -> Iterator[bytes]:
        name = index_name(blob.layer)
        data = self._files.read(name)
        if data is None or digest_of(data) != blob.digest:
            raise SnapshotterError(f"{self._files.locate(name)}: somebody has changed it just now: try again")
        yield data


class LocalFiles:
    """Files below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def locate(self, name: str) -> str:
        """See Files."""
        return str(self._directory / name)

    def read(self, name: str, end: int | None = None) -> bytes | None:
        """See Files."""
        try:
            with (self._directory / name).open("rb") as file:
                return file.read() if end is None else file.read(end)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SnapshotterError(f"{self._directory / name}: {error.strerror}") from error

    def size(self, name: str) -> int:
        """See Files."""
        with suppress(OSError):
            return (self._directory / name).stat().st_size
        return -1

    def names(self, folder: str) -> list[str]:
        """See Files."""
        try:
            return sorted(os.listdir(self._directory / folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise SnapshotterError(f"{self._directory / folder}: {error.strerror}") from error

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """See Files."""
        path = self._directory / name
        if not path.is_file():
            raise NotFound(f"{path}: no such file")
        yield path

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """See Files. By one rename, so that a reader finds it whole; readable as the umask says."""
        path = self._directory / name
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("xb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except OSError as error:
            raise SnapshotterError(f"{error.filename or path}: {error.strerror}") from error
        finally:
            with suppress(OSError):
                temporary.unlink()

    def prepare(self) -> None:
        """See Files."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SnapshotterError(f"{error.filename or self._directory}: {error.strerror}") from error


class UrlFiles:
    """Files below a URL, by way of fsspec. Connects with the first question."""

    def __init__(self, url: str) -> None:
        """InvalidArgument where fsspec is missing, or knows no such storage."""
        check_location(url)
        self._url = url.rstrip("/")

    def locate(self, name: str) -> str:
        """See Files."""
        return shown(f"{self._url}/{name}")

    def read(self, name: str, end: int | None = None) -> bytes | None:
        """See Files."""
        try:
            data: bytes = self._storage.cat_file(self._path(name), 0, end)
        except FileNotFoundError:
            return None
        except Exception as error:  # what a storage raises is its own
            raise storage_error(self.locate(name), error) from error
        return data

    def size(self, name: str) -> int:
        """See Files."""
        try:
            size = self._storage.size(self._path(name))
        except FileNotFoundError:
            return -1
        except Exception as error:  # as above
            raise storage_error(self.locate(name), error) from error
        return int(size) if size is not None else -1

    def names(self, folder: str) -> list[str]:
        """See Files."""
        try:
            found = self._storage.ls(self._path(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except Exception as error:  # as above
            raise storage_error(self.locate(folder), error) from error
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in found)

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """See Files. A copy, for as long as it is used."""
        with tempfile.NamedTemporaryFile(prefix="bootseer-") as spool:
            try:
                with self._storage.open(self._path(name), "rb") as file:
                    shutil.copyfileobj(file, spool)
            except Exception as error:  # as above
                raise storage_error(self.locate(name), error) from error
            spool.flush()
            yield Path(spool.name)

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """See Files. All bytes are here before the first is sent: a file that is closed is there, however short."""
        with tempfile.TemporaryFile(prefix="bootseer-") as spool:
            spool.writelines(chunks)
            spool.seek(0)
            try:
                path = self._path(name)
                self._storage.makedirs(path.rpartition("/")[0], exist_ok=True)
                with self._storage.open(path, "wb") as file:
                    shutil.copyfileobj(spool, file)
            except Exception as error:  # as above
                raise storage_error(self.locate(name), error) from error

    def prepare(self) -> None:
        """See Files."""
        try:
            self._storage.makedirs(self._opened[1], exist_ok=True)
        except Exception as error:  # as above
            raise storage_error(shown(self._url), error) from error

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """fsspec's storage and the directory's path there. Some connect now; raises what is theirs."""
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # it has no types

        storage, root = url_to_fs(self._url)
        return storage, root

    @property
    def _storage(self) -> Any:
        return self._opened[0]

    def _path(self, name: str) -> str:
        return f"{self._opened[1].rstrip('/')}/{name}"
