"""The service and the fetch process die while containerd pulls, starts and removes. See `stack`."""

import pytest

from tests.snapshotter.kills.conftest import NewLayer
from tests.snapshotter.kills.stack import Stack, name_of, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

PULL = (
    "fetch.staged",
    "fetch.layer-written",
    "fetch.record-written",
    "fetch.layer-described",
    "fetch.layer-published",
    "fetch.layer-arrived",
    "fetch.ensured",
    "service.loop-attached",
    "service.attached",
    "service.layer-mounted",
    "service.committing",
    "service.committed",
)
PULL_WITHOUT_INDEX = ("fetch.streamed",)
CONTAINER = ("service.dirs-made", "service.dirs-adopted")
REMOVAL = ("service.committing", "service.committed", "service.discarded", "service.unmounted", "service.detached")
CLEANUP = ("service.cleaning",)
COPY = ("service.copying",)


@pytest.mark.parametrize("point", PULL)
def test_a_pull(stack: Stack, new_layer: NewLayer, point: str) -> None:
    lower, layer = new_layer(files=2, size=5000), new_layer()
    stack.prepare(lower)
    stack.arm(point)
    stack.prepare(lower, layer)
    stack.require(point)
    stack.read(layer)
    stack.read(lower)
    stack.forget(lower, layer)
    stack.require_clean()


@pytest.mark.parametrize("point", [*PULL_WITHOUT_INDEX, "fetch.layer-described", "fetch.layer-published"])
def test_a_pull_without_an_index(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer(indexed=False)
    stack.arm(point, 3 if point == "fetch.streamed" else 1)
    stack.prepare(layer)
    stack.require(point)
    stack.read(layer)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", [*CONTAINER, "service.committing", "service.committed"])
def test_a_container(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer()
    stack.prepare(layer)
    stack.arm(point)
    key = stack.box(layer)
    stack.require(point)
    [lower] = stack.lowers(key)
    stack.read(layer, lower)
    stack.remove(key)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", REMOVAL)
def test_the_removal_of_an_image(stack: Stack, new_layer: NewLayer, point: str) -> None:
    """The layer is not mounted any more, and is so again at the next pull."""
    layer = new_layer()
    mount = stack.prepare(layer)
    stack.arm(point)
    stack.remove(name_of(layer))
    stack.require(point)
    until(lambda: not mount.exists(), "the layer stays mounted")
    stack.prepare(layer)
    stack.read(layer)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", [*CLEANUP, "service.discarded", "service.committing"])
def test_the_removal_of_a_container(stack: Stack, new_layer: NewLayer, point: str) -> None:
    layer = new_layer()
    stack.prepare(layer)
    key = stack.box(layer)
    stack.arm(point)
    stack.remove(key)
    stack.require(point)
    stack.read(layer)
    stack.forget(layer)
    stack.require_clean()


def test_another_image_of_the_same_layer(stack: Stack, new_layer: NewLayer) -> None:
    """The record of a layer in the store is written anew; half a record is nobody's."""
    layer = new_layer()
    stack.prepare(layer)
    stack.read(layer)
    stack.remove(name_of(layer))
    stack.arm("fetch.record-written")
    stack.image = "other:2"
    try:
        stack.prepare(layer)
    finally:
        stack.image = "app:1"
    stack.require("fetch.record-written")
    [directory] = (stack.daemon.root / "layers").iterdir()
    until(lambda: not list(directory.glob("layer.json.*")), "an unfinished record is left")
    stack.read(layer)
    stack.forget(layer)
    stack.require_clean()


@pytest.mark.parametrize("point", COPY)
def test_the_copy_of_the_store(stack: Stack, new_layer: NewLayer, point: str) -> None:
    """It is made anew by the next service, over what was left."""
    layer = new_layer()
    stack.arm(point)
    stack.prepare(layer)
    stack.require(point)
    stack.read(layer)
    stack.forget(layer)
    stack.require_clean()
