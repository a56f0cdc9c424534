"""Lazy layers in use: asks the provider for them, and gives them back when no snapshot needs them any more.

A layer has users that the store cannot see: Prepares between the provider's answer and the commit of the row, and
Mounts that bring a layer back. Each holds a *pin* meanwhile. The protocol, under one condition variable:
- a pin is taken before the provider is asked and waits while the layer is being released;
- a layer is released only by whoever marks it as releasing, when no pin is held and no row uses it (asked after the
  mark: rows are only added under a pin, so the answer stays true);
- who wants a layer gone altogether marks it in the same way (`kept_out`);
- neither the lock nor a transaction is held while the provider works, which may take as long as a download.
Invariant: a path given out under a pin stays mounted until the pin is gone and no row uses the layer.
"""

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotter.containerd.overlay import check_path
from snapshotter.errors import Precondition, SnapshotterError
from snapshotter.model import Digest, LayerProvider, LayerRef, MountedLayer

__all__ = ["LazyLayers"]

_log = logging.getLogger(__name__)


class LazyLayers:
    """`is_used(digest)` says whether a committed row stands on the layer. Thread-safe."""

    def __init__(self, provider: LayerProvider, is_used: Callable[[Digest], bool]) -> None:
        self._provider = provider
        self._is_used = is_used
        self._changed = threading.Condition()
        self._pins: Counter[Digest] = Counter()
        self._releasing: set[Digest] = set()
        # What the provider answered and was not told to release since, with device and inode of the mounted root, to
        # notice when somebody has unmounted it. Guarded by `_changed`.
        self._mounted: dict[Digest, tuple[MountedLayer, tuple[int, int] | None]] = {}

    @contextmanager
    def mounted(self, ref: LayerRef) -> Iterator[MountedLayer]:
        """The layer, its mount point kept for at least the length of the block. Blocks as long as the provider does.

        Raises what the provider raises. A layer that no row uses at the end of the block is released.
        """
        with self._changed:
            self._changed.wait_for(lambda: ref.digest not in self._releasing)
            self._pins[ref.digest] += 1
        try:
            yield self._layer(ref)
        finally:
            with self._changed:
                self._pins[ref.digest] -= 1
                answered = ref.digest in self._mounted
            if answered:
                self.release_if_unused(ref.digest)

    def release_if_unused(self, digest: Digest) -> None:
        """Give the layer back to the provider unless a row, a pin or another release holds it. Never raises."""
        with self._changed:
            if self._pins[digest] or digest in self._releasing:
                return
            del self._pins[digest]
            self._releasing.add(digest)
        try:
            if not self._is_used(digest):
                with self._changed:
                    self._mounted.pop(digest, None)
                self._provider.release(digest)
                _log.info("layer.released layer=%s", digest)
        except SnapshotterError as error:
            _log.warning("layer.release.failed layer=%s reason=%s", digest, error)
        except Exception:  # border to the provider: its bugs must not fail containerd's garbage collection
            _log.exception("layer.release.failed layer=%s", digest)
        finally:
            with self._changed:
                self._releasing.discard(digest)
                self._changed.notify_all()

    @contextmanager
    def kept_out(self, digest: Digest) -> Iterator[None]:
        """Nobody gets the layer for the length of the block: who asks for it waits. Raises Precondition when a pin or a
        row holds it."""
        with self._changed:
            self._changed.wait_for(lambda: digest not in self._releasing)
            if self._pins[digest]:
                raise Precondition(f"{digest} is in use: a pull or a container is asking for it now")
            del self._pins[digest]
            self._releasing.add(digest)
        try:
            if self._is_used(digest):
                raise Precondition(f"{digest} is in use by an image: remove the image from containerd first")
            with self._changed:
                self._mounted.pop(digest, None)
            yield
        finally:
            with self._changed:
                self._releasing.discard(digest)
                self._changed.notify_all()

    def _layer(self, ref: LayerRef) -> MountedLayer:
        with self._changed:
            known = self._mounted.get(ref.digest)
        if known is not None and known[1] is not None and _identity(known[0].path) == known[1]:
            return known[0]
        layer = self._provider.ensure(ref)
        with self._changed:
            self._mounted[ref.digest] = (layer, _identity(layer.path))
        check_path(layer.path)
        return layer

    def __repr__(self) -> str:
        with self._changed:
            pins = sum(self._pins.values())
            return f"<LazyLayers {len(self._mounted)} mounted, {pins} pins, {len(self._releasing)} being released>"


def _identity(path: Path) -> tuple[int, int] | None:
    """What file system and inode is there now; None when there is nothing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino
