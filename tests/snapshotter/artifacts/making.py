"""Artifacts for tests: small, valid, told apart by a seed."""

from collections.abc import Callable, Iterator
from hashlib import sha256

from snapshotter.artifacts.manifest import HEAD_TYPE, INDEX_TYPE, INLINE_BYTES, PACK_TYPE, digest_of
from snapshotter.artifacts.model import Artifact, Blob, Kind, Subject
from snapshotter.model import Digest

MANIFEST = "application/vnd.oci.image.manifest.v1+json"


def digest(seed: str) -> Digest:
    return Digest(f"sha256:{sha256(seed.encode()).hexdigest()}")


KEY = digest("an image's layers")
SUBJECT = Subject(digest("an image's manifest"), "application/vnd.docker.distribution.manifest.v2+json", 1234)


def layer_index(
    seed: str = "a", key: str = KEY, subject: Subject | None = SUBJECT, layers: int = 2, created: int = 0
) -> tuple[Artifact, dict[str, bytes]]:
    """A layer index artifact, and its blobs by digest."""
    made = [f"index {number} of {seed}".encode() * 50 for number in range(layers)]
    blobs = tuple(
        Blob(digest_of(data), len(data), INDEX_TYPE, digest(f"layer {number}")) for number, data in enumerate(made)
    )
    return Artifact(Kind.LAYER_INDEX, key, "", subject, blobs, (), created), {digest_of(data): data for data in made}


def hot_set(
    workload: str = "default",
    seed: str = "a",
    key: str = KEY,
    subject: Subject | None = SUBJECT,
    head_bytes: int = 300,
    created: int = 0,
) -> tuple[Artifact, dict[str, bytes]]:
    """A hot set with bytes, and its blobs by digest."""
    head = (f"head of {workload} {seed} ".encode() * head_bytes)[:head_bytes]
    pack = head + b"frames" * 2000
    inline = head if len(head) <= INLINE_BYTES else b""
    blobs = (
        Blob(digest_of(head), len(head), HEAD_TYPE, data=inline),
        Blob(digest_of(pack), len(pack), PACK_TYPE),
    )
    artifact = Artifact(Kind.HOT_SET, key, workload, subject, blobs, (), created)
    return artifact, {digest_of(data): data for data in (head, pack)}


def opener(blobs: dict[str, bytes]) -> Callable[[Blob], Iterator[bytes]]:
    """What `publish` takes its bytes from."""
    return lambda blob: iter((blobs[blob.digest],))
