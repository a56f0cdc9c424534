"""`bootseer hotset`: sets are found, packed, shown, merged, moved and removed; what is missing is said in one line."""

import gzip
import io
import json
import random
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from blockindex.builder import LayerBuilder
from blockindex.codec import encode_index, index_name
from blockindex.hotpack import Codec, decode_frame, decode_pack, encode_hotset
from blockindex.hotset import HotLayer, HotSet, from_touches, image_key
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK
from snapshotter import hotpacking
from snapshotter.blockstore import UNVERIFIED, BlockStore, LayerRecord, Staging, node_name
from snapshotter.cli import main
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.unproven import Pack, Unproven
from tests.snapshotter.daemon import Daemon, Layer, make_layer, origin, write_index
from tests.snapshotter.rangeserver import RangeServer

Out = pytest.CaptureFixture[str]
IMAGE = "registry.example/team/app:1"


def layer_of(files: dict[str, int], seed: int) -> tuple[Digest, LayerIndex, bytes]:
    """A layer with files of so many bytes: its digest, index and data region."""
    rng = random.Random(seed)
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, size in files.items():
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(rng.randbytes(size)))
    blob = gzip.compress(stream.getvalue(), 1, mtime=0)
    digest = Digest("sha256:" + sha256(blob).hexdigest())
    builder = LayerBuilder(digest)
    region: dict[int, bytes] = {offset: bytes(data) for offset, data in builder.feed(blob)}
    index = builder.finish()
    data = bytearray(index.data_size)
    for offset, part in region.items():
        data[offset : offset + len(part)] = part
    return digest, index, bytes(data)


LAYERS = [
    layer_of({"usr/lib/app/core.so": 40 * BLOCK, "usr/share/doc/long": 100 * BLOCK, "etc/app.conf": 10}, 1),
    layer_of({"opt/data/a": 8 * BLOCK, "opt/data/b": 8 * BLOCK - 1, "opt/data/a2": 5}, 2),
]
KEY = image_key([digest for digest, _, _ in LAYERS])


@dataclass
class Node:
    """A node's root without any daemon, and its configuration."""

    root: Path
    config: Path
    hotset: HotSet

    @property
    def store(self) -> HotStore:
        return HotStore(self.root)

    def directory(self, layer: int) -> Path:
        return self.root / "layers" / node_name(LAYERS[layer][0])

    def mark(self, layer: int, blocks: Iterable[int], state: int) -> None:
        """Say of blocks that they are ABSENT, PRESENT or UNVERIFIED."""
        path = self.directory(layer) / "present"
        states = bytearray(path.read_bytes())
        for block in blocks:
            states[block] = state
        path.write_bytes(states)

    def run(self, *argv: str) -> int:
        return main(["hotset", *argv, "--config", str(self.config)])

    def said(self, capsys: Out, *argv: str) -> Any:
        """The JSON of a command that works."""
        assert self.run(*argv, "--json") == 0
        return json.loads(capsys.readouterr().out)

    def mistake(self, capsys: Out, *argv: str) -> str:
        """The one line of a command that does not."""
        code = self.run(*argv)
        out, err = capsys.readouterr()
        assert code in (1, 2) and out == "" and err.startswith("bootseer: ") and err.count("\n") == 1, (code, out, err)
        return err


@pytest.fixture
def node(tmp_path: Path) -> Node:
    root = tmp_path / "root"
    store = BlockStore(root)
    for digest, index, data in LAYERS:
        record = LayerRecord(
            digest=digest,
            blob_size=index.blob_size,
            meta_size=len(index.metadata),
            data_size=index.data_size,
            images=(IMAGE,),
            implied_dirs=index.implied_dirs,
            layout=index.layout(),
        )
        staging = Staging(store.layers, digest)
        staging.write(0, data)
        staging.publish(record, index.metadata, encode_index(index), ())
        staging.discard()
    layers = [HotLayer(digest, index.block_count, index.layout()) for digest, index, _ in LAYERS]
    touches = [(0, 2, 6, 0), (1, 0, 3, 10), (0, 7, 9, 20), (0, 60, 61, 30), (0, 140, 141, 40), (1, 8, 10, 1500)]
    hotset = from_touches(layers, touches)
    HotStore(root).save(hotset)
    config = tmp_path / "config.toml"
    config.write_text(f'root = "{root}"\nrun = "{tmp_path}/run"\n[registry]\nhosts_dir = ""\n')
    return Node(root, config, hotset)


