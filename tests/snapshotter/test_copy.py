"""`bootseer copy`: images arrive byte for byte, with what refers to them, or not at all."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from blockindex.codec import index_name
from blockindex.hotset import hotset_name
from snapshotter.artifacts.finder import Finder
from snapshotter.artifacts.model import Kind
from snapshotter.artifacts.registryplace import RegistryPlace
from snapshotter.cli import main
from snapshotter.cli.publishing import image_name
from snapshotter.config import RegistryConfig
from snapshotter.imagesource import Layout
from snapshotter.registry import Registry, parse_reference
from snapshotter.trust.keys import SecretKey
from snapshotter.trust.statement import statement
from tests.registries import Front, docker_registry, go_registry
from tests.snapshotter.imagesource.layouts import OCI, LayoutWriter, tagged
from tests.snapshotter.rangeserver import Request, Reset, Status
from tests.snapshotter.test_publish import APP, ARM, BASE, NEW, images, mistake, record, said

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as it:
        yield it


@pytest.fixture(scope="module")
def other() -> Iterator[str]:
    """Another registry, which has the referrers API."""
    with go_registry(announce=True) as it:
        yield it


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's credentials are used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """Tag v1: two platforms with one layer in common, and an attestation of the first."""
    writer = LayoutWriter(tmp_path / "layout")
    amd = writer.image([BASE, APP])
    both = writer.several((amd, "linux/amd64"), (writer.image([BASE, ARM], "arm64"), "linux/arm64"))
    without_proof = writer.blobs / both["digest"][7:]
    content = json.loads(without_proof.read_bytes())
    without_proof.unlink()
    proof = writer.document(
        {
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": writer.blob(b"{}", f"{OCI}.config.v1+json"),
            "layers": [writer.blob(b'{"proof": 1}', "application/vnd.in-toto+json")],
        }
    )
    note = {"vnd.docker.reference.type": "attestation-manifest", "vnd.docker.reference.digest": amd["digest"]}
    unknown = {"os": "unknown", "architecture": "unknown"}
    content["manifests"].append({**proof, "annotations": note, "platform": unknown})
    writer.index([tagged(writer.document(content), "v1")])
    return writer.directory


def blobs_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "blobs" / "sha256").iterdir()}


@pytest.mark.system
def test_over_an_air_gap(host: str, other: str, layout: Path, tmp_path: Path, capsys: Out) -> None:
    """Registry, layout, another registry: image and artifacts are all there, signatures hold."""
    SecretKey.generate().save(tmp_path / "key.pem")
    public = SecretKey.load(tmp_path / "key.pem").public
    outside, gap, inside = f"{host}/outside/app:v1", tmp_path / "gap", f"{other}/inside/app:7"
    said(capsys, "copy", f"oci-layout:{layout}:v1", outside)
    said(capsys, "index", "publish", outside, "--key", tmp_path / "key.pem")
    both = images(layout, "v1")
    for image, last in zip(both, (APP, ARM), strict=True):
        for workload in ("default", "train"):
            record(image, [BASE, last], workload, tmp_path / "sets", packed=True)
    said(capsys, "hotset", "publish", outside, "--from", tmp_path / "sets", "--key", tmp_path / "key.pem")
    taken = said(capsys, "copy", outside, f"oci-layout:{gap}")
    assert taken["target"] == f"oci-layout:{gap}:v1" and taken["platforms"] == ["linux/amd64", "linux/arm64"]
    assert len(taken["artifacts"]) == 6 and {row["status"] for row in taken["artifacts"]} == {"copied"}
    assert blobs_of(layout).items() <= blobs_of(gap).items()
    brought = said(capsys, "copy", f"oci-layout:{gap}:v1", inside)
    assert brought["manifest"] == taken["manifest"] and len(brought["artifacts"]) == 6
    with closing(Registry(RegistryConfig())) as registry:
        for image in both:
            for kind, workload in ((Kind.LAYER_INDEX, ""), (Kind.HOT_SET, "default"), (Kind.HOT_SET, "train")):
                there = Finder(registry).find(parse_reference(outside), image.image_key, kind, workload)
                found = Finder(registry).find(parse_reference(inside), image.image_key, kind, workload)
                assert found is not None and there is not None and found.digest == there.digest
                artifact = found.artifact
                assert public.verify(statement(artifact), artifact.signatures[0].value)
                for blob in artifact.blobs:
                    assert len(b"".join(registry.blob(inside, blob.digest).stream(0, blob.size))) == blob.size
                (by_subject,) = {
                    it.digest
                    for it in Finder(registry).list(parse_reference(inside), image.image_key, image.manifest.digest)
                    if (it.artifact.kind, it.artifact.workload) == (kind, workload)
                }
                assert by_subject == found.digest
        root = registry.document(inside)
        assert root.digest == taken["manifest"] and len(json.loads(root.body)["manifests"]) == 3
        for entry in json.loads(root.body)["manifests"]:
            registry.document(inside, entry["digest"])
    again = said(capsys, "copy", f"oci-layout:{gap}:v1", inside)
    assert again["blobs"] == {"sent": 0, "mounted": 0, "there": len(all_blobs(layout)), "bytes": 0}
    assert {row["status"] for row in again["artifacts"]} == {"there"}


def all_blobs(directory: Path) -> set[str]:
    """The digests of the blobs of the image v1."""
    found = set()
    for data in blobs_of(directory).values():
        document = json.loads(data) if data.startswith(b"{") else {}
        if "config" in document and "artifactType" not in document:
            found |= {it["digest"] for it in (document["config"], *document["layers"])}
    return found


@pytest.mark.system
def test_within_a_registry_nothing_is_sent(host: str, layout: Path, capsys: Out) -> None:
    said(capsys, "copy", f"oci-layout:{layout}", f"{host}/mount/one:1")
    done = said(capsys, "copy", f"{host}/mount/one:1", f"{host}/mount/two:1")
    assert done["blobs"] == {"sent": 0, "mounted": len(all_blobs(layout)), "there": 0, "bytes": 0}
    retagged = said(capsys, "copy", f"{host}/mount/two:1", f"{host}/mount/two:2")
    assert retagged["blobs"]["there"] == len(all_blobs(layout))
    with closing(Registry(RegistryConfig())) as registry:
        digests = {registry.document(f"{host}/mount/{it}").digest for it in ("one:1", "two:1", "two:2")}
    assert digests == {done["manifest"]}


@pytest.mark.system
def test_a_registry_that_does_not_mount(host: str, layout: Path, capsys: Out) -> None:
    """Also over one connection to each host, were that not too few for reading and writing at once."""
    said(capsys, "copy", f"oci-layout:{layout}", f"{host}/unmounted/one:1")
    (layout / "c.toml").write_text("[registry]\nconnections_per_host = 1\n")

    def refuse(request: Request) -> Status | None:
        return Status(403) if "mount=" in request.path else None

    with Front(host, refuse) as front:
        source, target = f"{front.host}/unmounted/one:1", f"{front.host}/unmounted/two:1"
        assert main(["copy", source, target, "--json", "--config", str(layout / "c.toml")]) == 0
    assert json.loads(capsys.readouterr().out)["blobs"]["sent"] == len(all_blobs(layout))


@pytest.mark.system
def test_artifacts_of_an_image_that_was_there_before(host: str, layout: Path, capsys: Out) -> None:
    """The image is there already, what was published since comes along."""
    source, target = f"{host}/late/one:1", f"{host}/late/two:1"
    said(capsys, "copy", f"oci-layout:{layout}", source)
    assert said(capsys, "copy", source, target)["artifacts"] == []
    said(capsys, "index", "publish", source)
    rows = said(capsys, "copy", source, target)["artifacts"]
    assert [(row["platform"], row["status"]) for row in rows] == [("linux/amd64", "copied"), ("linux/arm64", "copied")]
    with closing(Registry(RegistryConfig())) as registry:
        place = RegistryPlace(registry, parse_reference(target))
        assert [len(place.held(image_name(image))) for image in images(layout, "v1")] == [1, 1]


@pytest.mark.system
@pytest.mark.parametrize("kind", ["docker", "go"])
def test_artifacts_from_other_places(
    kind: str, host: str, other: str, layout: Path, tmp_path: Path, capsys: Out
) -> None:
    """What is beside the image comes first, then each place in its order; plain files become artifacts."""
    SecretKey.generate().save(tmp_path / "key.pem")
    public = SecretKey.load(tmp_path / "key.pem").public
    source, target = f"{host}/{kind}/app:1", f"{host if kind == 'docker' else other}/{kind}/prod:1"
    repository, directory, url = f"{host}/{kind}/indexes", tmp_path / "files", f"memory://{tmp_path}/files"
    said(capsys, "copy", f"oci-layout:{layout}:v1", source)
    said(capsys, "index", "publish", source, "--to", repository, "--key", tmp_path / "key.pem")
    both = images(layout, "v1")
    for workload, packed, to in (
        ("default", True, ""),
        ("default", False, url),
        ("train", True, directory),
        ("serve", True, url),
    ):
        for image, last in zip(both, (APP, ARM), strict=True):
            record(image, [BASE, last], workload, tmp_path / f"{workload}{packed}", packed=packed)
        argv = ["--from", tmp_path / f"{workload}{packed}", *(["--to", to] if to else [])]
        said(capsys, "hotset", "publish", source, *argv)
    from_all = [word for place in (repository, directory, url) for word in ("--from", place)]
    rows = said(capsys, "copy", source, target, *from_all)["artifacts"]
    assert {(row["type"].rpartition(".")[2], row["workload"], row["source"]) for row in rows} == {
        (Kind.HOT_SET.value.rpartition(".")[2], "default", f"{host}/{kind}/app"),
        (Kind.LAYER_INDEX.value.rpartition(".")[2], "", repository),
        (Kind.HOT_SET.value.rpartition(".")[2], "train", str(directory)),
        (Kind.HOT_SET.value.rpartition(".")[2], "serve", url),
    }
    assert len(rows) == 8 and {row["status"] for row in rows} == {"copied"}
    with closing(Registry(RegistryConfig())) as registry:
        for image in both:
            index = Finder(registry).find(parse_reference(target), image.image_key, Kind.LAYER_INDEX, "")
            assert index is not None and public.verify(statement(index.artifact), index.artifact.signatures[0].value)
            for workload in ("default", "train", "serve"):
                found = Finder(registry).find(parse_reference(target), image.image_key, Kind.HOT_SET, workload)
                assert found is not None and found.artifact.subject is not None
                assert found.artifact.subject.digest == image.manifest.digest
                packed = (tmp_path / f"{workload}True" / hotset_name(image.image_key, workload)).read_bytes()
                blob = found.artifact.blobs[-1]
                assert b"".join(registry.blob(target, blob.digest).stream(0, blob.size)) == packed
    again = said(capsys, "copy", source, target, *from_all)["artifacts"]
    assert [{**row, "status": "copied"} for row in again] == rows and {row["status"] for row in again} == {"there"}


def test_places_that_have_less(layout: Path, tmp_path: Path, capsys: Out) -> None:
    """What is damaged, of another image, or lacks a layer is left; a place without anything is named."""
    both = images(layout, "v1")
    for workload in ("cut", "train"):
        record(both[0], [BASE, APP], workload, tmp_path / "files", packed=True)
    folder = (tmp_path / "files" / hotset_name(both[0].image_key, "train")).parent
    (folder / "cut.bsh").write_bytes((folder / "cut.bsh").read_bytes()[:-1])
    (folder / "other.bsh").write_bytes((folder / "train.bsh").read_bytes())
    (folder / "Not a name.bsh").write_bytes(b"")
    said(capsys, "index", "publish", f"oci-layout:{layout}", "--to", tmp_path / "files")
    (arm,) = (digest for digest in both[1].layers if digest not in both[0].layers)
    (tmp_path / "files" / index_name(arm)).unlink()
    argv = ["copy", f"oci-layout:{layout}:v1", f"oci-layout:{tmp_path}/two", "--json", "--config", "/dev/null"]
    for place in (tmp_path / "files", tmp_path / "empty"):
        argv += ["--from", str(place)]
    assert main(argv) == 0
    out, err = capsys.readouterr()
    rows = {(row["platform"], row["type"], row["workload"]) for row in json.loads(out)["artifacts"]}
    assert rows == {
        ("linux/amd64", Kind.LAYER_INDEX.value, ""),
        ("linux/amd64", Kind.HOT_SET.value, "train"),
    }
    assert err.splitlines() == [
        f"bootseer: {tmp_path}/files has no index of layer {arm}: no layer index is taken from there",
        f"bootseer: {tmp_path}/empty has no artifacts of this image",
    ]


@pytest.mark.system
def test_a_network_with_faults(host: str, layout: Path, capsys: Out) -> None:
    """Uploads begin anew; no blob arrives damaged."""
    seen: set[str] = set()

    def fault(request: Request) -> Reset | Status | None:
        what = request.path.partition("digest=")[2] or request.path  # each attempt of an upload has a URL of its own
        if request.method not in ("POST", "PUT") or "/blobs/" not in request.path or what in seen:
            return None
        seen.add(what)
        return Reset(-1) if len(seen) % 3 == 1 else Status(503) if len(seen) % 3 == 2 else None

    said(capsys, "index", "publish", f"oci-layout:{layout}")
    with Front(host, fault) as front:
        done = said(capsys, "copy", f"oci-layout:{layout}", f"{front.host}/faults/app:1")
    assert done["blobs"]["sent"] == len(all_blobs(layout)) and len(done["artifacts"]) == 2 and len(seen) > 7
    with closing(Registry(RegistryConfig())) as registry:
        for name in sorted(all_blobs(layout)):
            data = Layout(layout).path(name).read_bytes()
            assert b"".join(registry.blob(f"{host}/faults/app", name).stream(0, len(data))) == data


def test_between_layouts(layout: Path, tmp_path: Path, capsys: Out) -> None:
    said(capsys, "index", "publish", f"oci-layout:{layout}:v1")
    assert main(["copy", f"oci-layout:{layout}:v1", f"oci-layout:{tmp_path}/two:v2", "--config", "/dev/null"]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.startswith(f"oci-layout:{tmp_path}/two:v2: {len(all_blobs(layout))} blobs sent")
    assert rest == ["linux/amd64: layer index copied", "linux/arm64: layer index copied"]
    assert blobs_of(tmp_path / "two") == blobs_of(layout)


def test_one_platform(layout: Path, tmp_path: Path, capsys: Out) -> None:
    source, target = f"oci-layout:{layout}", f"oci-layout:{tmp_path}/two:arm"
    (arm,) = (image for image in images(layout, "v1") if image.platform.arch == "arm64")
    done = said(capsys, "copy", source, target, "--platform", "linux/arm64")
    assert done["platforms"] == ["linux/arm64"] and done["manifest"] == arm.manifest.digest
    assert len(blobs_of(tmp_path / "two")) == 1 + 1 + 2
    assert [image.image_key for image in images(tmp_path / "two", "arm")] == [arm.image_key]


def test_a_damaged_blob_is_not_taken(layout: Path, tmp_path: Path, capsys: Out) -> None:
    """The target has no image then: its root comes last."""
    (damaged,) = (
        path for path in (layout / "blobs" / "sha256").iterdir() if path.read_bytes() == NEW or _is(path, APP)
    )
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    code, line = mistake(capsys, "copy", f"oci-layout:{layout}", f"oci-layout:{tmp_path}/two")
    assert code == 1 and f"blob sha256:{damaged.name} is damaged there" in line
    assert Layout(tmp_path / "two").entries() == [] and not (tmp_path / "two/blobs/sha256" / damaged.name).exists()


def _is(path: Path, data: bytes) -> bool:
    return path.read_bytes() == data


def test_a_platform_that_is_missing(layout: Path, tmp_path: Path, capsys: Out) -> None:
    """As in a layout that holds one platform of an image: it can be copied alone."""
    arm = next(image for image in images(layout, "v1") if image.platform.arch == "arm64")
    Layout(layout).path(arm.manifest.digest).unlink()
    code, line = mistake(capsys, "copy", f"oci-layout:{layout}", f"oci-layout:{tmp_path}/two")
    assert code == 1
    assert f"{arm.manifest.digest} is not there: for the platforms that are there use --platform" in line
    done = said(capsys, "copy", f"oci-layout:{layout}", f"oci-layout:{tmp_path}/two", "--platform", "linux/amd64")
    assert done["platforms"] == ["linux/amd64"]


def test_what_is_no_image_is_copied_too(tmp_path: Path, capsys: Out) -> None:
    """And a layer that no registry has is named, and left where it is."""
    writer = LayoutWriter(tmp_path / "l")
    far = {**writer.blob(b"far", "application/vnd.example"), "urls": ["https://far.example/x"]}
    chart: dict[str, Any] = {
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": writer.blob(b"{}", "application/vnd.example.chart"),
        "layers": [writer.blob(b"chart", "application/vnd.example"), far],
    }
    writer.index([writer.document(chart)])
    (writer.blobs / far["digest"][7:]).unlink()
    done = said(capsys, "copy", f"oci-layout:{tmp_path}/l", f"oci-layout:{tmp_path}/two")
    assert done["blobs"]["sent"] == 2 and done["elsewhere"] == [far["digest"]] and done["platforms"] == []
    assert blobs_of(tmp_path / "two") == blobs_of(tmp_path / "l")


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (["oci-layout:/nowhere", "x:1"], 2, "/nowhere: not an OCI layout"),
        (["{l}", "X:1"], 2, "lower case"),
        (["{l}", "x@sha256:" + "0" * 64], 2, "an image is copied to a tag"),
        (["{l}", "oci-layout:{l}"], 2, "neither empty nor an OCI layout"),
        (["{l}:v9", "oci-layout:{t}"], 1, "no image with the tag 'v9'; there is: v1"),
        (["{l}", "oci-layout:{t}", "--platform", "linux"], 2, "is not a platform"),
        (["{l}", "oci-layout:{t}", "--platform", "linux/s390x"], 1, "no image for linux/s390x; there is"),
        (["docker-archive:{t}.tar", "x:1"], 1, "No such file"),
        (["{l}", "oci-layout:{t}", "--from", "oci-layout:/nowhere"], 2, "--from /nowhere: not an OCI layout"),
        (["{l}", "oci-layout:{t}", "--from", "https://x.example/d"], 2, "a web server does not list what it has"),
        (["{l}", "oci-layout:{t}", "--from", "nowhere"], 2, "--from nowhere: neither HOST/REPOSITORY, nor a directory"),
    ],
)
def test_mistakes(layout: Path, tmp_path: Path, capsys: Out, argv: list[str], code: int, words: str) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    names = {"oci-layout:{l}": f"oci-layout:{tmp_path}/full", "{l}": f"oci-layout:{layout}"}
    filled = [names.get(it) or it.replace("{l}", f"oci-layout:{layout}").replace("{t}", f"{tmp_path}/t") for it in argv]
    got, line = mistake(capsys, "copy", *filled)
    assert got == code and words in line, line
