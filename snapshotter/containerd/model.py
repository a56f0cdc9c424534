"""Values of the containerd service.

key = an active snapshot's (or view's) name, name = a committed one's, parent = the name of the committed snapshot
below, target = the name containerd wants a layer's snapshot to be committed under (its chain ID). A snapshot is *lazy*
when its files come from a layer that a `LayerProvider` mounted, *ordinary* when they lie in its own directory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from snapshotter.model import LayerRef

__all__ = ["Counters", "Kind", "LazyLayer", "Mount", "Snapshot", "Usage"]


class Kind(IntEnum):
    """What a snapshot is; the numbers are those of containerd's contract, in the database and on the wire."""

    VIEW = 1
    ACTIVE = 2
    COMMITTED = 3


@dataclass(frozen=True, slots=True)
class LazyLayer:
    """The layer behind a lazy snapshot: what to ask the provider for, and where it was mounted when last asked.

    `path` is the last answer, not the truth: after a restart only a new answer of the provider is. `skeleton`: whether
    the snapshot's own directory lies over the layer, see `skeleton.py`.
    """

    ref: LayerRef
    path: Path
    skeleton: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Disk use of a snapshot itself, without its parents. `size` is bytes on disk (blocks, not lengths)."""

    size: int
    inodes: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One row of the snapshot store. `id` is never used twice and names the snapshot's directory.

    `key` holds the key or the name, by `kind`; `parent` is empty for none. `usage` is what was measured at Commit
    (zero before, and for lazy snapshots, whose bytes the block store accounts for). `lazy` is None for ordinary ones.
    Times are nanoseconds since 1970: containerd compares them with its own clock and a microsecond is too coarse.
    """

    id: int
    key: str
    parent: str
    kind: Kind
    created_ns: int
    updated_ns: int
    labels: Mapping[str, str]
    usage: Usage
    lazy: LazyLayer | None


@dataclass(frozen=True, slots=True)
class Mount:
    """A mount that the caller is to make: `type` and `source` and `options` as for mount(8)."""

    type: str
    source: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Counters:
    """What became of the Prepare calls since this process started.

    `lazy`: served by the provider. `reused`: the target existed already. `ordinary`: an image layer that came without
    (readable) image labels. `refused`: the operator wants none of it lazy. `fallback`: the provider could not serve it,
    containerd unpacks. `containers`: all others.
    """

    lazy: int = 0
    reused: int = 0
    ordinary: int = 0
    refused: int = 0
    fallback: int = 0
    containers: int = 0
