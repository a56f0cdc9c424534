"""RegistryBlob against a true server that misbehaves: each row of the contract of BlobSource.stream."""

import contextlib
import hashlib
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.registry import Registry, RegistryBlob
from tests.snapshotter.rangeserver import (
    Behaviour,
    Drip,
    Hold,
    IgnoreRange,
    RangeServer,
    Reset,
    ShortRange,
    Status,
    TokenGate,
    Truncate,
    WrongRange,
    in_order,
    redirect,
)

DATA = random.Random(7).randbytes(1_000_003)
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"
PATH = f"/v2/team/app/blobs/{DIGEST}"
CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=0.4)


@contextlib.contextmanager
def serving(
    behaviour: Behaviour | None = None, config: RegistryConfig = CONFIG
) -> Iterator[tuple[RangeServer, RegistryBlob]]:
    with RangeServer({PATH: DATA}, behaviour) as server, contextlib.closing(Registry(config)) as registry:
        yield server, registry.blob(f"{server.host}/team/app:1", DIGEST)


def read(blob: RegistryBlob, start: int, end: int | None) -> bytes:
    return b"".join(blob.stream(start, end))


def test_ranges_and_whole_blob_over_one_connection() -> None:
    with serving() as (server, blob):
        assert read(blob, 0, None) == DATA
        assert read(blob, 100, 70_000) == DATA[100:70_000]
        assert read(blob, 999_000, None) == DATA[999_000:]
        assert read(blob, 0, len(DATA)) == DATA
        assert read(blob, 5, 5) == b""
        assert server.ranges() == [None, (100, 70_000), (999_000, None), (0, len(DATA))]
        assert server.connections == 1
        assert {request.headers["Accept-Encoding"] for request in server.requests} == {"identity"}


def test_chunks_come_as_they_arrive() -> None:
    gate = threading.Event()
    with serving(in_order([Hold(after=1000, until=gate)])) as (_, blob):
        stream = blob.stream(0, 50_000)
        first = next(stream)  # would stall until the time-out if a buffer had to be full
        assert first == DATA[: len(first)] and 0 < len(first) <= 1000
        gate.set()
        assert first + b"".join(stream) == DATA[:50_000]


@pytest.mark.parametrize("chunked", [False, True])
def test_ignored_range_is_skipped_to(chunked: bool) -> None:
    with serving(in_order([IgnoreRange(chunked), IgnoreRange(chunked)])) as (_, blob):
        assert not blob.ranges_ignored
        assert read(blob, 300_000, 400_000) == DATA[300_000:400_000]
        assert blob.ranges_ignored
        assert read(blob, 900_000, None) == DATA[900_000:]


def test_connection_of_an_abandoned_stream_is_not_reused() -> None:
    with serving() as (server, blob):
        stream = blob.stream(0, None)
        next(stream)
        stream.close()
        stream.close()
        assert read(blob, 10, 20) == DATA[10:20]
        assert server.connections == 2


