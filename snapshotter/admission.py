"""How many pulls may wait for layers at once, so that a registry that hangs holds up nobody else.

A Prepare that brings a layer in holds a thread of containerd's socket until the layer is there, which is as long as a
registry likes. Each registry has so many places, and all together have fewer than there are threads: what waits for
nothing (removing, listing, layers that are on the node) always finds one. Who gets no place is refused at once, and its
layer goes the ordinary way. Nobody queues for a place: that would hold a thread, too.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import Transient

__all__ = ["Admission"]


class Admission:
    """Thread-safe. `per_registry` and `in_all`: places."""

    def __init__(self, per_registry: int, in_all: int) -> None:
        self._per_registry = per_registry
        self._in_all = in_all
        self._lock = threading.Lock()
        self._waiting: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"<Admission {dict(self._waiting)} of {self._per_registry} a registry, {self._in_all} in all>"

    @contextmanager
    def place(self, image: str) -> Iterator[None]:
        """A place for the length of the block, for a layer of this image. Transient when there is none."""
        registry = image.partition("/")[0]
        with self._lock:
            here, all_ = self._waiting[registry], self._waiting.total()
            if here >= self._per_registry or all_ >= self._in_all:
                raise Transient(f"{here} layers of {registry} are being waited for already, {all_} of all registries")
            self._waiting[registry] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting[registry] -= 1
                if not self._waiting[registry]:
                    del self._waiting[registry]
