"""`bootseer index publish`, `hotset publish`: what they bring to a registry, a layout, a directory, a URL is found
there; what is there is not made again; whoever signs takes over only what this key has signed."""

import base64
import gzip
import json
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from blockindex.builder import LayerBuilder
from blockindex.codec import decode_index, index_name
from blockindex.hotpack import Codec, decode_pack, write_pack
from blockindex.hotset import HotLayer, HotSet, from_touches, hotset_name
from blockindex.model import BLOCK
from snapshotter.artifacts.finder import Finder, Found
from snapshotter.artifacts.model import Kind
from snapshotter.cli import main
from snapshotter.config import RegistryConfig
from snapshotter.hotstore import HotStore
from snapshotter.imagesource import Layout, LayoutImage, PlatformImage, platform_images
from snapshotter.model import Digest
from snapshotter.registry import Registry, parse_reference
from snapshotter.trust.keys import SecretKey
from snapshotter.trust.statement import statement
from tests.registries import Front, Tokens, docker_registry
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.imagesource.layouts import LayoutWriter, archive_of, tagged, write_archive

Out = pytest.CaptureFixture[str]

BASE = gzip_layer({"usr/base": random.Random(1).randbytes(200_000)})
APP = gzip_layer({"app/one": b"one" * 3000})
ARM = gzip_layer({"app/one": b"arm" * 3000})
NEW = gzip_layer({"app/one": b"new" * 3000})


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as it:
        yield it


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nobody's credentials are used."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)
    return tmp_path / "home"


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """Tags v1 (amd64, arm64 and Windows) and v2 (amd64, one layer of it new)."""
    writer = LayoutWriter(tmp_path / "layout")
    first = writer.several(
        (writer.image([BASE, APP, BASE]), "linux/amd64"),
        (writer.image([BASE, ARM], "arm64"), "linux/arm64"),
        (writer.image([APP], os="windows"), "windows/amd64"),
    )
    second = writer.several((writer.image([BASE, NEW]), "linux/amd64"))
    writer.index([tagged(first, "v1"), tagged(second, "v2")])
    return writer.directory


@pytest.fixture
def key(tmp_path: Path) -> Path:
    SecretKey.generate().save(tmp_path / "key.pem")
    return tmp_path / "key.pem"


def said(capsys: Out, *argv: object, code: int = 0) -> Any:
    """The JSON of a command."""
    got = main([*map(str, argv), "--json", "--config", "/dev/null"])
    out, err = capsys.readouterr()
    assert got == code, err
    return json.loads(out)


def mistake(capsys: Out, *argv: object) -> tuple[int, str]:
    """The exit code and the last line of stderr of a command that does nothing."""
    code = main([*map(str, argv), "--config", "/dev/null"])
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bootseer: ") and err.count("\n") == 1, (out, err)
    return code, err


def outcome(document: Any) -> list[tuple[str, str, list[str]]]:
    """Of each platform its status, and those of its layers."""
    rows = document["platforms"]
    return [(row["platform"], row["status"], [layer["status"] for layer in row["layers"]]) for row in rows]


def images(directory: Path, tag: str) -> list[PlatformImage]:
    return [it for it in platform_images(LayoutImage(Layout(directory), tag)) if isinstance(it, PlatformImage)]


def find(where: str, image: PlatformImage, kind: Kind, workload: str = "") -> tuple[Found, list[bytes]]:
    """An artifact as a node finds it, and its blobs."""
    with closing(Registry(RegistryConfig())) as registry:
        found = Finder(registry).find(parse_reference(where), image.image_key, kind, workload)
        assert found is not None
        listed = Finder(registry).list(parse_reference(where), image.image_key, image.manifest.digest)
        assert found in listed
        blobs = [registry.blob(where, it.digest).stream(0, it.size) for it in found.artifact.blobs]
        return found, [b"".join(blob) for blob in blobs]


# --- indexes


