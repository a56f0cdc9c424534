"""A lazy pull through containerd's API: what `ctr-remote images rpull` does, with our own registry client.

Index, manifest and configuration go into containerd's content store; the layers do not: for each of them, from the
lowest up, containerd is asked to prepare a snapshot with the labels that name it, which our snapshotter answers by "it
is there already". Labels tie it all together for containerd's garbage collection: image -> index -> manifest ->
configuration -> uppermost snapshot. A lease keeps it until the image record is written, last. Whatever fails leaves no
image record.
"""

import hashlib
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from snapshotter.errors import InvalidArgument, Precondition, Transient
from snapshotter.model import Digest
from snapshotter.registry import Descriptor, Document, ImageRef, Manifest, Platform, Registry, parse_reference

from .chain import chain_ids
from .client import Containerd, Session
from .labels import TARGET_LABEL

__all__ = ["Pull", "Pulled", "image_name", "label_documents", "source_labels"]

_CRI = "containerd.io/snapshot/cri."
_LABEL_BYTES = 4096  # containerd's limit for key and value together
_CONFIG_BYTES = 16 << 20
_GC = "containerd.io/gc.ref."


@dataclass(frozen=True, slots=True)
class Pulled:
    """What has come: the name containerd knows the image by, the manifest's digest, and the layers."""

    image: str
    manifest: Digest
    layers: tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class Pull:
    """How to pull. `progress(done, layers)` is called before each layer and after the last."""

    registry: Registry
    containerd: Containerd
    namespace: str
    snapshotter: str
    progress: Callable[[int, int], None]

    def run(self, ref: str, platform: Platform | None = None) -> Pulled:
        """Pull one image. Raises Precondition when a layer cannot be lazy (why is in the daemon's status), and what
        registry and containerd raise."""
        image = parse_reference(ref)
        name = image_name(image)
        manifest, documents = self.registry.documents(name, platform)
        config = self._config(name, manifest.config)
        chain = chain_ids(config, len(manifest.layers))
        with self.containerd.session(self.namespace) as session:
            top = {f"{_GC}snapshot.{self.snapshotter}": chain[-1]} if chain else {}
            session.put_blob(manifest.config.digest, config, {**source_labels(image), **top})
            label_documents(session, image, manifest, documents)
            self._layers(session, name, manifest, chain)
            target = documents[0]
            session.put_image(name, target.media_type, target.digest, len(target.body))
        return Pulled(name, manifest.digest, tuple(layer.digest for layer in manifest.layers))

    def _config(self, name: str, config: Descriptor) -> bytes:
        if config.size > _CONFIG_BYTES:
            raise InvalidArgument(f"{name}: a configuration of {config.size} bytes is not believed")
        with closing(self.registry.blob(name, config.digest).stream(0, config.size)) as chunks:
            body = b"".join(chunks)
        if f"sha256:{hashlib.sha256(body).hexdigest()}" != config.digest:
            raise Transient(f"{name}: what came as configuration {config.digest} has another digest")
        return body

    def _layers(self, session: Session, name: str, manifest: Manifest, chain: list[str]) -> None:
        parent = ""
        for number, chain_id in enumerate(chain):
            self.progress(number, len(chain))
            if not session.has_snapshot(self.snapshotter, chain_id):
                key = f"extract-{time.time_ns() % 10**9}-{secrets.token_urlsafe(3)} {chain_id}"
                labels = _labels(name, manifest, number, chain_id)
                if not session.prepare(self.snapshotter, key, parent, labels):
                    digest = manifest.layers[number].digest
                    raise Precondition(
                        f"{name}: layer {digest} cannot be lazy: see `bootseer status`, LEFT TO CONTAINERD"
                    )
                if not session.has_snapshot(self.snapshotter, chain_id):
                    raise Precondition(f"{name}: containerd lost the snapshot {chain_id}: try again")
            parent = chain_id
        self.progress(len(chain), len(chain))


def image_name(image: ImageRef) -> str:
    """The reference in full, as containerd's other clients name images."""
    return str(image) if image.tag or image.digest else f"{image}:latest"


def label_documents(session: Session, image: ImageRef, manifest: Manifest, documents: tuple[Document, ...]) -> None:
    """Have manifest and indexes in the content store, each with labels that name what it refers to. The manifest first,
    then the indexes above it: nothing is ever there without what it refers to."""
    labels = {f"{_GC}content.config": str(manifest.config.digest)}
    labels |= {f"{_GC}content.l.{number}": str(layer.digest) for number, layer in enumerate(manifest.layers)}
    for document in reversed(documents):
        session.put_blob(document.digest, document.body, {**source_labels(image), **labels})
        labels = {f"{_GC}content.m.0": str(document.digest)}


def source_labels(image: ImageRef) -> dict[str, str]:
    """What says from which repository a blob came."""
    return {f"containerd.io/distribution.source.{image.host}": image.repository}


def _labels(name: str, manifest: Manifest, number: int, chain_id: str) -> dict[str, str]:
    """What names the layer, in the family that Kubernetes uses; the list of layers is cut at containerd's limit."""
    key = f"{_CRI}image-layers"
    layers = ",".join(layer.digest for layer in manifest.layers[number:])
    if len(key) + len(layers) > _LABEL_BYTES:
        layers = layers[: _LABEL_BYTES - len(key)].rpartition(",")[0]
    return {
        TARGET_LABEL: chain_id,
        f"{_CRI}image-ref": name,
        f"{_CRI}manifest-digest": manifest.digest,
        f"{_CRI}layer-digest": manifest.layers[number].digest,
        key: layers,
    }
