"""The seam to the starts of containers, as the snapshots see it: one may get private mounts of its layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from snapshotter.model import Digest, LayerRef

__all__ = ["NoRecordings", "Recordings"]


class Recordings(Protocol):
    """See `workload.starts.Starts`. None of these raises for what goes wrong with a recording."""

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """A container is to get a snapshot on these layers, from the lowest up, all mounted: the private mount of each
        where it is to be recorded, else nothing. Whoever gets something calls `release` in the end."""

    def private(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """The mounts of a container's snapshot are asked for; `refs` as for `begin`, or none where not all layers are
        lazy: the private mount of each layer, mounted again if need be; nothing where the snapshot has none."""

    def release(self, key: str) -> None:
        """The snapshot is removed, or not a container's any more."""


class NoRecordings:
    """Nothing is ever recorded."""

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """Nothing."""
        return {}

    def private(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """Nothing."""
        return {}

    def release(self, key: str) -> None:
        """There is nothing to give up."""
