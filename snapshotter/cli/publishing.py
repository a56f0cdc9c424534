"""What the commands that publish share: the name of an image, whose signature it is, progress while blobs are sent.
The first two are `artifacts.naming`'s."""

import threading
from collections.abc import Iterator

from snapshotter.artifacts.model import Artifact, Blob
from snapshotter.artifacts.naming import image_name, is_signed_by
from snapshotter.artifacts.place import OpenBlob
from snapshotter.cli.progress import Progress

__all__ = ["ADVICE", "Sending", "image_name", "is_signed_by"]

ADVICE = "log in with `docker login`, or publish elsewhere with --to HOST/REPOSITORY or --to DIR"


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
