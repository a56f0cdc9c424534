"""One image: whether its registry answers, how fast, whether its layers can be lazy, and what others have published.

Indexes are looked for as the daemon does, and artifacts in all places, so that it is said which are trusted and why
others are not.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Protocol

from blockindex.codec import decode_index
from blockindex.errors import BlockIndexError
from snapshotter.errors import Denied, SnapshotterError
from snapshotter.fetch.arrival import FoundIndex
from snapshotter.fetch.lookup import Judged
from snapshotter.model import Digest
from snapshotter.registry import Descriptor, Manifest, Registry, RegistryBlob

from .model import Check, fail, ok, warn

__all__ = ["check_image"]

_SLOW_S = 1.0


class Elsewhere(Protocol):
    """What a node looks for: see `fetch.sources.Sources`."""

    def index(self, image: str, layers: Sequence[Digest], layer: Digest) -> FoundIndex | None:
        """The index that would be used for the layer."""

    def survey(self, image: str, layers: Sequence[Digest], manifest: Digest) -> list[tuple[str, list[Judged]]]:
        """For each place what it has of the image."""


def check_image(image: str, registry: Registry, elsewhere: Elsewhere) -> list[Check]:
    """The checks."""
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
    checks += [_layer(number, layer) for number, layer in enumerate(manifest.layers)]
    return checks + _published(image, manifest, elsewhere)


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


def _published(image: str, manifest: Manifest, elsewhere: Elsewhere) -> list[Check]:
    layers = list(dict.fromkeys(layer.digest for layer in manifest.layers))
    places = elsewhere.survey(image, layers, manifest.digest)
    checks = [_artifact(place, one) for place, found in places for one in (found or (None,))]
    indexes = [elsewhere.index(image, layers, layer) for layer in layers]
    if not any(indexes) and not any(found for _, found in places):
        fix = f"bootseer index publish {image}"
        why = "the first pull of a layer without an index reads all of it"
        where = ", ".join(place for place, _ in places) or "nowhere: see [index] url and [lookup]"
        return [warn("artifacts", f"nobody has published anything (looked for: {where})", why, fix)]
    found_by_layer = zip(layers, indexes, strict=True)
    checks += [_index(image, f"layer-{number}-index", *row) for number, row in enumerate(found_by_layer)]
    return checks


def _artifact(place: str, judged: Judged | None) -> Check:
    """One artifact that a place has; None: it has none."""
    if judged is None:
        return ok("artifacts", f"{place}: none")
    artifact, verdict = judged.found.artifact, judged.verdict
    kind = artifact.kind.name.lower().replace("_", "-")
    what = f"{place}: {' '.join(filter(None, (kind, artifact.workload, judged.found.digest[:19])))}"
    if verdict.trusted:
        return ok("artifacts", f"{what} {verdict.reason}")
    use = "which blocks are hot is taken from it, its bytes are not" if artifact.workload else "it is not used"
    fix = "have it signed by a trusted key (`bootseer artifact sign`), or put its key where `keys` in [trust] says"
    return warn("artifacts", what, f"it {verdict.reason}; {use}", fix)


def _layer(number: int, layer: Descriptor) -> Check:
    name, what = f"layer-{number}", f"{layer.digest[:19]} {layer.media_type} {layer.size / 1e6:.1f} MB"
    kind = layer.media_type
    if kind.endswith("zstd"):
        why = "unless it has many frames, the first missing block reads all of it"
        return warn(name, what, why, "compress the image's layers with gzip")
    if kind.endswith(("gzip", ".tar")):
        return ok(name, what)
    return warn(name, what, "not a type of layer that bootseer knows; it is tried all the same", "push it as tar+gzip")


def _index(image: str, name: str, digest: Digest, found: FoundIndex | None) -> Check:
    build = f"bootseer index publish {image}"
    if found is None:
        why = "its first pull reads all of it"
        return warn(name, "no index found", why, f"{build}; if it is there, see what was said above")
    try:
        index = decode_index(found.encoded)
    except BlockIndexError as error:
        return fail(name, "the index is damaged", f"{found.where}: {error}", f"remove it and run {build}")
    if index.blob_digest != digest:
        return fail(
            name,
            "the index is another layer's",
            f"{found.where} describes {index.blob_digest}",
            f"remove it, run {build}",
        )
    return ok(name, f"{len(found.encoded) / 1e3:.0f} kB, {len(index.spans)} spans, from {found.where}")
