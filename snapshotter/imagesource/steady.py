"""A blob as one stream that goes on where the network broke off."""

import time
from collections.abc import Callable, Iterator

from snapshotter.errors import Transient
from snapshotter.imagesource.verified import verified
from snapshotter.model import BlobSource, Digest

__all__ = ["steady"]

_TRIES = 5  # without a byte of progress in between
_BACKOFF_S = 0.5


def steady(
    blob: BlobSource, digest: Digest, size: int, where: str, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bytes]:
    """All bytes of the blob, `verified`. A stream that breaks off is asked for anew from there, a few times, later each
    time, as late as the other side asks; Transient after that."""
    return verified(_whole(blob, size, sleep), digest, size, where)


def _whole(blob: BlobSource, size: int, sleep: Callable[[float], None]) -> Iterator[bytes]:
    offset = tries = 0
    while offset < size:
        stream = blob.stream(offset, size)
        try:
            for chunk in stream:
                offset += len(chunk)
                tries = 0
                yield chunk
            return  # short, if at all, for whoever compares digests
        except Transient as error:
            tries += 1
            if tries == _TRIES:
                raise
            wait_s = error.retry_after_s or _BACKOFF_S * 2 ** (tries - 1)
        finally:
            stream.close()
        sleep(wait_s)
