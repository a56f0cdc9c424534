"""The snapshot store."""

import os
import sqlite3
import subprocess
import threading
from pathlib import Path

import pytest

from snapshotter.containerd.metadata import Metadata
from snapshotter.containerd.model import Kind, LazyLayer, Usage
from snapshotter.errors import AlreadyExists, NotFound, UserError
from snapshotter.model import LayerRef
from tests.snapshotter.containerd.fake_provider import digest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


def _lazy(character: str, image: str = "h/a:1") -> LazyLayer:
    own = digest(character)
    return LazyLayer(LayerRef(image, own, (own, digest("f"))), Path("/m") / character)


def test_everything_comes_back_after_reopening(path: Path) -> None:
    store = Metadata(path)
    with store.write() as change:
        base = change.insert("base", None, Kind.COMMITTED, {"k": "v", "ü": "\n"}, _lazy("a"))
        top = change.insert("top", base, Kind.ACTIVE, {})
    store.close()
    store = Metadata(path)
    with store.read() as view:
        assert view.get("base") == base
        assert view.get("top") == top
        assert view.all() == [base, top]
        assert view.parents(top) == [base]
    store.close()
    assert (base.lazy, top.parent, base.labels) == (_lazy("a"), "base", {"k": "v", "ü": "\n"})


def test_a_block_that_raises_changes_nothing(path: Path) -> None:
    store = Metadata(path)
    with pytest.raises(ZeroDivisionError), store.write() as change:
        change.insert("a", None, Kind.ACTIVE, {})
        raise ZeroDivisionError
    with store.read() as view:
        assert view.all() == []
        with pytest.raises(NotFound, match='"a"'):
            view.get("a")
    store.close()


def test_ids_are_never_used_twice(path: Path) -> None:
    store = Metadata(path)
    with store.write() as change:
        first = change.insert("a", None, Kind.ACTIVE, {})
        change.delete(first)
    with store.write() as change:
        assert change.insert("a", None, Kind.ACTIVE, {}).id > first.id
    store.close()


def test_keys_and_names_share_one_space(path: Path) -> None:
    store = Metadata(path)
    with store.write() as change:
        change.insert("taken", None, Kind.COMMITTED, {})
        active = change.insert("key", None, Kind.ACTIVE, {})
        with pytest.raises(AlreadyExists):
            change.insert("taken", None, Kind.VIEW, {})
        with pytest.raises(AlreadyExists):
            change.commit(active, "taken", None, {}, Usage(0, 0))
    store.close()


def test_a_parent_cannot_be_deleted(path: Path) -> None:
    store = Metadata(path)
    with pytest.raises(sqlite3.IntegrityError), store.write() as change:
        parent = change.insert("p", None, Kind.COMMITTED, {})
        change.insert("c", parent, Kind.ACTIVE, {})
        assert change.has_children(parent)
        change.delete(parent)
    store.close()


def test_committed_as_wants_label_kind_and_parent(path: Path) -> None:
    label = "containerd.io/snapshot.ref"
    store = Metadata(path)
    with store.write() as change:
        base = change.insert("ns/1/base", None, Kind.COMMITTED, {label: "chain"})
        change.insert("ns/2/active", None, Kind.ACTIVE, {label: "other"})
        assert change.committed_as(label, "chain", None) == base
        assert change.committed_as(label, "chain", base) is None
        assert change.committed_as(label, "other", None) is None
    store.close()


def test_lazy_lists_each_layer_once(path: Path) -> None:
    store = Metadata(path)
    with store.write() as change:
        change.insert("1", None, Kind.COMMITTED, {}, _lazy("a", "old/image:1"))
        change.insert("2", None, Kind.COMMITTED, {}, _lazy("b"))
        change.insert("3", None, Kind.COMMITTED, {}, _lazy("a", "new/image:1"))
        change.insert("4", None, Kind.COMMITTED, {})
    with store.read() as view:
        assert [snapshot.key for snapshot in view.lazy()] == ["2", "3"]
        assert view.uses_layer(digest("a"))
        assert not view.uses_layer(digest("c"))
    store.close()


def test_readers_go_on_while_a_writer_is_at_work(path: Path) -> None:
    store = Metadata(path)
    seen: list[int] = []

    def read() -> None:
        with store.read() as view:
            seen.append(len(view.all()))

    with store.write() as change:
        change.insert("a", None, Kind.ACTIVE, {})
        reader = threading.Thread(target=read)
        reader.start()
        reader.join(5)
        assert seen == [0]
    read()
    assert seen == [0, 1]
    store.close()


def test_writers_queue_up(path: Path) -> None:
    store = Metadata(path)
    parallel = 8

    def write(number: int) -> None:
        for step in range(5):
            with store.write() as change:
                change.insert(f"{number}.{step}", None, Kind.ACTIVE, {})

    threads = [threading.Thread(target=write, args=(number,)) for number in range(parallel)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    with store.read() as view:
        assert len(view.all()) == parallel * 5
    store.close()


def test_a_store_of_another_version_is_refused(path: Path) -> None:
    Metadata(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(UserError, match="version 9"):
        Metadata(path)


def test_a_store_that_cannot_be_opened_is_refused(path: Path) -> None:
    path.mkdir()
    with pytest.raises(UserError, match="cannot be used"):
        Metadata(path)


@pytest.mark.system
def test_a_store_can_be_opened_while_the_disk_is_full(tmp_path: Path) -> None:
    """A daemon that is restarted then has to serve, or it could not make room."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], check=True)
    try:
        store = Metadata(disk / "metadata.db")
        with store.write() as change:
            base = change.insert("base", None, Kind.COMMITTED, {})
        store.close()
        with (disk / "ballast").open("wb") as ballast, pytest.raises(OSError, match="No space left"):
            for at in range(0, 4 << 20, 4096):
                os.posix_fallocate(ballast.fileno(), at, 4096)
        store = Metadata(disk / "metadata.db")
        with store.read() as view:
            assert view.all() == [base]
        (disk / "ballast").unlink()
        with store.write() as change:
            change.insert("top", base, Kind.ACTIVE, {})
        store.copy()
        store.close()
        assert (disk / "metadata.db.reserve").exists()
    finally:
        subprocess.run(["umount", disk], check=True)
