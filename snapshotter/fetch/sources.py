"""All that the fetch process looks for elsewhere (indexes, hot sets, layers), put together from the configuration."""

from collections.abc import Sequence
from typing import Any

from blockindex.hotset import image_key
from snapshotter.artifacts.finder import Finder
from snapshotter.config import Config
from snapshotter.errors import InvalidArgument, UserError
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.registry import IndexDirectory, Registry
from snapshotter.registry.hotdir import HotDirectory
from snapshotter.registry.reference import parse_repository
from snapshotter.registry.storage import check_location
from snapshotter.trust.policy import Policy
from snapshotter.trust.quarantine import Quarantine

from .arrival import FoundIndex
from .hotsources import HotSources, Registries
from .images import Images
from .indexes import Indexes
from .lookup import Judged, Lookup

__all__ = ["Sources", "check_sources"]


class Sources:
    """See the module."""

    def __init__(self, config: Config, registry: Registry) -> None:
        timeout_s = config.lookup.timeout_s
        self.lookup = Lookup(
            Finder(registry, timeout_s=timeout_s, absent_s=config.lookup.absent_s),
            Policy.of(config.trust, Quarantine(config.root_path)).judge,
            config.lookup,
        )
        self.images = Images(registry.resolve, timeout_s)
        self._indexdir = IndexDirectory(config.index.url, config.index.timeout_s) if config.index.url else None
        self.indexes = Indexes(self._indexdir, self.lookup, self.images, registry.blob, timeout_s)
        self._hotdir = HotDirectory(config.hotset.url, config.hotset.timeout_s) if config.hotset.url else None

        def expect(image: str) -> None:
            if config.lookup.registry:
                registry.expect(image, config.hotset.far_streams)

        registries = Registries(self.lookup, self.images, registry.blob, timeout_s, expect)
        self.hot = HotSources(HotStore(config.root_path), self._hotdir, registries)

    def __repr__(self) -> str:
        return f"<Sources {self.indexes!r} {self.hot!r} {self.images!r}>"

    def index(self, image: str, layers: Sequence[Digest], layer: Digest) -> FoundIndex | None:
        """The index that would be used for the layer, as yet unread."""
        return next(self.indexes.find(image, layers, layer), None)

    def survey(self, image: str, layers: Sequence[Digest], manifest: Digest) -> list[tuple[str, list[Judged]]]:
        """For each place where artifacts of the image are looked for what it has, of all kinds and workloads."""
        return self.lookup.survey(image, image_key(layers), manifest)

    def close(self) -> None:
        """Ask nobody any more. The registry's connections are the caller's."""
        self.lookup.close()
        for directory in (self._indexdir, self._hotdir):
            if directory is not None:
                directory.close()

    def refused(self) -> list[dict[str, Any]]:
        """Artifacts that were found and not used, for `bootseer status`."""
        return self.lookup.refusals.rows()


def check_sources(config: Config) -> None:
    """UserError, in one line, for a directory or repository in the configuration that cannot be asked."""
    options = [
        ("[index] url", check_location, [config.index.url]),
        ("[hotset] url", check_location, [config.hotset.url]),
        ("[lookup] places", parse_repository, config.lookup.places),
    ]
    for option, parse, texts in options:
        for text in texts:
            try:
                parse(text)
            except InvalidArgument as error:
                raise UserError(f"{option}: {error}") from error
