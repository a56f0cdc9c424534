"""Lazy layers in use: who holds them, and when they are given back."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from snapshotter.containerd.lazy import LazyLayers
from snapshotter.errors import InvalidArgument, Precondition, Transient
from snapshotter.model import Digest, LayerRef, MountedLayer
from tests.snapshotter.containerd.fake_provider import FakeProvider, digest

A = digest("a")
REF = LayerRef("h/a:1", A, (A,))


def _start(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target)
    thread.start()
    return thread


def test_kept_while_a_row_uses_it_and_asked_for_once(provider: FakeProvider) -> None:
    provider.add(A, {"f": b"1"})
    layers = LazyLayers(provider, lambda layer: True)
    for _ in range(3):
        with layers.mounted(REF) as layer:
            assert (layer.path / "f").read_bytes() == b"1"
    layers.release_if_unused(A)
    assert (provider.ensured[A], provider.released) == (1, [])


def test_released_when_no_row_came_of_it(provider: FakeProvider) -> None:
    provider.add(A, {"f": b"1"})
    layers = LazyLayers(provider, lambda layer: False)
    with layers.mounted(REF):
        assert provider.released == []
    assert provider.released == [A]


def test_a_lost_mount_is_noticed(provider: FakeProvider) -> None:
    provider.add(A, {"f": b"1"})
    layers = LazyLayers(provider, lambda layer: True)
    with layers.mounted(REF):
        pass
    provider.lose(A)
    with layers.mounted(REF) as layer:
        assert (layer.path / "f").exists()
    assert provider.ensured[A] == 2


def test_a_failure_leaves_nothing_to_release(provider: FakeProvider) -> None:
    layers = LazyLayers(provider, lambda layer: False)
    provider.failure = Transient("no route")
    with pytest.raises(Transient), layers.mounted(REF):
        pass
    assert provider.released == []


def test_an_unusable_path_is_given_back(provider: FakeProvider, tmp_path: Path) -> None:
    class Odd(FakeProvider):
        def ensure(self, ref: LayerRef) -> MountedLayer:
            return MountedLayer(Path("/a:b"))

    odd = Odd(tmp_path)
    with pytest.raises(InvalidArgument), LazyLayers(odd, lambda layer: False).mounted(REF):
        pass
    assert odd.released == [A]


def test_release_waits_for_the_last_pin(provider: FakeProvider) -> None:
    provider.add(A, {})
    layers = LazyLayers(provider, lambda layer: False)
    with layers.mounted(REF):
        with layers.mounted(REF):
            layers.release_if_unused(A)
        assert provider.released == []
    assert provider.released == [A]


def test_a_pin_waits_until_a_release_is_over(provider: FakeProvider) -> None:
    """Otherwise it would get a path that is being unmounted."""
    provider.add(A, {})
    asked, go_on = threading.Event(), threading.Event()
    used = [False]

    def is_used(layer: Digest) -> bool:
        asked.set()
        assert go_on.wait(10)
        return used[0]

    layers = LazyLayers(provider, is_used)
    releasing = _start(lambda: layers.release_if_unused(A))
    assert asked.wait(10)
    got: list[Path] = []

    def pin() -> None:
        with ExitStack() as stack:
            got.append(stack.enter_context(layers.mounted(REF)).path)
            used[0] = True

    pinning = _start(pin)
    assert not provider.entered.acquire(timeout=0.1)
    go_on.set()
    for thread in (releasing, pinning):
        thread.join(10)
    assert provider.released == [A]
    assert got[0].exists()


def test_a_failing_release_is_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(FakeProvider):
        def release(self, layer: Digest) -> None:
            raise OSError("busy")

    layers = LazyLayers(Stuck(tmp_path), lambda layer: False)
    layers.release_if_unused(A)
    layers.release_if_unused(A)
    assert caplog.text.count("OSError: busy") == 2


def test_a_layer_in_use_is_not_kept_out_and_one_kept_out_is_waited_for(provider: FakeProvider) -> None:
    layer = digest("a")
    provider.add(layer, {})
    used = [True]
    layers = LazyLayers(provider, lambda digest: used[0])
    ref = LayerRef("r.io/a:1", layer, (layer,))
    with layers.mounted(ref), pytest.raises(Precondition, match="asking for it now"), layers.kept_out(layer):
        pass
    with pytest.raises(Precondition, match="by an image"), layers.kept_out(layer):
        pass
    used[0] = False
    arrived = threading.Event()

    def ask() -> None:
        with layers.mounted(ref):
            arrived.set()

    thread = threading.Thread(target=ask)
    with layers.kept_out(layer):
        thread.start()
        assert not arrived.wait(0.1)
    thread.join(10)
    assert arrived.is_set() and provider.ensured[layer] == 2
