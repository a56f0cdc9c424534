"""Artifacts in an OCI layout on disk: each an entry of `index.json` for each of its tags, as it would be in a registry.

So an image that is copied there, and from there to a registry, takes its artifacts along, without a network between.
"""

from collections.abc import Iterator
from contextlib import suppress

from snapshotter.artifacts.displacement import refuse_displacing
from snapshotter.artifacts.manifest import CONFIG, MANIFEST_TYPE, config_blob, decode, digest_of, encode, place_tags
from snapshotter.artifacts.model import Artifact, Blob, Kind
from snapshotter.artifacts.place import Held, ImageName, OpenBlob, Placed, is_same
from snapshotter.errors import InvalidArgument, NotFound
from snapshotter.imagesource.layout import Entry, Layout, tag_of
from snapshotter.model import Digest
from snapshotter.registry import parse_digest

__all__ = ["LayoutPlace"]

_TYPES = {kind.value for kind in Kind}


class LayoutPlace:
    """A Place in one layout."""

    def __init__(self, layout: Layout) -> None:
        self.name = f"oci-layout:{layout.directory}"
        self.signs = True
        self._layout = layout

    def __repr__(self) -> str:
        return f"<LayoutPlace {self.name}>"

    def prepare(self) -> None:
        """See Place."""
        config = config_blob(Kind.LAYER_INDEX)
        self._layout.write(config.digest, config.size, [CONFIG])

    def held(self, image: ImageName) -> list[Held]:
        """See Place. Entries that are damaged, or whose blobs are not all there, count as missing."""
        return [
            Held(artifact, digest, self._open)
            for digest, artifact in self._listed().items()
            if _is_of(artifact, image) and all(self._layout.has(it.digest, it.size) for it in artifact.blobs)
        ]

    def put(self, artifact: Artifact, open_blob: OpenBlob, *, replace: bool = False) -> Placed:
        """See Place. The blobs come first, then the manifest, its entries last; then what it supersedes is removed.
        All under the layout's lock: another's removal would not know of blobs that nothing lists yet."""
        tags = place_tags(artifact)
        with self._layout.locked():
            there = self._tagged(artifact, tags)
            if there:
                return Placed(True, there, tags)
            losing = self._at(tags)
            artifact = next((known for known in losing if is_same(known, artifact)), artifact)  # with its signatures
            for known in losing:
                refuse_displacing(artifact, known, self.name, replace=replace)
            body = encode(artifact)
            digest = digest_of(body)
            for blob in artifact.blobs:
                self._layout.write(blob.digest, blob.size, open_blob(blob))
            config = config_blob(artifact.kind)
            self._layout.write(config.digest, config.size, [CONFIG])
            self._layout.write(digest, len(body), [body])
            before = self._listed()
            entry: Entry = {
                "mediaType": MANIFEST_TYPE,
                "artifactType": artifact.kind.value,
                "digest": digest,
                "size": len(body),
            }
            self._layout.tag_locked(entry, tags)
            self._remove_superseded(before)
        return Placed(False, digest, tags)

    def _tagged(self, artifact: Artifact, tags: tuple[str, ...]) -> str:
        """The manifest that all tags lead to already, if it is of an equal artifact; else ""."""
        image = ImageName(artifact.image_key, (), artifact.subject)
        leads = {tag_of(entry): entry.get("digest") for entry in self._layout.entries()}
        for held in self.held(image):
            if is_same(held.artifact, artifact) and all(leads.get(tag) == held.digest for tag in tags):
                return held.digest
        return ""

    def _at(self, tags: tuple[str, ...]) -> list[Artifact]:
        """What would lose one of these tags."""
        leads = {entry.get("digest") for entry in self._layout.entries() if tag_of(entry) in tags}
        return [artifact for digest, artifact in self._listed().items() if digest in leads]

    def _listed(self) -> dict[Digest, Artifact]:
        """All artifacts that are listed, by their manifests; those that are damaged are not."""
        found: dict[Digest, Artifact] = {}
        for entry in self._layout.entries():
            if entry.get("artifactType") in _TYPES:
                with suppress(InvalidArgument, NotFound):
                    digest = parse_digest(str(entry.get("digest")))
                    if digest not in found:
                        found[digest] = decode(self._layout.document(digest).body)
        return found

    def _remove_superseded(self, before: dict[Digest, Artifact]) -> None:
        """Remove the manifests that have lost their last tag, and those of their blobs that no other artifact has."""
        now = self._listed()
        kept = {blob.digest for artifact in now.values() for blob in artifact.blobs}
        for digest in before.keys() - now.keys():
            for blob in before[digest].blobs:
                if blob.digest not in kept:
                    self._layout.remove(blob.digest)
            self._layout.remove(digest)

    def _open(self, blob: Blob) -> Iterator[bytes]:
        return self._layout.blob(blob.digest).stream(0, blob.size)


def _is_of(artifact: Artifact, image: ImageName) -> bool:
    if artifact.image_key != image.key:
        return False
    return artifact.subject is None or image.subject is None or artifact.subject.digest == image.subject.digest
