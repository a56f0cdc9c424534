"""OCI layouts on disk: what is written is found whole, also by several at once; images are told from all else."""

import hashlib
import json
import threading
from pathlib import Path

import pytest

from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.imagesource import Layout, LayoutImage, PlatformImage, Refused, parse_layout, platform_images
from snapshotter.model import Digest
from snapshotter.registry import parse_platform
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.imagesource.layouts import OCI, LayoutWriter, tagged

LAYERS = [gzip_layer({"a": b"a" * 5000}), gzip_layer({"b": b"b"}), gzip_layer({"c": b"c"})]
DATA = b"some bytes"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("oci-layout:dir", ("dir", "")),
        ("oci-layout:dir:v1", ("dir", "v1")),
        ("oci-layout:/a/b:1.2", ("/a/b", "1.2")),
        ("oci-layout:/a:b/c", ("/a:b/c", "")),
    ],
)
def test_names(text: str, found: tuple[str, str]) -> None:
    directory, tag = parse_layout(text)
    assert (str(directory), tag) == found


def test_a_directory_with_a_colon_counts_if_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    assert parse_layout(f"oci-layout:{tmp_path}/a:b") == (tmp_path / "a:b", "")
    with pytest.raises(InvalidArgument, match="no directory"):
        parse_layout("oci-layout:")


def digest_of(data: bytes) -> Digest:
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")


def test_blobs_come_whole_or_not_at_all(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "new")
    digest = digest_of(DATA)
    for wrong in ([DATA, b"x"], [DATA[:-1]], [b"other byte"]):
        with pytest.raises(InvalidArgument, match="another digest"):
            layout.write(digest, len(DATA), wrong)
        assert not layout.has(digest, len(DATA)) and list(layout.path(digest).parent.iterdir()) == []
    layout.write(digest, len(DATA), [DATA[:3], DATA[3:]])
    assert layout.has(digest, len(DATA)) and not layout.has(digest, 3)
    layout.write(digest, len(DATA), iter(()))  # it is there: nobody asks for the bytes
    assert b"".join(layout.blob(digest).stream(2, 6)) == DATA[2:6]


