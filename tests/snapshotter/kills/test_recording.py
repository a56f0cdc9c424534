"""Service and block server die while a container is recorded. See `stack`, and `snapshotter.record` for the protocol.

Whatever becomes of the recording, the container reads what is right, and nothing of it is left when it has gone.
"""

from pathlib import Path

import pytest

from blockindex.hotset import image_key
from blockindex.model import BLOCK
from snapshotter.blockstore import node_name
from snapshotter.config import WorkloadConfig
from snapshotter.hotstore import HotStore
from snapshotter.record.records import Records
from tests.snapshotter.daemon import Layer
from tests.snapshotter.kills.conftest import NewLayer
from tests.snapshotter.kills.stack import Stack, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

BEGIN = ("service.slot-taken", "service.log-made", "service.log-opened", "service.recording")
READ = ("block.noted",)
END = (
    "service.log-closed",
    "service.record-added",
    "service.default-stamped",
    "service.hotset-written",
    "service.record-kept",
    "service.record-ended",
)
REMOVAL = ("service.slot-unmounted", "service.slot-cleared")


def _private(stack: Stack, key: str, layer: Layer) -> Path:
    """Where the container has the layer; it may be the mount for all, where the recording was given up."""
    [lower] = stack.lowers(key)
    assert lower.name.partition(".")[0] == node_name(layer.digest)
    return lower


@pytest.mark.parametrize("point", BEGIN)
def test_the_beginning(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer()
    stack.prepare(layer)
    stack.arm(point)
    key = stack.box(layer)
    stack.require(point)
    stack.read(layer, _private(stack, key, layer))
    stack.remove(key)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", READ)
def test_the_reads(stack: Stack, new_layer: NewLayer, point: str) -> None:
    """A block server that dies has noted all that it served; what is noted twice counts once."""
    layer = new_layer()
    stack.prepare(layer)
    stack.control("record-arm", namespace="default", name="box", workload="w", manifest="", window_s=60)
    key = stack.box(layer)
    lower = _private(stack, key, layer)
    assert "." in lower.name, "it is not recorded"
    stack.arm(point, 2)
    stack.read(layer, lower)
    stack.require(point)
    stack.control("record-end", namespace="default", name="box", keep=True, why="all is read")
    pack = HotStore(stack.daemon.root).load(image_key([layer.digest]), "w")
    assert pack is not None
    assert pack.hotset.block_count == sum(-(-len(data) // BLOCK) for data in layer.contents.values())
    stack.remove(key)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", END)
def test_the_end(stack: Stack, new_layer: NewLayer, point: str) -> None:
    """It is kept, or another container is recorded in its place; what is made of it is known to be so."""
    layer = new_layer()
    stack.prepare(layer)
    stack.arm(point)
    first = stack.box(layer)
    lower = _private(stack, first, layer)
    stack.read(layer, lower)
    stack.require(point)
    stack.read(layer, _private(stack, first, layer))
    second = stack.box(layer)
    stack.read(layer, _private(stack, second, layer))
    key, records = image_key([layer.digest]), Records(stack.daemon.root, HotStore(stack.daemon.root), WorkloadConfig())
    until(lambda: records.hotsets.load(key, "default") is not None, "there is no hot set")
    assert records.mixes_default(key)
    stack.remove(first, second)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", REMOVAL)
def test_the_removal(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer()
    stack.prepare(layer)
    key = stack.box(layer)
    stack.read(layer, _private(stack, key, layer))
    stack.arm(point)
    stack.remove(key)
    stack.require(point)
    stack.forget(layer)
    stack.require_clean()
