"""Indexes and hot sets out of a registry: real look-ups, real artifacts, a server that can hold, lie and refuse."""

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.codec import index_name
from blockindex.hotpack import encode_hotset
from blockindex.hotset import hotset_name
from snapshotter.artifacts import manifest as manifest_module
from snapshotter.artifacts.model import Kind, Subject
from snapshotter.config import Config, HotSetConfig, IndexConfig, LookupConfig, RegistryConfig, TrustConfig
from snapshotter.errors import InvalidArgument, UserError
from snapshotter.fetch.arrival import FoundIndex
from snapshotter.fetch.sources import Sources, check_sources
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.registry import Registry
from snapshotter.registry.hotfile import HotFile
from snapshotter.trust.keys import SecretKey
from snapshotter.trust.quarantine import Quarantine
from tests.snapshotter.daemon import Layer, make_layer
from tests.snapshotter.fetch.artifactsite import Site, blob_of
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.rangeserver import Action, Hold, IgnoreRange, RangeServer, Request, Status

HOT = [(0, 0, 8), (1, 0, 16)]


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=4, size=128 << 10, seed=seed) for seed in (1, 2)]


class Node:
    """What a node looks for: `index` and `hot` ask as its engine does."""

    def __init__(self, root: Path, server: RangeServer, site: Site, policy: str = "signed", **config: object) -> None:
        self.image = f"{server.host}/app:1"
        self.site = site
        self.config = Config(
            root=str(root / "root"),
            trust=TrustConfig(policy=policy, keys=(str(root / "keys"),)),
            lookup=config.pop("lookup", LookupConfig(timeout_s=PATIENCE_S)),  # type: ignore[arg-type]
            **config,  # type: ignore[arg-type]  # sections
        )
        self.registry = Registry(RegistryConfig(hosts_dir="", docker_config="/nonexistent/config.json"))
        self.sources = Sources(self.config, self.registry)

    def __enter__(self) -> "Node":
        return self

    def __exit__(self, *exc: object) -> None:
        self.sources.close()
        self.registry.close()

    def index(self, number: int = 0, layers: list[Digest] | None = None) -> FoundIndex | None:
        found = self.sources.indexes.find(
            self.image, self.site.digests if layers is None else layers, self.site.digests[number]
        )
        return next(found, None)

    def hot(self, workload: str = "default") -> HotFile | None:
        return self.sources.hot.find(self.image, self.site.key, workload)

    def reasons(self) -> list[str]:
        return [str(row["reason"]) for row in self.sources.refused()]


@pytest.fixture
def key(tmp_path: Path) -> SecretKey:
    """One that the node trusts."""
    secret = SecretKey.generate()
    (tmp_path / "keys").mkdir()
    secret.public.save(tmp_path / "keys" / "ci.pub")
    return secret


@pytest.fixture
def site(layers: list[Layer], key: SecretKey) -> Site:
    return Site(layers, key)


def taken(file: HotFile, start: int, end: int) -> bytes:
    with contextlib.closing(file.stream(start, end)) as stream:
        return b"".join(stream)


# -- indexes ---------------------------------------------------------------------------------------------------------


def test_the_indexes_of_an_image_are_one_artifact_looked_for_once(tmp_path: Path, site: Site) -> None:
    [tag] = site.publish(site.index())
    with site.serve() as server, Node(tmp_path, server, site) as node:
        with ThreadPoolExecutor(2) as pool:
            first, second = pool.map(node.index, (0, 1))
        assert first is not None and second is not None
        assert [first.encoded, second.encoded] == site.indexes
        assert first.where == second.where and first.where.startswith(f"{server.host}/app@sha256:")
        assert sorted(it.path for it in server.requests) == sorted(
            [tag, *(f"/v2/app/blobs/{blob.digest}" for blob in site.index().blobs)]
        )
        assert node.reasons() == []