def test_create_touches_nothing_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    with pytest.raises(InvalidArgument, match="neither empty nor an OCI layout"):
        Layout.create(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(InvalidArgument, match="not an OCI layout"):
        Layout(tmp_path)
    with pytest.raises(SnapshotterError, match="mine"):
        Layout.create(tmp_path / "mine" / "deeper")


def test_twenty_at_once_are_all_listed(tmp_path: Path) -> None:
    Layout.create(tmp_path / "l")
    start = threading.Barrier(20)

    def tag(number: int) -> None:
        start.wait()
        Layout(tmp_path / "l").tag({"digest": f"sha256:{number:064x}", "size": 1}, [f"t{number}", f"u{number}"])

    threads = [threading.Thread(target=tag, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = {entry["annotations"]["org.opencontainers.image.ref.name"] for entry in Layout(tmp_path / "l").entries()}  # type: ignore[index]
    assert names == {f"{kind}{number}" for kind in "tu" for number in range(20)}


def test_a_tag_moves(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "l")
    first, second = {"digest": "sha256:1", "size": 1}, {"digest": "sha256:2", "size": 2}
    layout.tag(first, ["a", "b"])
    layout.tag(second, ["b"])
    layout.tag(first, [])
    layout.tag(first, [])
    assert layout.entries() == [tagged(first, "a"), tagged(second, "b"), first]


@pytest.mark.parametrize("index", ["{", "[]", '{"manifests": 1}', '{"manifests": [1]}', "null"])
def test_a_damaged_index(tmp_path: Path, index: str) -> None:
    layout = Layout.create(tmp_path / "l")
    (tmp_path / "l" / "index.json").write_text(index)
    with pytest.raises(InvalidArgument, match=r"index\.json: not the index of an OCI layout"):
        layout.entries()
    with pytest.raises(InvalidArgument):
        layout.tag({"digest": "x"}, [])
    assert (tmp_path / "l" / "index.json").read_text() == index


def test_documents_are_checked(tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "l")
    entry = writer.image(LAYERS[:1])
    layout = Layout(tmp_path / "l")
    digest = Digest(entry["digest"])
    assert layout.document(digest).media_type == f"{OCI}.manifest.v1+json"
    layout.path(digest).write_bytes(layout.path(digest).read_bytes() + b" ")
    with pytest.raises(InvalidArgument, match="damaged"):
        layout.document(digest)
    with pytest.raises(NotFound, match="is not there"):
        layout.document(Digest("sha256:" + "0" * 64))


def test_which_image(tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "l")
    layout = Layout(tmp_path / "l")
    with pytest.raises(NotFound, match="holds no image"):
        LayoutImage(layout).document()
    one, two = writer.image(LAYERS[:1]), writer.image(LAYERS[1:])
    artifact = {**writer.image(LAYERS[:2]), "artifactType": "application/vnd.example.thing"}
    writer.index([one, tagged(artifact, "note")])
    assert LayoutImage(layout).document().digest == one["digest"]
    writer.index([tagged(one, "a"), tagged(two, "b"), artifact])
    assert LayoutImage(layout, "b").document().digest == two["digest"]
    with pytest.raises(
        InvalidArgument, match=r"holds 2 images: say which one, as in oci-layout:\S+:TAG; there is: a, b"
    ):
        LayoutImage(layout).document()
    with pytest.raises(NotFound, match="no image with the tag 'c'; there is: a, b"):
        LayoutImage(layout, "c").document()


def test_platforms(tmp_path: Path) -> None:
    """An index is walked, also one below another; what is no image is passed over, what cannot be lazy is refused."""
    writer = LayoutWriter(tmp_path / "l")
    amd, arm = writer.image(LAYERS[:2]), writer.image([LAYERS[0], LAYERS[2]], "arm64")
    windows = writer.image(LAYERS[:1], os="windows")
    foreign = writer.image([], "s390x", layers=[{**writer.blob(b"x", "y"), "urls": ["ftp://x"]}])
    note = {"vnd.docker.reference.type": "attestation-manifest"}
    proof = {**writer.image(LAYERS[:1]), "platform": {"os": "unknown", "architecture": "unknown"}, "annotations": note}
    chart = writer.document(
        {
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": writer.blob(b"{}", "application/vnd.example.chart"),
            "layers": [],
        }
    )
    inner = writer.several((arm, "linux/arm64"), (foreign, "linux/s390x"))
    outer = writer.several((amd, "linux/amd64"), (windows, "windows/amd64"))
    content = json.loads((writer.blobs / outer["digest"][7:]).read_bytes())
    content["manifests"] += [inner, proof, chart]
    writer.index([writer.document(content)])
    source = LayoutImage(Layout(tmp_path / "l"))
    found = platform_images(source)
    assert [str(image.platform) for image in found] == ["linux/amd64", "windows/amd64", "linux/arm64", "linux/s390x"]
    assert [type(image) for image in found] == [PlatformImage, Refused, PlatformImage, Refused]
    passed, refused = found[1], found[3]
    assert isinstance(passed, Refused) and not passed.meant and "only images for Linux" in passed.reason
    assert isinstance(refused, Refused) and refused.meant and "foreign layer" in refused.reason
    first, second = found[0], found[2]
    assert isinstance(first, PlatformImage) and isinstance(second, PlatformImage)
    assert first.manifest.digest == amd["digest"] and len(first.layers) == 2
    assert first.layers[0] == second.layers[0] and first.image_key != second.image_key
    wanted = platform_images(source, parse_platform("linux/amd64"))
    assert [image.platform for image in wanted] == [first.platform]
    with pytest.raises(NotFound, match="no image for linux/ppc64le; there is"):
        platform_images(source, parse_platform("linux/ppc64le"))


def test_an_image_alone_says_its_platform_itself(tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "l")
    writer.index([writer.image([LAYERS[0], LAYERS[1], LAYERS[0]], "arm64")])
    source = LayoutImage(Layout(tmp_path / "l"))
    (image,) = platform_images(source)
    assert isinstance(image, PlatformImage)
    assert str(image.platform) == "linux/arm64" and len(image.manifest.layers) == 3 and len(image.layers) == 2
    with pytest.raises(NotFound, match="no image for linux/amd64; there is linux/arm64"):
        platform_images(source, parse_platform("linux/amd64"))


def test_what_is_no_image(tmp_path: Path) -> None:
    writer = LayoutWriter(tmp_path / "l")
    manifest = {"mediaType": f"{OCI}.manifest.v1+json", "layers": []}
    writer.index([writer.document({**manifest, "config": writer.blob(b"{}", "application/vnd.example.chart")})])
    with pytest.raises(InvalidArgument, match="no container image"):
        platform_images(LayoutImage(Layout(tmp_path / "l")))
    writer.index([writer.document({**manifest, "config": writer.blob(b"{}", f"{OCI}.config.v1+json")})])
    with pytest.raises(InvalidArgument, match="does not say its platform"):
        platform_images(LayoutImage(Layout(tmp_path / "l")))
    locked = writer.image(LAYERS[:1], layers=[writer.blob(b"?", f"{OCI}.layer.v1.tar+gzip+encrypted")])
    writer.index([locked])
    (refused,) = platform_images(LayoutImage(Layout(tmp_path / "l")))
    assert isinstance(refused, Refused) and refused.meant and "is encrypted" in refused.reason
