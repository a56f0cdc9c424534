"""How many round trips lie between a Prepare and the first byte of the pack, of an index, of a layer: counted.

A registry answers one chain of requests, each when its turn comes, and holds everything else for ever. What is at the
end of the chain comes only if it depends on nothing but the chain. So the chain's length is the number of dependent
round trips, however fast or slow the machine is. (The connection's own, TCP and TLS, come before the first.)
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapshotter.blockstore import LayerRecord
from snapshotter.config import Config, FetchConfig, HotSetConfig, LookupConfig, RegistryConfig, TrustConfig
from snapshotter.fetch.process import FetchProcess
from snapshotter.fetch.sources import Sources
from snapshotter.fuse.ring import Ring
from snapshotter.model import Digest
from snapshotter.registry import Registry, distance, parse_reference
from tests.snapshotter.daemon import Layer, make_layer
from tests.snapshotter.fetch.artifactsite import Site
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.fetch.test_sources import manifest_of
from tests.snapshotter.rangeserver import Action, Behaviour, Hold, RangeServer, Request, TokenGate, redirect

HOT = [(0, 0, 8), (1, 0, 16)]


class Chain:
    """A behaviour: answers requests for these paths in this order, by `then` where that says how, and holds others."""

    def __init__(self, *paths: str, then: Behaviour = lambda request: None) -> None:
        self.done = threading.Event()
        self._left = list(paths)
        self._then = then
        self._go = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, request: Request) -> Action | None:
        if self._go.is_set():
            return self._then(request)
        with self._lock:
            is_next = bool(self._left) and request.path.partition("?")[0] == self._left[0]
            if is_next:
                del self._left[0]
        if not is_next:
            return Hold(-1, self._go)
        if not self._left:
            self.done.set()
        return self._then(request)

    def check(self) -> None:
        """All of it has been asked for; from now on everything is answered."""
        reached = self.done.wait(PATIENCE_S)
        left, self._left = self._left, []
        self._go.set()
        assert reached, f"never asked for, or only after something else: {left}"


class Node:
    """A fetch process without a kernel."""

    def __init__(self, root: Path, site: Site, server: RangeServer) -> None:
        self.site = site
        self.image = f"{server.host}/app:1"
        config = Config(
            root=str(root),
            fetch=FetchConfig(background=False),
            trust=TrustConfig(policy="any"),
            lookup=LookupConfig(timeout_s=PATIENCE_S),
        )
        self.registry = Registry(RegistryConfig(hosts_dir="", docker_config="/nonexistent/config.json"))
        self.sources = Sources(config, self.registry)
        self._memory = Ring.create()
        self._ring = Ring(self._memory)
        self._pipe = os.pipe()
        sources = self.sources
        self.process = FetchProcess(
            config, self._ring, self._pipe[1], -1, sources.indexes, self.registry.blob,
            lambda image: parse_reference(image).api_host, sources.hot, sources.images.layers, sources.refused,
        )  # fmt: skip
        self._callers = ThreadPoolExecutor(4)

    def prepare(self, layers: Sequence[Digest]) -> None:
        """containerd's Prepares of the image, from the bottom up; `layers` are all that it has, as far as labels
        tell."""

        def pull() -> list[str]:
            return [self._ensure(number, layers) for number in range(len(self.site.digests))]

        self.ready = self._callers.submit(pull)

    def _ensure(self, number: int, layers: Sequence[Digest]) -> str:
        digests = self.site.digests
        request = {"image": self.image, "digest": digests[number], "siblings": digests[number:], "layers": list(layers)}
        return str(self.process.ensure(request)["name"])

    def settle(self) -> dict[str, Any]:
        """The one prefetch's status at its end."""
        self.ready.result(PATIENCE_S)
        deadline = time.monotonic() + PATIENCE_S
        while any(row["state"] in ("looking", "streaming") for row in self.process.status({})["prefetches"]):
            assert time.monotonic() < deadline, self.process.status({})["prefetches"]
            time.sleep(0.01)
        [prefetch] = self.process.status({})["prefetches"]
        return dict(prefetch)

    def close(self) -> None:
        self.settle()
        self._callers.shutdown()
        self.process._arrivals.close()
        for fetch in self.process._layers.values():
            fetch.stop_background()
            fetch.close()
        for host in self.process._hosts.values():
            host.close()
        self.sources.close()
        self.registry.close()
        self._ring.close()
        for fd in (self._memory, *self._pipe):
            os.close(fd)


class Bench:
    """A site whose image has both artifacts, and a registry before it."""

    def __init__(self, root: Path, layers: list[Layer]) -> None:
        self.site = Site(layers)
        self.hot, _ = self.site.hot(HOT)
        self.index = self.site.index()
        [self.hot_tag] = self.site.publish(self.hot)
        [self.index_tag] = self.site.publish(self.index)
        self.pack = f"/v2/app/blobs/{self.hot.blobs[1].digest}"
        self.site.files["/v2/app/manifests/1"] = manifest_of(self.site)
        self._root = root

    def count(self, *paths: str, then: Behaviour = lambda request: None, cut: bool = False) -> int:
        """The length of the chain, which is served, and turns out to be all that is needed."""
        with self.site.serve() as server:
            if isinstance(then, TokenGate):
                then.realm = f"{server.url}/token"
            node = Node(self._root, self.site, server)
            server.behaviour = chain = Chain(*paths, then=then)
            try:
                node.prepare([] if cut else self.site.digests)
                chain.check()
                node.close()
            finally:
                chain._go.set()
        return len(paths)


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=4, size=128 << 10, seed=seed) for seed in (1, 2)]


