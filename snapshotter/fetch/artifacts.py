"""Artifacts of a registry as what the engine works with: a layer's index, a hot set's file.

An index comes whole, and has to have the digest that its artifact names (which is what was signed). A hot set's head is
in the manifest, or is one more request; of its pack nothing is asked for here. The pack's digest is never checked as a
whole: the head, which is checked, has the digests of the frames. What cannot be used raises SnapshotterError or
BlockIndexError.
"""

import hashlib
import time
from collections.abc import Callable
from contextlib import closing

from blockindex.hotpack import MAX_HEAD, PROLOGUE_SIZE, HeadReader
from snapshotter.artifacts.model import Blob
from snapshotter.errors import InvalidArgument, Transient
from snapshotter.model import BlobSource, Digest
from snapshotter.registry.blob import RegistryBlob
from snapshotter.registry.distance import is_far
from snapshotter.registry.hotfile import HotFile, HotStream
from snapshotter.registry.indexdir import MAX_INDEX_BYTES

from .blobparts import fetch_parts, parts_of
from .lookup import Judged

__all__ = ["OpenBlob", "hot_file", "index_bytes"]

OpenBlob = Callable[[str, Digest], BlobSource]
"""A blob in the repository of a reference."""

_MIN_BYTES_PER_S = 1_000_000  # as for the directory of indexes: what comes at least this fast is waited for


def index_bytes(
    open_blob: OpenBlob,
    judged: Judged,
    layer: Digest,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> bytes | None:
    """The encoded index of the layer out of a layer index artifact; None where it has none of this layer. Takes at most
    `timeout_s` and a second for each MB that came, and as long as the registry may stall."""
    blobs = judged.found.artifact.blobs
    for blob in blobs:
        if blob.layer == layer:
            together = sum(other.size for other in blobs)
            return _whole(open_blob, judged, blob, MAX_INDEX_BYTES, timeout_s, clock, together)
    return None


def hot_file(
    open_blob: OpenBlob, judged: Judged, timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> HotFile:
    """The hot set of an artifact; without its bytes if the artifact is not trusted."""
    artifact = judged.found.artifact
    data = _whole(open_blob, judged, artifact.blobs[0], MAX_HEAD + PROLOGUE_SIZE, timeout_s, clock)
    reader = HeadReader()
    head = reader.feed(data)
    if head is None or reader.rest:
        raise InvalidArgument("the head has another length than it says")
    if (head.hotset.image_key, head.hotset.workload) != (artifact.image_key, artifact.workload):
        raise InvalidArgument("the head speaks of another image or workload")
    verdict = judged.verdict
    doubt = "" if verdict.trusted else verdict.reason
    if len(artifact.blobs) == 1:
        doubt = doubt or ("its frames are missing" if head.frames else "")
        return HotFile(judged.where, head.size, None, head=head, doubt=doubt, signed_by=verdict.key)
    pack = artifact.blobs[1]
    if pack.size != head.size:
        raise InvalidArgument(f"the pack has {pack.size} bytes, its head speaks of {head.size}")
    source = open_blob(str(judged.found.repository), pack.digest)

    def ask(start: int, end: int) -> HotStream:
        if isinstance(source, RegistryBlob) and source.ranges_ignored:  # each part would be the whole again
            raise InvalidArgument(f"{judged.where}: the registry, or a proxy before it, ignores byte ranges")
        stream = source.stream(start, end)
        return HotStream(start, end, stream, stream.close)

    def round_trip() -> float:
        return source.round_trip_s() if isinstance(source, RegistryBlob) else 0.0

    return HotFile(judged.where, head.size, None, ask, verdict.key, head, doubt, round_trip)


def _whole(
    open_blob: OpenBlob,
    judged: Judged,
    blob: Blob,
    most: int,
    timeout_s: float,
    clock: Callable[[], float],
    together: int = 0,
) -> bytes:
    """The blob's bytes; its digest is checked. `together`: bytes of all blobs that are asked for at the same time."""
    if blob.data:  # it came with the manifest, and was checked with that
        return blob.data
    if blob.size > most:
        raise InvalidArgument(f"blob {blob.digest} has {blob.size} bytes, more than {most}")
    deadline = clock() + timeout_s
    source = open_blob(str(judged.found.repository), blob.digest)

    def came(size: int) -> None:
        if clock() > deadline + size / _MIN_BYTES_PER_S:
            raise Transient(f"blob {blob.digest}: only {size} bytes within {timeout_s} s")

    data: bytes | None = None
    if isinstance(source, RegistryBlob) and is_far(source.round_trip_s()):
        parts = parts_of(blob.size, together)
        data = fetch_parts(source, blob.size, parts, came) if parts > 1 else None
    if data is None:
        data = _in_one(source, blob.size, came)
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != blob.digest:
        raise InvalidArgument(f"blob {blob.digest}: what came is something else ({len(data)} bytes)")
    return data


def _in_one(source: BlobSource, size: int, came: Callable[[int], None]) -> bytes:
    """The blob's bytes by one request, and little more than `size` of them."""
    data = bytearray()
    with closing(source.stream(0, None)) as chunks:
        for chunk in chunks:
            data += chunk
            if len(data) > size:
                break
            came(len(data))
    return bytes(data)
