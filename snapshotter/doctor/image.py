"""One image: whether its registry answers, how fast, and whether its layers can be lazy."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from blockindex.codec import decode_index
from blockindex.errors import BlockIndexError
from snapshotter.errors import Denied, SnapshotterError
from snapshotter.model import Digest
from snapshotter.registry import Descriptor, Registry, RegistryBlob

from .model import Check, fail, ok, warn

__all__ = ["check_image"]

_SLOW_S = 1.0


def check_image(image: str, registry: Registry, find_index: Callable[[Digest], bytes | None] | None) -> list[Check]:
    """The checks; `find_index` looks one layer's index up, None when no directory is configured."""
    started = time.monotonic()
    try:
        manifest = registry.resolve(image)
    except SnapshotterError as error:
        fix = "check the name, the network and proxies; a pull fails in the same way"
        if isinstance(error, Denied):
            fix = "give the registry's credentials, and check that they may pull this repository"
        return [fail("registry", f"{image} cannot be resolved", str(error), fix)]
    took_s = time.monotonic() - started
    checks = [ok("manifest", f"{manifest.digest}, {len(manifest.layers)} layers, resolved in {took_s:.3f} s")]
    if manifest.layers:
        checks.append(_first_byte(registry.blob(image, manifest.layers[0].digest)))
    return checks + _layers(image, manifest.layers, find_index)


def _first_byte(blob: RegistryBlob) -> Check:
    started = time.monotonic()
    try:
        with closing(blob.stream(0, 1)) as chunks:
            next(chunks, b"")
    except SnapshotterError as error:
        return fail(
            "registry", "layers cannot be fetched", str(error), "check that the registry serves blobs to this node"
        )
    took_s = time.monotonic() - started
    what = f"first byte of a layer after {took_s:.3f} s"
    if blob.ranges_ignored:
        why = "the registry, or a proxy before it, ignores byte ranges: each miss fetches its layer from the start"
        return warn("registry", what, why, "use a registry or mirror that serves ranges")
    if took_s > _SLOW_S:
        return warn("registry", what, "every missing block waits as long", "use a mirror near the node")
    return ok("registry", what)


def _layers(
    image: str, layers: Sequence[Descriptor], find_index: Callable[[Digest], bytes | None] | None
) -> list[Check]:
    checks = [_layer(number, layer) for number, layer in enumerate(layers)]
    if find_index is None:
        fix = f"bootseer index build {image} --out DIR, and DIR or its URL as `url` in [index]"
        why = "the first pull of a layer without an index reads all of it"
        return [*checks, warn("index", "no index directory is configured", why, fix)]
    for number, digest in enumerate(layer.digest for layer in layers):
        checks.append(_index(image, f"layer-{number}-index", digest, find_index(digest)))
    return checks


def _layer(number: int, layer: Descriptor) -> Check:
    name, what = f"layer-{number}", f"{layer.digest[:19]} {layer.media_type} {layer.size / 1e6:.1f} MB"
    kind = layer.media_type
    if kind.endswith("zstd"):
        why = "unless it has many frames, the first missing block reads all of it"
        return warn(name, what, why, "compress the image's layers with gzip")
    if kind.endswith(("gzip", ".tar")):
        return ok(name, what)
    return warn(name, what, "not a type of layer that bootseer knows; it is tried all the same", "push it as tar+gzip")


def _index(image: str, name: str, digest: Digest, encoded: bytes | None) -> Check:
    build = f"bootseer index build {image} --out DIR"
    if encoded is None:
        why = "its first pull reads all of it"
        return warn(name, "no index found", why, f"{build}, for `url` in [index]; if it is there, see indexdir.failed")
    try:
        index = decode_index(encoded)
    except BlockIndexError as error:
        return fail(name, "the index is damaged", str(error), f"remove it and run {build}")
    if index.blob_digest != digest:
        return fail(
            name, "the index is another layer's", f"it describes {index.blob_digest}", f"remove it, run {build}"
        )
    return ok(name, f"{len(encoded) / 1e3:.0f} kB, {len(index.spans)} spans")
