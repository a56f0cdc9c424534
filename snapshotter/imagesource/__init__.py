"""Images wherever they lie: in a registry, in an OCI layout on disk, in an archive of `docker save`.

One small interface, `ImageSource` (manifests as they came, blobs as streams), and on top of it the one walk through an
image index (`platform_images`). `ImageTarget` is the other way round, for copying. Needs no root, no daemon and no
containerd. Knows nothing of indexes and hot sets.
"""

from snapshotter.imagesource.dockerarchive import open_archive
from snapshotter.imagesource.layout import Layout
from snapshotter.imagesource.model import ImageSource, PlatformImage, Refused
from snapshotter.imagesource.platforms import platform_images
from snapshotter.imagesource.sources import LayoutImage, RegistryImage, parse_layout

__all__ = [
    "ImageSource",
    "Layout",
    "LayoutImage",
    "PlatformImage",
    "Refused",
    "RegistryImage",
    "open_archive",
    "parse_layout",
    "platform_images",
]
