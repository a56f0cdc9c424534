"""Metadata of trusted writers are mounted first and judged soon; what fails is found out, and does not come again."""

import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from blockindex.codec import PROLOGUE_SIZE, decode_index, head_end
from blockindex.columns import compress
from blockindex.errors import Corrupt
from proto import layerindex_pb2 as pb
from snapshotter.blockstore import BlockStore, node_name
from snapshotter.fetch.arrival import Arrivals, FoundIndex
from snapshotter.fetch.latejudge import LateJudge
from snapshotter.judgement import Judgements
from snapshotter.model import Digest
from tests.blockindex.test_codec import sealed
from tests.snapshotter.daemon import Layer, encoded_index, make_layer
from tests.snapshotter.fetch.blobs import FakeBlob

IMAGE = "registry.test/app:1"


class Found:
    """An IndexSource of one index."""

    def __init__(self, encoded: bytes, vouched: bool) -> None:
        self.index = FoundIndex(encoded, "here", vouched)

    def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
        yield self.index


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=4, size=20_000)


@pytest.fixture(scope="module")
def good(layer: Layer) -> bytes:
    return encoded_index(layer)


@pytest.fixture(scope="module")
def unsound(good: bytes) -> bytes:
    """All digests are right; the metadata are not what our writer writes."""
    head = pb.LayerIndexHead.FromString(good[PROLOGUE_SIZE : head_end(good)])
    metadata = bytearray(decode_index(good).metadata)
    metadata[1024] ^= 1
    head.metadata_zstd = compress(bytes(metadata))
    damaged = sealed(head, good[head_end(good) :])
    with pytest.raises(Corrupt):
        decode_index(damaged)
    return damaged


def _arrive(root: Path, layer: Layer, encoded: bytes, vouched: bool) -> tuple[Path, bool]:
    """The layer's directory, and whether it came with that index."""
    arrivals = Arrivals(BlockStore(root), Found(encoded, vouched), lambda image, digest: FakeBlob(layer.blob))
    try:
        directory = arrivals.ensure(IMAGE, layer.digest, ())
    finally:
        arrivals.close()
    return directory, (directory / "index").read_bytes() == encoded


def _judge(root: Path) -> None:
    """Have everything judged that is due."""
    judge = LateJudge(root, delay_s=0.0)
    give_up = time.monotonic() + 30
    while list(Judgements(root).due()):
        assert time.monotonic() < give_up
        judge.tend()
        time.sleep(0.01)


def test_a_sound_one_is_judged_once(tmp_path: Path, layer: Layer, good: bytes) -> None:
    directory, used = _arrive(tmp_path, layer, good, vouched=True)
    judgements = Judgements(tmp_path)
    assert used and list(judgements.due()) == [directory.name]
    _judge(tmp_path)
    assert not list(judgements.due()) and not judgements.unsound(directory.name)


def test_it_is_not_judged_before_its_time(tmp_path: Path, layer: Layer, good: bytes) -> None:
    _arrive(tmp_path, layer, good, vouched=True)
    judge = LateJudge(tmp_path, delay_s=3600.0)
    judge.tend()
    assert list(Judgements(tmp_path).due())


def test_what_nobody_answers_for_is_judged_before_it_is_stored(
    tmp_path: Path, layer: Layer, good: bytes, unsound: bytes
) -> None:
    _, used = _arrive(tmp_path / "good", layer, good, vouched=False)
    assert used and not list(Judgements(tmp_path / "good").due())
    _, used = _arrive(tmp_path / "unsound", layer, unsound, vouched=False)
    assert not used, "the layer was streamed, and has an index of its own"


def test_an_unsound_one_is_found_out_and_does_not_come_again(
    tmp_path: Path, layer: Layer, unsound: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    directory, used = _arrive(tmp_path, layer, unsound, vouched=True)
    assert used
    with caplog.at_level(logging.ERROR):
        _judge(tmp_path)
    assert "layer.unsound" in caplog.text
    judgements, store = Judgements(tmp_path), BlockStore(tmp_path)
    assert judgements.unsound(node_name(layer.digest))

    store.delete(store.set_aside(directory.name))
    directory, used = _arrive(tmp_path, layer, unsound, vouched=True)
    assert not used, "it is judged first now"
    assert not judgements.unsound(directory.name) and not list(judgements.due())
    assert decode_index((directory / "index").read_bytes()).blob_digest == layer.digest


def test_an_index_that_is_damaged_meanwhile_is_unsound(tmp_path: Path, layer: Layer, good: bytes) -> None:
    directory, _ = _arrive(tmp_path, layer, good, vouched=True)
    (directory / "index").write_bytes(good[:-1])
    _judge(tmp_path)
    assert Judgements(tmp_path).unsound(directory.name)


def test_a_removed_layer_is_not_due(tmp_path: Path, layer: Layer, good: bytes) -> None:
    directory, _ = _arrive(tmp_path, layer, good, vouched=True)
    store = BlockStore(tmp_path)
    store.delete(store.set_aside(directory.name))
    _judge(tmp_path)
