"""The service's way to its layers: whom it asks, and what it gives back."""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from snapshotter.blockstore import BlockStore, LayerRecord, node_name
from snapshotter.errors import Precondition
from snapshotter.judgement import Judgements
from snapshotter.layers import Layers, NoLayers
from snapshotter.model import Digest, LayerRef
from snapshotter.rpc import Server, Unanswered

DIGEST = Digest("sha256:" + "ab" * 32)
IMAGE = "registry.test/app:1"


class FakeAttacher:
    """Mounts nothing; `refuses` is raised by `detach`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.attached: set[str] = set()
        self.refuses: Exception | None = None

    def path(self, digest: Digest) -> Path:
        return self.root / node_name(digest)

    def attach(self, record: LayerRecord) -> Path:
        self.attached.add(node_name(record.digest))
        return self.path(record.digest)

    def detach(self, digest: Digest) -> None:
        if self.refuses:
            raise self.refuses
        self.attached.discard(node_name(digest))

    def mounted(self) -> dict[str, str]:
        return {name: str(self.root / name) for name in self.attached}

    def warm(self, digest: Digest) -> None:
        pass


class Bench:
    """Layers over a store, and a fetch process that notes what it is asked."""

    def __init__(self, root: Path) -> None:
        self.store = BlockStore(root)
        self.attacher = FakeAttacher(root / "m")
        self.asked: list[tuple[str, str]] = []
        self.watched = threading.Event()
        self.on_ensure: Callable[[], object] = lambda: None
        self._server = Server(
            root / "fetch.sock", {op: self._note(op) for op in ("ensure", "complete", "release", "remove")}
        )
        self.layers = Layers(self.store, root / "fetch.sock", self.attacher)  # type: ignore[arg-type]  # a fake

    def _note(self, op: str) -> Any:
        def handler(request: Mapping[str, Any]) -> Any:
            self.asked.append((op, request.get("image", "")))
            if op == "ensure":
                self.on_ensure()
            if op == "complete":
                self.watched.set()
            return {"name": node_name(DIGEST), "complete": False} if op == "ensure" else True

        return handler

    def close(self) -> None:
        for thread in threading.enumerate():
            if thread.name == "watch":
                thread.join()
        self._server.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    staging = bench.store.stage(DIGEST)
    staging.publish(LayerRecord(DIGEST, 1, 4096, 0, (IMAGE,), (), ""), bytes(4096), b"index", [])
    yield bench
    bench.close()


def _ref(image: str) -> LayerRef:
    return LayerRef(image, DIGEST, (DIGEST,))


def test_a_layer_in_the_store_is_mounted_without_asking(bench: Bench) -> None:
    assert bench.layers.ensure(_ref(IMAGE)).path == bench.attacher.path(DIGEST)
    assert ("ensure", IMAGE) not in bench.asked


def test_a_layer_that_was_found_unsound_is_dropped_and_asked_for_anew(bench: Bench) -> None:
    Judgements(bench.store.layers.parent).settle(node_name(DIGEST), "a loop")
    bench.layers.ensure(_ref(IMAGE))
    assert [op for op, _ in bench.asked][:2] == ["remove", "ensure"]


def test_another_image_of_a_layer_in_the_store_is_made_known(bench: Bench) -> None:
    """The registry of the first one may have lost the layer since."""
    assert bench.layers.ensure(_ref("other.test/app:1")).path == bench.attacher.path(DIGEST)
    assert ("ensure", "other.test/app:1") in bench.asked


def test_a_fetch_process_that_was_killed_is_told_of_the_image_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has lost its prefetch. One that lives is not: it would look for a hot set again and again."""
    calls: list[dict[str, object]] = []
    answers: list[object] = [False, Unanswered("killed"), False, False, True]

    def call(path: Path, op: str, timeout_s: float, **fields: object) -> object:
        calls.append({key: fields[key] for key in ("image", "layers") if key in fields})
        answer = answers[len(calls) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("snapshotter.layers.call", call)
    bench.layers.ensure(LayerRef(IMAGE, DIGEST, (DIGEST,), layers=(DIGEST,)))
    for thread in threading.enumerate():
        if thread.name == "watch":
            thread.join(10.0)
    assert calls == [{}, {}, {"image": IMAGE, "layers": [DIGEST]}, {}, {}]


def test_a_layer_that_cannot_be_unmounted_is_fetched_no_more(bench: Bench) -> None:
    bench.attacher.refuses = OSError("busy")
    with pytest.raises(OSError, match="busy"):
        bench.layers.release(DIGEST)
    assert bench.asked == [("release", "")]


def test_without_a_thread_to_watch_it_a_layer_is_mounted_and_watched_the_next_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert bench.layers.ensure(_ref(IMAGE)).path == bench.attacher.path(DIGEST)
    assert "layer.not_watched" in caplog.text and bench.asked == []
    caplog.clear()
    bench.layers.ensure(_ref(IMAGE))
    assert bench.watched.wait(5.0)


def test_a_node_that_cannot_mount_layers_says_so_and_gives_nothing_back() -> None:
    layers = NoLayers("this kernel has no EROFS")
    for refused in (lambda: layers.ensure(_ref(IMAGE)), layers.status):
        with pytest.raises(Precondition, match="no EROFS"):
            refused()
    layers.release(DIGEST)


def test_what_is_attached_is_told_by_digest(bench: Bench) -> None:
    assert bench.layers.attached() == []
    bench.attacher.attached |= {node_name(DIGEST), "0123456789abcd"}  # one that is not in the store any more
    assert bench.layers.attached() == [DIGEST]


def test_what_a_pull_will_ask_for_is_expected(bench: Bench) -> None:
    other = Digest("sha256:" + "cd" * 32)
    bench.layers.ensure(LayerRef(IMAGE, DIGEST, (DIGEST, other)))
    assert bench.layers.expected() == {DIGEST, other}


@pytest.mark.parametrize("name", ["index", "layer.json"])
def test_a_damaged_layer_is_dropped_and_asked_for_again(
    bench: Bench, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = bench.store.layers / node_name(DIGEST) / name
    good = path.read_bytes()
    path.write_bytes(b"what a disk made of it")
    bench.on_ensure = lambda: path.write_bytes(good)
    assert bench.layers.ensure(_ref(IMAGE)).path == bench.attacher.path(DIGEST)
    assert [op for op, _ in bench.asked[:2]] == ["remove", "ensure"] and "layer.dropped" in caplog.text
    caplog.clear()


def test_a_damaged_layer_that_is_mounted_is_served_on(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Containers stand on it; what the kernel has of it is right."""
    bench.layers.ensure(_ref(IMAGE))
    (bench.store.layers / node_name(DIGEST) / "index").write_bytes(b"what a disk made of it")
    assert bench.layers.ensure(_ref(IMAGE)).path == bench.attacher.path(DIGEST)
    assert "layer.damaged" in caplog.text and "remove" not in {op for op, _ in bench.asked}
    caplog.clear()