@pytest.mark.system
def test_indexes_beside_the_image(host: str, layout: Path, key: Path, capsys: Out) -> None:
    """Of all platforms, signed; found as a node does; the second time nothing is done."""
    where = f"{host}/one/app:1"
    said(capsys, "copy", f"oci-layout:{layout}:v1", where)
    done = said(capsys, "index", "publish", where, "--key", key)
    built = ["built", "built"]
    assert outcome(done) == [
        ("linux/amd64", "published", built),
        ("linux/arm64", "published", built),
        ("windows/amd64", "passed over", []),
    ]
    public = SecretKey.load(key).public
    for image, row in zip(images(layout, "v1"), done["platforms"], strict=False):
        found, blobs = find(where, image, Kind.LAYER_INDEX)
        artifact = found.artifact
        assert (found.digest, row["signed_by"]) == (row["artifact"], public.name)
        assert artifact.subject is not None and artifact.subject.digest == image.manifest.digest
        assert [decode_index(data).blob_digest for data in blobs] == list(image.layers)
        assert [blob.layer for blob in artifact.blobs] == list(image.layers)
        assert public.verify(statement(artifact), artifact.signatures[0].value)
    for more in (["--key", key], []):  # without a key too: what is there is at least as good
        again = said(capsys, "index", "publish", where, *more)
        assert [row[1] for row in outcome(again)] == ["there", "there", "passed over"]
        assert [row["artifact"] for row in again["platforms"]] == [row["artifact"] for row in done["platforms"]]


@pytest.mark.system
def test_only_what_is_new_is_read(host: str, layout: Path, key: Path, tmp_path: Path, capsys: Out) -> None:
    """Indexes of the image before are taken over, but never somebody else's by one who signs."""
    old, new = f"{host}/two/app:1", f"{host}/two/app:2"
    said(capsys, "copy", f"oci-layout:{layout}:v2", new)
    code = main(["index", "publish", new, "--reuse", old, "--platform", "linux/amd64", "--config", "/dev/null"])
    assert code == 0 and "nothing is taken over from" in capsys.readouterr().err
    said(capsys, "copy", f"oci-layout:{layout}:v1", old)
    first = said(capsys, "index", "publish", old, "--reuse", new)
    assert [row[2] for row in outcome(first)] == [["reused", "built"], ["reused", "built"], []]
    signed = said(capsys, "index", "publish", old, "--reuse", new, "--key", key)
    assert [row[2] for row in outcome(signed)] == [["built", "built"], ["built", "built"], []]
    assert [row[1] for row in outcome(signed)] == ["published", "published", "passed over"]
    again = said(capsys, "index", "publish", new, "--reuse", old, "--key", key)
    assert outcome(again) == [("linux/amd64", "published", ["reused", "built"])]
    _, blobs = find(new, images(layout, "v2")[0], Kind.LAYER_INDEX)
    assert len(blobs) == 2
    SecretKey.generate().save(tmp_path / "other.pem")
    other = said(capsys, "index", "publish", new, "--reuse", old, "--key", tmp_path / "other.pem", "--replace")
    assert outcome(other) == [("linux/amd64", "published", ["built", "built"])]


@pytest.mark.system
def test_indexes_in_another_repository(host: str, layout: Path, capsys: Out) -> None:
    """The subject need not be there."""
    done = said(capsys, "index", "publish", f"oci-layout:{layout}:v1", "--to", f"{host}/elsewhere/indexes")
    assert [row[1] for row in outcome(done)] == ["published", "published", "passed over"]
    for image in images(layout, "v1"):
        assert len(find(f"{host}/elsewhere/indexes", image, Kind.LAYER_INDEX)[1]) == 2
    again = said(capsys, "index", "publish", f"oci-layout:{layout}:v1", "--to", f"{host}/elsewhere/indexes")
    assert [row[1] for row in outcome(again)] == ["there", "there", "passed over"]


