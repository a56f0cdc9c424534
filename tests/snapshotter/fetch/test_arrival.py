"""How a layer comes into the store: with an index, streamed without one, and not at all."""

import errno
import hashlib
import logging
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from blockindex.codec import decode_index, decode_stored
from blockindex.errors import BlockIndexError
from blockindex.model import BLOCK
from snapshotter.blockstore import BlockStore, LayerFiles, LayerRecord, Staging, node_name
from snapshotter.errors import NotFound, Precondition, SnapshotterError, Transient
from snapshotter.fetch import arrival as arrival_module
from snapshotter.fetch.arrival import Arrivals, FoundIndex, _Wanted
from snapshotter.model import Digest
from snapshotter.registry import resumed as resumed_module
from tests.snapshotter.daemon import Layer, encoded_index, make_layer
from tests.snapshotter.fetch.blobs import PATIENCE_S, FakeBlob

IMAGE = "registry.test/app:1"


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=4, size=100_000, seed=seed) for seed in range(3)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumed_module, "_BACKOFF_S", 0.001)


class Indexes:
    """Layer indexes by digest. Looking one up waits at `gate`."""

    def __init__(self) -> None:
        self.known: dict[Digest, bytes] = {}
        self.better: dict[Digest, bytes] = {}  # what comes before it
        self.layers: dict[Digest, tuple[Digest, ...]] = {}  # that the look-up was told of
        self.asked: Counter[Digest] = Counter()
        self.asking = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
        self.asked[digest] += 1
        self.layers[digest] = tuple(layers)
        self.asking.set()
        assert self.gate.wait(PATIENCE_S)
        for where, known in (("first", self.better), ("second", self.known)):
            if digest in known:
                yield FoundIndex(known[digest], where)


class Bench:
    """Arrivals over a store, with blobs and indexes that the test prepares."""

    def __init__(self, root: Path, layers: list[Layer]) -> None:
        self.store = BlockStore(root)
        self.indexes = Indexes()
        self.blobs = {layer.digest: FakeBlob(layer.blob) for layer in layers}
        self.opened: list[tuple[str, Digest]] = []
        self.hurried: list[tuple[str, int]] = []  # (image, look-ups that were asked for by the end)
        self.arrivals = Arrivals(self.store, self.indexes, self._open, hurry=self._hurry)

    @contextmanager
    def _hurry(self, image: str) -> Iterator[None]:
        before = self.indexes.asked.total()
        yield
        self.hurried.append((image, self.indexes.asked.total() - before))

    def _open(self, image: str, digest: Digest) -> FakeBlob:
        self.opened.append((image, digest))
        if digest not in self.blobs:
            raise NotFound(f"{digest} is not at the registry")
        return self.blobs[digest]

    def ensure(self, layer: Layer, *siblings: Layer) -> Path:
        return self.arrivals.ensure(IMAGE, layer.digest, tuple(sibling.digest for sibling in siblings))

    def in_store(self) -> list[str]:
        """Everything below the store, also what is staged."""
        return sorted(path.name for path in self.store.layers.iterdir())


@pytest.fixture
def bench(tmp_path: Path, layers: list[Layer]) -> Iterator[Bench]:
    bench = Bench(tmp_path, layers)
    yield bench
    bench.indexes.gate.set()
    for blob in bench.blobs.values():
        blob.release_all()
    bench.arrivals.close()
    assert all(blob.open == 0 for blob in bench.blobs.values()), "a stream was not closed"


def _check_complete(directory: Path, layer: Layer) -> None:
    files = LayerFiles(directory)
    try:
        assert files.complete()
        region = bytearray(files.record.data_size)
        files.read_into(memoryview(region), files.meta_size)
        assert region == b"".join(data + bytes(-len(data) % BLOCK) for data in layer.contents.values())
        assert decode_index((directory / "index").read_bytes()).blob_digest == layer.digest
    finally:
        files.close()


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage().split(" ")[0] for record in caplog.records if record.levelno >= logging.WARNING]


# -- with an index ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indexed", [True, False], ids=["with an index", "streamed"])
def test_the_index_is_handed_on_once_as_it_would_be_read(bench: Bench, layers: list[Layer], indexed: bool) -> None:
    if indexed:
        bench.indexes.known[layers[0].digest] = encoded_index(layers[0])
    directory = bench.ensure(layers[0])
    handed = bench.arrivals.fresh(directory)
    assert handed == decode_stored((directory / "index").read_bytes())
    assert bench.arrivals.fresh(directory) is None


