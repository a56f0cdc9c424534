"""A small real image on disk as an OCI layout, and layers in the ways that tests need them."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["gzip_layer", "write_layout"]


def gzip_layer(files: Mapping[str, bytes]) -> bytes:
    """A tar+gzip layer of regular files; the same input gives the same bytes."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime, info.mode = len(data), 1_700_000_000, 0o644
            tar.addfile(info, io.BytesIO(data))
    return gzip.compress(raw.getvalue(), mtime=0)


def write_layout(directory: Path, layers: Sequence[bytes], arch: str = "amd64") -> list[str]:
    """Write an OCI layout with one image of these layers; returns the layers' digests."""
    blobs = directory / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(media_type: str, data: bytes) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": f"sha256:{digest}", "size": len(data)}

    entries = [put("layer.v1.tar+gzip", layer) for layer in layers]
    diff_ids = [
        f"sha256:{hashlib.sha256(gzip.decompress(layer)).hexdigest()}" for layer in layers if layer[:2] == b"\x1f\x8b"
    ]
    config = {"os": "linux", "architecture": arch, "config": {}, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": put("config.v1+json", json.dumps(config).encode()),
        "layers": entries,
    }
    entry = put("manifest.v1+json", json.dumps(manifest).encode())
    (directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
    (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return [str(entry["digest"]) for entry in entries]