def test_indexes_in_the_layout_itself(layout: Path, capsys: Out) -> None:
    source = f"oci-layout:{layout}:v1"
    done = said(capsys, "index", "publish", source)
    assert [row[1] for row in outcome(done)] == ["published", "published", "passed over"]
    count = len(Layout(layout).entries())
    assert count == 2 + 4  # each artifact by its image key and by its subject
    again = said(capsys, "index", "publish", source)
    assert [row[1] for row in outcome(again)] == ["there", "there", "passed over"]
    assert len(Layout(layout).entries()) == count
    new = said(capsys, "index", "publish", f"oci-layout:{layout}:v2", "--reuse", source)
    assert outcome(new) == [("linux/amd64", "published", ["reused", "built"])]
    with_a_new_one = said(capsys, "index", "publish", f"oci-layout:{layout}:v2")
    assert outcome(with_a_new_one) == [("linux/amd64", "there", [])]
    artifact = Digest(new["platforms"][0]["artifact"])
    for entry in json.loads(Layout(layout).document(artifact).body)["layers"]:
        Layout(layout).path(entry["digest"]).unlink()  # damaged: made again
    assert outcome(said(capsys, "index", "publish", f"oci-layout:{layout}:v2"))[0][2] == ["built", "built"]


def test_a_layout_with_artifacts_is_still_one(tmp_path: Path, capsys: Out) -> None:
    """For the commands that know only one image there."""
    writer = LayoutWriter(tmp_path / "l")
    writer.index([writer.image([BASE, APP])])
    said(capsys, "index", "publish", f"oci-layout:{writer.directory}")
    done = said(capsys, "index", "build", writer.directory, "--out", tmp_path / "out")
    assert [layer["status"] for layer in done["layers"]] == ["built", "built"]


@pytest.mark.parametrize("kind", ["directory", "file URL", "memory"])
def test_indexes_as_files(layout: Path, tmp_path: Path, capsys: Out, kind: str) -> None:
    to = {"directory": str(tmp_path / "out"), "file URL": f"file://{tmp_path}/out", "memory": f"memory://{tmp_path}"}
    source = f"oci-layout:{layout}:v1"
    done = said(capsys, "index", "publish", source, "--to", to[kind])
    assert [row[1:] for row in outcome(done)][:2] == [("published", ["built", "built"])] * 2
    layers = {layer for image in images(layout, "v1") for layer in image.layers}
    if kind == "memory":
        import fsspec

        storage = fsspec.filesystem("memory")
        files = {it.removeprefix(f"{tmp_path}/"): storage.cat_file(it) for it in storage.find(str(tmp_path))}
    else:
        files = {str(it.relative_to(tmp_path / "out")): it.read_bytes() for it in (tmp_path / "out").rglob("*.bsi")}
    assert {name: decode_index(data).blob_digest for name, data in files.items()} == {
        index_name(layer): layer for layer in layers
    }
    again = said(capsys, "index", "publish", source, "--to", to[kind])
    assert [row[1:] for row in outcome(again)][:2] == [("there", ["reused", "reused"])] * 2


@pytest.mark.parametrize(
    ("to", "code"),
    [("ftp://127.0.0.1:1/a", 1), ("reference://a", 1), ("nonsense://a", 2), ("x://[a", 2), ("http://[::1", 2)],
)
def test_urls_where_nothing_can_be_put(layout: Path, tmp_path: Path, capsys: Out, to: str, code: int) -> None:
    """One line, whatever is raised below; nobody listens at port 1."""
    record(images(layout, "v2")[0], [BASE, NEW], "default", tmp_path / "hot", packed=False)
    source = f"oci-layout:{layout}:v2"
    for argv in (
        ("index", "publish", source, "--to", to),
        ("hotset", "publish", source, "--from", tmp_path / "hot", "--to", to),
    ):
        got, line = mistake(capsys, *argv)
        assert got == code and to.rstrip("/") in line


@pytest.mark.parametrize("damage", [b"", b"\x89BSIDX\r\n", b"x" * 200])
def test_a_damaged_file_is_made_again(layout: Path, tmp_path: Path, capsys: Out, damage: bytes) -> None:
    argv = ("index", "publish", f"oci-layout:{layout}:v2", "--to", tmp_path / "out")
    said(capsys, *argv)
    path = sorted(tmp_path.glob("out/sha256/*.bsi"))[0]
    before = path.read_bytes()
    path.write_bytes(damage)
    done = said(capsys, *argv)
    assert sorted(outcome(done)[0][2]) == ["built", "reused"] and path.read_bytes() == before


