"""Which images' hot blocks are being prefetched, and where hot sets come from."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from blockindex.hotset import HotSet, image_key
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.registry.hotdir import HotDirectory, HotFile

from .host import Host, Lane
from .layer import LayerFetch
from .prefetch import HotFinder, Prefetch, State

__all__ = ["HotSources", "Prefetches"]

_log = logging.getLogger(__name__)

_AGAIN_S = 10.0  # the Prepares of one pull come within that time, and are to have one prefetch
_REMEMBERED = 64

_STATES = {State.LOOKING: "unknown", State.STREAMING: "found", State.OVER: "found", State.NONE: "none"}


class HotSources:
    """What the node has recorded, and the configured directory. A HotFinder."""

    def __init__(self, root: Path, url: str, timeout_s: float) -> None:
        self._store = HotStore(root)
        self._directory = HotDirectory(url, timeout_s) if url else None

    def __repr__(self) -> str:
        return f"<HotSources {self._store!r} {self._directory!r}>"

    def recorded(self, key: str, workload: str) -> HotSet | None:
        """See HotFinder."""
        pack = self._store.load(key, workload)
        return None if pack is None else pack.hotset

    def find(self, key: str, workload: str) -> HotFile | None:
        """See HotFinder."""
        return None if self._directory is None else self._directory.find(key, workload)


class Prefetches:
    """At most one prefetch an image at a time. Thread-safe."""

    def __init__(
        self,
        finder: HotFinder,
        host_of: Callable[[str], Host],
        layer_of: Callable[[Digest], LayerFetch | None],
        layers_of: Callable[[str], Sequence[Digest]],
        streams: int,
    ) -> None:
        """See `Prefetch`; `host_of` gives an image's host, `layers_of` its layers by asking the registry."""
        self._finder = finder
        self._host_of = host_of
        self._layer_of = layer_of
        self._layers_of = layers_of
        self._streams = streams
        self._lock = threading.Lock()
        self._known: dict[str, Prefetch] = {}
        self._resolved: dict[str, tuple[float, Sequence[Digest]]] = {}  # by image: asked when, and what the answer was

    def __repr__(self) -> str:
        return f"<Prefetches {len(self._active())} active, {len(self._known)} known>"

    def begin(self, image: str, layers: Sequence[Digest]) -> str:
        """Prefetch the image with these layers, from the bottom up; without any, those that the registry names. Does
        nothing while it is under way, or just was. Answers "found", "none" or "unknown"."""
        if not layers:
            layers = self._resolve(image)
        if not layers:
            return "unknown"
        key, now = image_key(layers), time.monotonic()
        with self._lock:
            known = self._known.get(key)
            if known is not None and (not known.ended_at or now < known.ended_at + _AGAIN_S):
                return _STATES[known.state]
            prefetch = Prefetch(layers, self._host_of(image), self._finder, self._layer_of, self._streams)
            self._known.pop(key, None)
            self._known[key] = prefetch
            for old in list(self._known)[:-_REMEMBERED]:
                if self._known[old].ended_at:
                    del self._known[old]
        prefetch.start()
        return _STATES[State.LOOKING]

    def flush(self) -> None:
        """A layer has come in: see `Prefetch.flush`."""
        for prefetch in self._active():
            prefetch.flush()

    def tend(self) -> None:
        """To be called now and then: see `Prefetch.tend`."""
        for prefetch in self._active():
            prefetch.tend()

    def status(self) -> list[dict[str, Any]]:
        """What `bootseer status` shows."""
        with self._lock:
            return [prefetch.status() for prefetch in self._known.values()]

    def _active(self) -> list[Prefetch]:
        with self._lock:
            return [prefetch for prefetch in self._known.values() if not prefetch.ended_at]

    def _resolve(self, image: str) -> Sequence[Digest]:
        """The image's layers if its registry has just named them. Else empty, and a thread asks for them: its Prepares
        did not name all (labels are short), and there is one for each layer."""
        now = time.monotonic()
        with self._lock:
            asked_at, layers = self._resolved.get(image, (-math.inf, ()))
            if now < asked_at + _AGAIN_S:
                return layers
            self._resolved.pop(image, None)
            self._resolved[image] = now, ()
            for old in list(self._resolved)[:-_REMEMBERED]:
                del self._resolved[old]

        def ask() -> None:
            try:
                layers = self._layers_of(image)
            except SnapshotterError as error:
                _log.warning("prefetch.no_layers image=%s error=%r", image, str(error))
                return
            with self._lock:
                self._resolved[image] = time.monotonic(), layers
            if layers:
                self.begin(image, layers)

        self._host_of(image).submit(Lane.HOT, ask)
        return ()
