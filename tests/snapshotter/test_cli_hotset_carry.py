"""`bootseer hotset carry`: sets of one image become those of another; what is missing is said in one line."""

import hashlib
import json
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from blockindex.builder import LayerBuilder
from blockindex.codec import encode_index, index_name
from blockindex.hotpack import encode_hotset
from blockindex.hotset import HotLayer, HotSet, from_touches, image_key
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK
from snapshotter.blockstore import BlockStore, LayerRecord, node_name
from snapshotter.cli import main
from snapshotter.hotstore import HotStore, read_head
from snapshotter.model import Digest
from tests.snapshotter.images import gzip_layer, write_layout
from tests.snapshotter.rangeserver import RangeServer

Out = pytest.CaptureFixture[str]
OLD_IMAGE = "registry.example/team/app:1"


def noise(seed: int, blocks: int) -> bytes:
    return random.Random(seed).randbytes(blocks * BLOCK)


BASE = gzip_layer({"lib/libc": noise(1, 20)})
OLD_APP = gzip_layer({"app/main": noise(2, 10), "app/one/model": noise(3, 8), "app/gone": noise(4, 2)})
NEW_APP = gzip_layer({"app/two/model": noise(3, 8), "app/main": noise(5, 12)})


def index_of(blob: bytes) -> LayerIndex:
    builder = LayerBuilder("sha256:" + hashlib.sha256(blob).hexdigest())
    for _ in builder.feed(blob):
        pass
    return builder.finish()


INDEXES = {blob: index_of(blob) for blob in (BASE, OLD_APP, NEW_APP)}


def layers_of(*blobs: bytes) -> list[HotLayer]:
    indexes = [INDEXES[blob] for blob in blobs]
    return [HotLayer(it.blob_digest, it.block_count, it.layout()) for it in indexes]


OLD = from_touches(layers_of(BASE, OLD_APP), [(0, 3, 5, 0), (1, 2, 4, 10), (1, 12, 14, 20), (1, 18, 19, 30)])
NEW_KEY = image_key([it.digest for it in layers_of(BASE, NEW_APP)])
WANTED = [(0, 3, 5, 0), (1, 10, 12, 10), (1, 2, 4, 20)]
"""libc, main (which begins at block 8 now), the model, which was moved."""


@dataclass
class Node:
    """A node's root without any daemon: what it has of the old image, an OCI layout with the new one, its index."""

    root: Path
    config: Path
    layout: str
    indexes: str

    @property
    def store(self) -> HotStore:
        return HotStore(self.root)

    def run(self, *argv: str) -> int:
        return main(["hotset", *argv, "--config", str(self.config)])

    def said(self, capsys: Out, *argv: str) -> Any:
        assert self.run(*argv, "--json") == 0
        return json.loads(capsys.readouterr().out)

    def mistake(self, capsys: Out, *argv: str) -> str:
        code = self.run("carry", *argv)
        out, err = capsys.readouterr()
        assert code in (1, 2) and out == "" and err.startswith("bootseer: ") and err.count("\n") == 1, (code, out, err)
        return err

    def carried(self, workload: str = "default") -> HotSet | None:
        pack = self.store.load(NEW_KEY, workload)
        return None if pack is None else pack.hotset


def put(root: Path, blob: bytes, image: str) -> None:
    """Have a layer in the block store, of which no block is there."""
    index = INDEXES[blob]
    record = LayerRecord(
        digest=Digest(index.blob_digest),
        blob_size=index.blob_size,
        meta_size=len(index.metadata),
        data_size=index.data_size,
        images=(image,),
        implied_dirs=index.implied_dirs,
        layout=index.layout(),
    )
    staging = BlockStore(root).stage(record.digest)
    staging.publish(record, index.metadata, encode_index(index), [(0, index.block_count)])


@pytest.fixture
def node(tmp_path: Path) -> Node:
    root = tmp_path / "root"
    for blob in (BASE, OLD_APP):
        put(root, blob, OLD_IMAGE)
    HotStore(root).save(OLD)
    write_layout(tmp_path / "new", [BASE, NEW_APP])
    path = tmp_path / "indexes" / index_name(INDEXES[NEW_APP].blob_digest)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_index(INDEXES[NEW_APP]))
    config = tmp_path / "config.toml"
    config.write_text(f'root = "{root}"\nrun = "{tmp_path}/run"\n[registry]\nhosts_dir = ""\n')
    return Node(root, config, f"oci-layout:{tmp_path}/new", str(tmp_path / "indexes"))


