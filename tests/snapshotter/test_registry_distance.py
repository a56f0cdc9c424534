"""Far hosts: what the kernel says of a round trip, connections opened ahead, and who waits for them."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import InvalidArgument
from snapshotter.registry import Registry, distance
from snapshotter.registry.distance import Distances, is_far, round_trip_s
from snapshotter.registry.places import Places
from tests.snapshotter.certificates import Authority
from tests.snapshotter.rangeserver import Action, Hold, RangeServer, Request, redirect

CONFIG = RegistryConfig(connect_timeout_s=5.0, read_timeout_s=5.0, hosts_dir="", docker_config="/nonexistent")
DIGEST = "sha256:" + "ab" * 32
PATH = f"/v2/app/blobs/{DIGEST}"
MANIFEST = "/v2/app/manifests/1"
DATA = bytes(range(256)) * 40
PATIENCE_S = 10.0
ORIGIN = ("http", "registry.test", 80)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything whose round trip was measured is far."""
    monkeypatch.setattr(distance, "FAR_S", 1e-9)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "does not happen"
        time.sleep(0.002)


# -- distances ---------------------------------------------------------------------------------------------------------


def test_the_kernel_says_how_long_a_round_trip_takes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        assert 0 < round_trip_s(client) < 0.04
    assert round_trip_s(client) == 0.0, "closed"
    left, right = socket.socketpair()
    with left, right:
        assert round_trip_s(left) == 0.0, "no TCP"


def test_the_shortest_round_trip_counts() -> None:
    distances = Distances()
    distances.note(ORIGIN, 0.0)
    assert not distances.is_known(ORIGIN) and distances.round_trip_s(ORIGIN) == 0.0
    distances.note(ORIGIN, 0.2)
    assert is_far(distances.round_trip_s(ORIGIN))
    distances.note(ORIGIN, 0.039)
    distances.note(ORIGIN, 0.3)
    assert distances.is_known(ORIGIN) and not is_far(distances.round_trip_s(ORIGIN))
    assert not distances.is_known(("https", *ORIGIN[1:])) and "0.039" in repr(distances)


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def places() -> Places:
    """Four, as urllib3 makes them."""
    made = Places(4)
    for _ in range(4):
        made.put(None)
    return made


def test_busy_ones_and_those_on_their_way_count(places: Places) -> None:
    assert places.get() is None, "busy"
    assert places.reserve(3) == 2 and places.reserve(3) == 0
    assert repr(places) == "<Places 1 of 4 not busy, 2 being opened>"
    places.opened("first")
    places.opened(None)
    assert [places.get() for _ in range(3)] == ["first", None, None]


def test_no_more_than_there_are(places: Places) -> None:
    assert places.reserve(9) == 4 and places.reserve(9) == 0
    for number in range(4):
        places.opened(number)
    assert places.reserve(9) == 0, "all have one"


def test_an_idle_one_is_not_waited_for(places: Places) -> None:
    assert places.reserve(1) == 1
    places.get()
    places.put("idle")
    places.wait(PATIENCE_S)
    assert places.get() == "idle"
    places.opened(None)


def test_as_many_wait_as_are_on_their_way(places: Places) -> None:
    assert places.reserve(1) == 1
    waiter = threading.Thread(target=places.wait, args=(PATIENCE_S,))
    waiter.start()
    until(lambda: places._waiting)
    places.wait(PATIENCE_S)  # returns: the one that comes is the other's
    assert waiter.is_alive()
    places.opened("new")
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and places.get() == "new"


def test_one_that_does_not_come_is_waited_for_only_so_long(places: Places) -> None:
    assert places.reserve(1) == 1
    places.wait(0.01)
    waiter = threading.Thread(target=places.wait, args=(PATIENCE_S,))
    waiter.start()
    until(lambda: places._waiting)
    places.opened(None)
    waiter.join(PATIENCE_S)
    assert not waiter.is_alive() and places.get() is None


# -- connections -------------------------------------------------------------------------------------------------------


class Held:
    """A behaviour: holds requests for manifests until `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def __call__(self, request: Request) -> Action | None:
        return Hold(-1, self.go) if "/manifests/" in request.path else None


@contextlib.contextmanager
def opened(server: RangeServer, config: RegistryConfig = CONFIG) -> Iterator[Registry]:
    registry = Registry(config)
    try:
        yield registry
    finally:
        registry.close()


def read(registry: Registry, server: RangeServer, number: int = 0) -> bytes:
    return b"".join(registry.blob(f"{server.host}/app:1", DIGEST).stream(number, number + 100))


def look_up(registry: Registry, server: RangeServer) -> None:
    with contextlib.suppress(InvalidArgument):  # the manifest is empty
        registry.resolve(f"{server.host}/app:1")


@pytest.mark.parametrize("tls", [False, True])
def test_connections_are_opened_beside_the_first_request(
    far: None, tls: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They are there before its answer, take the requests that follow, and no more are opened."""
    held, config, context = Held(), CONFIG, None
    if tls:
        authority = Authority(tmp_path_factory.mktemp("ca"))
        context = authority.server("127.0.0.1")
        hosts = tmp_path_factory.mktemp("certs.d")
        config = replace(config, hosts_dir=str(hosts))
    with RangeServer({PATH: DATA, MANIFEST: b"{}"}, held, tls=context) as server, ThreadPoolExecutor(8) as pool:
        if tls:
            (hosts / server.host).mkdir()
            (hosts / server.host / "hosts.toml").write_text(f'server = "{server.url}"\nca = "{authority.ca}"\n')
        with opened(server, config) as registry:
            registry.expect(f"{server.host}/app:1", 5)
            early = server.connections
            assert early == 0, "the first one tells how far the host is"
            asked = pool.submit(look_up, registry, server)
            until(lambda: server.connections == 5)
            assert not server.ranges()[1:], "nothing is asked for by them"
            got = list(pool.map(lambda number: read(registry, server, number), range(4)))
            held.go.set()
            asked.result(PATIENCE_S)
            assert got == [DATA[number : number + 100] for number in range(4)]
            assert server.connections == 5


