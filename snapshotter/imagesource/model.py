"""What an image is read from, and what comes out of it for one platform.

source = where an image lies; document = a manifest or an image index, as it came; the root = the document that the
source's own name leads to.
"""

from dataclasses import dataclass
from typing import Protocol

from blockindex.hotset import image_key
from snapshotter.model import BlobSource, Digest
from snapshotter.registry import Document, ImageRef, Manifest, Platform

__all__ = ["ImageSource", "PlatformImage", "Refused"]


class ImageSource(Protocol):
    """One image where it lies. Thread-safe."""

    @property
    def name(self) -> str:
        """How messages name it."""

    @property
    def home(self) -> ImageRef | None:
        """The repository that it is an image of, where that is known."""

    def document(self, digest: Digest | None = None) -> Document:
        """The root, or the document with this digest; its bytes match its digest. NotFound where it is not there."""

    def blob(self, digest: Digest) -> BlobSource:
        """A blob of the image; whether it exists shows when it is read."""


@dataclass(frozen=True, slots=True)
class PlatformImage:
    """One platform's image: its manifest, parsed and as it came."""

    platform: Platform
    manifest: Manifest
    document: Document

    @property
    def image_key(self) -> str:
        """What indexes and hot sets of it are found by."""
        return image_key(self.layers)

    @property
    def layers(self) -> tuple[Digest, ...]:
        """The layers from the bottom up, each once."""
        return tuple(dict.fromkeys(layer.digest for layer in self.manifest.layers))


@dataclass(frozen=True, slots=True)
class Refused:
    """An image of the source that we can do nothing with, and why. `meant`: it is for Linux, or was asked for, so that
    leaving it out is a failure; false for other systems' images, which are passed over."""

    platform: str
    digest: Digest
    reason: str
    meant: bool
