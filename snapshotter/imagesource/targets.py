"""Where images are copied to: a registry, an OCI layout."""

from collections.abc import Callable, Iterator
from typing import Protocol

from snapshotter.errors import Denied, InvalidArgument, NotFound
from snapshotter.imagesource.layout import Layout
from snapshotter.imagesource.sources import LAYOUT_PREFIX
from snapshotter.model import Digest
from snapshotter.registry import Document, ImageRef
from snapshotter.registry.push import Pusher

__all__ = ["ImageTarget", "LayoutTarget", "RegistryTarget"]


class ImageTarget(Protocol):
    """One image where it shall be. Thread-safe. Raises SnapshotterError."""

    @property
    def name(self) -> str:
        """How messages name it."""

    def has(self, digest: Digest, size: int) -> bool:
        """Whether a blob is there."""

    def mount(self, digest: Digest, home: ImageRef) -> bool:
        """Take a blob over from another repository without its bytes; false where that cannot be done."""

    def write(self, digest: Digest, size: int, open_: Callable[[], Iterator[bytes]]) -> None:
        """Keep a blob; `open_` may be called more than once, when an attempt has failed."""

    def put(self, document: Document, root: bool) -> None:
        """Keep a document all of whose blobs and documents are there; the root gets the image's name."""


class RegistryTarget:
    """An image reference that will lead to the image."""

    def __init__(self, pusher: Pusher, ref: ImageRef) -> None:
        self.name = str(ref)
        self._pusher = pusher
        self._ref = ref

    def has(self, digest: Digest, size: int) -> bool:
        """See ImageTarget."""
        return self._pusher.has_blob(self._ref, digest)

    def mount(self, digest: Digest, home: ImageRef) -> bool:
        """See ImageTarget."""
        if home.host != self._ref.host or home.repository == self._ref.repository:
            return False
        try:
            return self._pusher.mount_blob(self._ref, digest, home.repository)
        except (Denied, InvalidArgument, NotFound):  # a token for one repository only, mostly: then it is uploaded
            return False

    def write(self, digest: Digest, size: int, open_: Callable[[], Iterator[bytes]]) -> None:
        """See ImageTarget."""
        self._pusher.put_blob(self._ref, digest, size, open_)

    def put(self, document: Document, root: bool) -> None:
        """See ImageTarget."""
        target = self._ref.target if root else document.digest
        self._pusher.put_manifest(self._ref, target, document.body, document.media_type)


class LayoutTarget:
    """A tag of an OCI layout; without one the image is listed without a name."""

    def __init__(self, layout: Layout, tag: str) -> None:
        self.name = f"{LAYOUT_PREFIX}{layout.directory}{':' if tag else ''}{tag}"
        self._layout = layout
        self._tag = tag

    def has(self, digest: Digest, size: int) -> bool:
        """See ImageTarget."""
        return self._layout.has(digest, size)

    def mount(self, digest: Digest, home: ImageRef) -> bool:
        """See ImageTarget."""
        return False

    def write(self, digest: Digest, size: int, open_: Callable[[], Iterator[bytes]]) -> None:
        """See ImageTarget."""
        self._layout.write(digest, size, open_())

    def put(self, document: Document, root: bool) -> None:
        """See ImageTarget."""
        self._layout.write(document.digest, len(document.body), [document.body])
        if root:
            entry = {"mediaType": document.media_type, "digest": document.digest, "size": len(document.body)}
            self._layout.tag(entry, [self._tag] if self._tag else [])
