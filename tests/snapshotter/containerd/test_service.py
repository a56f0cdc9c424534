"""The gRPC adapter, through a real socket."""

import errno
import logging
import select
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.field_mask_pb2 import FieldMask

from proto import snapshots_pb2 as pb
from proto import snapshots_pb2_grpc
from snapshotter import errors
from snapshotter.containerd.service import serve
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.listening import bind
from tests.snapshotter.containerd.fake_provider import FakeProvider, digest, layer_labels

Stub = Any  # the generated stubs have no types

A = digest("a")


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "b.sock"


@pytest.fixture
def stub(snapshots: Snapshots, socket_path: Path) -> Iterator[Stub]:
    server = serve(snapshots, bind(socket_path), max_workers=8)
    with grpc.insecure_channel(f"unix://{socket_path}") as channel:
        yield snapshots_pb2_grpc.SnapshotsStub(channel)  # type: ignore[no-untyped-call]  # generated
    server.stop(None).wait(10)


def _code(call: Callable[[Any], object], request: object) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(request)
    error: Any = caught.value
    return error.code(), error.details()


def test_the_whole_life(stub: Stub) -> None:
    (mount,) = stub.Prepare(pb.PrepareSnapshotRequest(snapshotter="s", key="k", labels={"a": "1"})).mounts
    assert (mount.type, list(mount.options), mount.target) == ("bind", ["rw", "rbind"], "")
    info = stub.Stat(pb.StatSnapshotRequest(key="k")).info
    assert (info.name, info.parent, info.kind, dict(info.labels)) == ("k", "", pb.ACTIVE, {"a": "1"})
    assert info.created_at == info.updated_at
    assert info.created_at.nanos % 1000 or info.created_at.ToNanoseconds() > 1_700_000_000 * 10**9
    assert stub.Mounts(pb.MountsRequest(key="k")).mounts == [mount]
    usage = stub.Usage(pb.UsageRequest(key="k"))
    assert usage.inodes == 1
    stub.Commit(pb.CommitSnapshotRequest(name="n", key="k", labels={"b": "2"}))
    (view,) = stub.View(pb.ViewSnapshotRequest(key="v", parent="n")).mounts
    assert list(view.options) == ["ro", "rbind"]
    changed = pb.UpdateSnapshotRequest(
        info=pb.Info(name="n", parent="nonsense", labels={"c": "3", "d": "4"}),
        update_mask=FieldMask(paths=["labels.c"]),
    )
    updated = stub.Update(changed).info
    assert (dict(updated.labels), updated.parent, updated.kind) == ({"b": "2", "c": "3"}, "", pb.COMMITTED)
    assert updated.updated_at.ToNanoseconds() > updated.created_at.ToNanoseconds()
    stub.Remove(pb.RemoveSnapshotRequest(key="v"))
    stub.Remove(pb.RemoveSnapshotRequest(key="n"))
    stub.Cleanup(pb.CleanupRequest())
    assert list(stub.List(pb.ListSnapshotsRequest())) == []


def test_nanoseconds_are_not_rounded(stub: Stub, snapshots: Snapshots) -> None:
    stub.Prepare(pb.PrepareSnapshotRequest(key="k"))
    sent = stub.Stat(pb.StatSnapshotRequest(key="k")).info.created_at.ToNanoseconds()
    assert sent == snapshots.stat("k").created_ns


def test_lazy_layer(stub: Stub, provider: FakeProvider) -> None:
    provider.add(A, {})
    request = pb.PrepareSnapshotRequest(key="x", labels=layer_labels("sha256:c", A))
    assert _code(stub.Prepare, request) == (
        grpc.StatusCode.ALREADY_EXISTS,
        'target snapshot "sha256:c": already exists',
    )
    (message,) = stub.List(
        pb.ListSnapshotsRequest(filters=['labels."containerd.io/snapshot.ref"==sha256:c,parent==""'])
    )
    (info,) = message.info
    assert (info.name, info.kind, dict(info.labels)) == ("sha256:c", pb.COMMITTED, layer_labels("sha256:c", A))


