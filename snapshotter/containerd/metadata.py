"""The snapshot store: what snapshots exist, in one SQLite file.

It knows rows and names, not directories, mounts, or containerd's states: callers check those inside a transaction.
    with metadata.read() as view: ...     a consistent view, any number at once, never blocked by a writer (WAL)
    with metadata.write() as change: ...  one at a time; committed at the end, rolled back when the block raises
A transaction must not wait for anything but this file (no provider, no network): writers queue behind it.

What is committed survives a power cut (synchronous = FULL): containerd syncs its own database too, and a snapshot that
it knows and we lost makes an image unusable. A file that is damaged all the same is set aside at the start, and made
anew as far as that is possible (`salvage`); one that turns out to be damaged later is reported by `on_damage`: a start
is what helps.
"""

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from snapshotter.containerd import salvage
from snapshotter.containerd.model import Kind, LazyLayer, Snapshot, Usage
from snapshotter.containerd.reserve import Reserve
from snapshotter.errors import AlreadyExists, NotFound, UserError
from snapshotter.killpoints import reach
from snapshotter.model import Digest, LayerRef

__all__ = ["Change", "Metadata", "View"]

_log = logging.getLogger(__name__)

_VERSION = 2

_SCHEMA = """
CREATE TABLE snapshots (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice: names the snapshot's directory
    key         TEXT    NOT NULL UNIQUE,            -- key (view, active) or name (committed)
    parent_id   INTEGER REFERENCES snapshots (id),  -- NULL: no parent
    kind        INTEGER NOT NULL,                   -- model.Kind
    created_ns  INTEGER NOT NULL,                   -- since 1970; of the commit for committed ones
    updated_ns  INTEGER NOT NULL,                   -- since 1970
    labels      TEXT    NOT NULL,                   -- JSON object of strings
    size        INTEGER NOT NULL DEFAULT 0,         -- bytes on disk, measured at Commit
    inodes      INTEGER NOT NULL DEFAULT 0,         -- measured at Commit
    layer       TEXT,                               -- digest of the layer behind a lazy snapshot; NULL: ordinary
    image       TEXT,                               -- reference the layer was asked for under; NULL with layer
    siblings    TEXT,                               -- digests, comma separated, this layer first; NULL with layer
    mounted_at  TEXT,                               -- where the provider had it mounted then; NULL with layer
    skeleton    INTEGER                             -- 1: own directories lie over the layer, else 0; NULL with layer
);
CREATE INDEX snapshots_parent ON snapshots (parent_id);
CREATE INDEX snapshots_layer ON snapshots (layer);
"""

_SELECT = """
SELECT s.id, s.key, coalesce(p.key, ''), s.kind, s.created_ns, s.updated_ns, s.labels, s.size, s.inodes,
       s.layer, s.image, s.siblings, s.mounted_at, s.skeleton
FROM snapshots s LEFT JOIN snapshots p ON p.id = s.parent_id
"""


