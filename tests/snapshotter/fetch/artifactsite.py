"""A registry with an image and its artifacts, for tests of the look-up: a RangeServer, so that it can hold and refuse.

site = Site(layers); site.publish(site.index()); site.publish(site.hot([(0, 0, 8)])); with site.serve() as server: …

Artifacts lie at the tags that follow from the image key, in the image's repository `app` unless another is named.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import replace

from blockindex.codec import decode_index
from blockindex.hotpack import Codec, HotPack, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, image_key
from blockindex.model import BLOCK
from snapshotter.artifacts.manifest import HEAD_TYPE, INDEX_TYPE, INLINE_BYTES, PACK_TYPE, encode, place_tags
from snapshotter.artifacts.model import Artifact, Blob, Kind
from snapshotter.model import Digest
from snapshotter.trust.keys import SecretKey, sign
from tests.snapshotter.daemon import Layer, encoded_index
from tests.snapshotter.rangeserver import Behaviour, RangeServer

__all__ = ["Site", "blob_of"]


def blob_of(data: bytes, media_type: str, layer: str = "", inline: bool = False) -> Blob:
    digest = Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")
    return Blob(digest, len(data), media_type, layer, data if inline else b"")


class Site:
    """See the module. `files` are what its registry serves, by path."""

    def __init__(self, layers: Sequence[Layer], key: SecretKey | None = None) -> None:
        """What is published is signed by `key`."""
        self.layers = list(layers)
        self.digests = [layer.digest for layer in layers]
        self.key = image_key(self.digests)
        self.indexes = [encoded_index(layer) for layer in layers]
        self.signer = key
        self.files: dict[str, bytes] = {layer.path: layer.blob for layer in layers}

    def index(self) -> Artifact:
        """The image's layer index."""
        rows = zip(self.indexes, self.digests, strict=True)
        blobs = tuple(self._put(blob_of(data, INDEX_TYPE, layer), data) for data, layer in rows)
        return Artifact(Kind.LAYER_INDEX, self.key, "", None, blobs)

    def hot(self, extents: Sequence[tuple[int, int, int]], workload: str = "default") -> tuple[Artifact, HotPack]:
        """A hot set with bytes, of extents (layer, start, end)."""
        decoded = [decode_index(data) for data in self.indexes]
        rows = tuple(HotLayer(it.blob_digest, it.block_count, it.layout()) for it in decoded)
        hotset = HotSet(self.key, "", workload, rows, tuple(HotExtent(*extent, 0) for extent in extents), 1)
        out = io.BytesIO()
        pack = write_pack(hotset, self._bytes, Codec.LZ4, out)
        data = out.getvalue()
        head = data[: pack.head_size]
        blobs = (
            self._put(blob_of(head, HEAD_TYPE, inline=len(head) <= INLINE_BYTES), head),
            self._put(blob_of(data, PACK_TYPE), data),
        )
        return Artifact(Kind.HOT_SET, self.key, workload, None, blobs), pack

    def publish(self, artifact: Artifact, repository: str = "app") -> list[str]:
        """Put it at its tags; returns the paths of these."""
        if self.signer is not None:
            artifact = sign(artifact, self.signer)
        paths = [f"/v2/{repository}/manifests/{tag}" for tag in place_tags(artifact)]
        for path in paths:
            self.files[path] = encode(artifact)
        for blob in artifact.blobs:
            self.files[f"/v2/{repository}/blobs/{blob.digest}"] = self.files[f"/v2/app/blobs/{blob.digest}"]
        return paths

    def headless(self, artifact: Artifact) -> Artifact:
        """The hot set without its head in the manifest."""
        return replace(artifact, blobs=tuple(replace(blob, data=b"") for blob in artifact.blobs))

    def serve(self, behaviour: Behaviour | None = None) -> RangeServer:
        """Its registry."""
        return RangeServer(self.files, behaviour)

    def _put(self, blob: Blob, data: bytes) -> Blob:
        self.files[f"/v2/app/blobs/{blob.digest}"] = data
        return blob

    def _bytes(self, extent: HotExtent) -> bytes:
        layer = self.layers[extent.layer]
        whole = b"".join(data + bytes(-len(data) % BLOCK) for data in layer.contents.values())
        return whole[extent.start * BLOCK : extent.end * BLOCK]