def test_the_index_of_another_arrival_is_not_handed_on(bench: Bench, layers: list[Layer]) -> None:
    """A layer that has been removed and has come in again may have another index."""
    bench.indexes.known[layers[0].digest] = encoded_index(layers[0])
    directory = bench.ensure(layers[0])
    shutil.copytree(directory, directory.with_name("copy"))
    directory.rename(directory.with_name("gone"))
    directory.with_name("copy").rename(directory)
    assert bench.arrivals.fresh(directory) is None


def test_indexes_that_nobody_opens_are_not_kept_for_ever(
    bench: Bench, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_module, "_FRESH", 2)
    for layer in layers:
        bench.indexes.known[layer.digest] = encoded_index(layer)
    directories = [bench.ensure(layer) for layer in layers]
    assert [bench.arrivals.fresh(directory) is None for directory in directories] == [True, False, False]


def test_with_an_index_nothing_of_the_blob_is_needed(bench: Bench, layers: list[Layer]) -> None:
    encoded = bench.indexes.known[layers[0].digest] = encoded_index(layers[0])
    directory = bench.ensure(layers[0])
    assert bench.opened == []
    assert directory == bench.store.find(layers[0].digest)
    assert (directory / "index").read_bytes() == encoded
    record = LayerRecord.load(directory)
    assert record.digest == layers[0].digest and record.images == (IMAGE,)
    files = LayerFiles(directory)
    assert files.blocks_present() == 0 and files.meta_size == len(decode_index(encoded).metadata)
    files.close()


