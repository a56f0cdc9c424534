"""What the block store holds and who uses it, and which layers to remove to make room. Reads directories; removes none.

Used by the daemon, which knows its snapshots and mounts, and by the command line when no daemon runs.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blockindex.model import BLOCK

from .blockstore import BlockStore, LayerFiles, node_name
from .errors import NotFound, Precondition, SnapshotterError
from .model import Digest

__all__ = ["CachedLayer", "disk_bytes", "inventory", "pick", "plan", "refuse_if_used"]

_SHORTEST = 6


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """One layer of the store. `state`: complete, partial, or broken (then `digest` is unknown: ""). `disk_bytes` is
    what it takes, `size_bytes` and `present_bytes` are of the data region. `images`: those on the node that stand on
    it, `mount`: where it is mounted, or empty. `last_used_s`: since 1970."""

    digest: str
    name: str
    state: str
    disk_bytes: int
    size_bytes: int
    present_bytes: int
    last_used_s: float
    mount: str
    images: tuple[str, ...]

    @property
    def used(self) -> bool:
        """Whether an image of this node stands on it. A mount alone is no use: it is taken away on removal."""
        return bool(self.images)


def inventory(
    store: BlockStore, users: Mapping[Digest, Iterable[str]], mounted: Mapping[str, str]
) -> list[CachedLayer]:
    """All layers, the one that was used last at the end. `users`: images by layer; `mounted`: mount points by name."""
    images = {node_name(digest): tuple(found) for digest, found in users.items()}
    layers = []
    for name in store.names():
        try:
            layers.append(_look(store.layers / name, mounted.get(name, ""), images.get(name, ())))
        except FileNotFoundError:  # removed between the listing and the look
            continue
    return sorted(layers, key=lambda layer: layer.last_used_s)


def disk_bytes(directory: Path) -> int:
    """What the files below take on disk. What vanishes meanwhile is passed over, a directory that is not there is 0."""
    return sum(_file_bytes(os.path.join(parent, name)) for parent, _, names in os.walk(directory) for name in names)


def _file_bytes(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def pick(layers: Iterable[CachedLayer], text: str) -> CachedLayer:
    """The layer that `text`, the beginning of its digest (with or without `sha256:`), names."""
    wanted = text.removeprefix("sha256:").lower()
    if len(wanted) < _SHORTEST:
        raise NotFound(
            f"{text}: give at least {_SHORTEST} digits of the layer's digest, as `bootseer cache ls` shows it"
        )
    found = [layer for layer in layers if (layer.digest.removeprefix("sha256:") or layer.name).startswith(wanted)]
    if len(found) != 1:
        raise NotFound(f"{text}: {'no layer' if not found else 'more than one layer'} of the store begins like this")
    return found[0]


def plan(layers: Iterable[CachedLayer], max_bytes: int) -> tuple[list[CachedLayer], int]:
    """The unused layers to remove, those unused for longest first, until the store takes at most `max_bytes`; and what
    it takes then."""
    known = sorted(layers, key=lambda layer: layer.last_used_s)
    left = sum(layer.disk_bytes for layer in known)
    chosen = []
    for layer in known:
        if left > max_bytes and not layer.used:
            chosen.append(layer)
            left -= layer.disk_bytes
    return chosen, left


def refuse_if_used(layer: CachedLayer) -> None:
    """Raises Precondition for a layer in use."""
    if layer.used:
        raise Precondition(
            f"{layer.name} is in use by {', '.join(layer.images)}: remove the image from containerd first"
        )


def _look(directory: Path, mount: str, images: tuple[str, ...]) -> CachedLayer:
    files = [entry.stat() for entry in directory.iterdir()]
    marker = directory / "used"
    last_used_s = (marker if marker.exists() else directory).stat().st_mtime
    disk_bytes = sum(status.st_blocks * 512 for status in files)
    try:
        layer = LayerFiles(directory)
    except (SnapshotterError, OSError):
        return CachedLayer("", directory.name, "broken", disk_bytes, 0, 0, last_used_s, mount, images)
    try:
        present, record = layer.blocks_present(), layer.record
    finally:
        layer.close()
    state = "complete" if present == record.blocks else "partial"
    return CachedLayer(
        record.digest, directory.name, state, disk_bytes, record.data_size, present * BLOCK, last_used_s, mount, images
    )
