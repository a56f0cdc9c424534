"""Bytes checked against their digest: blobs while they pass through, documents as a whole."""

import hashlib
from collections.abc import Iterable, Iterator

from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest
from snapshotter.registry import Document
from snapshotter.registry.manifest import document_type

__all__ = ["checked_document", "verified"]


def verified(chunks: Iterable[bytes], digest: Digest, size: int, where: str) -> Iterator[bytes]:
    """The same chunks; InvalidArgument in place of the last one when all of them are not what `digest` says, so that
    nobody takes them for whole."""
    hashed, got, last = hashlib.sha256(), 0, b""
    for chunk in chunks:
        hashed.update(chunk)
        got += len(chunk)
        if last:
            yield last
        last = chunk
    if got != size or f"sha256:{hashed.hexdigest()}" != digest:
        raise InvalidArgument(f"{where}: blob {digest} is damaged there: {got} bytes came, of another digest")
    if last:
        yield last


def checked_document(body: bytes, digest: Digest, where: str) -> Document:
    """The manifest or image index that these bytes are; InvalidArgument where they have another digest, or are none."""
    if f"sha256:{hashlib.sha256(body).hexdigest()}" != digest:
        raise InvalidArgument(f"{where}: damaged: it has another digest than its name")
    try:
        return Document(document_type(body), digest, body)
    except (ValueError, RecursionError, AttributeError) as error:
        raise InvalidArgument(f"{where}: neither a manifest nor an image index") from error
