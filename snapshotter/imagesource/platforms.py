"""The walk from an image's root to its platform images: the one place that knows what is an image, and for whom.

Everything that is no image is passed over in silence: what describes other entries, artifacts, entries of the platform
"unknown". What is one, but cannot be lazy, comes out as `Refused`.
"""

import json

from snapshotter.errors import InvalidArgument, NotFound
from snapshotter.imagesource.model import ImageSource, PlatformImage, Refused
from snapshotter.model import Digest
from snapshotter.registry import Descriptor, Document, Manifest, Platform
from snapshotter.registry.manifest import choose, parse_manifest

__all__ = ["platform_images"]

_DEPTH = 3
_CONFIG_BYTES = 4 << 20
_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json", "")


def platform_images(source: ImageSource, wanted: Platform | None = None) -> list[PlatformImage | Refused]:
    """The images that `source` leads to, of all platforms or of `wanted` only, each once. NotFound where there is none
    for `wanted`; InvalidArgument where the source leads to no image at all."""
    found: dict[Digest, PlatformImage | Refused] = {}
    _walk(source, source.document(), None, wanted, found, _DEPTH)
    if not found:
        raise InvalidArgument(f"{source.name}: no container image")
    return list(found.values())


def _walk(
    source: ImageSource,
    document: Document,
    named: Platform | None,
    wanted: Platform | None,
    found: dict[Digest, PlatformImage | Refused],
    depth: int,
) -> None:
    """Add what `document` leads to; `named` is the platform that the index above gives it."""
    what = f"{source.name}: {document.digest}"
    try:
        parsed = parse_manifest(document.body, document.digest, what)
    except InvalidArgument as error:  # a foreign layer, most often
        platform = str(named or "")
        found[document.digest] = Refused(platform, document.digest, str(error), wanted is not None or _for_us(named))
        return
    if isinstance(parsed, Manifest):
        image = _image(source, parsed, document, named, wanted, what)
        if image is not None:
            found[document.digest] = image
        return
    if not depth:
        raise InvalidArgument(f"{source.name}: image indexes nested deeper than {_DEPTH}")
    for entry in (choose(parsed, wanted, what),) if wanted else parsed:
        if entry.digest in found or _is_unknown(entry):
            continue
        if entry.platform is not None and not _for_us(entry.platform) and not wanted:
            reason = f"for {entry.platform.os}: only images for Linux can be lazy"
            found[entry.digest] = Refused(str(entry.platform), entry.digest, reason, False)
            continue
        try:
            below = source.document(entry.digest)
        except NotFound as error:  # a layout need not hold all platforms that its image names
            if wanted:
                raise
            found[entry.digest] = Refused(str(entry.platform or ""), entry.digest, str(error), True)
            continue
        _walk(source, below, entry.platform, wanted, found, depth - 1)


def _image(
    source: ImageSource,
    manifest: Manifest,
    document: Document,
    named: Platform | None,
    wanted: Platform | None,
    what: str,
) -> PlatformImage | Refused | None:
    """The image of a manifest; None if it is no container's image."""
    if manifest.config.media_type not in _CONFIGS:
        return None
    platform = named or _platform_of(source, manifest.config, what)
    if wanted is not None and named is None and (wanted.os, wanted.arch) != (platform.os, platform.arch):
        raise NotFound(f"{source.name}: no image for {wanted}; there is {platform}")
    if not _for_us(platform):
        reason = f"for {platform.os}: only images for Linux can be lazy"
        return Refused(str(platform), document.digest, reason, wanted is not None)
    encrypted = next((layer for layer in manifest.layers if layer.media_type.endswith("+encrypted")), None)
    if encrypted is not None:
        reason = f"{what}: layer {encrypted.digest} is encrypted, which is not supported"
        return Refused(str(platform), document.digest, reason, True)
    return PlatformImage(platform, manifest, document)


def _platform_of(source: ImageSource, config: Descriptor, what: str) -> Platform:
    """What the image's configuration says; an image index says it too, but not every image is in one."""
    if config.size > _CONFIG_BYTES:
        raise InvalidArgument(f"{what}: its configuration has {config.size} bytes, more than {_CONFIG_BYTES}")
    try:
        fields = json.loads(b"".join(source.blob(config.digest).stream(0, config.size)))
        return Platform(fields["os"], fields["architecture"], fields.get("variant") or "")
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{what}: configuration {config.digest} does not say its platform") from error


def _for_us(platform: Platform | None) -> bool:
    return platform is None or platform.os in ("", "linux")


def _is_unknown(entry: Descriptor) -> bool:
    return entry.platform is not None and entry.platform.os == "unknown"
