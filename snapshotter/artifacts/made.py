"""Artifacts out of files: index files become a layer index, a hot set's file becomes a hot set."""

import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from blockindex.hotpack import HotPack
from snapshotter.artifacts.manifest import HEAD_TYPE, INDEX_TYPE, INLINE_ALL_BYTES, INLINE_BYTES, PACK_TYPE
from snapshotter.artifacts.model import Artifact, Blob, Kind, Subject
from snapshotter.artifacts.place import ImageName
from snapshotter.errors import NotFound
from snapshotter.model import Digest

__all__ = ["hot_artifact", "hot_blobs", "index_artifact", "index_blob", "read_chunks"]

_CHUNK = 1 << 20


def read_chunks(path: Path, end: int | None = None) -> Iterator[bytes]:
    """The file's bytes up to `end`. NotFound where it cannot be read."""
    try:
        with path.open("rb") as file:
            left = path.stat().st_size if end is None else end
            while chunk := file.read(min(_CHUNK, left)):
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from error


def index_blob(layer: Digest, path: Path) -> Blob:
    """The blob of one layer's index file."""
    digest, size = _digest(path)
    data = b"".join(read_chunks(path)) if size <= INLINE_ALL_BYTES else b""
    return Blob(digest, size, INDEX_TYPE, layer, data)


def index_artifact(image: ImageName, blobs: Mapping[Digest, Blob]) -> Artifact:
    """The artifact of an image's indexes, of which there is one for each layer. Of the bytes that blobs bring along the
    manifest gets as many as may be."""
    room, inline = INLINE_ALL_BYTES, set()
    for layer in sorted(image.layers, key=lambda layer: blobs[layer].size):
        room -= blobs[layer].size
        if room >= 0:
            inline.add(layer)
    in_order = tuple(blobs[layer] if layer in inline else replace(blobs[layer], data=b"") for layer in image.layers)
    return Artifact(Kind.LAYER_INDEX, image.key, "", image.subject, in_order, created=int(time.time()))


def hot_blobs(path: Path, pack: HotPack) -> tuple[Blob, ...]:
    """The blobs of a hot set's file: its head, and where there are frames the whole."""
    head_size = pack.frames[0].offset if pack.frames else pack.size
    digest, size = _digest(path, head_size)
    data = b"".join(read_chunks(path, head_size)) if head_size <= INLINE_BYTES else b""
    head = Blob(digest, size, HEAD_TYPE, data=data)
    return (head, Blob(*_digest(path), PACK_TYPE)) if pack.frames else (head,)


def hot_artifact(path: Path, pack: HotPack, subject: Subject | None) -> Artifact:
    """The artifact of a hot set's file, whose head has been read."""
    hotset = pack.hotset
    blobs = hot_blobs(path, pack)
    return Artifact(Kind.HOT_SET, hotset.image_key, hotset.workload, subject, blobs, created=int(time.time()))


def _digest(path: Path, end: int | None = None) -> tuple[Digest, int]:
    hashed, size = hashlib.sha256(), 0
    for chunk in read_chunks(path, end):
        hashed.update(chunk)
        size += len(chunk)
    return Digest(f"sha256:{hashed.hexdigest()}"), size
