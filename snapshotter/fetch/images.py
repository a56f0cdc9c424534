"""Which layers an image has, where a Prepare does not name them all: labels are short. Its registry is asked, once.

The manifest's digest is learnt with them: what was published without the image key's tag is found by it. That is worth
no request of its own.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from blockindex.hotset import image_key
from snapshotter.artifacts.answers import Answers
from snapshotter.errors import SnapshotterError
from snapshotter.model import Digest
from snapshotter.registry.manifest import Manifest
from snapshotter.registry.reference import parse_reference

__all__ = ["Image", "Images"]

_log = logging.getLogger(__name__)

_KEPT_S = 10.0  # the Prepares of one pull come within that time
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class Image:
    """An image all of whose layers are known. `manifest`: the digest of its platform's manifest, None if unknown."""

    reference: str
    layers: tuple[Digest, ...]
    manifest: Digest | None = None

    @property
    def key(self) -> str:
        """See `blockindex.hotset.image_key`."""
        return image_key(self.layers)


class Images:
    """Thread-safe."""

    def __init__(self, resolve: Callable[[str], Manifest], timeout_s: float) -> None:
        """`resolve(reference)` asks the registry for the manifest of this node's platform."""
        self._resolve = resolve
        self._answers: Answers[Image] = Answers(timeout_s, _KEPT_S)
        self._lock = Lock()
        self._manifests: dict[tuple[str, str], Digest] = {}  # by reference and image key; the oldest first

    def __repr__(self) -> str:
        return f"<Images {len(self._manifests)} resolved>"

    def named(self, reference: str, layers: Sequence[Digest]) -> Image:
        """The image with these layers, which somebody knows."""
        image = Image(reference, tuple(layers))
        return Image(reference, image.layers, self.manifest(reference, image.key))

    def manifest(self, reference: str, key: str) -> Digest | None:
        """The digest of the image's manifest, if its registry has named it."""
        return self._manifests.get((reference, key))

    def find(self, reference: str) -> Image | None:
        """The image as its registry has it now, or had it just now. None when it does not say in time."""
        try:
            host = parse_reference(reference).api_host
        except SnapshotterError:
            return None
        return self._answers.ask(host, (reference,), lambda: self._asked(reference))

    def layers(self, reference: str) -> Sequence[Digest]:
        """The layers of what `find` gives; none where it gives nothing."""
        image = self.find(reference)
        return image.layers if image is not None else ()

    def _asked(self, reference: str) -> Image | None:
        try:
            manifest = self._resolve(reference)
        except SnapshotterError as error:
            _log.warning("image.unknown_layers image=%s error=%r", reference, str(error))
            return None
        image = Image(reference, tuple(layer.digest for layer in manifest.layers), manifest.digest)
        if not image.layers:
            return None
        with self._lock:
            self._manifests[reference, image.key] = manifest.digest
            for old in list(self._manifests)[:-_REMEMBERED]:
                del self._manifests[old]
        return image
