"""Where hot sets come from: the node's own records, the configured directory, registries. A HotFinder.

All are asked at once. The directory's answer is taken first, then the first trusted pack of a registry. A pack that is
not trusted still says which blocks are hot: extents decide only what is fetched, and from where the layer is. So where
no other is found, it is used as a set without bytes.
"""

from collections.abc import Callable, Iterator

from blockindex.errors import BlockIndexError
from blockindex.hotset import HotSet
from snapshotter.artifacts.model import Kind
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore
from snapshotter.registry.hotdir import HotDirectory
from snapshotter.registry.hotfile import HotFile

from .artifacts import OpenBlob, hot_file
from .images import Images
from .lookup import Judged, Lookup

__all__ = ["HotSources", "Registries"]


class Registries:
    """Hot sets of registries. Thread-safe."""

    def __init__(
        self,
        lookup: Lookup,
        images: Images,
        open_blob: OpenBlob,
        timeout_s: float,
        expect: Callable[[str], None] = lambda image: None,
    ) -> None:
        """`expect(image)` is told that the blobs of a hot set will be asked for next (`Registry.expect`)."""
        self._expect = expect
        self._lookup = lookup
        self._images = images
        self._open_blob = open_blob
        self._timeout_s = timeout_s

    def __repr__(self) -> str:
        return f"<Registries {self._lookup!r}>"

    def ask(self, image: str, key: str, workload: str) -> Iterator[Judged]:
        """Begin to look; see Lookup."""
        self._expect(image)
        return self._lookup.ask(image, key, Kind.HOT_SET, workload, self._images.manifest(image, key))

    def best(self, answers: Iterator[Judged]) -> HotFile | None:
        """The first that is trusted, else the first one, without its bytes."""
        spare = None
        for judged in answers:
            if judged.verdict.trusted or spare is None:
                file = self._file(judged)
                if file is not None and judged.verdict.trusted:
                    return file
                spare = spare or file
        return spare

    def _file(self, judged: Judged) -> HotFile | None:
        try:
            return hot_file(self._open_blob, judged, self._timeout_s)
        except (SnapshotterError, BlockIndexError) as error:
            self._lookup.refusals.add(judged, f"the hot set cannot be used: {error}")
            return None


class HotSources:
    """See the module."""

    def __init__(
        self, store: HotStore, directory: HotDirectory | None = None, registries: Registries | None = None
    ) -> None:
        self._store = store
        self._directory = directory
        self._registries = registries

    def __repr__(self) -> str:
        return f"<HotSources {self._store!r} {self._directory!r} {self._registries!r}>"

    def recorded(self, key: str, workload: str) -> HotSet | None:
        """See HotFinder."""
        pack = self._store.load(key, workload)
        return None if pack is None else pack.hotset

    def find(self, image: str, key: str, workload: str) -> HotFile | None:
        """See HotFinder."""
        answers = self._registries.ask(image, key, workload) if self._registries is not None else iter(())
        file = self._directory.find(key, workload) if self._directory is not None else None
        if file is not None or self._registries is None:
            return file
        return self._registries.best(answers)
