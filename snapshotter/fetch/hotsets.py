"""Which images' hot blocks are being prefetched.

At its pull an image's `default` is prefetched: nobody knows yet what will run. When a container is created its workload
is known, and has a prefetch of its own (`promote`): while that one streams, that of `default` stands back. Where what
`default` brings has all of the workload's blocks, these are brought first, and nothing is fetched twice.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from blockindex.hotset import DEFAULT_WORKLOAD, HotSet, image_key
from snapshotter.model import Digest
from snapshotter.registry.hotfile import HotFile

from .host import Host, Lane
from .layer import LayerFetch
from .prefetch import HotFinder, Prefetch, State

__all__ = ["Prefetches"]

_log = logging.getLogger(__name__)

_AGAIN_S = 10.0  # the Prepares of one pull come within that time, and are to have one prefetch
_REMEMBERED = 64

_STATES = {State.LOOKING: "unknown", State.STREAMING: "found", State.OVER: "found", State.NONE: "none"}


class _OnlyHere:
    """A HotFinder that asks nobody else."""

    def __init__(self, finder: HotFinder) -> None:
        self.recorded = finder.recorded

    def find(self, image: str, key: str, workload: str) -> HotFile | None:
        """See HotFinder."""
        return None


class Prefetches:
    """At most one prefetch of an image and a workload at a time. Thread-safe; `_turns` is held while it is decided who
    stands back, and may be held when `_lock` is taken."""

    def __init__(
        self,
        finder: HotFinder,
        host_of: Callable[[str], Host],
        layer_of: Callable[[Digest], LayerFetch | None],
        layers_of: Callable[[str], Sequence[Digest]],
        streams: int,
        far_streams: int = 0,
    ) -> None:
        """See `Prefetch`; `host_of` gives an image's host, `layers_of` its layers by asking the registry, none
        where it does not say."""
        self._finder = finder
        self._host_of = host_of
        self._layer_of = layer_of
        self._layers_of = layers_of
        self._streams = streams
        self._far_streams = far_streams
        self._lock = threading.Lock()
        self._turns = threading.RLock()  # one that goes on may end at once, and its end is a turn again
        self._known: dict[tuple[str, str], Prefetch] = {}
        self._resolved: dict[str, tuple[float, Sequence[Digest]]] = {}  # by image: asked when, and what the answer was

    def __repr__(self) -> str:
        return f"<Prefetches {len(self._active())} active, {len(self._known)} known>"

    def begin(self, image: str, layers: Sequence[Digest]) -> str:
        """Prefetch the image with these layers, from the bottom up; without any, those that the registry names. Does
        nothing while it is under way, or just was. Answers "found", "none" (also for a set that was carried over from
        another image) or "unknown"."""
        if not layers:
            layers = self._resolve(image)
        return self.promote(image, layers, DEFAULT_WORKLOAD) if layers else "unknown"

    def promote(self, image: str, layers: Sequence[Digest], workload: str, finder: HotFinder | None = None) -> str:
        """Prefetch the image's hot set of this workload, ahead of what `default` still has to bring. Does nothing while
        it is under way, or just was. Answers as `begin` does. `finder` takes the place of the usual one."""
        key, now = image_key(layers), time.monotonic()
        with self._lock:
            known = self._known.get((key, workload))
            if known is not None and (not known.ended_at or now < known.ended_at + _AGAIN_S):
                return "none" if known.is_carried else _STATES[known.state]
            host = self._host_of(image)
            finder = finder or self._finder
            turns, covered = self._take_turns, partial(self._brought_by_default, key)
            prefetch = Prefetch(
                image,
                layers,
                host,
                finder,
                self._layer_of,
                self._streams,
                workload,
                turns,
                covered,
                self._far_streams,
            )
            self._known.pop((key, workload), None)
            self._known[(key, workload)] = prefetch
            for old in list(self._known)[:-_REMEMBERED]:
                if self._known[old].ended_at:
                    del self._known[old]
        prefetch.start()
        self._take_turns(key)
        return _STATES[State.LOOKING]

    def _brought_by_default(self, key: str, hotset: HotSet) -> bool:
        """Whether `default` brings this set of the image too, as where the image has one workload only."""
        with self._lock:
            default = self._known.get((key, DEFAULT_WORKLOAD))
        return default is not None and hotset.workload != DEFAULT_WORKLOAD and default.brings(hotset)

    def _take_turns(self, key: str) -> None:
        """A prefetch of the image has found its set, has ended or is new: `default` stands back for the others."""
        with self._turns:
            its = [prefetch for prefetch in self._active() if prefetch.key == key]
            first = any(it.workload != DEFAULT_WORKLOAD and it.state is State.STREAMING for it in its)
            for prefetch in its:
                if prefetch.workload == DEFAULT_WORKLOAD:
                    prefetch.stand_back(first)

    def lacks(self, layers: Sequence[Digest]) -> bool:
        """Whether the search for the hot set of the image with these layers has ended without one."""
        with self._lock:
            known = self._known.get((image_key(layers), DEFAULT_WORKLOAD))
        return known is not None and known.state is State.NONE

    def begin_anew(self, image: str, layers: Sequence[Digest]) -> None:
        """Look again for the hot sets that the image lacked just now, but only here: some have been carried over to it.
        So no reader waits for an answer from elsewhere a second time."""
        with self._lock:
            its = [it for it, known in self._known.items() if it[0] == image_key(layers) and known.state is State.NONE]
            for it in its:
                del self._known[it]
        for _, workload in its:
            self.promote(image, layers, workload, _OnlyHere(self._finder))

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
            layers = self._layers_of(image)
            with self._lock:
                self._resolved[image] = time.monotonic(), layers
            if layers:
                self.begin(image, layers)

        self._host_of(image).submit(Lane.HOT, ask)
        return ()
