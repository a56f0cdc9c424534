"""Completing an image that was pulled lazily: its layer blobs come into containerd's content store.

For whoever needs the blobs themselves: push, save, export, commit, another snapshotter. They come from the registry as
they are: what the block store holds are files, out of which no one could make the same compressed bytes again.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass

from snapshotter.errors import InvalidArgument, NotFound, Transient
from snapshotter.model import Digest
from snapshotter.registry import Descriptor, Document, ImageRef, Manifest, Platform, Registry, parse_reference
from snapshotter.registry.manifest import choose, document_type, host_platform, parse_manifest

from .client import Containerd, Content, Session
from .pull import image_name, label_documents, source_labels

__all__ = ["Completed", "Completion"]

_DOCUMENT_BYTES = 4 << 20
_DEPTH = 3
_RETRIES = 6
_BACKOFF_S = 0.3


@dataclass(frozen=True, slots=True)
class Completed:
    """The name containerd knows the image by, its layers, and those of them that had to be fetched, of `size` bytes."""

    image: str
    manifest: Digest
    layers: tuple[Digest, ...]
    fetched: tuple[Digest, ...]
    size: int


@dataclass(frozen=True, slots=True)
class Completion:
    """How to complete. `progress(done, total, layers_left)`: bytes, called for every chunk."""

    registry: Registry
    containerd: Containerd
    namespace: str
    progress: Callable[[int, int, int], None]

    def run(self, ref: str, platform: Platform | None = None) -> Completed:
        """Fetch the layers that the content store lacks. Raises NotFound when containerd has no such image, and what
        registry and containerd raise; then what has come is kept, and the next run goes on from there."""
        image = parse_reference(ref)
        name = image_name(image)
        with self.containerd.session(self.namespace) as session, self.containerd.content(self.namespace) as content:
            manifest, document = self._manifest(session, content, name, platform or host_platform())
            missing = [layer for layer in dict.fromkeys(manifest.layers) if not session.has_blob(layer.digest)]
            self._fetch(session, image, name, missing)
            label_documents(session, image, manifest, (document,))  # so that the garbage collector spares the layers
        return Completed(
            name,
            manifest.digest,
            tuple(layer.digest for layer in manifest.layers),
            tuple(layer.digest for layer in missing),
            sum(layer.size for layer in missing),
        )

    def _manifest(self, session: Session, content: Content, name: str, platform: Platform) -> tuple[Manifest, Document]:
        """The image's manifest for the platform, as containerd has it."""
        try:
            digest = session.image(name)
        except NotFound as error:
            raise NotFound(f"containerd has no image {name} in namespace {self.namespace}: pull it first") from error
        for _ in range(_DEPTH):
            body = content.read(digest, _DOCUMENT_BYTES)
            parsed = parse_manifest(body, digest, name)
            if isinstance(parsed, Manifest):
                return parsed, Document(document_type(body), digest, body)
            digest = choose(parsed, platform, name).digest
        raise InvalidArgument(f"{name}: image indexes nested deeper than {_DEPTH}")

    def _fetch(self, session: Session, image: ImageRef, name: str, missing: list[Descriptor]) -> None:
        total, before = sum(layer.size for layer in missing), 0
        for number, layer in enumerate(missing):

            def at(offset: int, before: int = before, left: int = len(missing) - number) -> None:
                self.progress(before + offset, total, left)

            self._fetch_layer(session, image, name, layer, at)
            before += layer.size

    def _fetch_layer(
        self, session: Session, image: ImageRef, name: str, layer: Descriptor, at: Callable[[int], None]
    ) -> None:
        """One layer, with some more attempts where the network fails; each goes on where the one before stopped."""
        blob = self.registry.blob(name, layer.digest)

        def read(offset: int) -> Iterator[bytes]:
            with closing(blob.stream(offset, layer.size)) as chunks:
                for chunk in chunks:
                    yield chunk
                    offset += len(chunk)
                    at(offset)

        for attempt in range(_RETRIES):
            try:
                session.write_blob(layer.digest, layer.size, source_labels(image), read)
                return
            except Transient as error:
                if attempt + 1 == _RETRIES:
                    raise
                time.sleep(error.retry_after_s or _BACKOFF_S * 2**attempt)