@pytest.mark.parametrize("reason", ["of another layer", "damaged", "cut", "empty"])
def test_an_index_that_is_not_right_is_refused_and_the_layer_streamed(
    bench: Bench, layers: list[Layer], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoded = encoded_index(layers[1 if reason == "of another layer" else 0])
    damaged = bytearray(encoded)
    damaged[len(damaged) // 2] ^= 1
    bad = {"of another layer": encoded, "damaged": bytes(damaged), "cut": encoded[:-5], "empty": b""}[reason]
    bench.indexes.known[layers[0].digest] = bad
    _check_complete(bench.ensure(layers[0]), layers[0])
    assert _warnings(caplog) == ["index.refused"]


def test_the_next_best_index_takes_the_place_of_a_refused_one(
    bench: Bench, layers: list[Layer], caplog: pytest.LogCaptureFixture
) -> None:
    digest = layers[0].digest
    bench.indexes.better[digest], bench.indexes.known[digest] = b"", encoded_index(layers[0])
    directory = bench.arrivals.ensure(IMAGE, digest, (), [layers[1].digest, digest])
    assert _warnings(caplog) == ["index.refused"] and "from=first" in caplog.text
    assert LayerRecord.load(directory).index_from == "second" and bench.opened == []
    assert bench.indexes.layers[digest] == (layers[1].digest, digest)


def test_the_first_sound_index_is_taken(bench: Bench, layers: list[Layer]) -> None:
    digest = layers[0].digest
    bench.indexes.better[digest] = bench.indexes.known[digest] = encoded_index(layers[0])
    assert LayerRecord.load(bench.ensure(layers[0])).index_from == "first"
    assert LayerRecord.load(bench.ensure(layers[1])).index_from == "", "made here"


# -- without one -----------------------------------------------------------------------------------------------------


def test_without_an_index_the_layer_is_streamed_once_and_indexed(bench: Bench, layers: list[Layer]) -> None:
    _check_complete(bench.ensure(layers[0]), layers[0])
    assert bench.opened == [(IMAGE, layers[0].digest)]
    assert bench.blobs[layers[0].digest].requests == [(0, len(layers[0].blob))]
    assert bench.in_store() == [node_name(layers[0].digest)]


def test_what_is_in_the_store_is_neither_looked_up_nor_fetched(bench: Bench, layers: list[Layer]) -> None:
    directory = bench.ensure(layers[0])
    assert bench.arrivals.ensure("other.test/copy:2", layers[0].digest, ()) == directory
    assert bench.indexes.asked == {layers[0].digest: 1} and len(bench.opened) == 1
    assert LayerRecord.load(directory).images == (IMAGE, "other.test/copy:2")


def test_siblings_come_at_once_and_once(bench: Bench, layers: list[Layer]) -> None:
    """All layers of an image are under way before the first is there; who asks for one meanwhile joins."""
    holds = [bench.blobs[layer.digest].hold(1000) for layer in layers]
    with ThreadPoolExecutor(8) as callers:
        first = callers.submit(bench.ensure, layers[0], *layers)
        for hold in holds:
            hold.await_stream()
        assert sorted(bench.arrivals.under_way()) == sorted(layer.digest for layer in layers)
        others = [callers.submit(bench.ensure, layer, *layers[number:]) for number, layer in enumerate(layers)]
        for hold in holds:
            hold.release()
        assert first.result(PATIENCE_S) == others[0].result(PATIENCE_S)
        for layer, other in zip(layers, others, strict=True):
            _check_complete(other.result(PATIENCE_S), layer)
    assert set(bench.indexes.asked.values()) <= {1, 2}  # a caller that came late looked into the store, not further
    assert all(blob.requests == [(0, blob.size())] for blob in bench.blobs.values())


def test_a_layer_does_not_wait_for_its_siblings(bench: Bench, layers: list[Layer]) -> None:
    hold = bench.blobs[layers[1].digest].hold(1000)
    _check_complete(bench.ensure(layers[0], layers[1]), layers[0])
    hold.await_stream()
    assert bench.store.find(layers[1].digest) is None
    hold.release()
    _check_complete(bench.ensure(layers[1]), layers[1])


def test_a_registry_that_hangs_holds_up_no_other(
    tmp_path: Path, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrival_module, "_STREAMS", 1)
    bench = Bench(tmp_path, layers)
    hanging = bench.blobs[layers[0].digest].hold(0)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(bench.ensure, layers[0])
        hanging.await_stream()
        healthy = bench.arrivals.ensure("other.test/app:1", layers[1].digest, ())
        _check_complete(healthy, layers[1])
        hanging.release()
        _check_complete(stuck.result(PATIENCE_S), layers[0])
    bench.arrivals.close()


@pytest.mark.parametrize("pool", ["arrival", "stream"])
def test_without_a_thread_an_arrival_fails_and_the_next_one_comes(
    bench: Bench, layers: list[Layer], monkeypatch: pytest.MonkeyPatch, pool: str
) -> None:
    """The node is out of threads for a moment: nobody waits for ever."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(pool):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched, ThreadPoolExecutor(1) as caller:
        patched.setattr(threading.Thread, "start", refuse)
        arriving = caller.submit(bench.ensure, layers[0])
        with pytest.raises(SnapshotterError, match="new thread"):
            arriving.result(PATIENCE_S)
    assert bench.arrivals.under_way() == []
    _check_complete(bench.ensure(layers[0]), layers[0])


def test_callers_of_one_layer_share_one_look_up(bench: Bench, layers: list[Layer]) -> None:
    bench.indexes.known[layers[0].digest] = encoded_index(layers[0])
    bench.indexes.gate.clear()
    with ThreadPoolExecutor(4) as callers:
        first = callers.submit(bench.ensure, layers[0])
        assert bench.indexes.asking.wait(PATIENCE_S)
        joined = bench.arrivals._start(_Wanted(IMAGE, layers[0].digest, ()))  # what `ensure` waits for
        bench.indexes.gate.set()
        assert joined.result(PATIENCE_S) == first.result(PATIENCE_S)
    assert bench.indexes.asked == {layers[0].digest: 1}


# -- trouble ---------------------------------------------------------------------------------------------------------


def test_a_broken_stream_is_taken_up_where_it_stopped(
    bench: Bench, layers: list[Layer], caplog: pytest.LogCaptureFixture
) -> None:
    blob = bench.blobs[layers[0].digest]
    for offset in (0, 12_345, 200_000, 200_000, 399_999):
        blob.break_off(offset, Transient("connection reset"))
    _check_complete(bench.ensure(layers[0]), layers[0])
    assert [start for start, _ in blob.requests] == [0, 0, 12_345, 200_000, 200_000, 399_999]
    assert _warnings(caplog) == ["stream.retry"] * 5


def test_a_registry_that_stays_away_ends_in_its_error_and_leaves_nothing(bench: Bench, layers: list[Layer]) -> None:
    blob = bench.blobs[layers[0].digest]
    for _ in range(resumed_module._RETRIES + 1):
        blob.break_off(70_000, Transient("503"))
    with pytest.raises(Transient, match="503"):
        bench.ensure(layers[0])
    assert bench.in_store() == [] and bench.arrivals.under_way() == []
    _check_complete(bench.ensure(layers[0]), layers[0])  # the next one tries anew


def test_a_registry_that_comes_back_between_failures_is_never_given_up(bench: Bench, layers: list[Layer]) -> None:
    blob = bench.blobs[layers[0].digest]
    for number in range(3 * resumed_module._RETRIES):
        blob.break_off(number * 10_000, Transient("reset"))
    _check_complete(bench.ensure(layers[0]), layers[0])


def test_a_layer_that_is_not_there(bench: Bench, layers: list[Layer]) -> None:
    del bench.blobs[layers[0].digest]
    with pytest.raises(NotFound):
        bench.ensure(layers[0])
    assert bench.in_store() == []


def test_bytes_that_do_not_hash_to_the_digest_never_become_a_layer(bench: Bench, layers: list[Layer]) -> None:
    blob = bench.blobs[layers[0].digest]
    blob.falsify(len(layers[0].blob) // 2)
    with pytest.raises(BlockIndexError):
        bench.ensure(layers[0])
    assert bench.in_store() == []
    _check_complete(bench.ensure(layers[0]), layers[0])


def test_what_is_no_layer_is_refused(bench: Bench) -> None:
    junk = b"<html>not found</html>" * 1000
    digest = Digest("sha256:" + hashlib.sha256(junk).hexdigest())
    bench.blobs[digest] = FakeBlob(junk)
    with pytest.raises(BlockIndexError):
        bench.arrivals.ensure(IMAGE, digest, ())
    assert bench.in_store() == []


def test_a_failed_sibling_is_no_failure_of_the_layer(bench: Bench, layers: list[Layer]) -> None:
    del bench.blobs[layers[1].digest]
    _check_complete(bench.ensure(layers[0], layers[1], layers[2]), layers[0])
    with pytest.raises(NotFound):
        bench.ensure(layers[1])
    _check_complete(bench.ensure(layers[2]), layers[2])


def test_a_full_disk_is_an_error_of_ours_and_leaves_nothing(
    bench: Bench, layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(staging: Staging, offset: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "write", full)
        with pytest.raises(SnapshotterError, match="No space left on device"):
            bench.ensure(layers[0])
    assert bench.in_store() == []
    _check_complete(bench.ensure(layers[0]), layers[0])


def test_two_layers_with_one_node_name(bench: Bench, layers: list[Layer]) -> None:
    """The second is refused and goes the ordinary way; the first stays as it is."""
    directory = bench.ensure(layers[0])
    digest = layers[0].digest
    twin = Digest(digest[:-1] + ("0" if digest[-1] != "0" else "1"))
    bench.blobs[twin] = FakeBlob(layers[1].blob)
    with pytest.raises(SnapshotterError, match="begins like"):
        bench.arrivals.ensure(IMAGE, twin, ())
    _check_complete(directory, layers[0])


def test_a_small_layer_is_brought_in_whole(tmp_path: Path, layers: list[Layer]) -> None:
    """`min_lazy_bytes` lies between two layers' sizes: the smaller one is streamed although there is an index."""
    small, large = make_layer(files=1, size=100), layers[0]
    indexes, blobs = Indexes(), {layer.digest: FakeBlob(layer.blob) for layer in (small, large)}
    indexes.known = {layer.digest: encoded_index(layer) for layer in (small, large)}
    arrivals = Arrivals(BlockStore(tmp_path), indexes, lambda image, digest: blobs[digest], len(small.blob) + 1)
    try:
        present = []
        for layer in (small, large):
            files = LayerFiles(arrivals.ensure(IMAGE, layer.digest, ()))
            present.append(files.blocks_present())
            files.close()
        assert present == [1, 0]
    finally:
        arrivals.close()


def test_a_layer_kept_out_is_waited_for(bench: Bench, layers: list[Layer]) -> None:
    with ThreadPoolExecutor(1) as pool:
        with bench.arrivals.kept_out(layers[0].digest):
            waiting = pool.submit(bench.ensure, layers[0])
            bench.ensure(layers[1], layers[0])  # a sibling of another is not waited for
            assert not waiting.done() and node_name(layers[0].digest) not in bench.in_store()
        assert waiting.result(PATIENCE_S).name == node_name(layers[0].digest)
    assert bench.arrivals.under_way() == []


def test_a_layer_on_its_way_in_is_not_kept_out(bench: Bench, layers: list[Layer]) -> None:
    bench.indexes.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        arriving = pool.submit(bench.ensure, layers[0])
        assert bench.indexes.asking.wait(PATIENCE_S)
        with pytest.raises(Precondition, match="on its way in"), bench.arrivals.kept_out(layers[0].digest):
            pass
        bench.indexes.gate.set()
        arriving.result(PATIENCE_S)


def test_other_traffic_is_kept_back_while_an_index_comes(bench: Bench, layers: list[Layer]) -> None:
    """The pull waits for the index, and for nothing else before the mount."""
    bench.indexes.known[layers[0].digest] = encoded_index(layers[0])
    directory = bench.arrivals.ensure("registry.test/app:1", layers[0].digest, ())
    assert bench.hurried == [("registry.test/app:1", 1)]
    bench.arrivals.ensure("registry.test/app:1", layers[0].digest, ())
    assert len(bench.hurried) == 1 and directory.exists(), "what is in the store is not looked for"
