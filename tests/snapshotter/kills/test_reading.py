"""Block server and fetch process die at each step between the kernel's request and its answer. See `stack`."""

import pytest

from tests.snapshotter.daemon import expected, reader
from tests.snapshotter.kills.conftest import NewLayer
from tests.snapshotter.kills.stack import Stack

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

AT = (
    "block.claimed",
    "block.came",
    "block.handed",
    "block.rung",
    "block.answered",
    "fetch.taken",
    "fetch.answered",
    "fetch.written",
    "fetch.present",
)
AT_A_START = {"block.recovered": "block", "fetch.inherited": "fetch"}


@pytest.mark.parametrize("point", AT)
def test_one_dies_under_a_cold_read(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer(files=10, size=20 << 10)
    stack.prepare(layer)
    stack.arm(point, 2)  # not the first request
    stack.read(layer)
    stack.require(point)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", AT_A_START)
def test_a_successor_dies_at_its_start(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer(files=8)
    mount = stack.prepare(layer)
    stack.arm(point)
    process = reader("read", *(mount / name for name in sorted(layer.contents)))
    stack.die(AT_A_START[point])
    digests, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and digests.split() == expected(layer, *sorted(layer.contents))
    stack.require(point)
    stack.forget(layer)
    stack.require_clean()


def test_both_die_under_one_read_again_and_again(stack: Stack, new_layer: NewLayer) -> None:
    """Every point of the way, in one life of one layer."""
    layer = new_layer(files=8)
    stack.prepare(layer)
    for point in AT:
        stack.arm(point)
    stack.read(layer)
    for point in AT:
        stack.require(point)
    stack.forget(layer)
    stack.require_clean()
