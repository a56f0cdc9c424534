"""A damaged snapshot store: what of it comes back, and that nothing of it is thrown away."""

import os
import random
import sqlite3
from collections.abc import Iterator, Set
from contextlib import closing
from pathlib import Path

import pytest

from snapshotter.containerd import salvage
from snapshotter.containerd.metadata import Metadata
from snapshotter.containerd.model import Kind, LazyLayer, Snapshot
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import NotFound
from snapshotter.model import LayerRef
from tests.snapshotter.containerd.fake_provider import FakeProvider, digest

PAGE = 4096
ROWS = 200


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What was made anew is said, in one line each time."""
    yield
    for record in caplog.records:
        assert record.getMessage().split()[0] in ("snapshots.rebuilt", "snapshots.lost", "snapshots.damaged")
    caplog.clear()


def _fill(path: Path, copy: bool = False) -> list[Snapshot]:
    """A store of chains of five snapshots each, most of them lazy."""
    store = Metadata(path)
    parent = None
    with store.write() as change:
        for number in range(ROWS):
            parent = parent if number % 5 else None
            own = digest(f"{number % 10}")
            lazy = LazyLayer(LayerRef("h/a:1", own, (own,)), Path("/m") / str(number)) if number % 3 else None
            parent = change.insert(f"default/{number}/chain", parent, Kind.COMMITTED, {"label": "x" * 60}, lazy)
    if copy:
        store.copy()
    with store.read() as view:
        rows = view.all()
    store.close()
    return rows


def _rows(path: Path) -> list[Snapshot]:
    store = Metadata(path)
    with store.read() as view:
        rows = view.all()
    store.close()
    return rows


def _overwrite(path: Path, page: int, data: bytes = b"") -> None:
    with path.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(data or random.Random(page).randbytes(PAGE))


def _table_pages(path: Path) -> int:
    return path.stat().st_size // PAGE


def test_a_sound_store_is_left_alone(path: Path) -> None:
    rows = _fill(path, copy=True)
    assert salvage.damage(path) == ""
    assert _rows(path) == rows
    names = ["metadata.db", "metadata.db.copy", "metadata.db.reserve"]
    assert sorted(it.name for it in path.parent.iterdir()) == names


@pytest.mark.parametrize("page", range(12))
def test_rows_on_other_pages_come_back(path: Path, page: int) -> None:
    """Any one page is gone. Without the first, which says what is where, nothing can be read."""
    rows = _fill(path)
    assert _table_pages(path) > 12
    before = path.read_bytes()
    _overwrite(path, page)
    damaged = path.read_bytes()
    assert salvage.damage(path)
    left = _rows(path)
    assert all(row in rows for row in left) and {row.parent for row in left} <= {"", *(row.key for row in left)}
    assert len(left) >= (0 if page < 2 else ROWS - 40), "a page holds up to 20 rows, and each has up to 4 upon it"
    [aside] = [it for it in path.parent.glob("*.damaged-*") if not it.name.endswith(("-wal", "-shm"))]
    assert aside.read_bytes() == damaged != before
    assert salvage.damage(path) == ""


def test_what_cannot_be_read_comes_from_the_copy(path: Path) -> None:
    rows = _fill(path, copy=True)
    for page in range(_table_pages(path)):
        _overwrite(path, page)
    assert _rows(path) == rows


@pytest.mark.parametrize("how", ["empty", "gone", "no database"])
def test_a_store_that_a_power_cut_ate(path: Path, how: str) -> None:
    """An empty file is a fine database of no snapshots: only the copy tells."""
    rows = _fill(path, copy=True)
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if how == "empty" else b"something else" * 1000)
    assert _rows(path) == rows


def test_newer_rows_are_taken_before_those_of_the_copy(path: Path) -> None:
    rows = _fill(path, copy=True)
    store = Metadata(path)
    with store.write() as change:
        change.delete(change.get("default/199/chain"))
        change.insert("default/199/chain", None, Kind.ACTIVE, {})
        change.relabel(change.get("default/0/chain"), {"new": "label"})
    store.close()
    with closing(sqlite3.connect(path)) as connection:  # damage that hurts no row: an index lacks an entry
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("DELETE FROM sqlite_schema WHERE name = 'snapshots_layer'")
        connection.commit()
    assert salvage.damage(path)
    left = {row.key: row for row in _rows(path)}
    assert left["default/199/chain"].kind is Kind.ACTIVE and left["default/0/chain"].labels == {"new": "label"}
    assert len(left) == len(rows)


def test_ids_are_not_given_again(path: Path) -> None:
    _fill(path)
    for page in range(_table_pages(path)):
        _overwrite(path, page)
    store = Metadata(path, known_ids=frozenset({7, 5000}))
    with store.write() as change:
        assert change.insert("new", None, Kind.ACTIVE, {}).id == 5001
    store.close()


def test_no_bit_flip_makes_a_row_up(path: Path) -> None:
    """Whatever the flip, each start ends well; rows are as they were, or are not there, or the flip is in a text."""
    rows = {row.key: row for row in _fill(path, copy=True)}
    pristine, source = path.read_bytes(), random.Random(7)
    for _ in range(40):
        data = bytearray(pristine)
        for _ in range(3):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        path.write_bytes(data)
        salvage.copy_path(path).unlink(missing_ok=True)
        left = _rows(path)
        assert sum(rows.get(row.key) != row for row in left) <= 15  # three texts, and what stands on these snapshots
        assert len(left) >= ROWS // 2 or salvage.damage(path) == ""
        for aside in path.parent.glob("*.damaged-*"):
            aside.unlink()


def test_damage_that_shows_later_is_reported(path: Path) -> None:
    _fill(path)
    told: list[bool] = []
    store = Metadata(path, on_damage=lambda: told.append(True))
    for page in range(1, _table_pages(path)):
        _overwrite(path, page)
    with pytest.raises(sqlite3.DatabaseError), store.read() as view:
        view.all()
    store.close()
    assert told


def test_a_disk_that_refuses_the_copy_is_no_failure(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rows = _fill(path)
    store = Metadata(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", _refuse)
        store.copy()
        store.copy()
    assert caplog.text.count("snapshots.not_copied") == 1
    caplog.clear()
    assert not list(path.parent.glob("*.copy*"))
    store.copy()
    store.close()
    path.unlink()
    assert _rows(path) == rows


def _refuse(fd: int) -> None:
    raise OSError("no space left")


def test_files_of_lost_snapshots_are_kept(tmp_path: Path) -> None:
    """The next cleanup would take them for garbage."""
    root = tmp_path / "root"
    snapshots = Snapshots(root, FakeProvider(tmp_path / "provider"))
    snapshots.prepare("container", "", {})
    (root / "s" / "1" / "fs" / "results").write_text("of a week")
    snapshots.close()
    for page in range(_table_pages(root / "metadata.db")):
        _overwrite(root / "metadata.db", page)
    snapshots = Snapshots(root, FakeProvider(tmp_path / "provider"))
    with pytest.raises(NotFound):
        snapshots.mounts("container")
    snapshots.cleanup()
    [kept] = root.glob("lost-*/1/fs/results")
    assert kept.read_text() == "of a week"
    snapshots.prepare("container", "", {})
    assert (root / "s" / "2").exists() and not (root / "s" / "1").exists()
    snapshots.close()


def test_nothing_is_lost_where_nothing_was(path: Path) -> None:
    lost: list[Set[int]] = []
    _fill(path, copy=True)
    path.unlink()
    Metadata(path, lose=lost.append).close()
    assert [len(known) for known in lost] == [ROWS]
