"""Which snapshots get private mounts of their layers, and when these are given back. The recorder is played here."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import AlreadyExists
from snapshotter.model import Digest, LayerRef
from tests.snapshotter.containerd.fake_provider import FakeProvider, digest, layer_labels

A, B = digest("a"), digest("b")


class Recorder:
    """Gives what `answer` says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.answer: Mapping[Digest, Path] = {A: Path("/private/a"), B: Path("/private/b")}
        self.begun: list[tuple[str, list[Digest]]] = []
        self.asked: list[tuple[str, list[Digest]]] = []
        self.released: list[str] = []
        self.known: set[str] = set()

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        self.begun.append((key, [ref.digest for ref in refs]))
        self.known.add(key)
        return self.answer

    def private(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        self.asked.append((key, [ref.digest for ref in refs]))
        return self.answer if key in self.known else {}

    def release(self, key: str) -> None:
        self.released.append(key)
        self.known.discard(key)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def snapshots(tmp_path: Path, provider: FakeProvider, recorder: Recorder) -> Iterator[Snapshots]:
    """With two lazy layers, `one` and `two` on it."""
    made = Snapshots(tmp_path / "root", provider, recordings=recorder)
    for name, layer, parent in (("one", A, ""), ("two", B, "one")):
        provider.add(layer, {f"file{layer[-1]}": b"x"})
        with pytest.raises(AlreadyExists):
            made.prepare(f"ns/1/extract-1-x {name}", parent, layer_labels(name, layer))
    yield made
    made.close()


def _lowers(snapshots: Snapshots, key: str) -> list[str]:
    (mount,) = snapshots.mounts(key)
    return mount.options[-1].removeprefix("lowerdir=").split(":")


def test_a_container_of_lazy_layers(snapshots: Snapshots, recorder: Recorder) -> None:
    (mount,) = snapshots.prepare("c", "two", {})
    assert recorder.begun == [("c", [A, B])], "from the lowest up"
    assert mount.options[-1] == "lowerdir=/private/b:/private/a"
    assert _lowers(snapshots, "c") == ["/private/b", "/private/a"]
    assert recorder.asked == recorder.begun
    recorder.answer = {}
    assert all("/private" not in lower for lower in _lowers(snapshots, "c"))
    snapshots.remove("c")
    assert recorder.released == ["c"]


def test_only_containers_are_offered(snapshots: Snapshots, recorder: Recorder, provider: FakeProvider) -> None:
    snapshots.view("view", "two", {})
    snapshots.prepare("empty", "", {})
    snapshots.prepare("ns/2/extract-2-y three", "two", {})
    snapshots.prepare("made", "two", {})
    recorder.begun.clear()
    snapshots.commit("ordinary", "made", {})
    assert recorder.released == ["made"], "it is no container's any more"
    snapshots.prepare("mixed", "ordinary", {})
    snapshots.mounts("mixed")
    assert recorder.asked == [("mixed", [])]
    assert recorder.begun == [], "layers that are not lazy are never seen"
    assert all("/private" not in lower for lower in _lowers(snapshots, "view"))


def test_what_was_begun_for_nothing_is_given_back(snapshots: Snapshots, recorder: Recorder) -> None:
    snapshots.prepare("c", "one", {})
    with pytest.raises(AlreadyExists):
        snapshots.prepare("c", "two", {})
    assert recorder.released == ["c"]
    recorder.released.clear()
    recorder.answer = {}
    with pytest.raises(AlreadyExists):
        snapshots.prepare("c", "two", {})
    assert recorder.released == [], "nothing was begun"
