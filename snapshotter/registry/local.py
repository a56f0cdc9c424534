"""Blobs and images in local files: the same seams as a registry, for `bootseer index build FILE` and for tests.

An OCI layout is a directory with `oci-layout`, `index.json` and `blobs/sha256/<hex>`.
"""

import hashlib
from collections.abc import Generator
from pathlib import Path

from snapshotter.errors import InvalidArgument, NotFound, Transient
from snapshotter.model import Digest
from snapshotter.registry.manifest import Manifest, Platform, choose, host_platform, parse_manifest
from snapshotter.registry.transport import CHUNK_BYTES

__all__ = ["FileBlob", "OciLayout"]


class FileBlob:
    """A BlobSource over one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<FileBlob {self._path}>"

    def size(self) -> int:
        """Bytes of the file."""
        try:
            return self._path.stat().st_size
        except OSError as exc:
            raise NotFound(f"{self._path}: {exc.strerror}") from exc

    def stream(self, start: int, end: int | None) -> Generator[bytes]:
        """The file's bytes `[start, end)`; Transient when it is shorter."""
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(start)
                left = (self.size() if end is None else end) - start
                while left > 0:
                    chunk = file.read(min(CHUNK_BYTES, left))
                    if not chunk:
                        raise Transient(f"{self._path}: shorter than expected by {left} bytes")
                    left -= len(chunk)
                    yield chunk
        except OSError as exc:
            raise NotFound(f"{self._path}: {exc.strerror}") from exc

    def digest(self) -> Digest:
        """The file's digest; reads it whole."""
        digest = hashlib.sha256()
        for chunk in self.stream(0, None):
            digest.update(chunk)
        return Digest(f"sha256:{digest.hexdigest()}")


class OciLayout:
    """The images of one OCI layout directory."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "oci-layout").is_file():
            raise InvalidArgument(f"{directory}: not an OCI layout (it has no file oci-layout)")
        self._directory = directory

    def __repr__(self) -> str:
        return f"<OciLayout {self._directory}>"

    def resolve(self, platform: Platform | None = None) -> Manifest:
        """The layout's only image for `platform` (this machine's by default)."""
        wanted = platform or host_platform()
        what = f"{self._directory}/index.json"
        parsed = parse_manifest(self._read(self._directory / "index.json"), Digest(""), what)
        for _ in range(4):
            if isinstance(parsed, Manifest):
                return parsed
            entry = parsed[0] if len(parsed) == 1 else choose(parsed, wanted, what)
            what = f"{self._directory}: {entry.digest}"
            parsed = parse_manifest(self._read(self._path(entry.digest)), entry.digest, what)
        raise InvalidArgument(f"{self._directory}: image indexes are nested too deep")

    def blob(self, digest: Digest) -> FileBlob:
        """The blob `digest`; whether it exists shows when it is read."""
        return FileBlob(self._path(digest))

    def _path(self, digest: Digest) -> Path:
        return self._directory / "blobs" / "sha256" / digest.removeprefix("sha256:")

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as exc:
            raise NotFound(f"{path}: {exc.strerror}") from exc
