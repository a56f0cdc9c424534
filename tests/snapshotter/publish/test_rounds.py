"""Rounds against a real registry: what nodes agree on is published once, found, and not published again."""

import fcntl
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from blockindex.hotpack import HeadReader
from blockindex.hotset import image_key
from snapshotter.artifacts.finder import Finder, Found
from snapshotter.artifacts.model import Kind
from snapshotter.cli import main
from snapshotter.config import RegistryConfig
from snapshotter.errors import SnapshotterError
from snapshotter.fetch.publishing import Publishing
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.registry import Registry, parse_reference
from snapshotter.trust.keys import SecretKey
from tests.registries import Front, docker_registry
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.imagesource.layouts import LayoutWriter, tagged
from tests.snapshotter.publish.nodes import Node
from tests.snapshotter.rangeserver import Action, Request, Status

pytestmark = pytest.mark.system

BLOBS = [gzip_layer({"usr/base": random.Random(1).randbytes(400_000)}), gzip_layer({"app/one": b"one" * 3000})]
LAYERS = {Digest(f"sha256:{sha256(blob).hexdigest()}"): blob for blob in BLOBS}
KEY = image_key(list(LAYERS))
START = [(0, 0, 20, 0), (1, 0, 1, 5)]
OTHER = [(0, 40, 70, 0)]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as it:
        yield it


