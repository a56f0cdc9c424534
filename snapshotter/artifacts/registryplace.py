"""Artifacts in a repository of a registry, as a Place: `finder` reads, `publisher` writes."""

from collections.abc import Iterator

from snapshotter.artifacts.finder import Finder
from snapshotter.artifacts.manifest import CONFIG, config_blob
from snapshotter.artifacts.model import Artifact, Blob, Kind
from snapshotter.artifacts.place import Held, ImageName, OpenBlob, Placed
from snapshotter.artifacts.publisher import publish
from snapshotter.imagesource.steady import steady
from snapshotter.registry import ImageRef, Registry
from snapshotter.registry.push import Pusher

__all__ = ["RegistryPlace"]


class RegistryPlace:
    """A Place in the repository of `ref`, whose tag and digest do not matter."""

    def __init__(self, registry: Registry, ref: ImageRef) -> None:
        self._repository = ImageRef(ref.host, ref.repository, None, None)
        self.name = str(self._repository)
        self.signs = True
        self._registry = registry
        self._finder = Finder(registry, strict=True)
        self._pusher = Pusher(registry)

    def __repr__(self) -> str:
        return f"<RegistryPlace {self.name}>"

    def prepare(self) -> None:
        """See Place: by the blob that all artifacts have."""
        config = config_blob(Kind.LAYER_INDEX)
        self._pusher.put_blob(self._repository, config.digest, config.size, lambda: iter([CONFIG]))

    def held(self, image: ImageName) -> list[Held]:
        """See Place."""
        subject = image.subject.digest if image.subject is not None else None
        found = self._finder.list(self._repository, image.key, subject)
        return [Held(one.artifact, one.digest, self._open) for one in found]

    def put(self, artifact: Artifact, open_blob: OpenBlob, *, replace: bool = False) -> Placed:
        """See Place."""
        done = publish(self._pusher, self._repository, artifact, open_blob, replace=replace)
        return Placed(done.existed, done.digest, tuple(done.tags))

    def _open(self, blob: Blob) -> Iterator[bytes]:
        return steady(self._registry.blob(self.name, blob.digest), blob.digest, blob.size, self.name)
