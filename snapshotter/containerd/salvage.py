"""A damaged snapshot store: set aside, and made anew out of the rows that can still be read and of its last copy.

Snapshots cannot be made up: containerd gave them their names, and knows what stands on what. What is in neither is
lost, and with it what stood on it; the caller keeps its directories. A row of the copy that has been removed since does
no harm: containerd's garbage collection removes what containerd does not know.

Order of things: the new store is complete as `<store>.rebuilt`, and directories that nobody knows any more are moved,
before the damaged one is set aside; then the new one takes its place. Whoever finds `<store>.rebuilt` goes on from
there (`finish`), so that one that is killed on the way loses no row. Nothing of the damaged file is changed.

Knows SQLite and the columns, not what snapshots are for.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from snapshotter.killpoints import reach

__all__ = ["Rebuilt", "copy_path", "copy_store", "damage", "finish", "is_damage", "rebuild"]

_log = logging.getLogger(__name__)

_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_STRIDE = 256  # rows that are read at once; where one of them cannot be, each for itself
_SPARE_IDS = 1 << 12  # how far beyond the greatest id that is known of rows are looked for
_SUFFIXES = ("", "-wal", "-shm")
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
_LAYER = ("layer", "image", "siblings", "mounted_at", "skeleton")

_Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """`read` rows came from the damaged file, `copied` ones from the copy; the damaged file is at `aside` now."""

    reason: str
    read: int
    copied: int
    aside: Path


def copy_path(path: Path) -> Path:
    """Where the last copy of the store is."""
    return path.with_name(f"{path.name}.copy")


def is_damage(error: sqlite3.Error) -> bool:
    """Whether the error says that the file is damaged, and not that it cannot be read or written now."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in _DAMAGE or code == sqlite3.SQLITE_IOERR_SHORT_READ


