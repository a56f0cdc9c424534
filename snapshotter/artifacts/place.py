"""Where artifacts are kept: the one interface over a repository, an OCI layout, a directory or URL.

`held` says what a place has of an image, `put` brings it there. What has been put is found by the nodes that look
there; putting what is there already changes nothing. A place that keeps plain files (`directory`) has no manifests, and
so no subjects and no signatures: whoever names it trusts it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from snapshotter.artifacts.model import Artifact, Blob, Subject
from snapshotter.model import Digest

__all__ = ["Held", "ImageName", "OpenBlob", "Place", "Placed", "is_same"]

OpenBlob = Callable[[Blob], Iterator[bytes]]
"""The bytes of a blob, from the start, at each call anew."""


@dataclass(frozen=True, slots=True)
class ImageName:
    """What artifacts are found by. `subject` is the platform's manifest where it is known; `layers` each once."""

    key: str
    layers: tuple[Digest, ...]
    subject: Subject | None


@dataclass(frozen=True, slots=True)
class Held:
    """An artifact that a place has. A layer index out of plain files may lack layers."""

    artifact: Artifact
    digest: str
    open: OpenBlob


@dataclass(frozen=True, slots=True)
class Placed:
    """What became of a `put`. `digest`: of the manifest, "" where there is none; `names`: tags, or files."""

    existed: bool
    digest: str
    names: tuple[str, ...]


def is_same(there: Artifact, wanted: Artifact) -> bool:
    """Whether what is there says all that is wanted, whenever it was made. More signatures do no harm."""
    if not set(wanted.signatures) <= set(there.signatures):
        return False
    return replace(there, created=0, signatures=()) == replace(wanted, created=0, signatures=())


class Place(Protocol):
    """Thread-safe. Raises SnapshotterError."""

    @property
    def name(self) -> str:
        """How messages name it."""

    @property
    def signs(self) -> bool:
        """Whether signatures are kept."""

    def prepare(self) -> None:
        """Make sure that something can be kept here, before anybody works for it. Denied where it cannot."""

    def held(self, image: ImageName) -> list[Held]:
        """All that is there of the image."""

    def put(self, artifact: Artifact, open_blob: OpenBlob, *, replace: bool = False) -> Placed:
        """Keep an artifact, in place of what is there of its kind and workload; `open_blob` is asked only for blobs
        that are not there. Displacement where what is there is signed, and this is not; or, unless `replace`, by none
        of the keys that signed that."""
