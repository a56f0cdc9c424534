"""OCI layouts: every name is the digest of what it names."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from scripts.rig.layers import read_tree
from scripts.rig.oci import Layout, LayoutWriter, read_layout


def _layout(directory: Path) -> Layout:
    root = directory / "root"
    root.mkdir(parents=True)
    writer = LayoutWriter(directory / "layout")
    (root / "one").write_text("1")
    first = read_tree(root)
    writer.add_layer(root, {}, first, 0)
    (root / "two").write_text("2" * 10_000)
    writer.add_layer(root, first, read_tree(root), 0)
    return writer.finish("amd64", ["/bin/app"], ["step one", "step two"])


def test_blobs_are_named_by_their_digests(tmp_path: Path) -> None:
    layout = _layout(tmp_path)
    blobs = list((layout.path / "blobs" / "sha256").iterdir())
    assert len(blobs) == 4, "two layers, config, manifest"
    assert all(hashlib.sha256(blob.read_bytes()).hexdigest() == blob.name for blob in blobs)


def test_manifest_config_and_layers_agree(tmp_path: Path) -> None:
    layout = _layout(tmp_path)
    blobs = layout.path / "blobs" / "sha256"
    manifest = json.loads((blobs / layout.manifest.removeprefix("sha256:")).read_text())
    config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
    layers = [(blobs / digest.removeprefix("sha256:")).read_bytes() for digest in layout.layers]
    assert [layer["digest"] for layer in manifest["layers"]] == list(layout.layers)
    assert layout.size == sum(map(len, layers))
    tars = [gzip.decompress(layer) for layer in layers]
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(tar).hexdigest()}" for tar in tars]
    assert config["config"]["Cmd"] == ["/bin/app"]
    assert [line["created_by"] for line in config["history"]] == ["step one", "step two"]


def test_the_same_content_gives_the_same_manifest(tmp_path: Path) -> None:
    assert _layout(tmp_path / "a").manifest == _layout(tmp_path / "b").manifest


def test_a_layout_without_index_is_not_read(tmp_path: Path) -> None:
    layout = _layout(tmp_path)
    assert read_layout(layout.path) == layout
    (layout.path / "index.json").unlink()
    with pytest.raises(FileNotFoundError):
        read_layout(layout.path)
