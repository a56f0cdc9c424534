"""Images in registries and in OCI layouts, as `ImageSource` has them; `dockerarchive` has the third kind."""

from pathlib import Path

from snapshotter.errors import InvalidArgument, NotFound
from snapshotter.imagesource.layout import Layout, notes_of, tag_of
from snapshotter.model import BlobSource, Digest
from snapshotter.registry import Document, ImageRef, Registry, parse_digest

__all__ = ["LAYOUT_PREFIX", "LayoutImage", "RegistryImage", "parse_layout"]

LAYOUT_PREFIX = "oci-layout:"
_IMAGE_TYPES = ("application/vnd.oci.image.config.", "application/vnd.docker.container.image.")


class RegistryImage:
    """An image reference. Each document is asked for once."""

    def __init__(self, registry: Registry, ref: ImageRef) -> None:
        self.name = str(ref)
        self.home: ImageRef | None = ref
        self._registry = registry
        self._ref = ref
        self._root: Document | None = None

    def __repr__(self) -> str:
        return f"<RegistryImage {self.name}>"

    def document(self, digest: Digest | None = None) -> Document:
        """See ImageSource."""
        if digest is not None and (self._root is None or digest != self._root.digest):
            return self._registry.document(self.name, digest)
        if self._root is None:
            self._root = self._registry.document(self.name)
        return self._root

    def blob(self, digest: Digest) -> BlobSource:
        """See ImageSource."""
        return self._registry.blob(self.name, digest)


class LayoutImage:
    """An image in an OCI layout: the one with this tag, or its only one."""

    def __init__(self, layout: Layout, tag: str = "") -> None:
        self.layout = layout
        self.name = f"{LAYOUT_PREFIX}{layout.directory}{':' if tag else ''}{tag}"
        self.home: ImageRef | None = None
        self._tag = tag

    def __repr__(self) -> str:
        return f"<LayoutImage {self.name}>"

    def document(self, digest: Digest | None = None) -> Document:
        """See ImageSource."""
        return self.layout.document(digest if digest is not None else self._root())

    def blob(self, digest: Digest) -> BlobSource:
        """See ImageSource."""
        return self.layout.blob(digest)

    def _root(self) -> Digest:
        images = [entry for entry in self.layout.entries() if _may_be_image(entry)]
        chosen = [entry for entry in images if not self._tag or tag_of(entry) == self._tag]
        digests = {str(entry.get("digest")) for entry in chosen}
        if len(digests) == 1:
            return parse_digest(digests.pop())
        tags = ", ".join(sorted(filter(None, map(tag_of, images)))) or "none with a tag"
        if self._tag:
            raise NotFound(f"{self.layout.directory}: no image with the tag {self._tag!r}; there is: {tags}")
        if not images:
            raise NotFound(f"{self.layout.directory}: holds no image")
        raise InvalidArgument(
            f"{self.layout.directory}: holds {len(digests)} images: say which one, as in "
            f"{LAYOUT_PREFIX}{self.layout.directory}:TAG; there is: {tags}"
        )


def parse_layout(text: str) -> tuple[Path, str]:
    """Directory and tag of `oci-layout:DIR[:TAG]`; a directory whose name has a colon counts if it exists."""
    rest = text.removeprefix(LAYOUT_PREFIX)
    directory, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag or Path(rest).is_dir():
        directory, tag = rest, ""
    if not directory:
        raise InvalidArgument(f"{text!r}: no directory: write {LAYOUT_PREFIX}DIR or {LAYOUT_PREFIX}DIR:TAG")
    return Path(directory), tag


def _may_be_image(entry: object) -> bool:
    """Artifacts are listed beside images, and say what they are."""
    if not isinstance(entry, dict):
        return False
    kind = str(entry.get("artifactType", ""))
    attestation = notes_of(entry).get("vnd.docker.reference.type") == "attestation-manifest"
    return not attestation and (not kind or kind.startswith(_IMAGE_TYPES))
