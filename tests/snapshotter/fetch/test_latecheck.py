"""What hot packs brought is compared with the layer: real packs that lie consistently, a real store, a real index."""

import errno
import io
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from blockindex.codec import decode_index
from blockindex.errors import Corrupt
from blockindex.hotpack import Codec, write_pack
from blockindex.hotset import HotExtent
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK
from snapshotter.alarms import Alarms
from snapshotter.blockstore import ABSENT, PRESENT, UNVERIFIED, BlockStore, LayerFiles
from snapshotter.fetch import host as host_module
from snapshotter.fetch import layer as layer_module
from snapshotter.fetch import prefetch as prefetch_module
from snapshotter.fetch.layer import LayerFetch
from snapshotter.trust.quarantine import Quarantine
from snapshotter.unproven import Pack, Unproven
from tests.snapshotter.daemon import Layer, encoded_index, make_layer
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.fetch.hotbench import HotBench
from tests.snapshotter.fetch.test_layer import SPAN, Bench

PACK = Pack("sha256:" + "c" * 64, "registry.test/app", "0123456789abcdef", "sha256:" + "d" * 64)
OTHER = Pack("sha256:" + "e" * 64, "registry.test/app", "fedcba9876543210", "sha256:" + "d" * 64)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=12, size=256 << 10)


@pytest.fixture(scope="module")
def index(layer: Layer) -> LayerIndex:
    return decode_index(encoded_index(layer, SPAN))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(host_module, "_AFTER_HOT_S", 0.0)
    monkeypatch.setattr(layer_module, "_BACKOFF_S", 0.005)