@pytest.fixture
def image(host: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A reference of an image of its own repository."""
    writer = LayoutWriter(tmp_path / "layout")
    writer.index([tagged(writer.several((writer.image(BLOBS), "linux/amd64")), "v1")])
    where = f"{host}/{sha256(request.node.name.encode()).hexdigest()[:12]}/app:1"
    assert main(["copy", f"oci-layout:{writer.directory}:v1", where, "--config", "/dev/null"]) == 0
    capsys.readouterr()
    return where


def found(where: str, kind: Kind, workload: str = "") -> list[Found]:
    """What is listed of this kind and workload; a node finds it."""
    with closing(Registry(RegistryConfig(hosts_dir="", docker_config="/nonexistent/config.json"))) as registry:
        ref = parse_reference(where)
        one = Finder(registry).find(ref, KEY, kind, workload)
        subject = one.artifact.subject.digest if one is not None and one.artifact.subject is not None else None
        listed = list(Finder(registry).list(ref, KEY, subject))
    assert one is None or one in listed
    return [it for it in listed if (it.artifact.kind, it.artifact.workload) == (kind, workload)]


def refuse(request: Request) -> Action | None:
    """A registry that lets nobody write."""
    return Status(403) if request.method in ("POST", "PUT", "PATCH") else None


def test_two_nodes_publish_one(image: str, tmp_path: Path) -> None:
    """Each with a pack; the second finds what the first has put as good as its own, the next rounds have nothing."""
    first, second = (Node(tmp_path / name, image, LAYERS) for name in "ab")
    for node in (first, second):
        node.record(START)
    assert first.done() == {"": "published"}, "one recording is none"
    first.record(START)
    second.record([*START, (0, 20, 21, 9)])
    assert first.done() == {"train": "published", "default": "published"}
    assert second.done() == {"": "there", "default": "there", "train": "there"}
    assert first.done() == second.done() == {}
    (index,) = found(image, Kind.LAYER_INDEX)
    assert {blob.layer for blob in index.artifact.blobs} == set(LAYERS) and index.artifact.subject is not None
    (hot,) = found(image, Kind.HOT_SET, "default")
    assert len(hot.artifact.blobs) == 2, "with its bytes"
    (train,) = found(image, Kind.HOT_SET, "train")
    assert len(train.artifact.blobs) == 1, "whose bytes are in the pack of default"


def test_two_nodes_at_the_same_time(image: str, tmp_path: Path) -> None:
    """Both may have looked before either has written; whatever comes first, one is found, whole, and that is all."""
    nodes = [Node(tmp_path / name, image, LAYERS) for name in "ab"]
    for node in nodes:
        node.record(START, times=2)
    with ThreadPoolExecutor() as pool:
        for done in pool.map(Node.done, nodes):
            assert set(done) == {"", "train", "default"} and set(done.values()) <= {"published", "there"}
    assert nodes[0].done() == nodes[1].done() == {}
    for kind, workload in ((Kind.LAYER_INDEX, ""), (Kind.HOT_SET, "train"), (Kind.HOT_SET, "default")):
        assert 1 <= len(found(image, kind, workload)) <= 2


def test_a_start_that_nobody_repeats_holds_nothing_back(image: str, tmp_path: Path) -> None:
    """`default` is published without it."""
    node = Node(tmp_path / "a", image, LAYERS)
    node.record(OTHER, "shell")
    assert node.done() == {"": "published"}
    node.record(START, times=2)
    assert node.done() == {"train": "published", "default": "published"}
    (default,) = found(image, Kind.HOT_SET, "default")
    pack = HeadReader().feed(default.artifact.blobs[0].data)
    assert pack is not None and pack.hotset.block_count == node.hotset(START, "train").block_count
    node.record(OTHER, "shell")
    assert node.done() == {"shell": "published", "default": "published"}


def test_a_set_that_has_changed_takes_the_place_of_the_old_one(image: str, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", image, LAYERS)
    node.config = replace(node.config, workload=replace(node.config.workload, records=2))
    node.record(START, times=2)
    node.done()
    (before,) = found(image, Kind.HOT_SET, "train")
    node.record([*START, (0, 21, 22, 9)], times=2)
    assert node.done() == {}, "one block more is no other set"
    node.record(OTHER)
    assert node.done() == {}, "the newest two do not agree"
    node.record(OTHER)
    assert node.done() == {"train": "published", "default": "published"}
    (after,) = found(image, Kind.HOT_SET, "train")
    assert after.digest != before.digest


def test_blocks_that_are_not_here_are_left_out(image: str, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", image, LAYERS, index_from="https://files.example")
    node.record(START, times=2)
    present = next((tmp_path / "a/layers").glob(f"{next(iter(LAYERS))[7:21]}/present"))
    present.write_bytes(bytes(len(present.read_bytes())))
    rows, failed = node.round()
    assert not failed and {row.workload: row.status for row in rows} == {"default": "published", "train": "published"}
    assert all("are not on this node" in row.reason for row in rows)
    assert not found(image, Kind.LAYER_INDEX), "no index was made here"
    (hot,) = found(image, Kind.HOT_SET, "train")
    assert len(hot.artifact.blobs) == 1


@pytest.mark.parametrize("made", ["carried over", "imported", "removed"])
def test_what_was_not_recorded_here_is_not_offered(image: str, tmp_path: Path, made: str) -> None:
    node = Node(tmp_path / "a", image, LAYERS, index_from="https://files.example")
    hotsets = HotStore(node.root)
    if made == "carried over":
        hotsets.save(replace(node.hotset(START, "train"), carried_from="sha256:" + "5" * 64))
    elif made == "imported":
        hotsets.save(node.hotset(OTHER, "default"))
    node.record(START, "train", times=0 if made == "carried over" else 2)
    if made == "removed":
        for workload in ("train", "default"):
            hotsets.remove(KEY, workload)
    assert node.done() == ({"train": "published"} if made == "imported" else {})


def test_what_another_key_has_signed_stays(image: str, tmp_path: Path) -> None:
    for name in "ab":
        SecretKey.generate().save(tmp_path / f"{name}.pem")
    first, second, unsigned = (Node(tmp_path / name, image, LAYERS) for name in "abc")
    for node, start in ((first, START), (second, OTHER), (unsigned, OTHER)):
        node.record(start, times=2)
    first.set(key=str(tmp_path / "a.pem"))
    second.set(key=str(tmp_path / "b.pem"))
    assert set(first.done().values()) == {"published"}
    (signed,) = found(image, Kind.HOT_SET, "train")
    for node in (second, unsigned):
        assert node.done() == {"": "there", "default": "refused", "train": "refused"}
        assert node.done() == {}, "that is not tried again"
    assert found(image, Kind.HOT_SET, "train") == [signed]


@pytest.mark.parametrize("kind", ["directory", "URL"])
def test_plain_files_are_as_good_as_they_are(image: str, tmp_path: Path, kind: str) -> None:
    """They are not signed; so no node waits for that, and writes what is there already."""
    SecretKey.generate().save(tmp_path / "key.pem")
    to = str(tmp_path / "files") if kind == "directory" else f"memory://{tmp_path}/files"
    first, second = (Node(tmp_path / name, image, LAYERS) for name in "ab")
    for node, start in ((first, START), (second, [*START, (0, 20, 21, 9)])):
        node.set(to=to, key=str(tmp_path / "key.pem"))
        node.record(start, times=2)
    assert first.done() == {"": "published", "train": "published", "default": "published"}
    assert second.done() == {"": "there", "default": "there", "train": "there"}


def test_a_place_that_refuses_is_left_alone(image: str, host: str, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", image, LAYERS)
    node.record(START, times=2)
    with Front(host, refuse) as front:
        node.set(to=f"{front.host}/team/indexes")
        rows, failed = node.round()
        assert rows == [] and len(failed) == 1, "the first refusal is enough"
        asked = len(front.asked("GET", "HEAD", "POST", "PUT"))
        node.now += 3599
        assert node.round() == ([], []) and len(front.asked("GET", "HEAD", "POST", "PUT")) == asked
        node.now += 1
        assert len(node.round()[1]) == 1
    node.now += 3600
    node.set(to="")
    assert set(node.done().values()) == {"published"}


def test_one_round_at_a_time(image: str, tmp_path: Path) -> None:
    node = Node(tmp_path / "a", image, LAYERS)
    with (node.root / "publishing.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert node.round() == ([], [])
    assert node.done() == {"": "published"}


def test_as_the_fetch_process_runs_it(image: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A child process, whose outcome is in the log and in the status; its failure is one line."""
    node = Node(tmp_path / "a", image, LAYERS)
    publishing = Publishing(node.config)
    with caplog.at_level("INFO"):
        publishing.round()
    assert "publish.done" in caplog.text and f"image={image}" in caplog.text
    (row,) = publishing.status()["done"]
    assert (row["what"], row["status"]) == ("layer-index", "published")
    (index,) = found(image, Kind.LAYER_INDEX)
    assert index.digest == row["digest"]
    node.set(key=str(tmp_path / "none.pem"))
    with pytest.raises(SnapshotterError, match="none"):
        Publishing(node.config).round()
    node.set(enabled=False)
    assert Publishing(node.config).status() == {}