class View:
    """Reads within one transaction."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def find(self, key: str) -> Snapshot | None:
        """The snapshot of this key or name, None when there is none."""
        row = self._connection.execute(f"{_SELECT} WHERE s.key = ?", (key,)).fetchone()
        return None if row is None else _snapshot(row)

    def get(self, key: str) -> Snapshot:
        """The snapshot of this key or name; raises NotFound."""
        found = self.find(key)
        if found is None:
            raise NotFound(f'snapshot "{key}" does not exist')
        return found

    def committed_as(self, label: str, value: str, parent: Snapshot | None) -> Snapshot | None:
        """The oldest committed snapshot on `parent` with this label, None when there is none."""
        query = (
            f"{_SELECT} WHERE s.parent_id IS ? AND s.kind = ? AND json_extract(s.labels, ?) = ? ORDER BY s.id LIMIT 1"
        )
        columns = (None if parent is None else parent.id, Kind.COMMITTED, f'$."{label}"', value)
        row = self._connection.execute(query, columns).fetchone()
        return None if row is None else _snapshot(row)

    def all(self) -> list[Snapshot]:
        """All snapshots, parents before children."""
        return [_snapshot(row) for row in self._connection.execute(f"{_SELECT} ORDER BY s.id")]

    def ids(self) -> set[int]:
        """The ids of all snapshots."""
        return {row[0] for row in self._connection.execute("SELECT id FROM snapshots")}

    def parents(self, snapshot: Snapshot) -> list[Snapshot]:
        """The snapshots below `snapshot`, the nearest first."""
        found: list[Snapshot] = []
        parent = snapshot.parent
        while parent:
            found.append(self.get(parent))
            parent = found[-1].parent
        return found

    def has_children(self, snapshot: Snapshot) -> bool:
        """Whether it is the parent of another."""
        query = "SELECT 1 FROM snapshots WHERE parent_id = ? LIMIT 1"
        return self._connection.execute(query, (snapshot.id,)).fetchone() is not None

    def uses_layer(self, digest: Digest) -> bool:
        """Whether a lazy snapshot stands on this layer."""
        query = "SELECT 1 FROM snapshots WHERE layer = ? LIMIT 1"
        return self._connection.execute(query, (digest,)).fetchone() is not None

    def lazy(self) -> list[Snapshot]:
        """One lazy snapshot for each layer in use, the latest of those that share it."""
        query = (
            f"{_SELECT} WHERE s.id IN (SELECT max(id) FROM snapshots WHERE layer NOT NULL GROUP BY layer) ORDER BY s.id"
        )
        return [_snapshot(row) for row in self._connection.execute(query)]


class Change(View):
    """Reads and writes within one transaction."""

    def insert(
        self,
        key: str,
        parent: Snapshot | None,
        kind: Kind,
        labels: Mapping[str, str],
        lazy: LazyLayer | None = None,
    ) -> Snapshot:
        """A new snapshot, created now; raises AlreadyExists when the key or name is taken."""
        now = time.time_ns()
        layer = (None,) * 5 if lazy is None else _layer_columns(lazy)
        columns = (key, None if parent is None else parent.id, kind, now, now, _json(labels), *layer)
        query = """
            INSERT INTO snapshots
                (key, parent_id, kind, created_ns, updated_ns, labels, layer, image, siblings, mounted_at, skeleton)
            VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
        self._require_free(key)
        self._connection.execute(query, columns)
        return self.get(key)

    def commit(
        self, snapshot: Snapshot, name: str, parent: Snapshot | None, labels: Mapping[str, str], usage: Usage
    ) -> None:
        """Turn an active snapshot into the committed one `name`; raises AlreadyExists when the name is taken."""
        self._require_free(name)
        now = time.time_ns()
        query = """
            UPDATE snapshots
            SET key = ?, parent_id = ?, kind = ?, created_ns = ?, updated_ns = ?, labels = ?, size = ?, inodes = ?
            WHERE id = ?"""
        parent_id = None if parent is None else parent.id
        columns = (name, parent_id, Kind.COMMITTED, now, now, _json(labels), usage.size, usage.inodes, snapshot.id)
        self._connection.execute(query, columns)

    def relabel(self, snapshot: Snapshot, labels: Mapping[str, str]) -> None:
        """Replace its labels; it counts as updated now."""
        query = "UPDATE snapshots SET labels = ?, updated_ns = ? WHERE id = ?"
        self._connection.execute(query, (_json(labels), time.time_ns(), snapshot.id))

    def delete(self, snapshot: Snapshot) -> None:
        """Forget it; it must have no children."""
        self._connection.execute("DELETE FROM snapshots WHERE id = ?", (snapshot.id,))

    def _require_free(self, key: str) -> None:
        if self.find(key) is not None:
            raise AlreadyExists(f'snapshot "{key}" already exists')


