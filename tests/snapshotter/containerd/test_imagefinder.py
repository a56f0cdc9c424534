"""Images by their chain IDs, out of a content store: which one, from where, and why none."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import pytest

from snapshotter.containerd.chain import chain_ids
from snapshotter.containerd.client import Blob, Containerd
from snapshotter.containerd.imagefinder import ImageFinder, Source
from snapshotter.errors import NotFound, SnapshotterError, Transient
from snapshotter.model import Digest, LayerRef

SOURCE = "containerd.io/distribution.source."
KEY = "k8s.io/7/extract-1-x sha256:whatever"


def digest(data: bytes) -> Digest:
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")


class Store:
    """A content store, as `Containerd.content` gives it for the namespace `k8s.io`."""

    def __init__(self) -> None:
        self.blobs: dict[Digest, bytes] = {}
        self.manifests: list[Blob] = []
        self.reads: list[Digest] = []
        self.failure: Exception | None = None

    @contextmanager
    def content(self, namespace: str) -> Iterator["Store"]:
        if self.failure is not None:
            raise self.failure
        yield self if namespace == "k8s.io" else Store()

    def labelled(self, label: str) -> list[Blob]:
        return [blob for blob in self.manifests if label in blob.labels]

    def read(self, name: Digest, limit: int) -> bytes:
        self.reads.append(name)
        if name not in self.blobs:
            raise NotFound(name)
        return self.blobs[name]

    def add(self, layers: Sequence[str], labels: Mapping[str, str], updated_ns: int = 0, config: bytes = b"") -> Digest:
        """An image whose layers have these names; they stand for contents and for blobs."""
        diff_ids = [digest(f"tar {name}".encode()) for name in layers]
        config = config or json.dumps({"rootfs": {"diff_ids": diff_ids}, "n": updated_ns}).encode()
        self.blobs[digest(config)] = config
        return self.add_manifest(
            {
                "schemaVersion": 2,
                "config": {"digest": digest(config), "size": len(config)},
                "layers": [{"digest": blob_of(name), "size": 1} for name in layers],
            },
            {"containerd.io/gc.ref.content.config": digest(config), **labels},
            updated_ns,
        )

    def add_manifest(self, document: object, labels: Mapping[str, str], updated_ns: int) -> Digest:
        body = json.dumps(document).encode()
        self.blobs[digest(body)] = body
        self.manifests.append(Blob(digest(body), len(body), updated_ns, labels))
        return digest(body)


def blob_of(name: str) -> Digest:
    return digest(f"blob {name}".encode())


def chain(*layers: str) -> str:
    """The chain ID of the uppermost."""
    config = json.dumps({"rootfs": {"diff_ids": [digest(f"tar {name}".encode()) for name in layers]}}).encode()
    return chain_ids(config, len(layers))[-1]


class Registries:
    """Stands for those that are asked for manifests."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[Source], Digest]] = []

    def locate(self, sources: Sequence[Source], manifest: Digest) -> str:
        self.asked.append((list(sources), manifest))
        if not sources[0][1]:
            raise NotFound("nobody has it")
        return f"{sources[0][0]}:5000/{sources[0][1]}"


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def registries() -> Registries:
    return Registries()


def finder(store: Store, registries: Registries, *under_way: str) -> ImageFinder:
    return ImageFinder(cast(Containerd, store), registries.locate, lambda: under_way)


def test_a_layer_its_siblings_and_its_registry(store: Store, registries: Registries) -> None:
    manifest = store.add(["a", "b", "a", "c"], {f"{SOURCE}r.io": "team/app,team/old"})
    found = finder(store, registries)
    image = f"r.io:5000/team/app@{manifest}"
    a, b, c = blob_of("a"), blob_of("b"), blob_of("c")
    assert found.find(KEY, chain("a")) == LayerRef(image, a, (a, b, c))
    assert found.find(KEY, chain("a", "b", "a")) == LayerRef(image, a, (a, c))
    assert found.find(KEY, chain("a", "b", "a", "c")) == LayerRef(image, c, (c,))
    assert registries.asked == [([("r.io", "team/app"), ("r.io", "team/old")], manifest)], "asked once"
    assert len(store.reads) == 2, "manifest and configuration are read once"


def test_the_newest_of_several(store: Store, registries: Registries) -> None:
    labels = {f"{SOURCE}r.io": "app"}
    store.add(["a", "b"], labels, 1)
    newest = store.add(["a", "c"], labels, 3)
    store.add(["a", "d"], labels, 2)
    assert finder(store, registries).find(KEY, chain("a")).image == f"r.io:5000/app@{newest}"


