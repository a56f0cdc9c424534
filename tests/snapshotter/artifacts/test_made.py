"""Artifacts out of files: what of them the manifest itself holds."""

from pathlib import Path

from snapshotter.artifacts.made import index_artifact, index_blob
from snapshotter.artifacts.manifest import decode, encode
from snapshotter.artifacts.place import ImageName
from snapshotter.model import Digest


def layer(number: int) -> Digest:
    return Digest(f"sha256:{number:064x}")


def test_the_smallest_indexes_are_in_the_manifest(tmp_path: Path) -> None:
    sizes = {layer(1): 9000, layer(2): 3000, layer(3): 5000, layer(4): 400}
    blobs = {}
    for digest, size in sizes.items():
        path = tmp_path / digest[-4:]
        path.write_bytes(bytes([int(digest[-1])]) * size)
        blobs[digest] = index_blob(digest, path)
    assert [len(blobs[digest].data) for digest in sizes] == [0, 3000, 5000, 400]
    image = ImageName("sha256:" + "ab" * 32, tuple(sizes), None)
    artifact = index_artifact(image, blobs)
    assert [blob.layer for blob in artifact.blobs] == list(sizes)
    assert [len(blob.data) for blob in artifact.blobs] == [0, 3000, 0, 400], "8 KiB together"
    manifest = encode(artifact)
    assert len(manifest) < 14_600 and decode(manifest) == artifact
