"""What the commands that publish share: the name of an image, whose signature it is, progress while blobs are sent."""

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from snapshotter.artifacts.model import Artifact, Blob, Subject
from snapshotter.artifacts.place import ImageName, OpenBlob
from snapshotter.cli.progress import Progress
from snapshotter.imagesource import PlatformImage
from snapshotter.trust.statement import statement

if TYPE_CHECKING:
    from snapshotter.trust.keys import SecretKey

__all__ = ["ADVICE", "Sending", "image_name", "is_signed_by"]

ADVICE = "log in with `docker login`, or publish elsewhere with --to HOST/REPOSITORY or --to DIR"


def image_name(image: PlatformImage) -> ImageName:
    """What the artifacts of this image are found by."""
    it = image.document
    return ImageName(image.image_key, image.layers, Subject(it.digest, it.media_type, len(it.body)))


def is_signed_by(artifact: Artifact, key: "SecretKey") -> bool:
    """Whether the key has signed exactly this."""
    mine = [one for one in artifact.signatures if one.key == key.public.name]
    return any(key.public.verify(statement(artifact), one.value) for one in mine)


class Sending:
    """Shows how much of an artifact's blobs was sent."""

    def __init__(self, artifact: Artifact, label: str) -> None:
        self._label = label
        self._progress = Progress(sum(blob.size for blob in artifact.blobs))
        self._lock = threading.Lock()
        self._done = 0

    def through(self, open_blob: OpenBlob) -> OpenBlob:
        """The same bytes, counted."""

        def counted(blob: Blob) -> Iterator[bytes]:
            for chunk in open_blob(blob):
                yield chunk
                with self._lock:
                    self._done += len(chunk)
                    self._progress.show(self._done, self._label)

        return counted

    def end(self) -> None:
        """Clear the bar."""
        self._progress.end()