def test_what_cannot_be_indexed(tmp_path: Path, capsys: Out) -> None:
    """One line a platform; the others are published all the same."""
    writer = LayoutWriter(tmp_path / "l")
    foreign = writer.image([], "s390x", layers=[{**writer.blob(b"x", "y"), "urls": ["ftp://x"]}])
    broken = writer.image([APP, gzip.compress(b"no tar", mtime=0)], "arm64")
    writer.index(
        [writer.several((writer.image([APP]), "linux/amd64"), (foreign, "linux/s390x"), (broken, "linux/arm64"))]
    )
    argv = ["index", "publish", f"oci-layout:{tmp_path}/l", "--to", str(tmp_path / "out"), "--config", "/dev/null"]
    assert main([*argv, "--json"]) == 1
    out, err = capsys.readouterr()
    assert [row[1:] for row in outcome(json.loads(out))] == [
        ("published", ["built"]),
        ("failed", []),
        ("failed", ["built", "failed"]),
    ]
    lines = [line for line in err.splitlines() if line.startswith("bootseer: ")]
    assert len(lines) == 2
    assert lines[0].startswith("bootseer: linux/s390x: failed: ") and "foreign layer" in lines[0]
    assert lines[1].startswith("bootseer: linux/arm64: failed: layer sha256:") and "has no index: " in lines[1]
    assert main([*argv, "--platform", "linux/amd64"]) == 0
    assert capsys.readouterr().out.splitlines()[0].split() == ["PLATFORM", "RESULT", "LAYERS", "INDEXES", "ARTIFACT"]


# --- archives


@pytest.mark.system
def test_an_archive_of_plain_tars(host: str, layout: Path, tmp_path: Path, capsys: Out) -> None:
    """The registry's blobs are indexed, once it is certain that they are of the same image."""
    where, archive = f"{host}/three/app:2", tmp_path / "app.tar"
    write_archive(archive, [BASE, NEW], [where])
    code, line = mistake(capsys, "index", "publish", f"docker-archive:{archive}")
    assert code == 1 and "its layers are plain tars" in line and "push it first, or name it with --image REF" in line
    said(capsys, "copy", f"oci-layout:{layout}:v2", where)
    done = said(capsys, "index", "publish", f"docker-archive:{archive}")
    assert outcome(done) == [("linux/amd64", "published", ["built", "built"])]
    assert find(where, images(layout, "v2")[0], Kind.LAYER_INDEX)[0].digest == done["platforms"][0]["artifact"]
    write_archive(archive, [BASE, NEW], [])
    code, line = mistake(capsys, "index", "publish", f"docker-archive:{archive}")
    assert code == 1 and "does not say its image's name: give it with --image REF" in line
    assert outcome(said(capsys, "index", "publish", f"docker-archive:{archive}", "--image", where))[0][1] == "there"
    write_archive(archive, [BASE, APP, BASE], [where])
    code, line = mistake(capsys, "index", "publish", f"docker-archive:{archive}")
    assert code == 1 and f"{where} in the registry is another image (other layers)" in line


def test_an_archive_with_the_registry_s_blobs(layout: Path, tmp_path: Path, capsys: Out) -> None:
    writer = LayoutWriter(tmp_path / "one")
    note = {"io.containerd.image.name": "registry.example/app:1"}
    writer.index([{**writer.image([BASE, APP]), "annotations": note}])
    archive_of(writer.directory, tmp_path / "app.tar")
    archive = f"docker-archive:{tmp_path}/app.tar"
    done = said(capsys, "index", "publish", archive, "--to", tmp_path / "out")
    assert outcome(done) == [("linux/amd64", "published", ["built", "built"])]
    archive_of(layout, tmp_path / "two.tar")
    two = ["index", "publish", f"docker-archive:{tmp_path}/two.tar", "--to", tmp_path / "out", "--image"]
    assert [row[1] for row in outcome(said(capsys, *two, "v2"))] == ["published"]
    code, line = mistake(capsys, *two, "v3")
    assert code == 1 and "two.tar: which image of it? Say so with --image REF; there is: v1, v2" in line