def test_codes_of_the_rules(stub: Stub) -> None:
    stub.Prepare(pb.PrepareSnapshotRequest(key="k"))
    assert _code(stub.Stat, pb.StatSnapshotRequest(key="x"))[0] is grpc.StatusCode.NOT_FOUND
    assert _code(stub.Prepare, pb.PrepareSnapshotRequest(key="k"))[0] is grpc.StatusCode.ALREADY_EXISTS
    assert _code(stub.View, pb.ViewSnapshotRequest(key="v", parent="k"))[0] is grpc.StatusCode.INVALID_ARGUMENT
    stub.Commit(pb.CommitSnapshotRequest(name="n", key="k"))
    stub.Prepare(pb.PrepareSnapshotRequest(key="c", parent="n"))
    code, text = _code(stub.Remove, pb.RemoveSnapshotRequest(key="n"))
    assert code is grpc.StatusCode.FAILED_PRECONDITION and "remove" in text
    code, _ = _code(lambda request: list(stub.List(request)), pb.ListSnapshotsRequest(filters=["name=="]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def _full() -> sqlite3.OperationalError:
    """What SQLite really raises."""
    connection = sqlite3.connect(":memory:")
    try:
        connection.execute("PRAGMA max_page_count = 2")
        connection.execute("CREATE TABLE big (data)")
        connection.execute("INSERT INTO big VALUES (zeroblob(100000))")
    except sqlite3.OperationalError as error:
        return error
    finally:
        connection.close()
    raise AssertionError("there was room")


@pytest.mark.parametrize(
    "error, code",
    [
        (errors.Transient("net"), grpc.StatusCode.UNAVAILABLE),
        (errors.Denied("no"), grpc.StatusCode.PERMISSION_DENIED),
        (errors.UserError("oops"), grpc.StatusCode.FAILED_PRECONDITION),
        (errors.SnapshotterError("other"), grpc.StatusCode.UNKNOWN),
        (OSError(errno.ENOSPC, "No space left on device"), grpc.StatusCode.UNAVAILABLE),
        (OSError(errno.EINVAL, "Invalid argument"), grpc.StatusCode.INTERNAL),
        (_full(), grpc.StatusCode.UNAVAILABLE),
        (sqlite3.OperationalError("near SELEKT: syntax error"), grpc.StatusCode.INTERNAL),
        (ZeroDivisionError("bug"), grpc.StatusCode.INTERNAL),
    ],
)
def test_codes_of_what_the_provider_raises(
    stub: Stub,
    provider: FakeProvider,
    error: Exception,
    code: grpc.StatusCode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    provider.add(A, {})
    _code(stub.Prepare, pb.PrepareSnapshotRequest(key="x", labels=layer_labels("t", A)))
    provider.lose(A)
    provider.failure = error
    got, text = _code(stub.Prepare, pb.PrepareSnapshotRequest(key="c", parent="t"))
    assert got is code and str(error) in text
    traceback_logged = any(record.exc_info and record.levelno == logging.ERROR for record in caplog.records)
    assert traceback_logged == (code is grpc.StatusCode.INTERNAL)
    provider.failure = None
    assert len(stub.Prepare(pb.PrepareSnapshotRequest(key="c", parent="t")).mounts) == 1


def test_list_streams_without_locks(stub: Stub) -> None:
    for number in range(120):
        stub.Prepare(pb.PrepareSnapshotRequest(key=f"{number}"))
    names = []
    for message in stub.List(pb.ListSnapshotsRequest()):
        assert len(message.info) <= 100
        for info in message.info:
            names.append(stub.Stat(pb.StatSnapshotRequest(key=info.name)).info.name)
            stub.Remove(pb.RemoveSnapshotRequest(key=info.name))
    assert names == [str(number) for number in range(120)]


def test_large_messages(stub: Stub) -> None:
    big = {f"label{number}": "x" * 4000 for number in range(2000)}  # 8 MB, twice gRPC's own default
    stub.Prepare(pb.PrepareSnapshotRequest(key="k", labels=big))


def test_many_at_once(stub: Stub, provider: FakeProvider) -> None:
    """Four layers still on their way, and the rest of the service answers."""
    for character in "abcd":
        provider.add(digest(character), {})
    provider.holding.clear()
    with ThreadPoolExecutor(4) as pool:
        calls = [
            pool.submit(_code, stub.Prepare, pb.PrepareSnapshotRequest(key=c, labels=layer_labels(f"t{c}", digest(c))))
            for c in "abcd"
        ]
        for _ in calls:
            assert provider.entered.acquire(timeout=10)
        stub.Prepare(pb.PrepareSnapshotRequest(key="container"), timeout=5)
        provider.holding.set()
        assert {call.result(10)[0] for call in calls} == {grpc.StatusCode.ALREADY_EXISTS}


# --- the socket


def test_only_root_may_connect(stub: Stub, socket_path: Path) -> None:
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    assert [entry.name for entry in socket_path.parent.iterdir()] == [socket_path.name]


def test_calls_wait_for_the_next_server(snapshots: Snapshots, socket_path: Path) -> None:
    """Nobody is refused while one server follows another, and no call is lost to the one that stops."""

    def ask() -> list[object]:
        with grpc.insecure_channel(f"unix://{socket_path}") as channel:
            made: Stub = snapshots_pb2_grpc.SnapshotsStub(channel)  # type: ignore[no-untyped-call]  # generated
            return list(made.List(pb.ListSnapshotsRequest(), timeout=10))

    with bind(socket_path) as kept, ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            server = serve(snapshots, kept.dup(), max_workers=2)
            assert ask() == []
            server.stop(None).wait(10)
            waiting = pool.submit(ask)
            assert select.select([kept], [], [], 10)[0], "it has connected"
            server = serve(snapshots, kept.dup(), max_workers=2)
            assert waiting.result(10) == []
            server.stop(None).wait(10)


def test_workers_end_with_the_server(snapshots: Snapshots, socket_path: Path) -> None:
    server = serve(snapshots, bind(socket_path), max_workers=2)
    with grpc.insecure_channel(f"unix://{socket_path}") as channel:
        made: Stub = snapshots_pb2_grpc.SnapshotsStub(channel)  # type: ignore[no-untyped-call]  # generated
        list(made.List(pb.ListSnapshotsRequest()))
    workers = [thread for thread in threading.enumerate() if thread.name.startswith("snapshots")]
    assert workers
    server.stop(None).wait(10)
    for thread in workers:
        thread.join(10)
        assert not thread.is_alive()
