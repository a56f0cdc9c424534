"""Vocabulary and seams of the daemon.

key = an active snapshot's name, name = a committed one's, parent = the committed snapshot below; chain ID = the name
containerd gives the snapshot of a layer and all below it. layer, block, span, piece: see `blockindex.model`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NewType, Protocol

__all__ = ["BlobSource", "ByteStream", "Digest", "LayerProvider", "LayerRef", "MountedLayer", "RemoteBlob"]

Digest = NewType("Digest", str)
"""`sha256:<64 hex>`; checked where it enters."""


@dataclass(frozen=True, slots=True)
class LayerRef:
    """One layer of one image, as the labels of a Prepare name it.

    `image` is the reference the client pulled (`host[:port]/repository[:tag][@digest]`), `siblings` the image's layers
    from this one upward, this one first (as far as the labels told): they can be fetched while containerd asks for
    the first. `cut` says that there may be more of them. `layers` are all layers of the image, each once, from the
    bottom up; empty where that is not known.
    """

    image: str
    digest: Digest
    siblings: tuple[Digest, ...]
    cut: bool = False
    layers: tuple[Digest, ...] = ()


@dataclass(frozen=True, slots=True)
class MountedLayer:
    """A layer at its mount point `path`, a read-only directory with the layer's files (whiteouts in overlayfs form).

    `implied_dirs` are absolute paths, ascending, of directories in it that no entry of the layer describes: their
    attributes are to be taken from the layers below, where these have such a directory.
    """

    path: Path
    implied_dirs: tuple[bytes, ...] = ()


class LayerProvider(Protocol):
    """Where the containerd service gets its lazy layers from."""

    def ensure(self, ref: LayerRef) -> MountedLayer:
        """Make the layer mounted on this node. Blocks until then; safe to call at once from many threads for one layer.
        Raises SnapshotterError when the layer cannot be served lazily; nothing is left behind then."""

    def release(self, digest: Digest) -> None:
        """No snapshot uses the layer any more: cancel its fetches and unmount it. Its blocks stay in the store."""


class ByteStream(Iterator[bytes], Protocol):
    """Chunks of a blob as they arrive."""

    def close(self) -> None:
        """End the request. Its connection stays warm only if all was read."""


class BlobSource(Protocol):
    """A blob at its registry. Thread-safe; every call may block on the network for at most its stated time-outs."""

    def size(self) -> int:
        """Bytes of the blob."""

    def stream(self, start: int, end: int | None) -> ByteStream:
        """The blob's bytes `[start, end)` (to its end when `end` is None) by one GET, in chunks as they arrive; whole
        or Transient at the point where they stop. Not reading on is back pressure. The caller closes the stream."""


class RemoteBlob(BlobSource, Protocol):
    """A blob that may be had in several ways, of which one may be bad."""

    def refuted(self, reason: str) -> None:
        """What came last was whole and is not the blob's: ask in another way next time, if there is one. Does no
        I/O."""