def test_the_directory_is_preferred_and_the_registry_not_waited_for(tmp_path: Path, site: Site) -> None:
    site.publish(site.index())
    path = tmp_path / "indexes" / index_name(site.digests[0])
    path.parent.mkdir(parents=True)
    path.write_bytes(site.indexes[0])
    index = IndexConfig(url=str(tmp_path / "indexes"))
    go = threading.Event()
    with site.serve(lambda request: Hold(-1, go)) as server, Node(tmp_path, server, site, index=index) as node:
        found = node.index(0)
        assert found is not None and (found.encoded, found.where) == (site.indexes[0], str(tmp_path / "indexes"))
        go.set()


def test_what_the_directory_lacks_comes_from_the_registry(tmp_path: Path, site: Site) -> None:
    site.publish(site.index())
    (tmp_path / "indexes").mkdir()
    index = IndexConfig(url=str(tmp_path / "indexes"))
    with site.serve() as server, Node(tmp_path, server, site, index=index) as node:
        found = node.index(1)
        assert found is not None and found.encoded == site.indexes[1]


def test_an_index_by_nobody_we_trust_is_not_used(
    tmp_path: Path, layers: list[Layer], key: SecretKey, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(layers)
    site.publish(site.index())
    with site.serve() as server, Node(tmp_path, server, site) as node:
        assert node.index(0) is None and node.index(1) is None
        assert node.reasons() == ["is not signed"] and [it.levelname for it in caplog.records] == ["WARNING"]
        assert len(server.requests) == 1, "its blobs are not even asked for"
        caplog.clear()
    with site.serve() as server, Node(tmp_path, server, site, policy="any") as node:
        assert node.index(0) is not None and node.reasons() == []


@pytest.mark.parametrize("damage", ["other bytes", "longer", "shorter", "gone"])
def test_a_blob_that_is_not_what_was_signed(
    tmp_path: Path, site: Site, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And the next place has a good one."""
    artifact = site.index()
    site.publish(artifact)
    site.publish(artifact, "elsewhere/indexes")
    path, data = f"/v2/app/blobs/{artifact.blobs[0].digest}", site.indexes[0]
    bad = {"other bytes": data[:-1] + b"x", "longer": data + b"x" * 100, "shorter": data[:-9], "gone": None}[damage]
    if bad is None:
        del site.files[path]
    else:
        site.files[path] = bad
    with site.serve() as server:
        places = LookupConfig(places=(f"{server.host}/elsewhere/indexes",), timeout_s=PATIENCE_S)
        with Node(tmp_path, server, site, lookup=places) as node:
            found = node.index(0)
            assert found is not None and found.encoded == data and "elsewhere" in found.where
            [reason] = node.reasons()
            assert site.digests[0] in reason and "cannot be used" in reason
        caplog.clear()


def test_a_layer_that_the_artifact_has_not(tmp_path: Path, site: Site) -> None:
    artifact = site.index()
    site.publish(replace(artifact, blobs=artifact.blobs[:1]))
    with site.serve() as server, Node(tmp_path, server, site) as node:
        assert node.index(1) is None and node.reasons() == []


def manifest_of(site: Site) -> bytes:
    """The image's own manifest."""
    config = blob_of(b"{}", "application/vnd.oci.image.config.v1+json")
    document = {
        "schemaVersion": 2,
        "mediaType": manifest_module.MANIFEST_TYPE,
        "config": {"mediaType": config.media_type, "digest": config.digest, "size": config.size},
        "layers": [
            {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": it.digest, "size": len(it.blob)}
            for it in site.layers
        ],
    }
    return json.dumps(document).encode()


def test_where_labels_are_short_the_manifest_names_the_layers_once(tmp_path: Path, site: Site) -> None:
    site.publish(site.index())
    site.files["/v2/app/manifests/1"] = manifest_of(site)
    with site.serve() as server, Node(tmp_path, server, site) as node:
        with ThreadPoolExecutor(3) as pool:
            found = [pool.submit(node.index, number, []) for number in (0, 1)]
            assert pool.submit(node.sources.images.layers, node.image).result() == tuple(site.digests)
            assert [it.result().encoded for it in found if (it.result())] == site.indexes
        assert [it.path for it in server.requests].count("/v2/app/manifests/1") == 1


def test_the_manifest_that_had_to_be_asked_for_finds_what_has_no_tag(tmp_path: Path, site: Site) -> None:
    """Other programs copy an image with what refers to it, but without our tags."""
    body = manifest_of(site)
    subject = Subject(blob_of(body, "").digest, manifest_module.MANIFEST_TYPE, len(body))
    signed = replace(site.index(), subject=subject)
    for path in site.publish(signed):
        document = site.files.pop(path)
    digest = blob_of(document, "").digest
    entry = {"mediaType": manifest_module.MANIFEST_TYPE, "digest": digest, "size": len(document)}
    referrers = {"schemaVersion": 2, "manifests": [{**entry, "artifactType": Kind.LAYER_INDEX.value}]}
    site.files |= {
        "/v2/app/manifests/1": body,
        f"/v2/app/manifests/{digest}": document,
        f"/v2/app/manifests/{subject.digest.replace(':', '-')}": json.dumps(referrers).encode(),
    }
    with site.serve() as server, Node(tmp_path, server, site) as node:
        assert node.index(0, []) is not None
        assert node.hot() is None, "with the manifest known, it is looked for in the same way"


def test_an_image_whose_layers_nobody_names(tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture) -> None:
    with site.serve() as server, Node(tmp_path, server, site) as node:
        assert node.index(0, []) is None and node.index(1, []) is None
        assert [it.path for it in server.requests] == ["/v2/app/manifests/1"]
        assert "image.unknown_layers" in caplog.text
        caplog.clear()
        assert node.sources.indexes.find("UP:::", [], site.digests[0]) is not None
        assert list(node.sources.indexes.find("UP:::", [], site.digests[0])) == []


# -- nothing there ---------------------------------------------------------------------------------------------------


def test_a_registry_without_artifacts_costs_one_request_a_kind_and_image(tmp_path: Path, site: Site) -> None:
    with site.serve() as server, Node(tmp_path, server, site) as node:
        for _ in range(3):
            assert [node.index(0), node.index(1), node.hot()] == [None] * 3
        assert len(server.requests) == 2 and {it.method for it in server.requests} == {"GET"}
        assert len({it.path for it in server.requests}) == 2


@pytest.mark.parametrize(
    "answer",
    [Status(404), Status(403), Status(405), Status(200, {"Content-Type": "text/html"}, b"<html>log in</html>")],
)
def test_whatever_a_registry_says_instead_is_none(
    tmp_path: Path, site: Site, answer: Action, caplog: pytest.LogCaptureFixture
) -> None:
    with site.serve(lambda request: answer) as server, Node(tmp_path, server, site) as node:
        assert [node.index(0), node.hot()] == [None] * 2
        caplog.clear()


def test_a_registry_that_hangs_is_not_waited_for(tmp_path: Path, site: Site) -> None:
    go = threading.Event()
    site.publish(site.index())
    lookup = LookupConfig(timeout_s=0.1)
    with site.serve(lambda request: Hold(-1, go)) as server, Node(tmp_path, server, site, lookup=lookup) as node:
        assert [node.index(0), node.hot()] == [None] * 2
        go.set()


def test_nobody_is_asked_where_that_is_switched_off(tmp_path: Path, site: Site) -> None:
    site.publish(site.index())
    with site.serve() as server:
        with Node(tmp_path, server, site, lookup=LookupConfig(registry=False)) as node:
            assert [node.index(0), node.hot()] == [None] * 2
        assert server.requests == []


# -- hot sets --------------------------------------------------------------------------------------------------------


def test_a_hot_set_s_head_comes_with_the_look_up_and_its_bytes_from_the_pack(tmp_path: Path, site: Site) -> None:
    artifact, pack = site.hot(HOT)
    [tag] = site.publish(artifact)
    data = site.files[f"/v2/app/blobs/{artifact.blobs[1].digest}"]
    with site.serve() as server, Node(tmp_path, server, site) as node:
        file = node.hot()
        assert file is not None and file.head == pack and file.first is None and file.size == len(data)
        assert file.doubt == "" and site.signer is not None and file.signed_by == site.signer.public.name
        assert [it.path for it in server.requests] == [tag]
        assert taken(file, 100, 5000) == data[100:5000] and taken(file, 5000, len(data)) == data[5000:]
        assert node.hot("other") is None


def test_a_pack_by_nobody_we_trust_is_a_set_without_bytes(
    tmp_path: Path, layers: list[Layer], key: SecretKey, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(layers)
    site.publish(site.hot(HOT)[0])
    with site.serve() as server, Node(tmp_path, server, site) as node:
        file = node.hot()
        assert file is not None and file.doubt == "is not signed" and file.head is not None
        assert next((it.layer, it.start, it.end) for it in file.head.hotset.extents) == HOT[0]
        assert len(server.requests) == 1 and node.reasons() == ["is not signed"]
    caplog.clear()


def test_a_trusted_pack_further_on_is_better_than_another_one_s_extents(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    artifact, _ = site.hot(HOT)
    site.publish(artifact, "elsewhere")
    site.signer = None
    site.publish(artifact)
    with site.serve() as server:
        places = LookupConfig(places=(f"{server.host}/elsewhere",), timeout_s=PATIENCE_S)
        with Node(tmp_path, server, site, lookup=places) as node:
            file = node.hot()
            assert file is not None and file.doubt == "" and "elsewhere" in file.where
    caplog.clear()


def test_a_pack_in_quarantine_is_a_set_without_bytes(
    tmp_path: Path, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    artifact, pack = site.hot(HOT)
    site.publish(artifact)
    with site.serve() as server, Node(tmp_path, server, site) as node:
        node.config.root_path.mkdir()
        Quarantine(node.config.root_path).add(pack.digest, "its bytes were wrong")
        file = node.hot()
        assert file is not None and "in quarantine: its bytes were wrong" in file.doubt
    caplog.clear()


def test_a_registry_that_ignores_ranges_gives_the_pack_once_not_for_each_part(tmp_path: Path, site: Site) -> None:
    artifact, _ = site.hot(HOT)
    site.publish(artifact)
    data = site.files[f"/v2/app/blobs/{artifact.blobs[1].digest}"]
    with site.serve(lambda request: IgnoreRange()) as server, Node(tmp_path, server, site) as node:
        file = node.hot()
        assert file is not None and taken(file, 100, 5000) == data[100:5000]
        with pytest.raises(InvalidArgument, match="ignores byte ranges"):
            file.stream(5000, 9000)
        assert len(server.requests) == 2


def test_a_long_head_is_one_more_request(tmp_path: Path, site: Site) -> None:
    artifact, pack = site.hot(HOT)
    site.publish(site.headless(artifact))
    with site.serve() as server, Node(tmp_path, server, site) as node:
        file = node.hot()
        assert file is not None and file.head == pack
        assert [it.path.rpartition("/")[2] for it in server.requests][1:] == [artifact.blobs[0].digest]


def test_a_set_without_bytes(tmp_path: Path, site: Site) -> None:
    artifact, pack = site.hot(HOT)
    head = encode_hotset(pack.hotset)
    site.publish(replace(artifact, blobs=(site._put(blob_of(head, artifact.blobs[0].media_type, "", True), head),)))
    with site.serve() as server, Node(tmp_path, server, site) as node:
        file = node.hot()
        assert file is not None and file.head is not None and file.head.frames == () and file.doubt == ""


def test_a_head_whose_pack_is_missing_is_a_set_without_bytes(tmp_path: Path, site: Site) -> None:
    artifact, _ = site.hot(HOT)
    site.publish(replace(artifact, blobs=artifact.blobs[:1]))
    with site.serve() as server, Node(tmp_path, server, site) as node:
        file = node.hot()
        assert file is not None and file.doubt == "its frames are missing"


@pytest.mark.parametrize("damage", ["no head", "another workload", "pack of another length", "trailing bytes"])
def test_a_hot_set_that_is_none(tmp_path: Path, site: Site, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """Although it is signed: whoever signs may make mistakes."""
    artifact, _ = site.hot(HOT, "train" if damage == "another workload" else "default")
    head, pack = artifact.blobs
    data = head.data
    if damage == "no head":
        data = b"<html>" * 30
    elif damage == "trailing bytes":
        data += b"x"
    elif damage == "pack of another length":
        whole = site.files[f"/v2/app/blobs/{pack.digest}"] + b"x"
        pack = site._put(blob_of(whole, pack.media_type), whole)
    head = site._put(blob_of(data, head.media_type, "", True), data)
    site.publish(replace(artifact, workload="default", blobs=(head, pack)))
    with site.serve() as server, Node(tmp_path, server, site) as node:
        assert node.hot() is None
        [reason] = node.reasons()
        assert reason.startswith("the hot set cannot be used: ") and "\n" not in reason
    caplog.clear()


def test_the_directory_s_hot_set_is_preferred(tmp_path: Path, site: Site) -> None:
    artifact, pack = site.hot(HOT)
    site.publish(artifact)
    path = tmp_path / "hot" / hotset_name(site.key, "default")
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_hotset(pack.hotset))
    hotset = HotSetConfig(url=str(tmp_path / "hot"))
    with site.serve() as server, Node(tmp_path, server, site, hotset=hotset) as node:
        file = node.hot()
        assert file is not None and file.where == str(path) and file.first is not None
        file.first.close()
        path.unlink()
        again = node.hot("train")
        assert again is None


def test_what_the_node_has_recorded(tmp_path: Path, site: Site) -> None:
    _, pack = site.hot(HOT)
    with site.serve() as server, Node(tmp_path, server, site) as node:
        assert node.sources.hot.recorded(site.key, "default") is None
        HotStore(node.config.root_path).save(pack.hotset)
        recorded = node.sources.hot.recorded(site.key, "default")
        assert recorded is not None and recorded.layers == pack.hotset.layers and server.requests == []


def test_a_survey_tells_what_each_place_has_of_all_kinds(tmp_path: Path, site: Site) -> None:
    site.publish(site.index())
    tags = [path.rpartition("/")[2] for path in site.publish(site.hot(HOT, "train")[0])]
    tags += [path.rpartition("/")[2] for path in site.publish(site.index(), "elsewhere")]
    site.files["/v2/app/tags/list"] = json.dumps({"name": "app", "tags": sorted({"1", *tags})}).encode()

    def without_query(request: Request) -> Action | None:
        path, query, _ = request.path.partition("?")
        known = site.files.get(path) if query else None
        return None if known is None else Status(200, {"Content-Type": "application/json"}, known)

    with site.serve(without_query) as server:
        places = LookupConfig(places=(f"{server.host}/empty",), timeout_s=PATIENCE_S)
        with Node(tmp_path, server, site, lookup=places) as node:
            (own, found), (other, nothing) = node.sources.survey(node.image, site.digests, Digest("sha256:" + "0" * 64))
            assert (own, other) == (f"{server.host}/app", f"{server.host}/empty") and nothing == []
            assert [(it.found.artifact.kind, it.found.artifact.workload, it.verdict.trusted) for it in found] == [
                (Kind.LAYER_INDEX, "", True),
                (Kind.HOT_SET, "train", True),
            ]
            assert node.reasons() == []


# -- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (Config(index=IndexConfig(url="nonsense://x")), r"^\[index\] url: .*nonsense"),
        (Config(hotset=HotSetConfig(url="http://")), r"^\[hotset\] url: .*expected an http"),
        (Config(lookup=LookupConfig(places=("h.test/a", "indexes"))), r"^\[lookup\] places: 'indexes' is not a repos"),
        (Config(lookup=LookupConfig(places=("h.test/a:1",))), r"^\[lookup\] places: .*expected HOST/REPOSITORY"),
    ],
)
def test_what_cannot_be_asked_is_said_before_anything_begins(config: Config, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_sources(config)


def test_what_can_be_asked() -> None:
    check_sources(Config())
    check_sources(Config(index=IndexConfig(url="/srv/indexes"), lookup=LookupConfig(places=("h.test:5000/a/b",))))