FAILURES: dict[str, tuple[object, type[SnapshotterError], str]] = {
    "truncated": (Truncate(5000), Transient, "short body"),
    "truncated before the answer": (Truncate(-1), Transient, "at 127.0.0.1"),
    "reset": (Reset(5000), Transient, "reset"),
    "reset before the answer": (Reset(-1), Transient, "reset"),
    "stalled": (Hold(5000), Transient, "stalled"),
    "stalled before the answer": (Hold(-1), Transient, "stalled"),
    "drips": (Drip(0.03), Transient, r"stalled: "),
    "another range": (WrongRange(1), Transient, "another range: bytes 101-"),
    "short range": (ShortRange(500), Transient, "short body after 500 bytes"),
    "no content-range": (Status(206, {}, b"x" * 10), Transient, "without a usable Content-Range"),
    "416 in range": (Status(416), Transient, "416"),
    "429": (Status(429, {"Retry-After": "7"}), Transient, "429"),
    "503": (Status(503), Transient, "503"),
    "400": (Status(400), InvalidArgument, "400"),
    "401 without challenge": (Status(401), Denied, "401"),
    "403": (Status(403), Denied, "403"),
    "404": (Status(404), NotFound, "404"),
    "redirect to a file": (redirect("file:///etc/passwd"), InvalidArgument, "neither http nor https"),
    "garbage location": (redirect("http://[::bad/"), SnapshotterError, "layer"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failure_is_typed_and_named(name: str) -> None:
    action, kind, words = FAILURES[name]
    with serving(in_order([action])) as (server, blob):  # type: ignore[list-item]  # the table mixes actions
        stream = blob.stream(100, 20_000)
        got = bytearray()
        with pytest.raises(kind, match="layer " + DIGEST) as caught:
            for chunk in stream:
                got += chunk
        assert words in str(caught.value) and "bytes [100, 20000)" in str(caught.value)
        assert got == DATA[100 : 100 + len(got)]
        assert len(server.requests) == 1, "no retry of its own"
        assert read(blob, 100, 20_000) == DATA[100:20_000], "and the next call works"


def test_retry_after_reaches_the_caller() -> None:
    with serving(in_order([Status(429, {"Retry-After": "7"}), Status(503)])) as (_, blob):
        with pytest.raises(Transient) as caught:
            read(blob, 0, 10)
        assert caught.value.retry_after_s == 7.0
        with pytest.raises(Transient) as caught:
            read(blob, 0, 10)
        assert caught.value.retry_after_s is None


def test_range_beyond_the_end_names_the_size() -> None:
    with serving() as (_, blob):
        with pytest.raises(InvalidArgument, match="1000003 bytes"):
            read(blob, len(DATA), len(DATA) + 10)
        with pytest.raises(Transient, match="short body after 3 bytes"):
            read(blob, len(DATA) - 3, len(DATA) + 10)


def test_nobody_listens() -> None:
    with serving() as (server, blob):
        server.close()
        with pytest.raises(Transient, match=f"bytes .0, 10. at {server.host}: .*refused"):
            read(blob, 0, 10)


_ASK = f"""
import socket
from snapshotter.config import RegistryConfig
from snapshotter.errors import Transient
from snapshotter.registry import Registry
registry = Registry(RegistryConfig(connect_timeout_s=60.0))
for server in (None, socket.socket(socket.AF_INET, socket.SOCK_DGRAM)):
    if server:
        server.bind(("127.0.0.1", 53))
    try:
        next(registry.blob("registry.test/team/app:1", "{DIGEST}").stream(0, 10))
    except Transient as error:
        print(error)
"""


@pytest.mark.system
def test_a_name_server_that_is_down_or_silent(tmp_path: Path) -> None:
    """It takes what resolv.conf allows, whatever our time-outs are."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    setup = f"ip link set lo up && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    inside = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", f'{setup} && exec "$@"', "sh"]
    done = subprocess.run([*inside, sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=50)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line in lines:
        assert "bytes [0, 10) at registry.test: " in line and "Temporary failure in name resolution" in line


def test_dead_kept_alive_connections_are_replaced_silently() -> None:
    drop = False

    def behaviour(request: object) -> Truncate | None:
        return Truncate(-1) if drop and server.connections <= before else None

    with serving(behaviour) as (server, blob):
        read(blob, 0, 10)
        before, drop = server.connections, True
        assert read(blob, 50, 60) == DATA[50:60]
        assert server.connections == before + 1
        server.drop_connections()
        assert read(blob, 70, 80) == DATA[70:80]


def test_fresh_connection_that_dies_is_not_retried() -> None:
    with serving(lambda request: Truncate(-1)) as (server, blob):
        with pytest.raises(Transient):
            read(blob, 0, 10)
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_followed_cached_and_gets_no_authorization(status: int) -> None:
    with RangeServer({"/signed": DATA}) as storage:
        gate = TokenGate(lambda request: redirect(f"{storage.url}/signed?sig=1", status))
        with serving(gate) as (server, blob):
            gate.realm = f"{server.url}/token"
            assert read(blob, 0, 10) == DATA[:10]
            assert read(blob, 20, 30) == DATA[20:30]
            assert [r.method for r in storage.requests] == ["GET", "GET"]
            assert all("Authorization" not in r.headers for r in storage.requests)
            blobs = [r for r in server.requests if r.path == PATH]
            assert [r.headers.get("Authorization") for r in blobs] == [None, "Bearer t1"], "second read went direct"
            assert server.connections == 1


def test_authorization_does_not_come_back_after_a_detour() -> None:
    with RangeServer({}) as storage, serving() as (server, blob):
        gate = TokenGate(lambda request: redirect(f"{storage.url}/away"), expires_in=300)
        gate.realm = f"{server.url}/token"
        storage.behaviour = lambda request: redirect(f"{server.url}/back")
        server.behaviour = lambda request: None if request.path == "/back" else gate(request)
        server.blobs["/back"] = DATA
        assert read(blob, 0, 10) == DATA[:10]
        assert "Authorization" not in server.requests[-1].headers and server.requests[-1].path == "/back"


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_refused_location_is_resolved_again_once(status: int) -> None:
    with (
        RangeServer({"/signed": DATA}) as storage,
        serving(lambda request: redirect(f"{storage.url}/signed")) as (server, blob),
    ):
        read(blob, 0, 10)
        storage.behaviour = in_order([Status(status)])
        assert read(blob, 10, 20) == DATA[10:20]
        assert len(server.requests) == 2 and len(storage.requests) == 3
        storage.behaviour = lambda request: Status(status)
        with pytest.raises(SnapshotterError, match=str(status)):
            read(blob, 10, 20)
        assert len(server.requests) == 3


@pytest.mark.parametrize("action", [Status(503), Reset(3), Truncate(3)])
def test_failing_location_is_forgotten(action: object) -> None:
    with (
        RangeServer({"/signed": DATA}) as storage,
        serving(lambda request: redirect(f"{storage.url}/signed")) as (server, blob),
    ):
        read(blob, 0, 10)
        storage.behaviour = in_order([action])  # type: ignore[list-item]  # one of three actions
        with pytest.raises(Transient):
            read(blob, 10, 20)
        assert read(blob, 10, 20) == DATA[10:20]
        assert len(server.requests) == 2


def test_endless_redirect_ends() -> None:
    with serving() as (server, blob):
        server.behaviour = lambda request: redirect(server.url + request.path)
        with pytest.raises(Transient, match="more than 5 redirects"):
            read(blob, 0, 10)
        assert len(server.requests) == 6


def test_size_by_head_by_range_and_from_an_answer() -> None:
    with serving() as (server, blob):
        assert blob.size() == len(DATA)
        assert blob.size() == len(DATA)
        assert [r.method for r in server.requests] == ["HEAD"]
    for refusal in (Status(405), Status(403), Status(501), Status(404)):
        with serving(in_order([refusal])) as (server, blob):
            assert blob.size() == len(DATA)
            assert server.requests[-1].range == (0, 1) and server.connections == 1
    with serving() as (server, blob):
        read(blob, 5, 6)
        assert blob.size() == len(DATA) and len(server.requests) == 1
    with serving(lambda request: Status(404)) as (_, blob), pytest.raises(NotFound):
        blob.size()
    with serving(lambda request: Status(503)) as (_, blob), pytest.raises(Transient):
        blob.size()


def test_close_wakes_a_blocked_reader() -> None:
    config = replace(CONFIG, read_timeout_s=30.0)
    with serving(in_order([Hold(after=1000)]), config) as (_, blob):
        stream = blob.stream(0, 50_000)
        while sum(map(len, [next(stream)])) < 1000 and stream._given < 1000:
            pass
        outcome: list[BaseException] = []

        def reader() -> None:
            try:
                next(stream)
            except BaseException as exc:
                outcome.append(exc)

        thread = threading.Thread(target=reader)
        thread.start()
        while not thread.is_alive():
            time.sleep(0.001)
        started = time.monotonic()
        stream.close()
        thread.join(5)
        assert time.monotonic() - started < 2
        assert isinstance(outcome[0], (Transient, StopIteration)), outcome


def test_connections_per_host_are_bounded_and_freed() -> None:
    config = replace(CONFIG, connections_per_host=2, connect_timeout_s=0.1, read_timeout_s=0.2)
    with serving(config=config) as (_, blob):
        streams = [blob.stream(0, None) for _ in range(2)]
        for stream in streams:
            next(stream)
        with pytest.raises(Transient, match="all 2 connections"):
            read(blob, 0, 10)
        streams[0].close()
        assert read(blob, 0, 10) == DATA[:10]
        streams[1].close()


def test_nonsense_ranges_are_refused() -> None:
    with serving() as (_, blob):
        for start, end in ((-1, 5), (5, 4)):
            with pytest.raises(InvalidArgument, match="not a range"):
                blob.stream(start, end)


CALLS: list[Callable[[Registry, str], object]] = [
    lambda registry, ref: registry.blob("UPPER", DIGEST),
    lambda registry, ref: registry.blob(ref, "sha256:short"),
]


@pytest.mark.parametrize("call", CALLS)
def test_bad_names_are_refused_before_any_request(call: Callable[[Registry, str], object]) -> None:
    with contextlib.closing(Registry(CONFIG)) as registry, pytest.raises(InvalidArgument):
        call(registry, "127.0.0.1:1/app")
