"""What the labels of a Prepare say: which layer of which image, and the name its snapshot is to get.

Every client that pulls lazily names the same facts, each family with its own keys. This is the only place that knows
them; a new family is one more row. Nothing here knows what is done with a layer.
"""

import re
from collections.abc import Mapping

from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest, LayerRef

__all__ = ["TARGET_LABEL", "is_layer_unpack", "layer_ref", "target_name"]

TARGET_LABEL = "containerd.io/snapshot.ref"

# (image reference, layer digest, digests of the layers from this one upward), the first family that is complete wins.
_FAMILIES = (
    # CRI, nerdctl, transfer service, `ctr-remote images rpull --use-containerd-labels`
    (
        "containerd.io/snapshot/cri.image-ref",
        "containerd.io/snapshot/cri.layer-digest",
        "containerd.io/snapshot/cri.image-layers",
    ),
    # `ctr-remote images rpull`
    (
        "containerd.io/snapshot/remote/stargz.reference",
        "containerd.io/snapshot/remote/stargz.digest",
        "containerd.io/snapshot/remote/stargz.layers",
    ),
)

# containerd's unpacker names a layer's key `<namespace>/<number>/extract-<time>-<random> <chain ID>`.
_UNPACK_KEY = re.compile(r"(^|/)extract-[^/]* ")
_LABEL_BYTES = 4096  # containerd's limit for key and value together; clients leave away what would not fit
_ONE_MORE = len(",sha256:") + 64
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = re.compile(r"[^\s/]+/\S+")


def target_name(labels: Mapping[str, str]) -> str:
    """The name the layer's snapshot is to be committed under; empty when the Prepare is not for an image layer."""
    return labels.get(TARGET_LABEL, "")


def is_layer_unpack(key: str, labels: Mapping[str, str]) -> bool:
    """Whether a Prepare is for a layer of an image (and not for a container): older clients set no target label."""
    return bool(target_name(labels)) or _UNPACK_KEY.search(key) is not None


def layer_ref(labels: Mapping[str, str]) -> LayerRef | None:
    """The layer that the labels name, or None when they name none.

    Raises InvalidArgument when they do, but cannot be understood. Siblings that cannot be understood are dropped: the
    list is only a hint, and clients cut it at 4096 bytes.
    """
    for image_key, digest_key, layers_key in _FAMILIES:
        image, digest = labels.get(image_key, ""), labels.get(digest_key, "")
        if not image or not digest:
            continue
        if not _DIGEST.fullmatch(digest):
            raise InvalidArgument(f"label {digest_key}: {digest!r} is not a sha256 digest")
        if not _REFERENCE.fullmatch(image):
            raise InvalidArgument(f"label {image_key}: {image!r} is not a reference with a registry host")
        listed = labels.get(layers_key, "")
        cut = len(layers_key) + len(listed) + _ONE_MORE > _LABEL_BYTES
        return LayerRef(image, Digest(digest), _siblings(Digest(digest), listed), cut)
    return None


def _siblings(own: Digest, listed: str) -> tuple[Digest, ...]:
    """The layer itself, then the layers above it, each once."""
    found = [own]
    for text in listed.split(","):
        digest = Digest(text.strip())
        if _DIGEST.fullmatch(digest) and digest not in found:
            found.append(digest)
    return tuple(found)
