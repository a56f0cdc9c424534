"""The seam to the recorder, as the snapshots see it: a container may get private mounts of its layers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from snapshotter.model import Digest, LayerRef

__all__ = ["NoRecordings", "Recordings"]


class Recordings(Protocol):
    """See `record.recorder.Recorder`. None of these raises for what goes wrong with a recording."""

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """A container is to get a snapshot on these layers, from the lowest up, all mounted: the private mount of each
        where it is to be recorded, else nothing. Whoever gets something calls `release` in the end."""

    def private(self, key: str) -> Mapping[Digest, Path]:
        """The private mounts of the snapshot, mounted again if need be; nothing where it has none."""

    def release(self, key: str) -> None:
        """The snapshot is removed, or not a container's any more."""


class NoRecordings:
    """Nothing is ever recorded."""

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """Nothing."""
        return {}

    def private(self, key: str) -> Mapping[Digest, Path]:
        """Nothing."""
        return {}

    def release(self, key: str) -> None:
        """There is nothing to give up."""