class Metadata:
    """The store in `path`, made there if need be. Thread-safe; one process at a time."""

    def __init__(
        self,
        path: Path,
        on_damage: Callable[[], None] = lambda: None,
        known_ids: Set[int] = frozenset(),
        lose: Callable[[Set[int]], None] = lambda known: None,
    ) -> None:
        """`known_ids` and `lose`: see `salvage.rebuild`."""
        self._path = path
        self._on_damage = on_damage
        self._changes, self._copied = 0, -1  # transactions, and how many of them the copy has
        self._is_refused = False
        self._writing = threading.Lock()
        self._pool_lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._reserve = Reserve(path.with_name(f"{path.name}.reserve"))
        try:
            try:
                self._open(known_ids, lose)
            except (sqlite3.OperationalError, OSError):  # the disk is full, it may be
                if not self._reserve.give_up():
                    raise
                self._open(known_ids, lose)
        except (sqlite3.Error, OSError) as error:
            self.close()
            raise UserError(f"{path}: cannot be used as snapshot store: {error}") from error
        except UserError:
            self.close()
            raise
        self._reserve.take()

    def _open(self, known_ids: Set[int], lose: Callable[[Set[int]], None]) -> None:
        salvage.finish(self._path)
        reason = salvage.damage(self._path)
        if reason:
            salvage.rebuild(self._path, reason, _make_schema, known_ids, lose)
        with self.write() as change:
            _prepare_schema(change._connection, self._path)
        for suffix in ("", "-wal", "-shm"):  # later ones get the mode of the first
            Path(f"{self._path}{suffix}").chmod(0o600)  # names of images are nobody's business

    @contextmanager
    def read(self) -> Iterator[View]:
        """A consistent view of the store for the length of the block."""
        with self._connection() as connection:
            connection.execute("BEGIN")
            try:
                yield View(connection)
            finally:
                connection.execute("ROLLBACK")

    @contextmanager
    def write(self) -> Iterator[Change]:
        """The only writer for the length of the block."""
        with self._writing, self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield Change(connection)
                reach("service.committing")
                connection.execute("COMMIT")
                reach("service.committed")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            self._changes += 1

    def copy(self) -> None:
        """Bring the copy up to date that a damaged store is made anew from; nothing to do where it is. A disk that
        refuses is logged, once: there will be another time."""
        changes = self._changes
        if changes == self._copied:
            return
        try:
            with self._connection() as connection:
                salvage.copy_store(connection, self._path)
        except (sqlite3.Error, OSError) as error:
            if not self._is_refused:
                _log.warning("snapshots.not_copied file=%s error=%r", self._path, str(error))
            self._is_refused = True
            return
        self._reserve.take()
        self._copied, self._is_refused = changes, False

    def close(self) -> None:
        """Close the file; transactions still open end first, later ones fail."""
        with self._writing, self._pool_lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection of the pool for one transaction: there are never more than transactions at once."""
        with self._pool_lock:
            assert not self._closed, "the snapshot store is closed"
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
        try:
            yield connection
        except sqlite3.DatabaseError as error:
            if salvage.is_damage(error):
                _log.error("snapshots.damaged file=%s error=%r", self._path, str(error))
                self._on_damage()
            raise
        finally:
            with self._pool_lock:
                keep = not self._closed
                if keep:
                    self._idle.append(connection)
            if not keep:
                connection.close()

    def _connect(self) -> sqlite3.Connection:
        # Without isolation_level the module would begin transactions by itself. A connection has one user at a time.
        connection = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    def __repr__(self) -> str:
        return f"<Metadata {self._path} {len(self._idle)} connections idle>"


def _prepare_schema(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == _VERSION:
        return
    if version != 0:
        raise UserError(
            f"{path}: snapshot store of version {version}, this bootseer reads {_VERSION}: use the one that made it"
        )
    _make_schema(connection)


def _make_schema(connection: sqlite3.Connection) -> None:
    for statement in _SCHEMA.split(";\n"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def _json(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels), sort_keys=True)


def _layer_columns(lazy: LazyLayer) -> tuple[str, str, str, str, int]:
    return lazy.ref.digest, lazy.ref.image, ",".join(lazy.ref.siblings), str(lazy.path), int(lazy.skeleton)


def _snapshot(
    row: tuple[int, str, str, int, int, int, str, int, int, str | None, str | None, str | None, str | None, int | None],
) -> Snapshot:
    lazy = None
    layer, image, siblings, mounted_at, skeleton = row[9:]
    if layer is not None:
        assert image is not None and siblings is not None and mounted_at is not None
        ref = LayerRef(image, Digest(layer), tuple(Digest(text) for text in siblings.split(",")))
        lazy = LazyLayer(ref, Path(mounted_at), bool(skeleton))
    labels: dict[str, str] = json.loads(row[6])
    return Snapshot(row[0], row[1], row[2], Kind(row[3]), row[4], row[5], labels, Usage(row[7], row[8]), lazy)