def test_none_are_opened_to_a_host_that_is_near() -> None:
    with RangeServer({PATH: DATA}) as server, opened(server) as registry:
        registry.expect(f"{server.host}/app:1", 5)
        assert read(registry, server) == DATA[:100]
        assert not is_far(registry.blob(f"{server.host}/app:1", DIGEST).round_trip_s())
        registry.expect(f"{server.host}/app:1", 5)
        assert server.connections == 1


def test_no_more_than_may_be_under_way(far: None) -> None:
    with RangeServer({PATH: DATA}) as server, opened(server, replace(CONFIG, connections_per_host=3)) as registry:
        assert read(registry, server) == DATA[:100]
        registry.expect(f"{server.host}/app:1", 64)
        until(lambda: server.connections == 3)
        assert read(registry, server) == DATA[:100] and server.connections == 3
        registry.expect(f"{server.host}/app:1", 64)
        assert not any("connect-" in thread.name for thread in threading.enumerate()), "they are there"


def test_one_that_was_closed_before_it_was_used_is_no_failure(far: None) -> None:
    """As any kept-alive connection: the request is made again, over another."""
    with RangeServer({PATH: DATA}) as server, opened(server) as registry:
        assert read(registry, server) == DATA[:100]
        registry.expect(f"{server.host}/app:1", 2)
        until(lambda: server.connections == 2)
        pool = next(iter(pools(registry)))
        until(lambda: pool.pool.queue[-1] is not None and pool.pool.queue[-2] is not None)
        for connection in pool.pool.queue[-2:]:
            connection.sock.shutdown(socket.SHUT_RD)  # as if the other side had gone, unnoticed until it is read from
        assert read(registry, server) == DATA[:100]


def test_where_nobody_answers_nothing_is_said_and_nothing_is_left(far: None) -> None:
    with RangeServer({PATH: DATA}) as server, opened(server) as registry:
        assert read(registry, server) == DATA[:100]
        host = server.host
    with opened(server) as registry:
        registry.transport._adapter.distances.note(("http", "127.0.0.1", int(host.rpartition(":")[2])), 0.1)
        registry.expect(f"{host}/app:1", 3)
        pool = next(iter(pools(registry)))
        until(lambda: pool.pool._opening == 0)
        assert pool.pool.queue == [None] * CONFIG.connections_per_host
        registry.expect("no image:at all", 3)


def test_a_blob_elsewhere_is_as_far_as_that_host(far: None) -> None:
    with RangeServer({"/data": DATA}) as store, RangeServer({}) as server, opened(server) as registry:
        server.behaviour = lambda request: redirect(f"{store.url}/data")
        blob = registry.blob(f"{server.host}/app:1", DIGEST)
        assert blob.round_trip_s() == 0.0, "nothing is known yet"
        assert b"".join(blob.stream(0, 100)) == DATA[:100]
        assert is_far(blob.round_trip_s())
        distances = registry.transport._adapter.distances
        assert len(distances._known) == 2
        distances._known[("http", "127.0.0.1", int(store.host.rpartition(":")[2]))] = -1.0
        assert not is_far(blob.round_trip_s()) and is_far(registry.round_trip_s(blob._image))


def test_behind_a_proxy_nobody_is_far(far: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy's distance says nothing of the registry's."""
    with RangeServer({}) as proxy:
        proxy.behaviour = lambda request: None
        proxy.blobs[f"http://registry.test{PATH}"] = DATA
        proxy.blobs[PATH] = DATA
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("http_proxy", proxy.url)
        with opened(proxy, replace(CONFIG, plain_http=("registry.test",))) as registry:
            registry.expect("registry.test/app:1", 5)
            blob = registry.blob("registry.test/app:1", DIGEST)
            assert b"".join(blob.stream(0, 100)) == DATA[:100]
            registry.expect("registry.test/app:1", 5)
            assert blob.round_trip_s() == 0.0 and proxy.connections == 1


def test_the_close_of_all_ends_those_that_come_late(far: None, tmp_path: Path) -> None:
    with RangeServer({PATH: DATA}) as server:
        registry = Registry(CONFIG)
        assert read(registry, server) == DATA[:100]
        pool = next(iter(pools(registry)))
        places = pool.pool
        assert places.reserve(2) == 1
        registry.close()
        pool._open(places)
        assert places.queue[-1].sock is None, "closed"


def pools(registry: Registry) -> list:  # type: ignore[type-arg]  # urllib3's are not typed so far
    manager = registry.transport._adapter.poolmanager
    return [manager.pools[key] for key in manager.pools.keys()]  # noqa: SIM118  # no mapping, see `connections`
