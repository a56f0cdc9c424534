"""An image as an OCI layout: a directory with `oci-layout`, `index.json` and blobs named by their digests.

It knows nothing of what is in the layers. A layout is complete or not there: the index is written last.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from scripts.rig.layers import EPOCH_S, Blob, Tree, write_layer

__all__ = ["Layout", "LayoutWriter", "read_layout"]

TAG = "bench"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


@dataclass(frozen=True, slots=True)
class Layout:
    """A finished layout: `layers` digests from the lowest up, `size` the bytes of the layer blobs together."""

    path: Path
    manifest: str
    layers: tuple[str, ...]
    size: int


class LayoutWriter:
    """Writes a layout into the empty directory `path`, the lowest layer first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._blobs = path / "blobs" / "sha256"
        self._blobs.mkdir(parents=True)
        self._layers: list[Blob] = []

    def add_layer(self, root: Path, before: Tree, after: Tree, started_ns: int) -> Blob:
        """Add the layer between two states of the tree at `root` (see `layers.write_layer`)."""
        return self.add_blob(lambda out: write_layer(root, before, after, started_ns, out))

    def add_blob(self, write: Callable[[BinaryIO], Blob]) -> Blob:
        """Add the layer that `write` writes."""
        partial = self._blobs / "partial"
        with partial.open("wb") as out:
            blob = write(out)
        partial.rename(self._blobs / blob.digest.removeprefix("sha256:"))
        self._layers.append(blob)
        return blob

    def finish(self, architecture: str, command: Sequence[str], created_by: Iterable[str]) -> Layout:
        """Write config, manifest and index; `created_by` has one line for each layer."""
        created = datetime.fromtimestamp(EPOCH_S, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        config = {
            "created": created,
            "architecture": architecture,
            "os": "linux",
            "config": {
                "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
                "Cmd": list(command),
            },
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in self._layers]},
            "history": [{"created": created, "created_by": line} for line in created_by],
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": _MANIFEST,
            "config": self._put(config, _CONFIG),
            "layers": [{"mediaType": _LAYER, "digest": layer.digest, "size": layer.size} for layer in self._layers],
        }
        reference = {
            **self._put(manifest, _MANIFEST),
            "platform": {"architecture": architecture, "os": "linux"},
            "annotations": {"org.opencontainers.image.ref.name": TAG},
        }
        (self._path / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
        (self._path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [reference]}))
        return read_layout(self._path)

    def _put(self, document: Mapping[str, object], media_type: str) -> dict[str, object]:
        data = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
        digest = hashlib.sha256(data).hexdigest()
        (self._blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def read_layout(path: Path) -> Layout:
    """The layout at `path`, which must be complete."""
    index = json.loads((path / "index.json").read_text())
    manifest = index["manifests"][0]["digest"]
    blobs = path / "blobs" / "sha256"
    document = json.loads((blobs / manifest.removeprefix("sha256:")).read_text())
    layers = document["layers"]
    for layer in layers:
        assert os.path.getsize(blobs / layer["digest"].removeprefix("sha256:")) == layer["size"]
    return Layout(path, manifest, tuple(layer["digest"] for layer in layers), sum(layer["size"] for layer in layers))