def damage(path: Path) -> str:
    """What is wrong with the store in one line, empty where nothing is or where there is none. Raises sqlite3.Error
    where that cannot be said. Any process may ask at any time."""
    if not path.exists():
        return "it is gone, and its copy is not" if copy_path(path).exists() else ""
    try:
        with _open(f"file:{path}?mode=ro") as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (found,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            rows = connection.execute("SELECT * FROM snapshots").fetchall() if found == "ok" and version else []
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
        return str(error)
    if found != "ok":
        return " ".join(str(found).split())
    if not version and copy_path(path).exists():
        return "it is empty, and its copy is not"
    return next((f"row {row['id']} cannot be one of ours" for row in rows if not _is_sound(dict(row))), "")


@contextlib.contextmanager
def _open(uri: str) -> Iterator[sqlite3.Connection]:
    """A connection that reads whatever bytes stand where text should."""
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=30, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        connection.text_factory = lambda data: data.decode("utf-8", "surrogateescape")
        yield connection


def copy_store(connection: sqlite3.Connection, path: Path) -> None:
    """Write the copy of the store in `path`, whole or not at all, from a connection to it that is in no transaction."""
    temporary = path.with_name(f"{path.name}.copy-new")
    temporary.unlink(missing_ok=True)  # of one that was killed
    try:
        connection.execute("VACUUM INTO ?", (str(temporary),))
        descriptor = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        temporary.chmod(0o600)
        reach("service.copying")
        temporary.rename(copy_path(path))
    finally:
        temporary.unlink(missing_ok=True)


def rebuild(
    path: Path,
    reason: str,
    prepare: Callable[[sqlite3.Connection], None],
    known_ids: Set[int],
    lose: Callable[[Set[int]], None],
) -> Rebuilt:
    """Set the damaged store aside and put a new one, with the schema that `prepare` makes, into its place. `known_ids`
    are in use, as far as anybody knows; the ids of new snapshots are greater. `lose` is told which ids there are in
    the new store, just before it is the store: others are no garbage."""
    known_id = max(known_ids, default=0)
    new = path.with_name(f"{path.name}.new")
    for left in path.parent.glob("salvage-*"):  # of one that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="salvage-") as scratch:
        for suffix in _SUFFIXES:
            with contextlib.suppress(FileNotFoundError):
                shutil.copyfile(f"{path}{suffix}", f"{scratch}/store{suffix}")
        copied = _read(copy_path(path), known_id) if copy_path(path).exists() else {}
        known_id = max([known_id, *copied])
        read = _read(Path(scratch, "store"), known_id)
    rows = _consistent(read, copied)
    known_id = max([known_id, *read])
    for suffix in _SUFFIXES:
        Path(f"{new}{suffix}").unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        prepare(connection)
        for row in rows.values():
            names = ", ".join(row)
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO snapshots ({names}) VALUES ({marks})", tuple(row.values()))
        connection.execute("DELETE FROM sqlite_sequence WHERE name = 'snapshots'")
        connection.execute("INSERT INTO sqlite_sequence (name, seq) VALUES ('snapshots', ?)", (known_id,))
        connection.execute("COMMIT")
    lose(rows.keys())
    reach("service.salvaging")
    new.rename(_rebuilt_path(path))
    aside = finish(path)
    from_file = sum(1 for number, row in rows.items() if read.get(number) is row)
    done = Rebuilt(reason, from_file, len(rows) - from_file, aside)
    said = "snapshots.rebuilt reason=%r rows_read=%d rows_of_copy=%d damaged_file=%s"
    _log.error(said, reason, done.read, done.copied, aside)
    return done


def finish(path: Path) -> Path:
    """Put a store that was made anew into the place of the damaged one, which is set aside: where that is now. Does
    nothing where none was made."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}")
    if _rebuilt_path(path).exists():
        for suffix in reversed(_SUFFIXES):  # the file last: what a log without a file is to become nobody knows
            with contextlib.suppress(FileNotFoundError):
                os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        reach("service.salvaged")
        _rebuilt_path(path).rename(path)
    return aside


def _rebuilt_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.rebuilt")


def _read(path: Path, known_id: int) -> dict[int, _Row]:
    """The rows of a store that can be read, by id; no more than can, whatever is in the file."""
    found: dict[int, _Row] = {}
    try:
        with _open(f"file:{path}") as connection:
            connection.execute("SELECT 1 FROM snapshots LIMIT 0")  # no such table: nothing to be had
            with contextlib.suppress(sqlite3.Error):
                (last,) = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'snapshots'").fetchone()
                known_id = max(known_id, min(int(last), known_id + _SPARE_IDS))
            for start in range(0, known_id + _SPARE_IDS, _STRIDE):
                for row in _some_rows(connection, start, start + _STRIDE):
                    if _is_sound(row):
                        found[int(str(row["id"]))] = row
    except (sqlite3.Error, OSError):
        _log.debug("snapshots.unreadable file=%s", path, exc_info=True)
    return found


def _some_rows(connection: sqlite3.Connection, start: int, end: int) -> Iterator[_Row]:
    """Rows with ids `[start, end)`; if a page in between is damaged, those that lie on others."""
    query = "SELECT * FROM snapshots NOT INDEXED WHERE id >= ? AND id < ?"
    try:
        yield from [dict(row) for row in connection.execute(query, (start, end))]
        return
    except sqlite3.DatabaseError as error:
        if not is_damage(error):
            raise
    for number in range(start, end):
        with contextlib.suppress(sqlite3.DatabaseError):
            yield from [dict(row) for row in connection.execute(query, (number, number + 1))]


def _is_sound(row: _Row) -> bool:
    """Whether the row can be one of ours: a damaged page can hold anything."""
    try:
        labels = json.loads(str(row["labels"]))
        numbers = (row["id"], row["kind"], row["created_ns"], row["updated_ns"], row["size"], row["inodes"])
        layer = [row[name] for name in _LAYER]
        "".join(value for value in row.values() if isinstance(value, str)).encode()
    except (KeyError, ValueError):
        return False
    return (
        all(isinstance(number, int) for number in numbers)
        and isinstance(row["key"], str)
        and bool(row["key"])
        and row["kind"] in (1, 2, 3)
        and isinstance(labels, dict)
        and all(isinstance(value, str) for value in labels.values())
        and (all(value is None for value in layer) or _is_layer(*layer))
        and isinstance(row["parent_id"], (int, type(None)))
    )


def _is_layer(layer: object, image: object, siblings: object, mounted_at: object, skeleton: object) -> bool:
    digests = [layer, *str(siblings).split(",")]
    texts = isinstance(layer, str) and isinstance(image, str) and isinstance(mounted_at, str)
    return texts and skeleton in (0, 1) and all(_DIGEST.fullmatch(str(digest)) for digest in digests)


def _consistent(read: dict[int, _Row], copied: dict[int, _Row]) -> dict[int, _Row]:
    """Both together, what was read before what was copied: no id and no key twice, and no row without its parent."""
    rows: dict[int, _Row] = {}
    keys = set()
    for source in (read, copied):
        for number, row in source.items():
            if number not in rows and row["key"] not in keys:
                rows[number] = row
                keys.add(row["key"])
    parents: set[object] = {None, *rows}
    while orphans := [number for number, row in rows.items() if row["parent_id"] not in parents]:
        for number in orphans:
            del rows[number]
        parents.difference_update(orphans)
    return rows