@pytest.mark.parametrize("text", [b"", b"no tar at all" * 100, b"\x1f\x8b\x08"])
def test_what_is_no_archive(tmp_path: Path, capsys: Out, text: bytes) -> None:
    (tmp_path / "app.tar").write_bytes(text)
    code, line = mistake(capsys, "index", "publish", f"docker-archive:{tmp_path}/app.tar")
    assert code == 1 and f"{tmp_path}/app.tar: " in line
    code, line = mistake(capsys, "index", "publish", f"docker-archive:{tmp_path}/none.tar")
    assert code == 1 and "No such file" in line


# --- mistakes


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["x:1", "--to", "indexes"], "write ./indexes for a new directory"),
        (["x:1", "--to", "team/indexes"], "neither HOST/REPOSITORY, nor a directory"),
        (["x:1", "--to", "registry.example/a:1"], "has neither tag nor digest"),
        (["x:1", "--to", "https://server/dir"], "cannot write to a web server"),
        (["x:1", "--to", "nonsense://a"], "--to directory 'nonsense://a': Protocol not known"),
        (["x:1", "--to", "./d", "--key", "k"], "plain files, which are not signed"),
        (["x:1", "--to", "registry.example/a", "--key", "/nowhere/k"], "/nowhere/k: cannot read the key"),
        (["x:1", "--to", "./d", "--platform", "amd64"], "is not a platform"),
        (["x:1", "--image", "y:1"], "--image says what image docker-archive:FILE is"),
        (["A:B"], "lower case"),
        (["/tmp"], "write oci-layout:/tmp"),
        (["oci-layout:"], "no directory"),
        (["oci-layout:/nowhere"], "/nowhere: not an OCI layout"),
    ],
)
def test_mistakes_in_the_call(argv: list[str], words: str, capsys: Out) -> None:
    code, line = mistake(capsys, "index", "publish", *argv)
    assert code == 2 and words in line, line


@pytest.mark.system
def test_a_registry_that_does_not_let_us_in(host: str, layout: Path, home: Path, capsys: Out) -> None:
    """Anybody may pull, as of a public image. The line says where credentials were looked for, and what else could be
    done; it comes before any layer is read."""
    with Front(host, tokens=Tokens({"me": "pw"})) as front:
        argv = ("index", "publish", f"oci-layout:{layout}:v2", "--to", f"{front.host}/five/app")
        code, line = mistake(capsys, *argv)
        assert code == 1 and f"cannot write to {front.host}/five/app: " in line
        assert f"{home}/.docker/config.json" in line
        assert "log in with `docker login`, or publish elsewhere with --to HOST/REPOSITORY or --to DIR" in line
        front.tokens = Tokens({"me": "pw"}, {"": set()})
        code, error = mistake(capsys, "index", "publish", f"{front.host}/five/private:1")
        assert code == 1 and "access denied" in error and f"{home}/.docker/config.json" in error
        (home / ".docker").mkdir()
        login = {"auths": {front.host: {"auth": base64.b64encode(b"me:pw").decode()}}}
        (home / ".docker" / "config.json").write_text(json.dumps(login))
        assert outcome(said(capsys, *argv))[0][1] == "published"


# --- hot sets


def recorded(image: PlatformImage, layers: list[bytes], workload: str) -> tuple[HotSet, list[bytes]]:
    """A hot set of the image, and the data regions of its layers."""
    hot, regions = [], []
    for digest, blob in zip(image.layers, layers, strict=True):
        builder = LayerBuilder(digest)
        region = {offset: bytes(data) for offset, data in builder.feed(blob)}
        index = builder.finish()
        data = bytearray(index.data_size)
        for offset, part in region.items():
            data[offset : offset + len(part)] = part
        regions.append(bytes(data))
        hot.append(HotLayer(digest, index.block_count, index.layout()))
    return from_touches(hot, [(0, 3, 9, 0), (1, 0, 1, 5), (0, 20, 30, 10)], workload=workload), regions


