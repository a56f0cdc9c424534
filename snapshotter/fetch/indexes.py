"""Where a layer's index comes from: the configured directory, then registries. An IndexSource.

In a registry the indexes of all layers of an image are one artifact. So the layers have to be known: the first Prepare
names them, or the registry does. The artifact is looked for once an image, beside the directory; then each layer has
its own blob. An artifact that is not trusted is not used: an index decides which bytes of the network are right.
"""

from collections.abc import Iterator, Sequence

from blockindex.errors import BlockIndexError
from snapshotter.artifacts.model import Kind
from snapshotter.errors import SnapshotterError
from snapshotter.model import Digest
from snapshotter.registry.indexdir import IndexDirectory

from .arrival import FoundIndex
from .artifacts import OpenBlob, index_bytes
from .images import Images
from .lookup import Judged, Lookup

__all__ = ["Indexes"]


class Indexes:
    """See the module. Thread-safe."""

    def __init__(
        self,
        directory: IndexDirectory | None,
        lookup: Lookup,
        images: Images,
        open_blob: OpenBlob,
        timeout_s: float,
    ) -> None:
        self._directory = directory
        self._lookup = lookup
        self._images = images
        self._open_blob = open_blob
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<Indexes {self._directory!r} {self._lookup!r}>"

    def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
        """See IndexSource."""
        asked = self._ask(image, layers) if layers else None
        if self._directory is not None:
            encoded = self._directory.get(digest)
            if encoded is not None:
                yield FoundIndex(encoded, self._directory.location, self._directory.is_authentic)
        for judged in self._ask(image, ()) if asked is None else asked:
            if judged.verdict.trusted:
                encoded = self._fetch(judged, digest)
                if encoded is not None:
                    yield FoundIndex(encoded, judged.where, bool(judged.verdict.key))

    def _ask(self, image: str, layers: Sequence[Digest]) -> Iterator[Judged]:
        known = self._images.named(image, layers) if layers else self._images.find(image)
        if known is None:
            return iter(())
        return self._lookup.ask(image, known.key, Kind.LAYER_INDEX, "", known.manifest)

    def _fetch(self, judged: Judged, digest: Digest) -> bytes | None:
        try:
            return index_bytes(self._open_blob, judged, digest, self._timeout_s)
        except (SnapshotterError, BlockIndexError) as error:
            self._lookup.refusals.add(judged, f"the index of layer {digest} cannot be used: {error}")
            return None