@pytest.fixture
def bench(tmp_path: Path, layer: Layer, index: LayerIndex) -> Iterator[Bench]:
    bench = Bench(tmp_path, layer, index)
    yield bench
    bench.close()


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The alarm lines so far."""
    yield lambda: [it.getMessage() for it in caplog.records if it.levelname == "ERROR"]
    caplog.clear()


def right(bench: Bench, start: int, end: int) -> bytes:
    return bench.region[start * BLOCK : end * BLOCK]


def wrong(bench: Bench, start: int, end: int, *at: int) -> bytes:
    """What the layer holds, with a bit flipped in the blocks `at`."""
    data = bytearray(right(bench, start, end))
    for block in at:
        data[(block - start) * BLOCK + 77] ^= 1
    return bytes(data)


def land(bench: Bench, start: int, data: bytes, pack: Pack = PACK) -> None:
    bench.layer.land_hot(start, start + len(data) // BLOCK, memoryview(data), pack)


def unproven(bench: Bench) -> list[tuple[int, int]]:
    """What is noted on disk."""
    notes = Unproven(bench.directory, bench.files.record.blocks)
    try:
        return list(notes.runs())
    finally:
        notes.close()


def root(bench: Bench) -> Path:
    return bench.directory.parents[1]


def reopen(bench: Bench) -> None:
    """The successor of a killed fetch process, or that after a reboot, takes over."""
    bench.layer.close()
    bench.files = LayerFiles(bench.directory, writable=True)
    bench.layer = LayerFetch(bench.files, bench.index, [bench.blob], bench.host, 1 << 30, patience_s=1.0)


def fill(bench: Bench) -> None:
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()


def piece(bench: Bench, span: int, number: int = 0) -> tuple[int, int]:
    found = bench.index.pieces(span)[number]
    return found.block_start, found.block_end


# -- packs that tell the truth ---------------------------------------------------------------------------------------


def test_blocks_of_a_part_of_a_piece_are_served_at_once_and_proven_by_the_layer(bench: Bench) -> None:
    start, _ = piece(bench, 2)
    land(bench, start + 1, right(bench, start + 1, start + 5))
    assert unproven(bench) == [(start + 1, start + 5)]
    bench.check(bench.read(start + 1, start + 5))
    assert bench.blob.requests == []
    fill(bench)
    assert unproven(bench) == [] and not Alarms(root(bench)).entries()
    assert set(bench.landings.values()) == {1}, "no request for the check alone"


def test_a_whole_piece_is_proven_before_it_is_served(bench: Bench) -> None:
    start, end = piece(bench, 2)
    land(bench, start - 1, right(bench, start - 1, end + 1))
    assert unproven(bench) == [(start - 1, start), (end, end + 1)]
    bench.check(bench.read(start - 1, end + 1))


def test_frames_that_make_a_piece_whole_prove_it(bench: Bench) -> None:
    start, end = piece(bench, 2)
    land(bench, start + 3, right(bench, start + 3, end), OTHER)
    assert unproven(bench) == [(start + 3, end)]
    land(bench, start, right(bench, start, start + 3))
    assert unproven(bench) == [] and bench.files.has(start, end) and bench.blob.requests == []


def test_a_reader_of_the_rest_of_the_piece_has_it_proven(bench: Bench) -> None:
    start, end = piece(bench, 2)
    land(bench, start, right(bench, start, start + 3))
    bench.check(bench.read(end - 1, end))
    bench.settle()
    assert unproven(bench) == []


def test_a_layer_is_complete_when_all_is_there(bench: Bench) -> None:
    """Holes apart, what is whole is proven."""
    blocks = bench.files.record.blocks
    for start in range(0, blocks, 7):
        land(bench, start, right(bench, start, min(start + 7, blocks)))
    assert bench.files.complete() and unproven(bench) == [] and bench.blob.requests == []


# -- packs that lie --------------------------------------------------------------------------------------------------


def test_a_piece_that_is_refuted_is_never_served(bench: Bench, errors: Callable[[], list[str]]) -> None:
    start, end = piece(bench, 2)
    with pytest.raises(Corrupt, match=f"blocks {start}-{end} are not those of the layer"):
        land(bench, start - 2, wrong(bench, start - 2, end, start + 4))
    assert max(bench.files.present[start - 2 : end]) == ABSENT
    [alarm] = Alarms(root(bench)).entries()
    assert not alarm.served and alarm.runs == ((start, end),)
    assert "served=false" in errors()[0] and Quarantine(root(bench)).is_quarantined(PACK.digest)
    bench.check(bench.read(start - 2, end))


def test_a_lie_in_a_part_of_a_piece_raises_an_alarm_and_is_mended(
    bench: Bench, layer: Layer, errors: Callable[[], list[str]]
) -> None:
    start, _ = piece(bench, 2)
    lie = wrong(bench, start + 1, start + 5, start + 2, start + 3)
    land(bench, start + 1, lie)
    assert bench.read(start + 1, start + 5).result() == lie, "it cannot be known yet"
    fill(bench)
    [alarm] = Alarms(root(bench)).entries()
    assert (alarm.layer, alarm.name, alarm.pack) == (layer.digest, bench.files.name, PACK)
    assert alarm.runs == ((start + 2, start + 4),) and alarm.blocks == 2 and alarm.served
    assert alarm.images == bench.files.record.images
    assert alarm.files == ("/" + sorted(layer.contents)[(start + 2) // 64],)
    [line] = errors()
    for word in (layer.digest, f"{start + 2}-{start + 4}", PACK.digest, PACK.where, PACK.key, "served=true"):
        assert word in line
    bench.check(bench.read(0, bench.files.record.blocks))
    assert unproven(bench) == []


def test_nothing_more_is_taken_from_a_pack_that_lied(bench: Bench, errors: Callable[[], list[str]]) -> None:
    start, end = piece(bench, 2)
    land(bench, start, wrong(bench, start, start + 1, start))
    bench.check(bench.read(end - 1, end))
    bench.settle()
    assert len(errors()) == 1
    other, _ = piece(bench, 5)
    with pytest.raises(Corrupt, match="in quarantine"):
        land(bench, other, right(bench, other, other + 1))
    land(bench, other, right(bench, other, other + 1), OTHER)
    assert bench.files.has(other, other + 1)


def test_what_else_came_of_it_is_served_only_after_the_layer_has_proven_it(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    first, second, third = (piece(bench, span)[0] for span in (2, 5, 7))
    land(bench, first, wrong(bench, first, first + 1, first))
    land(bench, second, wrong(bench, second, second + 2, second + 1))
    land(bench, third, right(bench, third, third + 2), OTHER)
    bench.check(bench.read(first + 2, first + 3))  # its piece refutes the pack
    bench.settle()
    assert not bench.files.has(second, second + 2), "not served any more"
    assert bench.files.has(third, third + 2), "another pack's"
    bench.check(bench.read(second, second + 2))
    bench.settle()
    [alarm] = Alarms(root(bench)).entries()
    assert alarm.runs == ((first, first + 1), (second + 1, second + 2)), "the same pack and layer: one alarm"


def test_frames_that_make_a_piece_whole_refute_it(bench: Bench, errors: Callable[[], list[str]]) -> None:
    start, end = piece(bench, 2)
    land(bench, start + 3, wrong(bench, start + 3, end, start + 7))
    assert bench.files.has(start + 3, end)
    land(bench, start, right(bench, start, start + 3))
    assert max(bench.files.present[start:end]) == UNVERIFIED and len(errors()) == 1
    bench.check(bench.read(start, end))
    bench.settle()
    [alarm] = Alarms(root(bench)).entries()
    assert alarm.served and unproven(bench) == []


def test_a_pack_never_writes_over_what_may_have_been_read(bench: Bench, errors: Callable[[], list[str]]) -> None:
    end, _ = bench.span_blocks(3)
    bench.check(bench.read(end, end + 4))  # from here on it is the layer's own
    bench.settle()
    land(bench, end - 2, wrong(bench, end - 2, end + 4, end - 1, end + 1))
    bench.check(bench.read(end, end + 4))
    land(bench, end - 2, right(bench, end - 2, end), OTHER)
    assert bench.read(end - 1, end).result() != right(bench, end - 1, end), "no silent swap, not even for the better"
    fill(bench)
    assert [alarm.pack for alarm in Alarms(root(bench)).entries()] == [PACK]


def test_bytes_that_the_disk_refuses_leave_no_lie_to_be_served(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, errors: Callable[[], list[str]]
) -> None:
    start, end = piece(bench, 2)
    land(bench, start, wrong(bench, start, start + 1, start))
    room, filling = threading.Event(), LayerFiles.fill

    def full(files: LayerFiles, first: int, last: int, data: bytes) -> None:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        filling(files, first, last, data)

    monkeypatch.setattr(LayerFiles, "fill", full)
    with pytest.raises(OSError, match="No space"):
        bench.layer.late.store(start, end, right(bench, start, end))
    assert not bench.files.has(start, start + 1) and len(errors()) == 1
    room.set()
    bench.check(bench.read(start, end))
    assert len(Alarms(root(bench)).entries()) == 1


# -- restarts and reboots --------------------------------------------------------------------------------------------


def test_a_successor_knows_what_is_not_proven(bench: Bench, errors: Callable[[], list[str]]) -> None:
    start, _ = piece(bench, 2)
    land(bench, start, wrong(bench, start, start + 2, start + 1))
    land(bench, start + 5, right(bench, start + 5, start + 6), OTHER)
    reopen(bench)
    assert unproven(bench) == [(start, start + 2), (start + 5, start + 6)] and not errors()
    fill(bench)
    [alarm] = Alarms(root(bench)).entries()
    assert alarm.pack == PACK and alarm.runs == ((start + 1, start + 2),)


@pytest.mark.parametrize("lies", [False, True])
def test_a_successor_checks_what_has_become_whole(bench: Bench, lies: bool, errors: Callable[[], list[str]]) -> None:
    """Its predecessor was killed between the last write and the check."""
    start, end = piece(bench, 2)
    land(bench, start, (wrong if lies else right)(bench, start, end - 1, *([start] if lies else [])))
    bench.files.fill(end - 1, end, right(bench, end - 1, end))
    reopen(bench)
    assert unproven(bench) == ([(start, end - 1)] if lies else []) and len(errors()) == lies
    assert bench.files.has(start, end) is not lies
    bench.check(bench.read(start, end))


def test_after_a_reboot_a_lie_is_still_found(bench: Bench, errors: Callable[[], list[str]]) -> None:
    start, end = piece(bench, 2)
    land(bench, start, wrong(bench, start, start + 2, start + 1))
    BlockStore(root(bench)).recover("another boot")
    reopen(bench)
    assert not bench.files.has(start, start + 1)
    bench.check(bench.read(start, end))
    bench.settle()
    [alarm] = Alarms(root(bench)).entries()
    assert alarm.runs == ((start + 1, start + 2),)


def test_a_write_that_a_power_cut_lost_is_no_finding(bench: Bench, errors: Callable[[], list[str]]) -> None:
    start, end = piece(bench, 2)
    land(bench, start, right(bench, start, start + 2))
    bench.files.fill(start + 1, start + 2, bytes(BLOCK))
    BlockStore(root(bench)).recover("another boot")
    reopen(bench)
    bench.check(bench.read(start, end))
    assert not Alarms(root(bench)).entries() and not errors()


def test_a_lie_of_zeros_is_found_all_the_same(bench: Bench, errors: Callable[[], list[str]]) -> None:
    """Also when it is in doubt already, for no power was cut."""
    first, second = piece(bench, 2)[0], piece(bench, 5)[0]
    land(bench, first, wrong(bench, first, first + 1, first))
    land(bench, second, bytes(BLOCK))
    for start in (first, second):
        bench.check(bench.read(start + 2, start + 3))
        bench.settle()
    [alarm] = Alarms(root(bench)).entries()
    assert alarm.runs == ((first, first + 1), (second, second + 1))


def test_a_successor_trusts_nothing_of_a_pack_in_quarantine(bench: Bench) -> None:
    start, _ = piece(bench, 2)
    land(bench, start, right(bench, start, start + 2))
    Quarantine(root(bench)).add(PACK.digest, "another layer refuted it")
    reopen(bench)
    assert bench.files.present[start : start + 2] == bytes([UNVERIFIED]) * 2
    bench.check(bench.read(start, start + 2))
    bench.settle()
    assert bench.files.present[start : start + 2] == bytes([PRESENT]) * 2


def test_more_packs_than_have_numbers_are_left_to_the_layer(bench: Bench) -> None:
    start, end = piece(bench, 2)
    for number in range(255):
        pack = Pack(f"sha256:{number:064x}", "registry.test/app", "", "")
        land(bench, start, right(bench, start, start + 1), pack)
        with (bench.files.directory / "present").open("r+b") as present:
            present.seek(start)
            present.write(bytes([ABSENT]))
    land(bench, start - 1, right(bench, start - 1, end))
    assert not bench.files.has(start - 1, start), "it could not be noted"
    assert bench.files.has(start, end), "proven before"
    reopen(bench)
    bench.check(bench.read(start - 1, end))


# -- the whole way ---------------------------------------------------------------------------------------------------


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HotBench]:
    monkeypatch.setattr(prefetch_module, "_LOOK_S", 0.05)
    bench = HotBench(tmp_path, [make_layer(files=4, size=128 << 10, seed=seed) for seed in (1, 2)])
    yield bench
    bench.close()


def serve_lies(bench: HotBench, extents: list[tuple[int, int, int]], lies: set[tuple[int, int]]) -> str:
    """The directory has a pack in which all is consistent, and the blocks `lies` (layer, block) are wrong."""
    out = io.BytesIO()

    def read(extent: HotExtent) -> bytes:
        data = bytearray(bench.region(extent.layer, extent.start, extent.end))
        for layer, block in lies:
            if layer == extent.layer and extent.start <= block < extent.end:
                data[(block - extent.start) * BLOCK : (block - extent.start + 1) * BLOCK] = b"E" * BLOCK
        return bytes(data)

    pack = write_pack(bench.hotset(extents), read, Codec.ZSTD, out, first_frame=32 << 10, frame=64 << 10)
    bench.serve(out.getvalue())
    return pack.digest


def test_a_malicious_pack_is_found_out_and_every_byte_mended(
    image: HotBench, tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    digest = serve_lies(image, [(0, 1, 5), (1, 2, 6)], {(0, 3), (1, 4)})
    image.over(image.start())
    assert image.present(0, 1, 5) and image.present(1, 2, 6) and not errors()
    for fetch in image.fetches.values():
        fetch.fill_in_background(0.0)
    for fetch in image.fetches.values():
        assert fetch.completed.wait(PATIENCE_S)
    image.settle()
    alarms = Alarms(tmp_path).entries()
    assert sorted((alarm.layer, alarm.runs) for alarm in alarms) == sorted(
        [(image.digests[0], ((3, 4),)), (image.digests[1], ((4, 5),))]
    )
    assert {(alarm.pack.digest, alarm.pack.where, alarm.served) for alarm in alarms} == {(digest, "fake", True)}
    for number, fetch in image.fetches.items():
        image.read(number, 0, fetch.files.record.blocks).check()
    assert len(errors()) == 2


def test_a_malicious_pack_ends_its_prefetch_and_no_later_one_takes_from_it(
    image: HotBench, tmp_path: Path, errors: Callable[[], list[str]]
) -> None:
    """A whole piece of it lies; the start goes on from the layers."""
    digest = serve_lies(image, [(0, 0, 32), (1, 2, 6)], {(0, 3)})
    image.over(image.start())
    image.settle()
    assert Quarantine(tmp_path).is_quarantined(digest) and not image.present(0, 3, 4)
    again = image.start()  # its extents are as good as anybody's: the layers bring them
    image.over(again)
    image.settle()
    assert image.present(0, 0, 32) and image.present(1, 2, 6) and again.blocks == 0
    assert again.status()["bytes_refused"].startswith("is in quarantine")
    image.read(0, 0, 32).check()
    image.read(1, 2, 6).check()
    assert [alarm.served for alarm in Alarms(tmp_path).entries()] == [True], "no frame has the piece whole"
    for fetch in image.fetches.values():
        fetch.fill_in_background(0.0)
    for fetch in image.fetches.values():
        assert fetch.completed.wait(PATIENCE_S)
    for number, fetch in image.fetches.items():
        image.read(number, 0, fetch.files.record.blocks).check()
