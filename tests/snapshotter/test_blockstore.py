"""The block store: layers appear whole, presence is trusted only as far as it can be."""

import errno
import hashlib
import os
import threading
from pathlib import Path

import pytest

from blockindex.model import BLOCK
from snapshotter.blockstore import UNVERIFIED, BlockStore, LayerFiles, LayerRecord, node_id, node_name, write_all
from snapshotter.errors import NotFound, Precondition, SnapshotterError
from snapshotter.model import Digest

DIGEST = Digest("sha256:" + hashlib.sha256(b"layer").hexdigest())
META = os.urandom(2 * BLOCK)
DATA = os.urandom(10 * BLOCK)


def _record(digest: Digest = DIGEST) -> LayerRecord:
    return LayerRecord(digest, 1234, len(META), len(DATA), ("registry.test/image:1",), (b"/opt", b"/tmp\xff"), "layout")


def _publish(store: BlockStore, absent: list[tuple[int, int]], digest: Digest = DIGEST) -> Path:
    staging = store.stage(digest)
    try:
        if not absent:
            staging.write(0, DATA)
        return staging.publish(_record(digest), META, b"index", absent)
    finally:
        staging.discard()


def test_a_layer_is_not_there_until_it_is_published_and_then_whole(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    assert store.find(DIGEST) is None
    directory = _publish(store, absent=[])
    assert store.find(DIGEST) == directory
    assert list(store.names()) == [node_name(DIGEST)]
    files = LayerFiles(directory)
    buffer = bytearray(len(META) + len(DATA))
    files.read_into(memoryview(buffer), 0)
    assert bytes(buffer) == META + DATA
    assert files.complete()
    files.close()
    assert (directory / "index").read_bytes() == b"index"


@pytest.mark.parametrize(("offset", "size"), [(0, 4096), (8191, 2), (8192, 4096), (100, 40000), (8192 + 4095, 2)])
def test_reads_cross_from_the_metadata_into_the_data_region(tmp_path: Path, offset: int, size: int) -> None:
    files = LayerFiles(_publish(BlockStore(tmp_path), absent=[]))
    buffer = bytearray(size)
    files.read_into(memoryview(buffer), offset)
    assert bytes(buffer) == (META + DATA)[offset : offset + size]
    files.close()


def test_blocks_of_counts_only_the_data_region(tmp_path: Path) -> None:
    files = LayerFiles(_publish(BlockStore(tmp_path), absent=[]))
    assert files.blocks_of(0, len(META)) == (0, 0)
    assert files.blocks_of(len(META) - 1, 2) == (0, 1)
    assert files.blocks_of(len(META) + BLOCK - 1, 2) == (0, 2)
    assert files.blocks_of(len(META) + 3 * BLOCK, BLOCK) == (3, 4)
    assert files.blocks_of(len(META) + 3 * BLOCK, 0) == (3, 3)
    assert files.blocks_of(0, len(META) + BLOCK) == (0, 1)
    files.close()


def test_presence_is_seen_by_another_mapping_once_the_bytes_are_there(tmp_path: Path) -> None:
    directory = _publish(BlockStore(tmp_path), absent=[(2, 6)])
    writer, reader = LayerFiles(directory, writable=True), LayerFiles(directory)
    assert reader.has(0, 2) and not reader.has(1, 3) and reader.blocks_present() == 6
    writer.fill(2, 4, DATA[2 * BLOCK : 4 * BLOCK])
    assert reader.has(0, 4) and not reader.complete()
    writer.fill(4, 6, DATA[4 * BLOCK : 6 * BLOCK])
    assert reader.complete()
    writer.close()
    reader.close()


def test_after_a_reboot_nothing_is_trusted_and_leftovers_are_swept(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    store.recover("boot-1")
    directory = _publish(store, absent=[(2, 3)])
    abandoned = store.stage(DIGEST)
    store.recover("boot-1")
    assert not abandoned.directory.exists()
    files = LayerFiles(directory)
    assert files.blocks_present() == 9
    files.close()
    store.recover("boot-2")
    files = LayerFiles(directory)
    assert files.blocks_present() == 0
    assert files.present[:10].count(UNVERIFIED) == 9  # the absent block stays absent
    files.close()
    abandoned.discard()


@pytest.mark.parametrize("name", ["data", "present", "layer.json"])
def test_after_a_reboot_a_layer_that_did_not_survive_whole_is_dropped(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = BlockStore(tmp_path)
    store.recover("boot-1")
    directory = _publish(store, absent=[(2, 3)])
    os.truncate(directory / name, os.path.getsize(directory / name) // 2)
    store.recover("boot-2")
    assert store.find(DIGEST) is None
    assert "layer.dropped" in caplog.text
    caplog.clear()


def test_two_publishers_of_one_layer_end_with_one(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    first = _publish(store, absent=[])
    second = _publish(store, absent=[(0, 10)])
    assert first == second
    files = LayerFiles(first)
    assert files.complete()  # the first one was kept
    files.close()
    assert [entry.name for entry in store.layers.iterdir()] == [node_name(DIGEST)]


def test_a_digest_with_the_same_first_digits_is_refused(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    _publish(store, absent=[])
    twin = Digest(DIGEST[:-1] + ("0" if DIGEST[-1] != "0" else "1"))
    with pytest.raises(Precondition, match="begins like"):
        store.find(twin)
    with pytest.raises(Precondition, match="begins like"):
        _publish(store, absent=[], digest=twin)


def test_the_newest_image_reference_comes_last_and_the_list_is_bounded(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    directory = _publish(store, absent=[])
    for number in range(20):
        store.add_image(directory, f"registry.test/image:{number}")
    record = LayerRecord.load(directory)
    assert record.implied_dirs == (b"/opt", b"/tmp\xff")
    images = record.images
    assert len(images) == 8 and images[-1] == "registry.test/image:19"


def test_an_unreadable_record_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        LayerRecord.load(tmp_path)
    (tmp_path / "layer.json").write_text('{"version": 1, "digest": 3')
    with pytest.raises(SnapshotterError, match=r"layer\.json.*remove the directory"):
        LayerRecord.load(tmp_path)


def test_node_names_and_ids_are_inverse_and_never_collide_with_the_root() -> None:
    name = node_name(DIGEST)
    assert f"{node_id(name) >> 8:014x}" == name
    assert node_id("0" * 13 + "1") > 1


def test_a_short_file_is_an_error_never_zeros(tmp_path: Path) -> None:
    directory = _publish(BlockStore(tmp_path), absent=[])
    os.truncate(directory / "data", 5 * BLOCK)
    files = LayerFiles(directory)
    with pytest.raises(OSError, match="shorter"):
        files.read_into(memoryview(bytearray(2 * BLOCK)), len(META) + 4 * BLOCK)
    files.close()


@pytest.mark.parametrize("name", ["meta", "data", "present"])
def test_a_broken_layer_is_an_error_of_ours_and_leaks_no_descriptor(tmp_path: Path, name: str) -> None:
    """Each read of it opens it again: the node would run out of descriptors."""
    directory = _publish(BlockStore(tmp_path), absent=[])
    (directory / name).unlink()
    if name == "present":
        (directory / name).write_bytes(b"\1")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SnapshotterError, match="remove the directory"):
        LayerFiles(directory)
    assert os.listdir("/proc/self/fd") == before


def test_two_images_that_are_added_at_once_are_both_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlockStore(tmp_path)
    directory = _publish(store, absent=[])
    second = threading.Thread(target=store.add_image, args=(directory, "registry.test/second:1"))
    rename = Path.rename

    def slow_rename(path: Path, target: Path) -> Path:
        if second.ident is None:
            second.start()
            second.join(0.2)  # it ends, or it waits for its turn
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", slow_rename)
    store.add_image(directory, "registry.test/first:1")
    second.join()
    assert set(LayerRecord.load(directory).images) >= {"registry.test/first:1", "registry.test/second:1"}
    assert sorted(path.name for path in directory.iterdir()) == ["data", "index", "layer.json", "meta", "present"]


def test_a_store_without_a_boot_marker_is_not_trusted(tmp_path: Path) -> None:
    """A power cut took the marker along: nothing says which boot wrote the layers."""
    store = BlockStore(tmp_path)
    store.recover("boot-1")
    directory = _publish(store, absent=[])
    (tmp_path / "boot_id").unlink()
    store.recover("boot-1")
    files = LayerFiles(directory)
    assert files.blocks_present() == 0
    files.close()


def test_a_stray_file_among_the_layers_is_left_alone(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    (store.layers / "notes.txt").write_text("mine")
    assert list(store.names()) == []
    store.recover("boot-1")
    store.recover("boot-2")
    assert (store.layers / "notes.txt").read_text() == "mine"


def test_write_all_goes_on_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, bytes(data)[:7], offset))
    with open(tmp_path / "file", "w+b") as file:
        write_all(file.fileno(), b"x" * 30, 5)
    assert (tmp_path / "file").read_bytes() == b"\0" * 5 + b"x" * 30


def test_a_full_disk_does_not_keep_the_daemon_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The boot cannot be noted, so the next start trusts nothing either."""
    store = BlockStore(tmp_path)
    store.recover("boot-1")
    directory = _publish(store, absent=[])

    def full(path: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        store.recover("boot-1")
        assert "store.boot_not_noted" not in caplog.text
        store.recover("boot-2")
    assert "store.boot_not_noted" in caplog.text
    caplog.clear()
    store.recover("boot-2")
    files = LayerFiles(directory)
    assert files.blocks_present() == 0
    files.close()
