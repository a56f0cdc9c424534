"""The fetch process dies while a hot pack comes in, and while one is found to lie. See `stack`, `fetch.latecheck`."""

from contextlib import closing
from pathlib import Path

import pytest

from blockindex.codec import decode_index
from blockindex.hotpack import Codec, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, hotset_name, image_key
from blockindex.model import BLOCK
from snapshotter.blockstore import LayerRecord, node_name
from snapshotter.trust.quarantine import Quarantine
from snapshotter.unproven import Unproven
from tests.snapshotter.daemon import Layer, encoded_index, expected, reader
from tests.snapshotter.kills.conftest import NewLayer
from tests.snapshotter.kills.stack import Stack, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

HOT = 4  # blocks: the first file
LONG, SHORT = 1 << 16, 1 << 14  # spans: of the first file and others, or of it alone, which the pack has whole
ARRIVAL = ("fetch.pack-named", "fetch.pack-noted", "fetch.written", "fetch.pack-stored", "fetch.compared")
LIE = ("fetch.doubted", "fetch.alarm-written", "fetch.alarmed", "fetch.quarantined")


def _publish(home: Path, layer: Layer, span: int, lie: int = -1) -> str:
    """A pack of the layer's first file, in which block `lie` is wrong; its digest."""
    index = decode_index(encoded_index(layer, span))
    row = HotLayer(layer.digest, index.block_count, index.layout())
    piece = index.piece_of_block(0)
    assert piece is not None and (piece.block_end == HOT) == (span == SHORT)
    hotset = HotSet(image_key([layer.digest]), "", "default", (row,), (HotExtent(0, 0, HOT, 0),), 1)
    region = b"".join(layer.contents[name] for name in sorted(layer.contents))

    def read(extent: HotExtent) -> bytes:
        data = bytearray(region[extent.start * BLOCK : extent.end * BLOCK])
        if lie >= 0:
            data[lie * BLOCK : (lie + 1) * BLOCK] = b"evil" * (BLOCK // 4)
        return bytes(data)

    path = home / "hotsets" / hotset_name(hotset.image_key, "default")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb") as file:
        return write_pack(hotset, read, Codec.LZ4, file).digest


def _present(stack: Stack, layer: Layer) -> int:
    return sum(int(row["blocks_present"]) for row in _rows(stack, layer))


def _rows(stack: Stack, layer: Layer) -> list[dict[str, object]]:
    layers = stack.status()["layers"]
    return [row for row in layers if row["digest"] == layer.digest]


def _unproven(directory: Path, blocks: int) -> list[tuple[int, int]]:
    with closing(Unproven(directory, blocks)) as notes:
        return list(notes.runs())


def _read_others(stack: Stack, layer: Layer) -> None:
    """All files but the first, whose blocks are hot; its piece comes with the second."""
    names = sorted(layer.contents)[1:]
    process = reader("read", *(stack.mount(layer) / name for name in names))
    digests, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and digests.split() == expected(layer, *names)


@pytest.mark.parametrize("point", ARRIVAL)
def test_a_pack_comes_in(stack: Stack, new_layer: NewLayer, home: Path, point: str) -> None:
    """In the end all is there, and proven by the layer itself."""
    layer = new_layer(files=24, size=HOT * BLOCK, span=LONG)
    _publish(home, layer, LONG)
    stack.arm(point)
    stack.prepare(layer)
    if point == "fetch.compared":
        until(lambda: _present(stack, layer) >= HOT, "the pack does not come")
        _read_others(stack, layer)
    stack.require(point)
    stack.read(layer)
    _read_others(stack, layer)
    directory = stack.daemon.root / "layers" / node_name(layer.digest)
    blocks = LayerRecord.load(directory).blocks
    until(lambda: _present(stack, layer) == blocks, "blocks are missing")
    stack.die("fetch")
    until(lambda: not _unproven(directory, blocks), "blocks are not proven")
    assert stack.status()["alarms"] == []
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize(
    ("point", "whole"), [*((point, False) for point in LIE), ("fetch.alarmed", True), ("fetch.quarantined", True)]
)
def test_a_pack_lies(stack: Stack, new_layer: NewLayer, home: Path, point: str, whole: bool) -> None:
    """Wherever the process that finds it dies: there is an alarm, the pack is in quarantine, and then
    the bytes are right: what the kernel has read ahead of all readers is dropped a moment after the alarm."""
    span = SHORT if whole else LONG
    layer = new_layer(files=24, size=HOT * BLOCK, span=span)
    digest = _publish(home, layer, span, 2)
    stack.arm(point)
    stack.prepare(layer)
    if not whole:  # else it is refused when it comes
        until(lambda: _present(stack, layer) >= HOT, "the pack does not come")
        _read_others(stack, layer)
    stack.require(point)
    _read_others(stack, layer)
    until(lambda: Quarantine(stack.daemon.root).is_quarantined(digest), "the pack is used on")
    until(lambda: bool(stack.status()["alarms"]), "there is no alarm")
    [alarm] = stack.status()["alarms"]
    assert (alarm["layer"], alarm["pack"]["digest"], alarm["served"]) == (layer.digest, digest, not whole)
    until(lambda: stack.is_right(layer), "what the pack has brought stays in the page cache")
    (stack.daemon.root / "alarms" / alarm["id"]).unlink()
    stack.forget(layer)
    stack.require_clean()