def content(data: bytes) -> dict[tuple[int, int], bytes]:
    """Every block of a pack."""
    pack = decode_pack(data)
    found = {}
    for frame in pack.frames:
        for extent, view in decode_frame(pack, frame, data[frame.offset : frame.offset + frame.size]):
            for number, block in enumerate(range(extent.start, extent.end)):
                found[extent.layer, block] = bytes(view[number * BLOCK : (number + 1) * BLOCK])
    return found


def blocks(hotset: HotSet) -> set[tuple[int, int]]:
    return {(extent.layer, block) for extent in hotset.extents for block in range(extent.start, extent.end)}


def bytes_of(places: Iterable[tuple[int, int]]) -> dict[tuple[int, int], bytes]:
    return {(layer, block): LAYERS[layer][2][block * BLOCK : (block + 1) * BLOCK] for layer, block in places}


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
@pytest.mark.parametrize("image", [KEY, KEY[7:], KEY[7:13], IMAGE, "file"])
def test_build(node: Node, tmp_path: Path, capsys: Out, codec: str, image: str) -> None:
    image = str(node.store.path(KEY, "default")) if image == "file" else image
    result = node.said(capsys, "build", image, "--codec", codec, "--out", str(tmp_path / "out"))
    path = tmp_path / "out" / "hot" / KEY[7:] / "default.bsh"
    data = path.read_bytes()
    assert result["path"] == str(path) and result["file_bytes"] == len(data) and result["codec"] == codec
    assert result["frames"] == len(decode_pack(data).frames) > 0
    closed = {(0, 6)}  # the one gap of one block
    assert content(data) == bytes_of(blocks(node.hotset) | closed)
    assert [path] == [it for it in (tmp_path / "out").rglob("*") if it.is_file()]


def test_build_says_what_it_made(node: Node, tmp_path: Path, capsys: Out) -> None:
    assert node.run("build", KEY, "--out", str(tmp_path / "out"), "--gap", "0") == 0
    out, err = capsys.readouterr()
    assert "0.0 MB: 0.1 MB in 7 extents and 2 zstd frames" in out and err == ""
    assert content((tmp_path / "out" / "hot" / KEY[7:] / "default.bsh").read_bytes()) == bytes_of(blocks(node.hotset))


@pytest.mark.parametrize("state", [0, UNVERIFIED])
def test_a_block_that_is_not_here_is_named(node: Node, tmp_path: Path, capsys: Out, state: int) -> None:
    node.mark(0, [4, 8, 50], state)
    line = node.mistake(capsys, "build", KEY, "--out", str(tmp_path / "out"))
    assert f"2 of layer {LAYERS[0][0][7:19]}" in line and "while the daemon runs" in line
    assert list((tmp_path / "out").rglob("*.bsh")) == []


def test_a_block_that_a_pack_brought_and_no_layer_has_proven_is_not_packed_again(
    node: Node, tmp_path: Path, capsys: Out
) -> None:
    """Else a pack that lies would live on under another name, and another key."""
    notes = Unproven(node.directory(0), LAYERS[0][1].block_count, writable=True)
    notes.mark(2, 4, notes.number(Pack("sha256:" + "c" * 64, "registry.test/app", "", KEY)))
    notes.mark(5, 6, 1)
    assert f"3 of layer {LAYERS[0][0][7:19]}" in node.mistake(capsys, "build", KEY, "--out", str(tmp_path / "out"))
    notes.mark(0, 6, 0)
    notes.close()
    node.said(capsys, "build", KEY, "--out", str(tmp_path / "out"))


def test_a_gap_whose_blocks_are_not_here_stays_open(node: Node, tmp_path: Path, capsys: Out) -> None:
    node.mark(0, [6], 0)
    node.said(capsys, "build", KEY, "--out", str(tmp_path))
    assert content((tmp_path / "hot" / KEY[7:] / "default.bsh").read_bytes()) == bytes_of(blocks(node.hotset))


