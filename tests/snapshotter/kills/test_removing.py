"""Processes die while a layer is taken out of the store. See `stack`, and `snapshotter.layers` for the protocol."""

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from snapshotter.blockstore import node_name
from snapshotter.errors import Precondition
from snapshotter.rpc import Unanswered, call
from tests.snapshotter.daemon import Layer
from tests.snapshotter.kills.conftest import NewLayer
from tests.snapshotter.kills.stack import PATIENCE_S, Stack, name_of, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

REMOVAL = (
    "service.removing",
    "fetch.set-aside",
    "fetch.forgotten",
    "fetch.doomed",
    "fetch.deleted",
    "service.removed",
    "block.forgetting",
)
EVICTION = ("service.evicting",)


@pytest.mark.parametrize("point", REMOVAL)
def test_a_layer_is_removed(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer()
    stack.prepare(layer)
    stack.read(layer)
    stack.remove(name_of(layer))
    stack.arm(point)
    stack.drop(layer)
    stack.require(point)
    stack.require_clean()
    stack.prepare(layer)
    stack.read(layer)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", ["fetch.set-aside", "fetch.forgotten"])
def test_nobody_asks_again(stack: Stack, new_layer: NewLayer, point: str) -> None:
    """As when the service dies, too: the layer is in the store as before, and sound."""
    layer = new_layer()
    stack.prepare(layer)
    stack.read(layer)
    stack.remove(name_of(layer))
    stack.arm(point)
    with pytest.raises(Unanswered):
        _remove_only(stack, layer)
    stack.require(point)
    until(lambda: (stack.daemon.root / "layers" / node_name(layer.digest)).exists(), "it is gone")
    requests = len(stack.daemon.registry.requests)
    stack.prepare(layer)
    stack.read(layer)
    assert len(stack.daemon.registry.requests) == requests, "all was there"
    stack.forget(layer)
    stack.require_clean()


def test_somebody_has_it_open(stack: Stack, new_layer: NewLayer) -> None:
    """By the FUSE file, as a file-backed mount that was detached: in no book. Who reads there goes on, also when nobody
    has a file of the layer open any more; and the removal is refused when it is asked for again."""
    layer = new_layer()
    stack.prepare(layer)
    stack.read(layer)
    with _fuse_file(stack, layer) as file:
        stack.remove(name_of(layer))
        stack.arm("fetch.set-aside")
        with pytest.raises(Unanswered):
            _remove_only(stack, layer)
        stack.require("fetch.set-aside")
        until(lambda: (stack.daemon.root / "layers" / node_name(layer.digest)).exists(), "it is not put back")
        stack.die("block")
        size = os.fstat(file).st_size
        os.posix_fadvise(file, 0, size, os.POSIX_FADV_DONTNEED)
        whole = b"".join(os.pread(file, 1 << 16, offset) for offset in range(0, size, 1 << 16))
        assert all(data in whole for data in layer.contents.values())
        with pytest.raises(Precondition, match="in use"):
            _remove_only(stack, layer)
    stack.forget(layer)
    stack.require_clean()


def _remove_only(stack: Stack, layer: Layer) -> None:
    """What the service asks the fetch process for, once."""
    name = node_name(layer.digest)
    call(stack.daemon.run / "fetch.sock", "remove", PATIENCE_S, name=name, digest=layer.digest)


@contextlib.contextmanager
def _fuse_file(stack: Stack, layer: Layer) -> Iterator[int]:
    """The layer's file in the daemon's FUSE mount, which only the service reaches."""
    held = f"/proc/{stack.pids()['service']}/fd"
    [mount] = [fd for fd in os.listdir(held) if os.readlink(f"{held}/{fd}") == "/"]
    file = os.open(f"{held}/{mount}/{node_name(layer.digest)}", os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


@pytest.mark.parametrize("point", EVICTION)
def test_room_is_made(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer(files=5, size=500 << 10, indexed=False)
    stack.prepare(layer)
    stack.arm(point)
    stack.remove(name_of(layer))
    stack.die("service")  # the next one does not know of the pull
    directory = stack.daemon.root / "layers" / node_name(layer.digest)
    long_ago = time.time() - 3600
    os.utime(directory / "used", (long_ago, long_ago))
    stack.require(point)
    until(lambda: not directory.exists(), "it is not evicted")
    stack.require_clean()