def record(image: PlatformImage, layers: list[bytes], workload: str, directory: Path, packed: bool) -> None:
    """Put a hot set of the image into a directory of hot sets, with its bytes or without."""
    hotset, regions = recorded(image, layers, workload)

    def write(file: BinaryIO) -> None:
        write_pack(
            hotset,
            lambda it: regions[it.layer][it.start * BLOCK : it.end * BLOCK],
            Codec.ZSTD if packed else Codec.NONE,
            file,
        )

    HotStore(directory).put(hotset.image_key, workload, write)


@pytest.mark.system
def test_hot_sets_beside_the_image(host: str, layout: Path, key: Path, tmp_path: Path, capsys: Out) -> None:
    where = f"{host}/four/app:2"
    said(capsys, "copy", f"oci-layout:{layout}:v2", where)
    (image,) = images(layout, "v2")
    files = tmp_path / "sets"
    for workload, packed in (("default", True), ("train", True), ("plain", False)):
        record(image, [BASE, NEW], workload, files, packed)
    done = said(capsys, "hotset", "publish", where, "--from", files, "--key", key)
    rows = {row["workload"]: row for row in done["sets"]}
    assert {name: (row["status"], row["packed"]) for name, row in rows.items()} == {
        "default": ("published", True),
        "train": ("published", True),
        "plain": ("published", False),
    }
    assert [rows[name]["note"] for name in ("train", "plain")] == ["", "its bytes are in the pack of default"]
    for workload, row in rows.items():
        found, blobs = find(where, image, Kind.HOT_SET, workload)
        whole = (files / hotset_name(image.image_key, workload)).read_bytes()
        assert found.digest == row["artifact"] and whole.startswith(blobs[0]) and blobs[-1] == whole
        assert len(blobs) == 1 + row["packed"] and found.artifact.blobs[0].data == blobs[0]
        assert decode_pack(whole).hotset.workload == workload and row["signed_by"]
    again = said(capsys, "hotset", "publish", where, "--from", files / hotset_name(image.image_key, "train"))
    assert [(row["workload"], row["status"]) for row in again["sets"]] == [("train", "there")]
    record(image, [BASE, NEW], "train", files, packed=False)
    train = files / hotset_name(image.image_key, "train")
    SecretKey.generate().save(tmp_path / "other.pem")
    for argv in ([], ["--key", tmp_path / "other.pem"]):
        (row,) = said(capsys, "hotset", "publish", where, "--from", train, *argv, code=1)["sets"]
        assert (row["status"], row["artifact"], row["signed_by"]) == ("refused", "", "")
        assert f"the hot set train there is signed by {rows['train']['signed_by']}, the new one " in row["note"]
    (row,) = said(capsys, "hotset", "publish", where, "--from", train, *argv, "--replace")["sets"]
    assert row["status"] == "published" and row["artifact"] != rows["train"]["artifact"]


def test_an_index_of_another_key_is_replaced_when_told(layout: Path, key: Path, tmp_path: Path, capsys: Out) -> None:
    source = f"oci-layout:{layout}:v2"
    said(capsys, "index", "publish", source, "--key", key)
    SecretKey.generate().save(tmp_path / "other.pem")
    (row,) = said(capsys, "index", "publish", source, "--key", tmp_path / "other.pem", code=1)["platforms"]
    assert row["status"] == "refused" and "say --replace" in row["reason"] and row["layers"] == []
    (row,) = said(capsys, "index", "publish", source, "--key", tmp_path / "other.pem", "--replace")["platforms"]
    assert row["status"] == "published"


def test_a_copy_leaves_what_is_signed(layout: Path, key: Path, tmp_path: Path, capsys: Out) -> None:
    """The image is copied all the same."""
    (image,) = images(layout, "v2")
    source, target = f"oci-layout:{layout}:v2", f"oci-layout:{tmp_path / 'out'}:v2"
    said(capsys, "copy", source, target)
    for where, packed, argv in ((target, True, ["--key", key]), (source, False, [])):
        record(image, [BASE, NEW], "default", tmp_path / f"{packed}", packed)
        said(capsys, "hotset", "publish", where, "--from", tmp_path / f"{packed}", *argv)
    assert [row["status"] for row in said(capsys, "copy", source, target, code=1)["artifacts"]] == ["refused"]
    (row,) = said(capsys, "hotset", "publish", target, "--from", tmp_path / "True", "--key", key)["sets"]
    assert row["status"] == "there" and row["signed_by"]


