"""What an artifact is: one manifest of a registry, about one image. See docs/format.md for the manifest.

An artifact belongs to an image by its *image key* (`blockindex.hotset.image_key`), which follows from the layers alone,
and names the platform's manifest as its `subject` where that is known.
"""

from dataclasses import dataclass
from enum import Enum

from snapshotter.model import Digest

__all__ = ["Artifact", "Blob", "Kind", "Signature", "Subject"]


class Kind(Enum):
    """The kinds; the value is the artifact type."""

    LAYER_INDEX = "application/vnd.bootseer.layerindex.v1"
    """One an image: a blob for each layer, the encoded index."""

    HOT_SET = "application/vnd.bootseer.hotset.v1"
    """One a workload: the head of the hot set's file; then, where there are bytes, the whole file, which begins with
    that head."""


@dataclass(frozen=True, slots=True)
class Subject:
    """The manifest that an artifact refers to."""

    digest: Digest
    media_type: str
    size: int


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob of an artifact. `layer`: the layer an index is of, else empty. `data`: the bytes, where the manifest holds
    them too (checked against `digest` when it is decoded), else empty."""

    digest: Digest
    size: int
    media_type: str
    layer: str = ""
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class Signature:
    """`key`: the public key's name; `value`: 64 bytes, an ed25519 signature of `trust.statement`."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Artifact:
    """One artifact. `workload` is empty for a layer index. `created`: seconds since the epoch, 0 where not told."""

    kind: Kind
    image_key: str
    workload: str
    subject: Subject | None
    blobs: tuple[Blob, ...]
    signatures: tuple[Signature, ...] = ()
    created: int = 0