def test_layers_that_are_not_here_or_another(node: Node, tmp_path: Path, capsys: Out) -> None:
    changed = [replace(node.hotset.layers[0], layout="sha256:" + "0" * 64), node.hotset.layers[1]]
    node.store.save(replace(node.hotset, layers=tuple(changed)))
    assert "laid out differently" in node.mistake(capsys, "build", KEY, "--out", str(tmp_path / "out"))
    node.store.save(node.hotset)
    shutil.rmtree(node.directory(1))
    line = node.mistake(capsys, "build", KEY, "--out", str(tmp_path / "out"))
    assert f"layer {LAYERS[1][0]} is not in the block store" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("build", "sha256:" + "0" * 64, "--out", "OUT"), "no hot set on this node"),
        (("build", KEY, "--workload", "serve", "--out", "OUT"), "of workload 'serve' (there are: default)"),
        (("build", KEY, "--workload", "../x", "--out", "OUT"), "is not a name"),
        (("build", KEY, "--gap", "-1", "--out", "OUT"), "is not a whole number"),
        (("build", KEY, "--codec", "gzip", "--out", "OUT"), "invalid choice"),
        (("build", KEY, "--out", "FILE"), "Not a directory"),
        (("show", "not there.bsh"), "no such file"),
        (("show", "FILE"), "not a hot set (wrong magic)"),
        (("show", "UPPER CASE"), "neither a file, nor an image key, nor an image reference"),
        (("rm", "FILE"), "is a file"),
        (("rm", "sha256:" + "1" * 64), "no hot set on this node"),
        (("import", "FILE"), "not a hot set (wrong magic)"),
        (("import", "nothing-there"), "no such file"),
        (("import", "EMPTY"), "no hot/<image key>/<workload>.bsh below it"),
        (("merge", "FILE", "--out", "OUT"), "not a hot set (wrong magic)"),
        (("merge", "SET", "--min-share", "2", "--out", "OUT"), "is not between 0 and 1"),
        (("merge", "SET", "--out", "FILE/below"), "Not a directory"),
        (("export", "sha256:" + "0" * 64, "--to", "OUT"), "no hot set on this node"),
        (("export", KEY, "--to", "FILE"), "Not a directory"),
    ],
)
def test_mistakes_are_one_line(
    node: Node, tmp_path: Path, capsys: Out, argv: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange").write_bytes(b"<!DOCTYPE html>" + b" " * 100)
    (tmp_path / "empty").mkdir()
    names = {"OUT": "out", "FILE": "strange", "FILE/below": "strange/below", "EMPTY": "empty"}
    places = {name: str(tmp_path / path) for name, path in names.items()}
    places["SET"] = str(node.store.path(KEY, "default"))
    monkeypatch.chdir(tmp_path)
    assert message in node.mistake(capsys, *(places.get(word, word) for word in argv))
    assert not list((tmp_path / "out").rglob("*.bsh"))


def test_show(node: Node, capsys: Out) -> None:
    (shown,) = node.said(capsys, "show", IMAGE)["sets"]
    assert (shown["image_key"], shown["workload"], shown["records"]) == (KEY, "default", 1)
    assert (shown["hot_bytes"], shown["seconds"], shown["codec"]) == (13 * BLOCK, 1.5, "none")
    totals = [index.data_size for _, index, _ in LAYERS]
    assert [(it["name"], it["hot_bytes"], it["bytes"]) for it in shown["layers"]] == [
        (LAYERS[0][0], 8 * BLOCK, totals[0]),
        (LAYERS[1][0], 5 * BLOCK, totals[1]),
    ]
    assert [(it["name"], it["hot_bytes"] // BLOCK, it["bytes"] // BLOCK) for it in shown["directories"]] == [
        ("/usr/lib/app", 6, 40),
        ("/opt/data", 5, 17),
        ("/etc", 1, 1),
        ("/usr/share/doc", 1, 100),
    ]
    (cut,) = node.said(capsys, "show", IMAGE, "--depth", "1")["sets"]
    assert [(it["name"], it["hot_bytes"] // BLOCK) for it in cut["directories"]] == [
        ("/usr", 7),
        ("/opt", 5),
        ("/etc", 1),
    ]
    assert node.run("show", KEY) == 0
    out = capsys.readouterr().out
    for line in ("default, 1 recordings, 1.5 s", "no frames", "/usr/lib/app", "15.0 %", LAYERS[0][0][7:19]):
        assert line in out


def test_show_of_a_pack_elsewhere_finds_indexes_where_it_is_told(node: Node, tmp_path: Path, capsys: Out) -> None:
    node.said(capsys, "export", KEY, "--to", str(tmp_path / "out"))
    pack = tmp_path / "out" / "hot" / KEY[7:] / "default.bsh"
    shutil.rmtree(node.root)
    (shown,) = node.said(capsys, "show", str(pack), "--indexes", str(tmp_path / "out"))["sets"]
    assert shown["directories"][0]["name"] == "/usr/lib/app" and shown["without_index"] == []
    assert len(shown["frames"]) == 2 and shown["frames"][0]["offset"] == shown["head_bytes"]
    assert node.run("show", str(pack)) == 0
    out = capsys.readouterr().out
    assert "2 layers without an index here" in out and "DIRECTORY" not in out


def test_show_does_not_take_an_index_of_another_layout(node: Node, capsys: Out) -> None:
    changed = [replace(node.hotset.layers[0], layout="sha256:" + "0" * 64), node.hotset.layers[1]]
    node.store.save(replace(node.hotset, layers=tuple(changed)))
    (shown,) = node.said(capsys, "show", KEY)["sets"]
    assert shown["without_index"] == [LAYERS[0][0]]
    assert [it["name"] for it in shown["directories"]] == ["/opt/data"]


def test_blocks_of_a_file_that_the_layer_replaces(tmp_path: Path, node: Node, capsys: Out) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, size in (("a/x", 2 * BLOCK), ("a/y", BLOCK), ("a/x", 10)):
            info = tarfile.TarInfo(name)
            info.size = size
            tar.addfile(info, io.BytesIO(b"z" * size))
    blob = gzip.compress(stream.getvalue(), mtime=0)
    digest = "sha256:" + sha256(blob).hexdigest()
    builder = LayerBuilder(digest)
    list(builder.feed(blob))
    index = builder.finish()
    (tmp_path / index_name(digest)).parent.mkdir()
    (tmp_path / index_name(digest)).write_bytes(encode_index(index))
    it = from_touches([HotLayer(digest, index.block_count, index.layout())], [(0, 0, index.block_count, 0)])
    (tmp_path / "it.bsh").write_bytes(encode_hotset(it))
    (shown,) = node.said(capsys, "show", str(tmp_path / "it.bsh"), "--indexes", str(tmp_path))["sets"]
    assert [(row["name"], row["hot_bytes"] // BLOCK) for row in shown["directories"]] == [
        ("(files that the layer itself replaces)", 2),
        ("/a", 2),
    ]


def test_ls(node: Node, capsys: Out) -> None:
    node.store.save(replace(node.hotset, workload="serve", records=4))
    damaged = node.store.path("sha256:" + "f" * 64, "default")
    damaged.parent.mkdir()
    damaged.write_bytes(b"not a set")
    rows = node.said(capsys, "ls")["sets"]
    assert {(row["image_key"], row["workload"], bool(row["problem"])) for row in rows} == {
        (KEY, "default", False),
        (KEY, "serve", False),
        ("sha256:" + "f" * 64, "default", True),
    }
    served = next(row for row in rows if row["workload"] == "serve")
    assert (served["records"], served["hot_bytes"], served["images"]) == (4, 13 * BLOCK, [IMAGE])
    assert node.run("ls") == 0
    out = capsys.readouterr().out
    assert out.count(KEY[7:19]) == 2 and "damaged" in out and IMAGE in out
    shutil.rmtree(node.root)
    assert node.run("ls") == 0 and capsys.readouterr().out == "no hot sets\n"


def test_rm(node: Node, capsys: Out) -> None:
    node.store.save(replace(node.hotset, workload="serve"))
    (removed,) = node.said(capsys, "rm", IMAGE, "--workload", "serve")["removed"]
    assert removed["workload"] == "serve" and list(node.store.find(KEY)) == ["default"]
    assert node.run("rm", KEY[:15]) == 0
    assert capsys.readouterr().out == f"removed {node.store.path(KEY, 'default')}\n" and not node.store.find(KEY)


def test_merge(node: Node, tmp_path: Path, capsys: Out) -> None:
    other = from_touches(node.hotset.layers, [(1, 0, 3, 5), (0, 100, 104, 9)], workload="other")
    (tmp_path / "other.bsh").write_bytes(encode_hotset(other))
    own = str(node.store.path(KEY, "default"))
    result = node.said(capsys, "merge", own, str(tmp_path / "other.bsh"), "--out", str(tmp_path / "merged.bsh"))
    merged = decode_pack((tmp_path / "merged.bsh").read_bytes()).hotset
    assert blocks(merged) == blocks(node.hotset) | blocks(other)
    assert (result["records"], result["workload"], result["hot_bytes"]) == (2, "default", 17 * BLOCK)
    argv = (own, str(tmp_path / "other.bsh"), "--min-share", "0.6", "--out", str(tmp_path / "half.bsh"))
    assert node.run("merge", *argv) == 0
    assert "of 2 recordings" in capsys.readouterr().out
    half = decode_pack((tmp_path / "half.bsh").read_bytes()).hotset
    assert blocks(half) == {(1, 0), (1, 1), (1, 2)}
    node.said(capsys, "build", str(tmp_path / "merged.bsh"), "--out", str(tmp_path / "out"))
    stranger = from_touches([HotLayer(LAYERS[0][0], 5, KEY)], [(0, 0, 1, 0)])
    (tmp_path / "stranger.bsh").write_bytes(encode_hotset(stranger))
    line = node.mistake(capsys, "merge", own, str(tmp_path / "stranger.bsh"), "--out", str(tmp_path / "x.bsh"))
    assert "different images" in line and not (tmp_path / "x.bsh").exists()


def test_what_one_node_exports_another_imports(node: Node, tmp_path: Path, capsys: Out) -> None:
    node.store.save(replace(node.hotset, workload="serve"))
    result = node.said(capsys, "export", IMAGE, KEY, "--to", str(tmp_path / "out"), "--codec", "lz4")
    assert [(it["workload"], it["codec"], it["problem"]) for it in result["sets"]] == [
        ("default", "lz4", ""),
        ("serve", "lz4", ""),
    ]
    for digest, index, _ in LAYERS:
        assert (tmp_path / "out" / index_name(digest)).read_bytes() == encode_index(index)
    assert result["indexes"] == [digest for digest, _, _ in LAYERS] and result["without_index"] == []
    shutil.rmtree(node.root)
    imported = node.said(capsys, "import", str(tmp_path / "out"))["imported"]
    assert {row["workload"] for row in imported} == {"default", "serve"}
    for name in ("default", "serve"):
        loaded = node.store.load(KEY, name)
        assert loaded is not None and loaded.codec is Codec.LZ4
        assert (
            node.store.path(KEY, name).read_bytes() == (tmp_path / "out" / "hot" / KEY[7:] / f"{name}.bsh").read_bytes()
        )
    assert node.run("import", str(tmp_path / "out" / "hot" / KEY[7:] / "serve.bsh")) == 0
    assert "serve" in capsys.readouterr().out


def test_export_of_what_is_not_all_here(node: Node, tmp_path: Path, capsys: Out) -> None:
    node.mark(1, [2], 0)
    shutil.rmtree(node.directory(0))
    assert node.run("export", KEY, "--to", str(tmp_path / "out")) == 1
    out, err = capsys.readouterr()
    assert "no bytes" in out and "1 of 2 layers with their index" in out
    assert err.count("\n") == 1 and "written without bytes: layer" in err
    assert decode_pack((tmp_path / "out" / "hot" / KEY[7:] / "default.bsh").read_bytes()).hotset == node.hotset


def test_a_damaged_frame_is_not_imported(node: Node, tmp_path: Path, capsys: Out) -> None:
    node.said(capsys, "build", KEY, "--out", str(tmp_path))
    path = tmp_path / "hot" / KEY[7:] / "default.bsh"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "do not match its digest" in node.mistake(capsys, "import", str(path))
    loaded = node.store.load(KEY, "default")
    assert loaded is not None and loaded.codec is Codec.NONE


def test_packing_reads_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames come in order, and no more of them are in memory than the CPUs need."""
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    given: list[int] = []

    def items() -> Iterator[bytes]:
        for number in range(20):
            given.append(number)
            yield bytes([number])

    taken = []
    for data in hotpacking.on_all_cpus(lambda item: item * 2, items()):
        taken.append(data)
        assert len(given) - len(taken) <= 3
    assert taken == [bytes([number]) * 2 for number in range(20)]


def manifest(*digests: str) -> bytes:
    layer = "application/vnd.oci.image.layer.v1.tar+gzip"
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:" + "c" * 64, "size": 2}
    layers = [{"mediaType": layer, "digest": digest, "size": 9} for digest in digests]
    kind = "application/vnd.oci.image.manifest.v1+json"
    return json.dumps({"schemaVersion": 2, "mediaType": kind, "config": config, "layers": layers}).encode()


def test_a_reference_that_the_store_does_not_know_is_asked_of_its_registry(node: Node, capsys: Out) -> None:
    digests = [digest for digest, _, _ in LAYERS]
    paths = {"/v2/app/manifests/1": manifest(*digests), "/v2/app/manifests/2": manifest(*digests, digests[0])}
    paths["/v2/app/manifests/other"] = manifest(digests[0])
    with RangeServer(paths) as server:
        for tag in ("1", "2"):
            (shown,) = node.said(capsys, "show", f"{server.host}/app:{tag}")["sets"]
            assert shown["image_key"] == KEY
        assert "no hot set on this node" in node.mistake(capsys, "show", f"{server.host}/app:other")
        assert "404" in node.mistake(capsys, "show", f"{server.host}/app:none")
        asked = len(server.requests)
        node.said(capsys, "show", IMAGE)
        assert len(server.requests) == asked


def test_a_reference_of_two_images_here_is_asked_of_its_registry(node: Node, capsys: Out) -> None:
    """A tag that has moved: the layers of both images carry its name."""
    first = replace(node.hotset, layers=node.hotset.layers[:1], image_key=image_key([LAYERS[0][0]]))
    first = replace(first, extents=tuple(extent for extent in first.extents if extent.layer == 0))
    node.store.save(first)
    with RangeServer({"/v2/app/manifests/1": manifest(LAYERS[0][0])}) as server:
        for directory in (node.directory(0), node.directory(1)):
            record = LayerRecord.load(directory)
            replace(record, images=(f"{server.host}/app:1",)).save(directory)
        (shown,) = node.said(capsys, "show", f"{server.host}/app:1")["sets"]
        assert shown["image_key"] == first.image_key and len(server.requests) == 1


@pytest.mark.system
def test_missing_blocks_come_through_the_daemon(tmp_path: Path, capsys: Out) -> None:
    """Nothing of the layer is on the node but its index: `build` has the daemon fetch and verify the hot blocks."""
    layer = make_layer(6, 40 * BLOCK)
    write_index(tmp_path / "indexes", layer)
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n[fetch]\nbackground = false\n'
    with origin(layer) as registry, Daemon(tmp_path, registry, toml) as daemon:
        daemon.prepare(layer)
        record = LayerRecord.load(daemon.root / "layers" / node_name(layer.digest))
        hot = HotLayer(layer.digest, record.blocks, record.layout)
        hotset = from_touches([hot], [(0, 45, 50, 0), (0, 200, 203, 5)])
        HotStore(daemon.root).save(hotset)
        argv = [
            "hotset",
            "build",
            hotset.image_key,
            "--out",
            str(tmp_path / "out"),
            "--config",
            f"{tmp_path}/config.toml",
        ]
        assert main(argv) == 0, capsys.readouterr()
        data = HotStore(tmp_path / "out").path(hotset.image_key, "default").read_bytes()
    assert content(data) == _expected(layer, [*range(45, 50), *range(200, 203)])


def _expected(layer: Layer, numbers: list[int]) -> dict[tuple[int, int], bytes]:
    whole = b"".join(layer.contents.values())  # each file is a whole number of blocks
    return {(0, block): whole[block * BLOCK : (block + 1) * BLOCK] for block in numbers}
