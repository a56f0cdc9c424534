"""A blob that goes on where the network broke off, and is known to be the right one at its end."""

import time
from collections.abc import Callable, Iterator

from snapshotter.imagesource.verified import verified
from snapshotter.model import BlobSource, Digest
from snapshotter.registry.resumed import resumed

__all__ = ["steady"]


def steady(
    blob: BlobSource, digest: Digest, size: int, where: str, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bytes]:
    """All bytes of the blob, `resumed` and `verified`."""
    return verified(resumed(blob, size, sleep), digest, size, where)
