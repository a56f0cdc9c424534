"""Directories that no web server serves: on a disk, and at a URL of fsspec's."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from blockindex.codec import index_name
from blockindex.hotset import hotset_name
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.model import Digest
from snapshotter.registry import IndexDirectory
from snapshotter.registry import storage as storage_module
from snapshotter.registry.hotdir import FIRST_BYTES, HotDirectory
from snapshotter.registry.storage import LocalStorage, Storage, UrlStorage, check_location, open_storage
from tests.snapshotter.fetch.blobs import PATIENCE_S

DATA = bytes(range(256)) * 40
URL = "memory://bootseer-test-storage"


@pytest.fixture(params=["local", "url"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """One that has `a/b` with DATA in it."""
    if request.param == "local":
        (tmp_path / "a").mkdir()
        (tmp_path / "a/b").write_bytes(DATA)
        yield LocalStorage(tmp_path)
        return
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bootseer-test-storage/a/b", DATA)
    with contextlib.closing(UrlStorage(f"{URL}/", PATIENCE_S)) as storage:
        yield storage
    memory.rm("/bootseer-test-storage", recursive=True)


def test_size_and_ranges(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "_URL_CHUNK", 3000)
    assert storage.size("a/b") == len(DATA)
    assert b"".join(storage.chunks("a/b", 0, len(DATA))) == DATA
    assert b"".join(storage.chunks("a/b", 100, 9000)) == DATA[100:9000]
    assert list(storage.chunks("a/b", 100, 100)) == []


def test_what_is_not_there(storage: Storage) -> None:
    for name in ("a/c", "c"):
        with pytest.raises(NotFound, match=name):
            storage.size(name)


def test_a_file_that_is_shorter_than_it_was(storage: Storage) -> None:
    with pytest.raises(Transient, match="a/b"):
        list(storage.chunks("a/b", 0, len(DATA) + 1))


def test_a_storage_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "size", lambda self, path: go.wait(PATIENCE_S))
    with contextlib.closing(UrlStorage(URL, 0.05)) as storage:
        with pytest.raises(Transient, match="no answer within"):
            storage.size("a/b")
        go.set()


@pytest.mark.parametrize(
    ("raised", "expected"), [(OSError("refused\nby them"), Transient), (ValueError("x"), InvalidArgument)]
)
def test_what_a_storage_raises_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[SnapshotterError]
) -> None:
    def fail(self: object, path: str) -> int:
        raise raised

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "size", fail)
    with contextlib.closing(UrlStorage(URL, PATIENCE_S)) as storage, pytest.raises(expected) as caught:
        storage.size("a/b")
    assert str(caught.value) == f"{URL}/a/b: {' '.join(str(raised).split())}"


def test_indexes_and_hot_sets_at_a_url(caplog: pytest.LogCaptureFixture) -> None:
    layer, key = Digest("sha256:" + "ab" * 32), "sha256:" + "cd" * 32
    pack = DATA * 50
    assert len(pack) > FIRST_BYTES
    memory = fsspec.filesystem("memory")
    memory.pipe_file(f"/bootseer-test-storage/{index_name(layer)}", DATA)
    memory.pipe_file(f"/bootseer-test-storage/{hotset_name(key, 'default')}", pack)
    indexes, hotsets = IndexDirectory(URL, PATIENCE_S), HotDirectory(URL, PATIENCE_S)
    assert indexes.get(layer) == DATA and indexes.get(Digest(key)) is None
    file = hotsets.find(key, "default")
    assert file is not None and file.size == len(pack) and file.first is not None
    with contextlib.closing(file.first) as first:
        assert (first.end, b"".join(first)) == (FIRST_BYTES, pack[:FIRST_BYTES]), "the rest side by side"
    with contextlib.closing(file.stream(FIRST_BYTES, len(pack))) as rest:
        assert b"".join(rest) == pack[FIRST_BYTES:]
    assert hotsets.find(layer, "default") is None and not caplog.records
    memory.rm("/bootseer-test-storage", recursive=True)


@pytest.mark.parametrize("location", ["/x", "x", "file:///x", "file://localhost/x"])
def test_local_locations(location: str) -> None:
    assert isinstance(open_storage(location, 1.0), LocalStorage)


def test_web_servers_have_their_own_way() -> None:
    assert open_storage("https://h.test/x", 1.0) is None


@pytest.mark.parametrize("location", ["nonsense://x", "http://", "file://host/x", "https:///x"])
def test_no_location(location: str) -> None:
    with pytest.raises(InvalidArgument, match=location):
        check_location(location)


def test_without_fsspec_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidArgument, match=r"s3://b/x.*install bootseer\[fsspec\]"):
        check_location("s3://b/x")
    check_location("https://h.test/x")
