"""The node's hot sets on disk: whole or not at all, and what lies about is no hot set."""

import logging
import random
from pathlib import Path
from typing import BinaryIO

import pytest

from blockindex.errors import Corrupt, Unsupported
from blockindex.hotpack import Codec, encode_hotset, write_pack
from blockindex.hotset import MAX_EXTENTS, hotset_name
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore, read_head
from tests.blockindex.hotsets import hotset, layer_digest, read_blocks

SET = hotset((100, 9), (0, 3, 9, 0), (1, 0, 2, 4))
OTHER = hotset((100,), (0, 0, 1, 0), workload="serve")


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    store = HotStore(tmp_path / "root")
    assert store.find(SET.image_key) == {} and store.load(SET.image_key, "default") is None
    path = store.save(SET)
    assert path == tmp_path / "root" / hotset_name(SET.image_key, "default")
    assert path.read_bytes() == encode_hotset(SET)
    loaded = store.load(SET.image_key, "default")
    assert loaded is not None and (loaded.hotset, loaded.codec) == (SET, Codec.NONE)
    assert store.find(SET.image_key) == {"default": path}
    again = store.save(hotset((100, 9), (1, 5, 6, 0), records=3))
    assert again == path and store.load(SET.image_key, "default") != loaded
    assert len(files(tmp_path)) == 1 and "1 hot sets" in repr(store)


def test_workloads_and_images_side_by_side(tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    first, second = store.save(SET), store.save(OTHER)
    third = store.save(hotset((100,), (0, 5, 6, 0)))
    assert store.find(OTHER.image_key) == {"default": third, "serve": second}
    assert {path for _, _, path in store.entries()} == {first, second, third}
    assert ("serve", second) in {(workload, path) for key, workload, path in store.entries() if key == OTHER.image_key}
    assert store.remove(OTHER.image_key, "serve") and not store.remove(OTHER.image_key, "serve")
    assert store.find(OTHER.image_key) == {"default": third}
    assert not store.remove(layer_digest(5), "default")


def test_other_files_are_passed_over(tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    path = store.save(SET)
    for name in (".default.bsh.1234", "UPPER.bsh", "default.bsh.old", "x" * 80 + ".bsh"):
        path.with_name(name).write_bytes(b"")
    (tmp_path / "hot" / "short").mkdir()
    (tmp_path / "hot" / "short" / "default.bsh").write_bytes(b"")
    assert [found for _, _, found in store.entries()] == [path]
    assert store.find(SET.image_key) == {"default": path}


@pytest.mark.parametrize("cut", [0, 20, 60, -1])
def test_a_damaged_file_is_none_and_said_so(tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture) -> None:
    store = HotStore(tmp_path)
    path = store.save(SET)
    path.write_bytes(path.read_bytes()[:cut])
    with caplog.at_level(logging.WARNING):
        assert store.load(SET.image_key, "default") is None
    assert [record.message.split()[0] for record in caplog.records] == ["hotset.damaged"]
    assert str(path) in caplog.text
    caplog.clear()
    with pytest.raises(Corrupt):
        read_head(path)


def test_a_file_under_another_name_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = HotStore(tmp_path)
    for key, workload in ((OTHER.image_key, "serve"), (SET.image_key, "other")):
        target = store.path(key, workload)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(encode_hotset(SET))
        assert store.load(key, workload) is None
    assert caplog.text.count("another image or workload") == 2
    caplog.clear()


def test_a_long_head_is_read_in_pieces(tmp_path: Path) -> None:
    rng = random.Random(1)
    starts = rng.sample(range(0, 1 << 24, 2), 30_000)
    store = HotStore(tmp_path)
    path = store.save(hotset((1 << 24,), *((0, start, start + 1, 0) for start in starts)))
    assert path.stat().st_size > 64 << 10
    assert [extent.start for extent in read_head(path).hotset.extents] == starts


def test_the_head_of_a_pack_is_read_and_its_length_must_be_right(tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    path = store.put(SET.image_key, "default", lambda file: write_pack(SET, read_blocks, Codec.LZ4, file))
    loaded = store.load(SET.image_key, "default")
    assert loaded is not None and loaded.hotset == SET and loaded.head_size < loaded.size == path.stat().st_size
    with path.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(Corrupt, match="its head speaks of"):
        read_head(path)


def test_a_writer_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    path = store.save(SET)
    before = path.read_bytes()

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyError("no block")

    with pytest.raises(KeyError):
        store.put(SET.image_key, "default", write)
    assert path.read_bytes() == before and files(tmp_path) == [str(path.relative_to(tmp_path))]


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "hot").write_bytes(b"a file in the way")
    with pytest.raises(SnapshotterError, match="cannot write the hot set: "):
        HotStore(tmp_path).save(SET)
    directory = HotStore(tmp_path / "other").path(SET.image_key, "default")
    directory.mkdir(parents=True)
    with pytest.raises(SnapshotterError, match="cannot remove the hot set: "):
        HotStore(tmp_path / "other").remove(SET.image_key, "default")


def test_a_set_of_too_many_extents_is_coalesced(tmp_path: Path) -> None:
    rows = MAX_EXTENTS + 5
    many = hotset((3 * rows,), *((0, 3 * row, 3 * row + 1, 0) for row in range(rows)))
    with pytest.raises(Unsupported):
        encode_hotset(many)
    HotStore(tmp_path).save(many)
    loaded = HotStore(tmp_path).load(many.image_key, "default")
    assert loaded is not None and len(loaded.hotset.extents) == 1
    assert loaded.hotset.block_count == 3 * rows - 2


@pytest.mark.parametrize(("key", "workload"), [("../x", "default"), (SET.image_key, "../x")])
def test_names_do_not_lead_out(tmp_path: Path, key: str, workload: str) -> None:
    with pytest.raises(Corrupt):
        HotStore(tmp_path).path(key, workload)