def rows(hotset: HotSet) -> list[tuple[int, int, int, int]]:
    return [(it.layer, it.start, it.end, it.time_ms) for it in hotset.extents]


@pytest.mark.parametrize("old", [OLD_IMAGE, OLD.image_key, OLD.image_key[7:15], "file"])
def test_into_the_nodes_own_directory(node: Node, capsys: Out, old: str) -> None:
    old = str(node.store.path(OLD.image_key, "default")) if old == "file" else old
    document = node.said(capsys, "carry", old, node.layout, "--indexes", node.indexes)
    carried = node.carried()
    assert carried is not None and rows(carried) == WANTED and carried.carried_from == OLD.image_key
    (row,) = document["sets"]
    assert row == {
        "image_key": NEW_KEY,
        "workload": "default",
        "carried_from": OLD.image_key,
        "extents": 3,
        "blocks": 6,
        "kept": 2,
        "changed": 2,
        "moved": 2,
        "lost": 1,
        "path": str(node.store.path(NEW_KEY, "default")),
    }
    assert document["without_index"] == 0


def test_what_it_prints_and_what_others_say_of_it(node: Node, capsys: Out) -> None:
    assert node.run("carry", OLD_IMAGE, node.layout, "--indexes", node.indexes) == 0
    out, err = capsys.readouterr()
    assert [line.split() for line in out.splitlines()[:2]] == [
        ["WORKLOAD", "HOT", "KEPT", "CHANGED", "MOVED", "LOST"],
        ["default", "0.0", "MB", "0.0", "MB", "0.0", "MB", "0.0", "MB", "0.0", "MB"],
    ]
    assert out.endswith(f"\n{node.store.path(NEW_KEY, 'default')}\n") and err == ""
    by_key = {row["image_key"]: row["carried_from"] for row in node.said(capsys, "ls")["sets"]}
    assert by_key == {OLD.image_key: "", NEW_KEY: OLD.image_key}
    assert node.said(capsys, "show", NEW_KEY)["sets"][0]["carried_from"] == OLD.image_key
    assert node.run("show", NEW_KEY) == node.run("ls") == 0
    out = capsys.readouterr().out
    assert f"carried    from {OLD.image_key}" in out and f"1 (carried from {OLD.image_key[7:19]})" in out


def test_into_a_file_without_any_node(node: Node, tmp_path: Path, capsys: Out) -> None:
    """As in CI: a set, a layout and indexes are all there is."""
    (tmp_path / "old.bsh").write_bytes(encode_hotset(OLD))
    shutil.rmtree(node.root)
    for blob in (BASE, OLD_APP):
        (Path(node.indexes) / index_name(INDEXES[blob].blob_digest)).write_bytes(encode_index(INDEXES[blob]))
    argv = ("carry", str(tmp_path / "old.bsh"), node.layout, "--indexes", node.indexes)
    (row,) = node.said(capsys, *argv, "--out", str(tmp_path / "new.bsh"))["sets"]
    assert row["path"] == str(tmp_path / "new.bsh") and not node.root.exists()
    assert rows(read_head(tmp_path / "new.bsh").hotset) == WANTED
    assert [it.name for it in tmp_path.glob("*new.bsh*")] == ["new.bsh"]


def test_a_reference_is_asked_of_its_registry(node: Node, tmp_path: Path, capsys: Out) -> None:
    entry = json.loads((tmp_path / "new" / "index.json").read_text())["manifests"][0]
    blobs = {f"/v2/app/blobs/sha256:{it.name}": it.read_bytes() for it in tmp_path.glob("new/blobs/sha256/*")}
    manifest = blobs[f"/v2/app/blobs/{entry['digest']}"]
    with RangeServer({"/v2/app/manifests/2": manifest, **blobs}) as registry:
        node.said(capsys, "carry", OLD_IMAGE, f"{registry.host}/app:2", "--indexes", node.indexes)
    carried = node.carried()
    assert carried is not None and rows(carried) == WANTED


def test_every_workload_or_one(node: Node, capsys: Out) -> None:
    node.store.save(replace(OLD, workload="serve", records=3))
    node.said(capsys, "carry", OLD_IMAGE, node.layout, "--indexes", node.indexes, "--workload", "serve")
    serve = node.carried("serve")
    assert serve is not None and serve.records == 3 and node.carried() is None
    assert len(node.said(capsys, "carry", OLD_IMAGE, node.layout, "--indexes", node.indexes)["sets"]) == 2
    assert node.carried() is not None
    argv = (OLD_IMAGE, node.layout, "--indexes", node.indexes, "--out", "/nowhere/it")
    assert "takes one hot set, and" in node.mistake(capsys, *argv)
    assert "/nowhere" in node.mistake(capsys, *argv, "--workload", "serve")


