"""Directories that no web server serves: on a disk, and at a URL of fsspec's."""

import contextlib
import io
import random
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from blockindex.codec import index_name
from blockindex.hotpack import Codec, write_pack
from blockindex.hotset import HotLayer, from_touches, hotset_name
from blockindex.model import BLOCK
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
    assert [storage.first("a/b", size) for size in (100, len(DATA), 2 * len(DATA))] == [DATA[:100], DATA, DATA]


def test_what_is_not_there(storage: Storage) -> None:
    for name in ("a/c", "c"):
        for ask in (storage.size, lambda name: storage.first(name, 5)):
            with pytest.raises(NotFound, match=name):
                ask(name)


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


_HANGS = """
import contextlib, threading, fsspec
from snapshotter.errors import Transient
from snapshotter.registry.storage import UrlStorage

type(fsspec.filesystem("memory")).size = lambda self, path: threading.Event().wait()
with contextlib.suppress(Transient), contextlib.closing(UrlStorage("memory://x", 0.05)) as storage:
    storage.size("a")
"""


@pytest.mark.timeout(60)
def test_a_storage_that_hangs_keeps_no_program_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS], capture_output=True, text=True, timeout=45, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_more_calls_at_once_than_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(storage_module, "_THREADS", 1)
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "size", lambda self, path: go.wait(PATIENCE_S) and 5)
    with contextlib.closing(UrlStorage(URL, 0.05)) as storage:
        for words in ("no answer within", "are waited for already"):
            with pytest.raises(Transient, match=words):
                storage.size("a/b")
        go.set()
        while True:
            with contextlib.suppress(Transient):
                assert storage.size("a/b") == 5, "a thread that comes back can be used again"
                break
    with pytest.raises(Transient, match="not asked any more"):
        storage.size("a/b")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (OSError("refused\nby them"), Transient),
        (socket.gaierror(-2, "Name or service not known"), Transient),
        (EOFError(), Transient),
        (KeyError("a"), Transient),
        (ValueError("x"), InvalidArgument),
        (ImportError("Install s3fs"), InvalidArgument),
    ],
)
def test_what_a_storage_raises_becomes_one_line(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: type[SnapshotterError]
) -> None:
    def fail(self: object, path: str) -> int:
        raise raised

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "size", fail)
    with contextlib.closing(UrlStorage(URL, PATIENCE_S)) as storage, pytest.raises(expected) as caught:
        storage.size("a/b")
    assert str(caught.value) == f"{URL}/a/b: {' '.join(str(raised).split()) or type(raised).__name__}"


