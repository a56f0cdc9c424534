"""A blob from its first byte to its last, although the network breaks off: the one rule for whoever reads all of it.

Does not look at the bytes: whoever reads compares digests.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from snapshotter.errors import Transient
from snapshotter.model import BlobSource

__all__ = ["resumed"]

_RETRIES = 6  # without a byte of progress in between: 32 s, if the other side asks for nothing else
_BACKOFF_S = 0.5
_LONGEST_S = 30.0


def resumed(
    blob: BlobSource,
    size: int | None,
    sleep: Callable[[float], None] = time.sleep,
    retrying: Callable[[int, int, Transient], None] | None = None,
) -> Iterator[bytes]:
    """All bytes of a blob of `size` bytes, or of one whose size is not known. A stream that breaks off is asked for
    anew from there, each time later, with jitter, or when the other side asks, but within 30 s; Transient after 6 times
    in vain. `retrying(offset, failures, error)` is told before each pause."""
    offset = failures = 0
    while size is None or offset < size:
        try:
            with closing(blob.stream(offset, size)) as chunks:
                for chunk in chunks:
                    offset += len(chunk)
                    failures = 0
                    yield chunk
            return  # short, if at all, for whoever compares digests
        except Transient as error:
            failures += 1
            if failures > _RETRIES:
                raise
            wait_s = error.retry_after_s or _BACKOFF_S * 2 ** (failures - 1) * random.uniform(0.7, 1.3)
            if retrying is not None:
                retrying(offset, failures, error)
        sleep(min(wait_s, _LONGEST_S))