def test_one_that_was_imported_comes_after_one_with_a_source(store: Store, registries: Registries) -> None:
    imported = store.add(["a"], {}, 2)
    with pytest.raises(NotFound, match=f"no label of {imported} says .* imported"):
        finder(store, registries).find(KEY, chain("a"))
    pulled = store.add(["a"], {f"{SOURCE}r.io": "app"}, 1)
    assert finder(store, registries).find(KEY, chain("a")).image == f"r.io:5000/app@{pulled}"


def test_the_reference_of_a_pull_that_is_under_way(store: Store, registries: Registries) -> None:
    store.add(["a"], {f"{SOURCE}docker.io": "library/nginx", f"{SOURCE}r.io": "app"})
    others = ("r.io:5000/other:1", "not a reference", "s.io/app:1")
    assert finder(store, registries, *others, "r.io:5001/app:2").find(KEY, chain("a")).image == "r.io:5001/app:2"
    assert finder(store, registries, "nginx:1").find(KEY, chain("a")).image == "docker.io/library/nginx:1"
    assert registries.asked == []


def test_what_is_no_image_is_passed_over(store: Store, registries: Registries) -> None:
    config = {"containerd.io/gc.ref.content.config": "x", f"{SOURCE}r.io": "app"}
    store.add_manifest({"manifests": []}, config, 9)
    store.add_manifest([], config, 8)
    store.add(["a"], config, 7, b"no configuration of an image")
    store.add(["a", "b"], config, 6, json.dumps({"rootfs": {"diff_ids": [digest(b"tar a")]}}).encode())
    with pytest.raises(NotFound, match="none of 4 manifests"):
        finder(store, registries).find(KEY, chain("a"))
    store.add(["a"], {f"{SOURCE}r.io": "app"}, 1)
    assert finder(store, registries).find(KEY, chain("a")).digest == blob_of("a")


def test_a_configuration_on_its_way_is_looked_for_again(store: Store, registries: Registries) -> None:
    manifest = store.add(["a"], {f"{SOURCE}r.io": "app"})
    config = next(name for name in store.blobs if name != manifest)
    body = store.blobs.pop(config)
    found = finder(store, registries)
    with pytest.raises(NotFound):
        found.find(KEY, chain("a"))
    store.blobs[config] = body
    assert found.find(KEY, chain("a")).digest == blob_of("a")


def test_namespaces(store: Store, registries: Registries) -> None:
    store.add(["a"], {f"{SOURCE}r.io": "app"})
    with pytest.raises(NotFound, match="none of 0 manifests"):
        finder(store, registries).find("default/1/extract-1-x y", chain("a"))
    for key in ("extract-1-x y", "k8s.io/extract-1-x y"):
        with pytest.raises(NotFound, match="no namespace"):
            finder(store, registries).find(key, chain("a"))


def test_a_registry_that_does_not_know_it_is_asked_again(store: Store, registries: Registries) -> None:
    store.add(["a"], {f"{SOURCE}r.io": ","})
    with pytest.raises(NotFound, match="imported"):
        finder(store, registries).find(KEY, chain("a"))
    del store.manifests[:]
    store.add(["a"], {f"{SOURCE}r.io": "app"})
    answers: list[SnapshotterError | str] = [Transient("down"), "r.io/app"]

    def locate(sources: Sequence[Source], manifest: Digest) -> str:
        answer = answers.pop(0)
        if isinstance(answer, SnapshotterError):
            raise answer
        return answer

    found = ImageFinder(cast(Containerd, store), locate)
    with pytest.raises(Transient, match="down"):
        found.find(KEY, chain("a"))
    assert found.find(KEY, chain("a")).image.startswith("r.io/app@")


def test_time_is_bounded(store: Store, registries: Registries) -> None:
    for number in range(20):
        store.add([f"x{number}"], {f"{SOURCE}r.io": "app"}, number)
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0  # as slow a containerd
        return now[0]

    found = ImageFinder(cast(Containerd, store), registries.locate, tuple, clock)
    with pytest.raises(Transient, match="20 manifests could not all be read within 5 s"):
        found.find(KEY, chain("a"))
    assert len(store.reads) < 15


def test_a_containerd_that_is_away(store: Store, registries: Registries) -> None:
    store.failure = Transient("no such socket")
    with pytest.raises(Transient, match="no such socket"):
        finder(store, registries).find(KEY, chain("a"))