def test_hot_sets_as_files(layout: Path, tmp_path: Path, capsys: Out) -> None:
    """From the node's own directory too: without its blocks, the extents alone."""
    (image,) = images(layout, "v2")
    record(image, [BASE, NEW], "default", tmp_path / "node", packed=False)
    record(image, [BASE, NEW], "train", tmp_path / "node", packed=True)
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/node"\n')
    source, out = f"oci-layout:{layout}:v2", tmp_path / "out"
    argv = ["hotset", "publish", source, "--to", str(out), "--config", str(tmp_path / "c.toml")]
    assert main([*argv, "--json"]) == 0
    printed, err = capsys.readouterr()
    assert [(row["workload"], row["packed"]) for row in json.loads(printed)["sets"]] == [
        ("default", False),
        ("train", True),
    ]
    assert "linux/amd64 default: published without bytes: layer sha256:" in err
    for workload in ("default", "train"):
        name = hotset_name(image.image_key, workload)
        assert (out / name).read_bytes() == (tmp_path / "node" / name).read_bytes()
    assert main([*argv, "--workload", "train"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["linux/amd64", "train", "there"]
    code = main([*argv, "--workload", "other"])
    assert code == 1 and "no hot set of workload 'other' (there is: default, train)" in capsys.readouterr().err


def test_a_newer_set_in_a_layout(layout: Path, tmp_path: Path, capsys: Out) -> None:
    """The older one is removed with its blobs, but for those that others have as well."""
    (image,) = images(layout, "v2")
    blobs, source = layout / "blobs" / "sha256", f"oci-layout:{layout}:v2"
    for workload, packed in (("default", True), ("other", True)):
        record(image, [BASE, NEW], workload, tmp_path / "sets", packed)
    said(capsys, "index", "publish", source)
    said(capsys, "hotset", "publish", source, "--from", tmp_path / "sets")
    before = {path.name for path in blobs.iterdir()}
    record(image, [BASE, NEW], "default", tmp_path / "sets", packed=False)
    done = said(capsys, "hotset", "publish", source, "--from", tmp_path / "sets")
    assert [(row["workload"], row["status"]) for row in done["sets"]] == [("default", "published"), ("other", "there")]
    after = {path.name for path in blobs.iterdir()}
    assert len(before - after) == 3 and len(after - before) == 2  # manifest, head and pack; manifest and head
    again = said(capsys, "hotset", "publish", source, "--from", tmp_path / "sets")
    assert {row["status"] for row in again["sets"]} == {"there"}
    assert [row[1] for row in outcome(said(capsys, "index", "publish", source))] == ["there"]
    assert {path.name for path in blobs.iterdir()} == after


def test_hot_sets_that_are_not_to_be_published(layout: Path, tmp_path: Path, capsys: Out) -> None:
    (image,) = images(layout, "v2")
    files, source = tmp_path / "sets", f"oci-layout:{layout}"
    code, line = mistake(capsys, "hotset", "publish", f"{source}:v2", "--from", files)
    assert code == 1 and "sets: no such file" in line
    files.mkdir()
    code, line = mistake(capsys, "hotset", "publish", f"{source}:v2", "--from", files)
    assert code == 1 and f"no hot set: looked in {files}; " in line and "bootseer record" in line
    record(image, [BASE, NEW], "default", files, packed=True)
    path = files / hotset_name(image.image_key, "default")
    code, line = mistake(capsys, "hotset", "publish", f"{source}:v1", "--from", path)
    assert code == 2 and "is a hot set of another image" in line
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, line = mistake(capsys, "hotset", "publish", f"{source}:v2", "--from", path)
    assert code == 1 and "do not match its digest" in line
    assert len(Layout(layout).entries()) == 2, "something was published"
