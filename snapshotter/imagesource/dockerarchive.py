"""`docker-archive:FILE`: a tar that `docker save` or `podman save` wrote.

Indexes are of a registry's blobs. An archive holds these only if it has an OCI manifest whose layers are compressed;
then it is read like an OCI layout. Otherwise its layers are plain tars, the registry's are not, and two programs that
compress the same tar give different blobs: so the image is read from its registry, once it is certain that it is the
same one, by the digest of its configuration or by its diff IDs.
"""

import hashlib
import json
import tarfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blockindex.model import Compression
from blockindex.source import detect
from snapshotter.errors import InvalidArgument, NotFound
from snapshotter.imagesource.layout import REF_NAME
from snapshotter.imagesource.model import ImageSource, PlatformImage
from snapshotter.imagesource.platforms import platform_images
from snapshotter.imagesource.sources import RegistryImage
from snapshotter.imagesource.verified import checked_document
from snapshotter.model import BlobSource, Digest
from snapshotter.registry import Document, FileBlob, ImageRef, Platform, Registry, parse_digest, parse_reference

__all__ = ["ARCHIVE_PREFIX", "open_archive"]

ARCHIVE_PREFIX = "docker-archive:"
_DOCUMENT_BYTES = 4 << 20
_IMAGE_NAME = "io.containerd.image.name"


def open_archive(path: Path, image: str, registry: Registry) -> ImageSource:
    """The image of an archive: in the archive itself if its blobs are a registry's, else in the registry. `image`: the
    reference to look for, empty for the one that the archive names. InvalidArgument, NotFound say what is missing."""
    archive = _Archive(path)
    inside = archive.oci_image(image)
    if inside is not None and _is_compressed(inside):
        return inside
    return _in_registry(path, archive.saved_image(image), registry)


def _is_compressed(source: ImageSource) -> bool:
    """Whether all layers are there, and are gzip or zstd by their first bytes: media types are often wrong."""
    try:
        images = [image for image in platform_images(source) if isinstance(image, PlatformImage)]
        layers = [layer for image in images for layer in image.manifest.layers]
        heads = [b"".join(source.blob(layer.digest).stream(0, min(4, layer.size))) for layer in layers]
    except NotFound:  # `docker save` leaves the blobs of other platforms out, and names them all the same
        return False
    return bool(images) and all(detect(head) is not Compression.TAR for head in heads)


@dataclass(frozen=True, slots=True)
class _Saved:
    """An image as `manifest.json` lists it."""

    reference: str
    config_digest: str
    diff_ids: tuple[str, ...]
    platform: Platform


def _in_registry(path: Path, saved: _Saved, registry: Registry) -> ImageSource:
    """The same image where it was pushed to."""
    ref = _reference(path, saved.reference)
    try:
        images = platform_images(RegistryImage(registry, ref), saved.platform)
    except NotFound as error:
        raise NotFound(
            f"{path}: its layers are plain tars, and {ref} is not in its registry yet ({error}): push it first, or "
            "name it with --image REF"
        ) from error
    for image in images:
        if isinstance(image, PlatformImage) and _is_same(registry, ref, image, saved):
            return RegistryImage(registry, ImageRef(ref.host, ref.repository, ref.tag, image.manifest.digest))
    raise InvalidArgument(
        f"{path}: {ref} in the registry is another image (other layers): push this one, or name it with --image REF"
    )


def _is_same(registry: Registry, ref: ImageRef, image: PlatformImage, saved: _Saved) -> bool:
    config = image.manifest.config
    if config.digest == saved.config_digest:
        return True
    if config.size > _DOCUMENT_BYTES:
        return False
    body = b"".join(registry.blob(str(ref), config.digest).stream(0, config.size))
    try:
        found = json.loads(body)["rootfs"]["diff_ids"]
    except (ValueError, RecursionError, KeyError, TypeError):
        return False
    return bool(saved.diff_ids) and found == list(saved.diff_ids)


def _reference(path: Path, text: str) -> ImageRef:
    try:
        return parse_reference(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}: name the image with --image REF") from error


