"""Which layer of which image a chain ID stands for, out of containerd's content store.

For clients that name the snapshot they want (`containerd.io/snapshot.ref`, a chain ID) and no image. Before containerd
asks for the first layer it has the image's manifest and configuration: the configuration gives the chain IDs, the
manifest the layers in the same order, and `containerd.io/distribution.source.<host>` on the manifest the repositories
it came from, but without the registry's port. So where a pull that passes through our CRI proxy just now fits, its
reference is taken; else registries are asked for the manifest, and the image is `host[:port]/repository@digest`.

The newest manifest is looked at first: a pull relabels the one it is about. What a manifest says never changes, so it
is read once, and registries are asked once for it; a table that has grown too long is begun anew.
"""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from snapshotter.errors import InvalidArgument, NotFound, Transient
from snapshotter.model import Digest, LayerRef
from snapshotter.registry.manifest import Manifest, parse_manifest
from snapshotter.registry.reference import parse_reference

from .chain import chain_ids
from .client import Blob, Containerd, Content

__all__ = ["ImageFinder", "Source"]

Source = tuple[str, str]
"""A registry's host without the port, and a repository."""

_HAS_CONFIG = "containerd.io/gc.ref.content.config"  # containerd puts it on the manifests of images, and only there
_SOURCE = "containerd.io/distribution.source."
_KEY = re.compile(r"([^/]+)/[0-9]+/")  # how containerd's keys reach a snapshotter: namespace, number, client's key
_BLOB_BYTES = 16 << 20
_LOOK_S = 5.0  # a Prepare waits for this: 5 ms where the image is known, 2 ms more for each manifest not read before
_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class _Image:
    """A manifest's layers and their chain IDs, from the lowest up."""

    chain: tuple[str, ...]
    layers: tuple[Digest, ...]


_NO_IMAGE = _Image((), ())


class ImageFinder:
    """Looks in one containerd. Thread-safe: its tables are only added to or replaced."""

    def __init__(
        self,
        containerd: Containerd,
        locate: Callable[[Sequence[Source], Digest], str],
        under_way: Callable[[], Sequence[str]] = tuple,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`locate(sources, manifest)` gives `host[:port]/repository` of who has the manifest, or raises
        SnapshotterError; `under_way()` the references of pulls that containerd is known to be at."""
        self._containerd = containerd
        self._locate = locate
        self._under_way = under_way
        self._clock = clock
        self._known: dict[Digest, _Image] = {}
        self._places: dict[Digest, str] = {}

    def __repr__(self) -> str:
        return f"<ImageFinder {self._containerd!r}, {len(self._known)} manifests known>"

    def find(self, key: str, target: str) -> LayerRef:
        """The layer whose snapshot in the namespace of `key` is to be called `target`. Raises NotFound with what is
        missing, and what containerd and `locate` raise. Takes at most about 5 s and one call's time-out, and `locate`
        once."""
        namespaced = _KEY.match(key)
        if namespaced is None:
            raise NotFound(f"the key {key!r} names no namespace of containerd")
        found, image = self._search(namespaced[1], target)
        sources = _sources(found.labels)
        if not sources:
            raise NotFound(f"no label of {found.digest} says which registry it is from: was it imported?")
        layers = image.layers[image.chain.index(target) :]
        return LayerRef(self._reference(sources, found.digest), layers[0], tuple(dict.fromkeys(layers)))

    def _search(self, namespace: str, target: str) -> tuple[Blob, _Image]:
        """The newest manifest that has the layer; of those with a source, where there are such."""
        give_up = self._clock() + _LOOK_S
        without: tuple[Blob, _Image] | None = None
        with self._containerd.content(namespace) as content:
            manifests = sorted(content.labelled(_HAS_CONFIG), key=lambda blob: blob.updated_ns, reverse=True)
            for manifest in manifests:
                if self._clock() > give_up:
                    raise Transient(f"{len(manifests)} manifests could not all be read within {_LOOK_S:g} s")
                image = self._image(content, manifest.digest)
                if target in image.chain:
                    if _sources(manifest.labels):
                        return manifest, image
                    without = without or (manifest, image)
        if without is None:
            raise NotFound(f"none of {len(manifests)} manifests there has such a layer")
        return without

    def _reference(self, sources: Sequence[Source], manifest: Digest) -> str:
        for text in self._under_way():
            with suppress(InvalidArgument):
                image = parse_reference(text)
                if (urlsplit(f"//{image.host}").hostname, image.repository) in sources:
                    return str(image)
        place = self._places.get(manifest)
        if place is None:
            place = self._locate(sources, manifest)
            if len(self._places) >= _KNOWN:
                self._places = {}
            self._places[manifest] = place
        return f"{place}@{manifest}"

    def _image(self, content: Content, digest: Digest) -> _Image:
        image = self._known.get(digest)
        if image is None:
            try:
                image = _read(content, digest)
            except NotFound:  # its configuration is still on its way, or it has just been removed
                return _NO_IMAGE
            if len(self._known) >= _KNOWN:
                self._known = {}
            self._known[digest] = image
        return image


def _read(content: Content, digest: Digest) -> _Image:
    """What a manifest says; nothing when it is no image's, or not of one that we can serve."""
    try:
        manifest = parse_manifest(content.read(digest, _BLOB_BYTES), digest, str(digest))
        if not isinstance(manifest, Manifest):
            return _NO_IMAGE
        config = content.read(manifest.config.digest, _BLOB_BYTES)
        layers = tuple(layer.digest for layer in manifest.layers)
        return _Image(tuple(chain_ids(config, len(layers))), layers)
    except InvalidArgument:
        return _NO_IMAGE


def _sources(labels: Mapping[str, str]) -> list[Source]:
    """Where the labels of a blob say that it is from."""
    named = {label.removeprefix(_SOURCE): text for label, text in labels.items() if label.startswith(_SOURCE)}
    return [(host, repository) for host, text in sorted(named.items()) for repository in text.split(",") if repository]