@pytest.fixture
def bench(tmp_path: Path, layers: list[Layer]) -> Iterator[Bench]:
    yield Bench(tmp_path, layers)


def test_to_the_first_byte_of_the_pack(bench: Bench) -> None:
    """The artifact's manifest, which has the head in it; then the pack."""
    assert bench.count(bench.hot_tag, bench.pack) == 2


def test_by_way_of_another_host(bench: Bench, layers: list[Layer]) -> None:
    with RangeServer({"/signed": bench.site.files[bench.pack]}) as store:
        answers = {bench.pack: redirect(f"{store.url}/signed?until=tomorrow")}
        far = Chain("/signed")
        store.behaviour = far
        count = bench.count(bench.hot_tag, bench.pack, then=lambda request: answers.get(request.path))
        far.check()
        assert count + 1 == 3


def test_with_a_token_that_nobody_has_yet(bench: Bench) -> None:
    """The refusal names the token server. The look-up of the index waits for the same token."""
    gate = TokenGate()
    assert bench.count(bench.hot_tag, "/token", bench.hot_tag, bench.pack, then=gate) == 4
    assert gate.issued == 1, "one for all that is asked of the repository"


def test_with_a_token_that_is_there(bench: Bench) -> None:
    gate = TokenGate()
    with bench.site.serve(gate) as server:
        gate.realm = f"{server.url}/token"
        node = Node(bench._root, bench.site, server)
        node.registry.resolve(node.image)
        server.behaviour = chain = Chain(bench.hot_tag, bench.pack, then=gate)
        try:
            node.prepare(bench.site.digests)
            chain.check()
            node.close()
        finally:
            chain._go.set()


def test_where_the_labels_do_not_name_all_layers(bench: Bench) -> None:
    assert bench.count("/v2/app/manifests/1", bench.hot_tag, bench.pack, cut=True) == 3


def test_where_the_head_is_too_long_for_the_manifest(bench: Bench) -> None:
    bench.site.publish(bench.site.headless(bench.hot))
    head = f"/v2/app/blobs/{bench.hot.blobs[0].digest}"
    assert bench.count(bench.hot_tag, head, bench.pack) == 3


def test_to_the_index(bench: Bench) -> None:
    assert bench.count(bench.index_tag, f"/v2/app/blobs/{bench.index.blobs[0].digest}") == 2


def test_indexes_that_are_in_the_manifest_come_with_it(bench: Bench) -> None:
    data = bench.site.indexes
    inline = tuple(replace(blob, data=data[number]) for number, blob in enumerate(bench.index.blobs))
    bench.site.publish(replace(bench.index, blobs=inline))
    with bench.site.serve() as server:
        node = Node(bench._root, bench.site, server)
        server.behaviour = chain = Chain(bench.index_tag)
        try:
            node.prepare(bench.site.digests)
            assert len(node.ready.result(PATIENCE_S)) == 2, "everything else is still held"
            chain.check()
            node.close()
        finally:
            chain._go.set()
        assert not [it for it in server.requests if it.path.endswith(tuple(blob.digest for blob in inline))]


def test_a_layer_without_an_index_streams_after_one_round_trip(bench: Bench) -> None:
    """The look-up's, which also opens the connection and gets the token that the stream needs."""
    del bench.site.files[bench.index_tag]
    assert bench.count(bench.index_tag, bench.site.layers[0].path) == 2


def test_far_away_connections_for_the_pack_are_there_before_the_answer_that_names_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connecting costs the pack no round trip: it goes on beside the look-up's, once that has told how far it is."""
    monkeypatch.setattr(distance, "FAR_S", 1e-9)
    with bench.site.serve() as server:
        node = Node(bench._root, bench.site, server)
        answered = threading.Event()
        server.behaviour = lambda request: Hold(-1, answered) if "/manifests/" in request.path else None
        try:
            node.prepare(bench.site.digests)
            deadline = time.monotonic() + PATIENCE_S
            while server.connections < HotSetConfig().far_streams:
                assert time.monotonic() < deadline, f"only {server.connections} connections"
                time.sleep(0.005)
        finally:
            answered.set()
        prefetch = node.settle()
        node.close()
        assert server.connections == HotSetConfig().far_streams and prefetch["blocks"] == 24


def test_all_of_it_arrives(bench: Bench) -> None:
    """The same without holding anything."""
    with bench.site.serve() as server:
        node = Node(bench._root, bench.site, server)
        node.prepare(bench.site.digests)
        name = node.ready.result(PATIENCE_S)[0]
        prefetch = node.settle()
        node.close()
        record = LayerRecord.load(bench._root / "layers" / name)
        assert record.index_from.startswith(f"{server.host}/app@sha256:")
        assert prefetch["from"].startswith(f"{server.host}/app@sha256:") and prefetch["blocks"] == 24
        assert not [it for it in server.requests if it.path in {layer.path for layer in bench.site.layers}]