class _Archive:
    """The files of a tar, by name, where they lie in it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._members: dict[str, tuple[int, int]] = {}
        try:
            with tarfile.open(path, "r:") as tar:  # not compressed, so that a blob is a part of the file
                links: dict[str, str] = {}
                for member in tar:
                    if member.isreg():
                        self._members[member.name] = (member.offset_data, member.size)
                    elif member.issym() or member.islnk():  # a layer that is there twice
                        links[member.name] = member.linkname
                for name, target in links.items():
                    found = self._members.get(_beside(name, target)) or self._members.get(target)
                    if found is not None:
                        self._members[name] = found
        except OSError as error:
            raise NotFound(f"{path}: {error.strerror or error}") from error
        except (tarfile.TarError, ValueError, OverflowError) as error:  # the latter two for absurd sizes
            raise InvalidArgument(f"{path}: not a plain tar archive of `docker save` ({error})") from error

    def oci_image(self, image: str) -> "_ArchiveImage | None":
        """The image that is there as in an OCI layout, if there is one (of this name, where one is given)."""
        if "index.json" not in self._members:
            return None
        found = self._listed()
        chosen = {digest: name for digest, name in found.items() if not image or _same_name(name, image)}
        if len(chosen) != 1:
            return None
        digest, name = chosen.popitem()
        try:
            home = parse_reference(image or name)
        except InvalidArgument:
            home = None
        return _ArchiveImage(self, f"{ARCHIVE_PREFIX}{self._path}", parse_digest(digest), home)

    def _listed(self) -> dict[str, str]:
        """The names of the images that `index.json` lists, by the digests of their roots."""
        found: dict[str, str] = {}
        for entry in _objects(self._object("index.json").get("manifests")):
            notes = _dict(entry.get("annotations"))
            found.setdefault(str(entry.get("digest")), str(notes.get(_IMAGE_NAME) or notes.get(REF_NAME) or ""))
        return found

    def saved_image(self, image: str) -> _Saved:
        """The image that `manifest.json` lists (of this name, where one is given)."""
        reference, name = self._saved_entry(image)
        if not reference:
            raise InvalidArgument(f"{self._path}: does not say its image's name: give it with --image REF")
        config = self._object(name)
        diff_ids = _dict(config.get("rootfs")).get("diff_ids")
        return _Saved(
            reference,
            f"sha256:{hashlib.sha256(self.read(name)).hexdigest()}",
            tuple(map(str, diff_ids)) if isinstance(diff_ids, list) else (),
            Platform(*(str(config.get(key) or "") for key in ("os", "architecture", "variant"))),
        )

    def _saved_entry(self, image: str) -> tuple[str, str]:
        """Its reference and the name of its configuration."""
        if "manifest.json" not in self._members:
            if "index.json" in self._members:
                raise self._unclear(self._listed().values())
            raise InvalidArgument(f"{self._path}: neither index.json nor manifest.json in it: not from `docker save`")
        listed = {str(entry.get("Config")): _names(entry) for entry in _objects(self._json("manifest.json"))}
        if len(listed) == 1:  # then --image may be another name, that it was pushed under
            config, names = listed.popitem()
            return image or next(iter(names), ""), config
        fitting = [config for config, names in listed.items() if any(_same_name(name, image) for name in names)]
        if len(fitting) == 1:
            return image, fitting[0]
        raise self._unclear(name for names in listed.values() for name in names)

    def _unclear(self, names: Iterable[str]) -> InvalidArgument:
        there = ", ".join(filter(None, names)) or "none with a name"
        return InvalidArgument(f"{self._path}: which image of it? Say so with --image REF; there is: {there}")

    def read(self, name: str) -> bytes:
        """A small file of the archive."""
        size = self._place(name)[1]
        if size > _DOCUMENT_BYTES:
            raise InvalidArgument(f"{self._path}: {name} has {size} bytes, more than {_DOCUMENT_BYTES}")
        return b"".join(self.stream(name, 0, size))

    def size(self, name: str) -> int:
        """Bytes of a file of the archive."""
        return self._place(name)[1]

    def stream(self, name: str, start: int, end: int | None) -> Generator[bytes]:
        """The bytes `[start, end)` of a file of the archive; Transient when the archive is shorter."""
        offset, size = self._place(name)
        return FileBlob(self._path).stream(offset + start, offset + (size if end is None else end))

    def _place(self, name: str) -> tuple[int, int]:
        try:
            return self._members[name]
        except KeyError as error:
            raise NotFound(f"{self._path}: {name} is not in it") from error

    def _json(self, name: str) -> object:
        try:
            found: object = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{self._path}: {name} is not JSON") from error
        return found

    def _object(self, name: str) -> dict[str, object]:
        return _dict(self._json(name))


class _ArchiveImage:
    """An ImageSource inside an archive."""

    def __init__(self, archive: _Archive, name: str, root: Digest, home: ImageRef | None) -> None:
        self.name = name
        self.home = home
        self._archive = archive
        self._root = root

    def __repr__(self) -> str:
        return f"<ArchiveImage {self.name}>"

    def document(self, digest: Digest | None = None) -> Document:
        """See ImageSource."""
        digest = digest or self._root
        return checked_document(self._archive.read(_blob_name(digest)), digest, f"{self.name}: {digest}")

    def blob(self, digest: Digest) -> BlobSource:
        """See ImageSource."""
        return _ArchiveBlob(self._archive, _blob_name(digest))


class _ArchiveBlob:
    """A BlobSource over a part of an archive."""

    def __init__(self, archive: _Archive, name: str) -> None:
        self._archive = archive
        self._name = name

    def size(self) -> int:
        """Bytes of the blob."""
        return self._archive.size(self._name)

    def stream(self, start: int, end: int | None) -> Generator[bytes]:
        """See BlobSource."""
        return self._archive.stream(self._name, start, end)


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _beside(name: str, target: str) -> str:
    """What a relative link from `name` leads to."""
    parts = name.split("/")[:-1]
    for part in target.split("/"):
        if part == "..":
            del parts[-1:]
        elif part not in (".", ""):
            parts.append(part)
    return "/".join(parts)


def _same_name(one: str, other: str) -> bool:
    try:
        left, right = parse_reference(one), parse_reference(other)
    except InvalidArgument:
        return one == other
    return (left.host, left.repository, left.target) == (right.host, right.repository, right.target)


def _names(entry: dict[str, object]) -> list[str]:
    tags = entry.get("RepoTags")
    return [str(tag) for tag in tags] if isinstance(tags, list) else []


def _dict(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> Iterator[dict[str, object]]:
    yield from (_dict(entry) for entry in (value if isinstance(value, list) else []))
