"""Of an image: what its artifacts are found by; of an artifact: whether a key has signed it."""

from typing import TYPE_CHECKING

from snapshotter.artifacts.model import Artifact, Subject
from snapshotter.artifacts.place import ImageName
from snapshotter.imagesource.model import PlatformImage
from snapshotter.trust.statement import statement

if TYPE_CHECKING:
    from snapshotter.trust.keys import SecretKey

__all__ = ["image_name", "is_signed_by"]


def image_name(image: PlatformImage) -> ImageName:
    """What the artifacts of this image are found by."""
    it = image.document
    return ImageName(image.image_key, image.layers, Subject(it.digest, it.media_type, len(it.body)))


def is_signed_by(artifact: Artifact, key: "SecretKey") -> bool:
    """Whether the key has signed exactly this."""
    mine = [one for one in artifact.signatures if one.key == key.public.name]
    return any(key.public.verify(statement(artifact), one.value) for one in mine)