def test_a_set_of_its_own_stays_and_a_guess_does_not(node: Node, capsys: Out) -> None:
    own = from_touches(layers_of(BASE, NEW_APP), [(0, 0, 1, 0)])
    node.store.save(replace(OLD, workload="serve"))
    node.store.save(replace(own, workload="serve"))
    argv = (OLD_IMAGE, node.layout, "--indexes", node.indexes)
    assert "has a hot set of its own" in node.mistake(capsys, *argv)
    assert node.carried() is None, "nothing is written where not all can be"
    node.store.save(replace(own, carried_from=OLD.image_key))
    node.said(capsys, "carry", *argv, "--workload", "default")
    carried = node.carried()
    assert carried is not None and rows(carried) == WANTED
    # the new image may be named by a set that it has
    assert node.run("carry", OLD_IMAGE, NEW_KEY, "--indexes", node.indexes, "--workload", "default") == 0


def test_what_is_not_here(node: Node, capsys: Out) -> None:
    assert f"layer {INDEXES[NEW_APP].blob_digest} of the new image: no index in" in node.mistake(
        capsys, OLD_IMAGE, node.layout
    )
    shutil.rmtree(node.root / "layers" / node_name(Digest(INDEXES[OLD_APP].blob_digest)))
    assert node.run("carry", OLD.image_key, node.layout, "--indexes", node.indexes, "--json") == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["sets"]
    assert (row["kept"], row["lost"]) == (2, 5) and json.loads(out)["without_index"] == 1
    assert err.startswith("bootseer: 1 layers of") and err.count("\n") == 1


def test_indexes_that_are_not_what_they_should_be(node: Node, tmp_path: Path, capsys: Out) -> None:
    """Damaged, or of another layer: as if there were none."""
    path = Path(node.indexes) / index_name(INDEXES[NEW_APP].blob_digest)
    good = path.read_bytes()
    for bad in (good[:-1], good[:100], b"<html>", encode_index(INDEXES[OLD_APP])):
        path.write_bytes(bad)
        assert "no index in" in node.mistake(capsys, OLD_IMAGE, node.layout, "--indexes", node.indexes)
    (node.root / "layers" / node_name(Digest(INDEXES[OLD_APP].blob_digest)) / "meta").write_bytes(b"short")
    path.write_bytes(good)
    assert node.run("carry", OLD.image_key, node.layout, "--indexes", node.indexes) == 0
    assert "1 layers of" in capsys.readouterr().err


def test_a_set_of_another_layout_is_not_translated(node: Node, capsys: Out) -> None:
    layers = (OLD.layers[0], replace(OLD.layers[1], layout="sha256:" + "0" * 64))
    node.store.save(replace(OLD, layers=layers))
    document = node.said(capsys, "carry", OLD.image_key, node.layout, "--indexes", node.indexes)
    assert document["without_index"] == 1 and document["sets"][0]["lost"] == 5


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("nothing.bsh", "LAYOUT"), "no such file"),
        (("sha256:" + "0" * 64, "LAYOUT"), "no hot set on this node"),
        (("OLD", "sha256:" + "0" * 64), "give its reference"),
        (("OLD", "oci-layout:/nowhere"), "/nowhere"),
        (("OLD", "UPPER CASE"), "UPPER CASE"),
        (("OLD", "SAME"), "is the key of both"),
        (("OLD", "LAYOUT", "--platform", "linux"), "is not a platform"),
        (("OLD", "LAYOUT", "--platform", "linux/arm64"), "arm64"),
        (("OLD", "LAYOUT", "--indexes", "what://x/"), "what"),
        (("OLD", "LAYOUT", "--workload", "serve"), "of workload 'serve' (there are: default)"),
        (("FILE", "LAYOUT"), "not a hot set"),
    ],
)
def test_mistakes_are_one_line(
    node: Node, tmp_path: Path, capsys: Out, argv: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange").write_bytes(b"<!DOCTYPE html>" + b" " * 100)
    monkeypatch.chdir(tmp_path)
    names = {"OLD": OLD_IMAGE, "LAYOUT": node.layout, "SAME": OLD.image_key, "FILE": "strange"}
    assert message in node.mistake(capsys, *(names.get(word, word) for word in argv))
    assert node.carried() is None
