"""An OCI layout on disk, to read and to write: `oci-layout`, `index.json`, `blobs/sha256/<hex>`.

A blob appears whole, under the digest that it was found to have, by one rename. `index.json` is changed under a lock of
the directory and replaced by one rename: of several programs at once each finds its entry afterwards. Knows nothing of
what a blob is.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.imagesource.verified import checked_document
from snapshotter.model import Digest
from snapshotter.registry import Document, FileBlob, parse_digest

__all__ = ["REF_NAME", "Entry", "Layout", "notes_of", "tag_of"]

REF_NAME = "org.opencontainers.image.ref.name"
"""The annotation of an entry that holds its tag."""

_VERSION = b'{"imageLayoutVersion": "1.0.0"}'
_DOCUMENT_BYTES = 4 << 20  # what registries accept

Entry = Mapping[str, object]
"""A descriptor in `index.json`, as it is there."""


class Layout:
    """One directory. Several processes and threads may use it at once."""

    def __init__(self, directory: Path) -> None:
        """InvalidArgument for a directory that is no layout."""
        self.directory = directory
        if not (directory / "oci-layout").is_file():
            raise InvalidArgument(f"{directory}: not an OCI layout (it has no file oci-layout)")

    def __repr__(self) -> str:
        return f"<Layout {self.directory}>"

    @classmethod
    def create(cls, directory: Path) -> "Layout":
        """The layout in `directory`, made first where nothing is there. A directory that holds other things is left as
        it is: InvalidArgument."""
        if not (directory / "oci-layout").is_file():
            with _writing(directory):
                if directory.is_dir() and any(directory.iterdir()):
                    raise InvalidArgument(f"{directory}: neither empty nor an OCI layout: name another directory")
                (directory / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
                _replace(directory / "index.json", json.dumps({"schemaVersion": 2, "manifests": []}).encode())
                _replace(directory / "oci-layout", _VERSION)
        return cls(directory)

    def entries(self) -> list[Entry]:
        """What `index.json` lists. InvalidArgument where it is damaged."""
        path = self.directory / "index.json"
        try:
            found = json.loads(path.read_bytes())["manifests"]
        except OSError as error:
            raise NotFound(f"{path}: {error.strerror}") from error
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise InvalidArgument(f"{path}: not the index of an OCI layout") from error
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise InvalidArgument(f"{path}: not the index of an OCI layout")
        return found

    def document(self, digest: Digest) -> Document:
        """The manifest or image index with this digest, checked against it. NotFound, InvalidArgument."""
        path = self.path(digest)
        try:
            with path.open("rb") as file:
                body = file.read(_DOCUMENT_BYTES + 1)
        except OSError as error:
            raise NotFound(f"{self.directory}: {digest} is not there") from error
        return checked_document(body, digest, str(path))

    def blob(self, digest: Digest) -> FileBlob:
        """The blob with this digest; whether it exists shows when it is read."""
        return FileBlob(self.path(digest))

    def path(self, digest: str) -> Path:
        """Where a blob lies, or would."""
        return self.directory / "blobs" / "sha256" / parse_digest(digest).removeprefix("sha256:")

    def has(self, digest: Digest, size: int) -> bool:
        """Whether a blob is there in its full size."""
        with suppress(OSError):
            return self.path(digest).stat().st_size == size
        return False

    def write(self, digest: Digest, size: int, chunks: Iterable[bytes]) -> None:
        """Keep a blob. InvalidArgument, and nothing kept, when it is not what was announced."""
        path = self.path(digest)
        if self.has(digest, size):
            return
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
        hashed, written = hashlib.sha256(), 0
        with _writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("xb") as file:
                    for chunk in chunks:
                        hashed.update(chunk)
                        written += len(chunk)
                        file.write(chunk)
                    file.flush()
                    os.fsync(file.fileno())
                if (f"sha256:{hashed.hexdigest()}", written) != (digest, size):
                    raise InvalidArgument(f"blob {digest}: what came has another digest, or not {size} bytes")
                temporary.rename(path)
            finally:
                with suppress(OSError):
                    temporary.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else changes what `index.json` lists meanwhile, nor removes a blob."""
        with _writing(self.directory):
            descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                yield
            finally:
                os.close(descriptor)

    def tag(self, entry: Entry, names: Iterable[str]) -> None:
        """Have each of the names (tags) lead to `entry`, a descriptor; without names it is listed without one."""
        with self.locked():
            self.tag_locked(entry, names)

    def tag_locked(self, entry: Entry, names: Iterable[str]) -> None:
        """The same, for a caller that has `locked` the layout."""
        entries = self.entries()
        before = list(entries)
        for name in tuple(names) or ("",):
            notes = {**notes_of(entry), **({REF_NAME: name} if name else {})}
            wanted = {**entry, **({"annotations": notes} if notes else {})}
            if wanted in entries:
                continue
            if name:
                entries[:] = [one for one in entries if tag_of(one) != name]
            entries.append(wanted)
        if entries != before:
            path = self.directory / "index.json"
            _replace(path, json.dumps({**json.loads(path.read_bytes()), "manifests": entries}, indent=2).encode())

    def remove(self, digest: str) -> None:
        """Remove a blob that nothing listed refers to any more, with the layout `locked`."""
        with suppress(FileNotFoundError):
            self.path(digest).unlink()


def tag_of(entry: Entry) -> str:
    """The tag of an entry, "" where it has none."""
    return str(notes_of(entry).get(REF_NAME, ""))


def notes_of(entry: Entry) -> Mapping[str, object]:
    """The annotations of an entry."""
    notes = entry.get("annotations")
    return notes if isinstance(notes, dict) else {}


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SnapshotterError(f"{error.filename or path}: {error.strerror}") from error