def test_a_storage_that_does_not_tell_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "size", lambda self, path: None)
    with contextlib.closing(UrlStorage(URL, PATIENCE_S)) as storage, pytest.raises(InvalidArgument, match="size"):
        storage.size("a/b")


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/a", "reference://a", "zip://a", "data://a"])
def test_a_url_whose_storage_does_not_even_open(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens at port 1, and the others need more than a URL: each raises something else from the start."""
    monkeypatch.chdir(tmp_path)
    with (
        contextlib.closing(IndexDirectory(url, PATIENCE_S)) as indexes,
        contextlib.closing(HotDirectory(url, PATIENCE_S)) as hotsets,
    ):
        assert indexes.get(Digest("sha256:" + "ab" * 32)) is None
        assert hotsets.find("sha256:" + "cd" * 32, "default") is None
        for ask in (
            lambda: indexes.read(Digest("sha256:" + "ab" * 32)),
            lambda: hotsets.open("sha256:" + "cd" * 32, "default"),
        ):
            with pytest.raises(SnapshotterError, match=f"^{url}/[^\n]+: [^\n]+$"):
                ask()
    assert [it.getMessage().split()[:2] for it in caplog.records] == [
        ["indexdir.failed", f"location={url}"],
        ["hotdir.failed", f"location={url}"],
    ]
    assert not any("\n" in it.getMessage() or it.exc_info for it in caplog.records)


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


def packed(blocks: int) -> bytes:
    """A hot pack of this many blocks that do not compress."""
    layer = HotLayer("sha256:" + "ab" * 32, blocks, "sha256:" + "00" * 32)
    hotset = from_touches([layer], [(0, 0, blocks, 0)])
    out = io.BytesIO()
    noise = random.Random(blocks).randbytes(blocks * BLOCK)
    write_pack(hotset, lambda extent: noise[extent.start * BLOCK : extent.end * BLOCK], Codec.NONE, out)
    return out.getvalue()


@pytest.mark.parametrize(
    ("file", "questions"),
    [(None, ["cat"]), (packed(2), ["cat"]), (packed(200), ["cat"]), (bytes(2 * FIRST_BYTES), ["cat", "size"])],
    ids=["none", "in the first bytes", "that goes on", "damaged"],
)
def test_what_finding_a_hot_set_at_a_url_asks(
    file: bytes | None, questions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = fsspec.filesystem("memory")
    key = "sha256:" + "cd" * 32
    if file is not None:
        memory.pipe_file(f"/bootseer-test-storage/{hotset_name(key, 'default')}", file)
    asked = counted(monkeypatch)
    with contextlib.closing(HotDirectory(URL, PATIENCE_S)) as hotsets:
        found = hotsets.find(key, "default")
    assert asked == questions
    assert (found.size if found is not None else None) == (len(file) if file is not None else None)
    if file is not None:
        memory.rm("/bootseer-test-storage", recursive=True)


@pytest.mark.parametrize(("size", "questions"), [(5, ["cat"]), (9_000_000, ["cat", "size", "cat"])])
def test_what_an_index_at_a_url_asks(size: int, questions: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = fsspec.filesystem("memory")
    layer, body = Digest("sha256:" + "ab" * 32), random.Random(size).randbytes(size)
    memory.pipe_file(f"/bootseer-test-storage/{index_name(layer)}", body)
    asked = counted(monkeypatch)
    with contextlib.closing(IndexDirectory(URL, PATIENCE_S)) as indexes:
        assert indexes.get(layer) == body
    assert asked == questions
    memory.rm("/bootseer-test-storage", recursive=True)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the storage `memory` is asked from here on."""
    asked: list[str] = []
    memory = type(fsspec.filesystem("memory"))

    def noting(what: str, call: Callable[..., object]) -> Callable[..., object]:
        def noted(*args: object, **more: object) -> object:
            asked.append(what)
            return call(*args, **more)

        return noted

    monkeypatch.setattr(memory, "cat_file", noting("cat", memory.cat_file))
    monkeypatch.setattr(memory, "size", noting("size", memory.size))
    return asked


@pytest.mark.parametrize("location", ["/x", "x", "file:///x", "file://localhost/x"])
def test_local_locations(location: str) -> None:
    assert isinstance(open_storage(location, 1.0), LocalStorage)


def test_web_servers_have_their_own_way() -> None:
    assert open_storage("https://h.test/x", 1.0) is None


@pytest.mark.parametrize(
    "location", ["nonsense://x", "S3://x", "http://", "file://host/x", "https:///x", "http://[::1", "x://[x", "://x"]
)
def test_no_location(location: str) -> None:
    for check in (check_location, lambda text: open_storage(text, 1.0)):
        with pytest.raises(InvalidArgument, match=re.escape(location)):
            check(location)


@pytest.mark.parametrize("scheme", ["ftp", "http", "nonsense"])
def test_passwords_in_urls_are_not_told(scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody listens at port 1."""
    url = f"{scheme}://me:secret@127.0.0.1:1/a"
    try:
        directories = IndexDirectory(url, PATIENCE_S), HotDirectory(url, PATIENCE_S)
    except InvalidArgument as error:
        assert "secret" not in str(error) and "me:***@127.0.0.1" in str(error)
        return
    indexes, hotsets = directories
    with contextlib.closing(indexes), contextlib.closing(hotsets):
        assert indexes.get(Digest("sha256:" + "ab" * 32)) is None
        assert hotsets.find("sha256:" + "cd" * 32, "default") is None
        assert "secret" not in f"{indexes!r} {hotsets!r} {indexes.location}"
    assert "secret" not in caplog.text and caplog.text.count("me:***@127.0.0.1") >= 2


def test_no_location_of_the_systems() -> None:
    with pytest.raises(InvalidArgument, match="byte 0"):
        open_storage("/x\0y", 1.0)


def test_a_storage_whose_module_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(protocol: str) -> None:
        raise AttributeError("module 'aiohttp' has\nno attribute 'x'")

    monkeypatch.setattr(fsspec, "get_filesystem_class", broken)
    with pytest.raises(InvalidArgument, match=r"^directory 's3://b': module 'aiohttp' has no attribute 'x'$"):
        check_location("s3://b")


def test_without_fsspec_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InvalidArgument, match=r"s3://b/x.*install bootseer\[fsspec\]"):
        check_location("s3://b/x")
    check_location("https://h.test/x")
