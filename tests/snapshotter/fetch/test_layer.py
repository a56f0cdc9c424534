"""Fetching of one layer: a real index and a real store, a blob that stops and breaks where the test wants it to."""

import errno
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from blockindex.codec import decode_index
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK, Piece
from snapshotter.blockstore import PRESENT, UNVERIFIED, BlockStore, LayerFiles
from snapshotter.errors import NotFound, Transient
from snapshotter.fetch import flight as flight_module
from snapshotter.fetch import host as host_module
from snapshotter.fetch import latecheck as latecheck_module
from snapshotter.fetch import layer as layer_module
from snapshotter.fetch.arrival import Arrivals, FoundIndex
from snapshotter.fetch.flight import Flight
from snapshotter.fetch.host import Host, Lane
from snapshotter.fetch.layer import LayerFetch, Waiter
from snapshotter.fetch.overflow import Overflow
from snapshotter.model import Digest
from tests.snapshotter.daemon import Layer, encoded_index, make_layer
from tests.snapshotter.fetch.blobs import PATIENCE_S, FakeBlob

SPAN = 1 << 18
"""Span size of the layer's index: two to three pieces a span, some ten spans."""


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=12, size=256 << 10)


@pytest.fixture(scope="module")
def index(layer: Layer) -> LayerIndex:
    return decode_index(encoded_index(layer, SPAN))


@pytest.fixture(autouse=True)
def plain_course(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time constants that only cost time here; one background request after the other, so that tests can tell."""
    monkeypatch.setattr(layer_module, "_BACKGROUND_WIDTH", 1)
    monkeypatch.setattr(host_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(host_module, "_AFTER_HOT_S", 0.0)
    monkeypatch.setattr(layer_module, "_BACKOFF_S", 0.005)


class Read:
    """A reader of the blocks `[start, end)`."""

    def __init__(self, bench: "Bench", start: int, end: int, since: float) -> None:
        self.answers: list[int] = []
        self.data = b""
        self._files = bench.files
        self._answered = threading.Event()
        offset = bench.files.meta_size + start * BLOCK
        self.waiter = Waiter(offset, (end - start) * BLOCK, start, end, since, self._answer)

    def _answer(self, waiter: Waiter, error: int) -> None:
        assert waiter is self.waiter
        self.answers.append(error)
        if not error:
            buffer = bytearray(waiter.size)
            self._files.read_into(memoryview(buffer), waiter.offset)
            waiter.overlay(buffer, self._files.meta_size)
            self.data = bytes(buffer)
        self._answered.set()

    def result(self) -> bytes:
        """The bytes, once they have come."""
        assert self._answered.wait(PATIENCE_S), "the reader was not answered"
        assert self.answers == [0]
        return self.data

    @property
    def waits(self) -> bool:
        return not self.answers


class Bench:
    """A layer in a store, its blob, and everything that lands."""

    def __init__(self, root: Path, layer: Layer, index: LayerIndex, growth: int = 1 << 30) -> None:
        self.index = index
        self.region = b"".join(data + bytes(-len(data) % BLOCK) for data in layer.contents.values())
        self.blob = FakeBlob(layer.blob)
        self.host = Host("registry.test", demand_threads=4, hot_threads=2, background_threads=2)
        self.directory = store_layer(root, layer)
        self.files = LayerFiles(self.directory, writable=True)
        self.landings: Counter[int] = Counter()
        self.layer = LayerFetch(self.files, index, [self.blob], self.host, growth, patience_s=1.0)
        self._land = self.layer.land
        self.layer.land = self._count  # type: ignore[method-assign]

    def _count(self, piece: Piece, lane: Lane) -> bool:
        self.landings[piece.block_start] += 1
        return self._land(piece, lane)

    def read(self, start: int, end: int, since: float | None = None) -> Read:
        """Begin to read blocks."""
        read = Read(self, start, end, time.monotonic() if since is None else since)
        self.layer.wait_for(read.waiter)
        return read

    def check(self, read: Read) -> None:
        """The reader gets what the layer holds."""
        start, end = read.waiter.start * BLOCK, read.waiter.end * BLOCK
        assert read.result() == self.region[start:end]

    def span_blocks(self, span: int) -> tuple[int, int]:
        return self.index.spans.block_starts[span], self.index.spans.block_ends[span]

    def span_range(self, first: int, last: int) -> tuple[int, int]:
        """Blob bytes of the spans `[first, last)`."""
        return self.index.spans[first].blob_start, max(self.index.spans.columns.blob_ends[first:last])

    def settle(self) -> None:
        """Return when nothing is in flight or queued."""
        deadline = time.monotonic() + PATIENCE_S
        while "0 running, 0 queued" not in repr(self.host):
            assert time.monotonic() < deadline, f"does not come to rest: {self.layer!r} {self.host!r}"
            time.sleep(0.001)

    def close(self) -> None:
        self.blob.release_all()
        self.layer.stop_background()
        try:
            self.settle()
        finally:
            self.host.close()  # else a thread that waits for ever would keep the interpreter
        state = repr(self.layer) + repr(self.host)
        self.layer.close()
        assert self.blob.open == 0, "a stream was not closed"
        assert "0 spans in flight" in state
        assert "0 urgent" in state, "a flight that is over still holds others back"


def store_layer(root: Path, layer: Layer) -> Path:
    """Put a layer with its index into a store, with no block present."""
    encoded = encoded_index(layer, SPAN)

    class Index:
        def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
            yield FoundIndex(encoded, "")

    def no_blob(image: str, digest: str) -> FakeBlob:
        raise AssertionError("the index was refused")

    arrivals = Arrivals(BlockStore(root), Index(), no_blob)
    directory = arrivals.ensure("registry.test/app:1", layer.digest, ())
    arrivals.close()
    return directory


@pytest.fixture
def bench(tmp_path: Path, layer: Layer, index: LayerIndex) -> Iterator[Bench]:
    bench = Bench(tmp_path, layer, index)
    yield bench
    bench.close()


def test_the_layer_is_as_these_tests_want_it(bench: Bench) -> None:
    assert len(bench.index.spans) >= 10
    assert all(len(bench.index.pieces(span)) >= 2 for span in range(9))
    assert len(bench.region) == bench.index.data_size


# -- readers ---------------------------------------------------------------------------------------------------------


def test_a_piece_that_lands_while_a_reader_is_taken_on_answers_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader has looked, and is not on the list yet, when the last block it misses comes."""
    place = bench.index.pieces(3)[0]
    data = bench.region[place.block_start * BLOCK : place.block_end * BLOCK]
    lander = threading.Thread(
        target=bench.layer.land, args=(Piece(place.block_start, place.block_end, data), Lane.DEMAND)
    )
    has = LayerFiles.has

    def look(files: LayerFiles, start: int, end: int) -> bool:
        found = has(files, start, end)
        if not found and lander.ident is None:
            lander.start()
            lander.join(0.2)  # it ends, or it waits for whoever is looking
        return found

    monkeypatch.setattr(LayerFiles, "has", look)
    read = bench.read(place.block_start, place.block_end)
    lander.join(PATIENCE_S)
    bench.check(read)


def test_a_read_that_cannot_be_taken_on_leaves_nobody_on_the_list(bench: Bench) -> None:
    """Who takes it answers it with an error: a second answer would be another reader's."""
    beyond = bench.files.record.blocks
    with pytest.raises(IndexError):
        bench.read(beyond, beyond + 1)
    assert bench.layer.waiting() == 0


def test_a_read_of_present_blocks_is_answered_at_once(bench: Bench) -> None:
    bench.check(bench.read(0, 8))
    bench.settle()
    requests = len(bench.blob.requests)
    read = bench.read(2, 6)
    assert read.answers == [0]
    bench.check(read)
    assert len(bench.blob.requests) == requests
    assert bench.layer.tally.waits == 1


def test_a_cold_read_fetches_its_span_and_no_more(bench: Bench) -> None:
    start, _ = bench.span_blocks(4)
    bench.check(bench.read(start, start + 1))
    bench.settle()
    assert bench.blob.requests == [bench.span_range(4, 5)]
    assert bench.layer.tally.demand_fetches == 1 and bench.layer.tally.background_fetches == 0
    assert bench.layer.tally.demand_bytes == sum(bench.blob.served)


def test_readers_are_answered_while_the_stream_goes_on(bench: Bench) -> None:
    start, end = bench.span_blocks(3)
    blob_start, blob_end = bench.span_range(3, 4)
    hold = bench.blob.hold(blob_start + (blob_end - blob_start) * 3 // 4)
    early, late = bench.read(start, start + 4), bench.read(end - 1, end)
    hold.await_stream()
    bench.check(early)
    assert late.waits
    hold.release()
    bench.check(late)
    assert bench.blob.requests == [bench.span_range(3, 4)]


def test_a_reader_joins_the_flight_that_brings_its_blocks(bench: Bench) -> None:
    start, end = bench.span_blocks(2)
    hold = bench.blob.hold(bench.span_range(2, 3)[0] + 100)
    reads = [bench.read(start, start + 1)]
    hold.await_stream()
    reads += [bench.read(start + number % (end - start), end) for number in range(20)]
    assert bench.layer.waiting() == 21
    hold.release()
    for read in reads:
        bench.check(read)
    assert bench.blob.requests == [bench.span_range(2, 3)]


def test_a_read_across_spans_fetches_each_once(bench: Bench) -> None:
    read = bench.read(bench.span_blocks(1)[1] - 2, bench.span_blocks(5)[0] + 2)
    bench.check(read)
    bench.settle()
    assert set(bench.landings.values()) == {1}
    assert bench.blob.requests == [bench.span_range(1, 2), bench.span_range(2, 4), bench.span_range(4, 8)]


def test_each_reader_is_answered_once(bench: Bench) -> None:
    """Also one whose blocks come by several flights."""
    reads = [bench.read(number * 5, number * 5 + 90) for number in range(130)]
    for read in reads:
        bench.check(read)
    bench.settle()
    assert all(read.answers == [0] for read in reads)
    assert bench.layer.waiting() == 0
    assert set(bench.landings.values()) == {1}


def test_readers_that_read_on_get_more_at_a_time(bench: Bench) -> None:
    spans = []
    for span in (0, 1, 3, 7):
        start, _ = bench.span_blocks(span)
        bench.check(bench.read(start, start + 1))
        bench.settle()
        spans.append(bench.blob.requests[-1])
    assert spans == [
        bench.span_range(0, 1),
        bench.span_range(1, 3),
        bench.span_range(3, 7),
        bench.span_range(7, min(15, len(bench.index.spans))),
    ]
    assert set(bench.landings.values()) == {1}


def test_growth_is_bounded(tmp_path: Path, layer: Layer, index: LayerIndex) -> None:
    bench = Bench(tmp_path, layer, index, growth=2 * index.blob_size // len(index.spans))
    for span in (0, 1, 3, 5):
        start, _ = bench.span_blocks(span)
        bench.check(bench.read(start, start + 1))
        bench.settle()
    assert bench.blob.requests[1:] == [bench.span_range(span, span + 2) for span in (1, 3, 5)]
    bench.close()


# -- background ------------------------------------------------------------------------------------------------------


def test_the_background_fills_everything_once(bench: Bench) -> None:
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert bench.files.complete()
    assert bench.layer.tally.demand_fetches == 0
    assert set(bench.landings.values()) == {1}
    starts = {bench.span_range(span, span + 1)[0]: span for span in range(len(bench.index.spans))}
    firsts = [starts[start] for start, _ in bench.blob.requests]
    assert firsts == sorted(set(firsts)), "a span was asked for twice"
    lasts = [*firsts[1:], len(bench.index.spans)]
    assert bench.blob.requests == [bench.span_range(first, last) for first, last in zip(firsts, lasts, strict=True)]
    buffer = bytearray(len(bench.region))
    bench.files.read_into(memoryview(buffer), bench.files.meta_size)
    assert buffer == bench.region
    bench.layer.fill_in_background(0.0)  # nothing is left to do
    bench.settle()
    assert not bench.layer.background


def test_the_background_leaves_out_what_readers_have_fetched(bench: Bench) -> None:
    for span in (0, 4, 8):
        start, _ = bench.span_blocks(span)
        bench.check(bench.read(start, start + 1))
    bench.settle()
    demanded = len(bench.blob.requests)
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert set(bench.landings.values()) == {1}
    assert bench.blob.requests[demanded][0] == bench.span_range(1, 2)[0]


def test_a_stopped_background_stops(bench: Bench) -> None:
    hold = bench.blob.hold(bench.span_range(0, 1)[0] + 8192)
    bench.layer.fill_in_background(0.0)
    hold.await_stream()
    bench.layer.stop_background()
    hold.release()
    bench.settle()
    assert len(bench.blob.requests) == 1
    assert not bench.files.complete()
    start, _ = bench.span_blocks(6)
    bench.check(bench.read(start, start + 1))  # readers are served even so
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)


def test_a_reader_never_finds_much_background_in_front_of_it(bench: Bench) -> None:
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    assert len(bench.blob.requests) > 1
    slack = 1 << 17  # what finishes the last block of a request
    assert max(end - start for start, end in bench.blob.requests) <= layer_module._BACKGROUND_RUN + slack


def test_the_background_gives_way_to_readers(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gives_way = threading.Event()
    give_way = bench.host.give_way

    def giving_way(lane: Lane) -> None:
        gives_way.set()
        give_way(lane)

    monkeypatch.setattr(bench.host, "give_way", giving_way)
    start, end = bench.span_blocks(8)
    hold = bench.blob.hold(bench.span_range(8, 9)[0] + 8192)
    read = bench.read(start, end)
    hold.await_stream()
    bench.layer.fill_in_background(0.0)
    assert gives_way.wait(PATIENCE_S)
    assert len(bench.blob.requests) == 1
    bench.check(bench.read(0, 4))  # a reader does not wait for what gives way
    assert bench.blob.requests[1:] == [bench.span_range(0, 1)]
    hold.release()
    bench.check(read)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert set(bench.landings.values()) == {1}


def test_a_flight_that_begins_while_a_reader_cuts_it_asks_for_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, go = threading.Event(), threading.Event()
    cut = bench.layer._cut

    def give_way(lane: Lane) -> None:
        waiting.set()
        assert go.wait(PATIENCE_S)

    def cutting(flight: Flight, span: int) -> None:
        go.set()
        deadline = time.monotonic() + 0.1  # all a flight could need to get ahead of us
        while not bench.blob.requests and time.monotonic() < deadline:
            time.sleep(0.001)
        cut(flight, span)

    monkeypatch.setattr(bench.host, "give_way", give_way)
    monkeypatch.setattr(bench.layer, "_cut", cutting)
    bench.layer.fill_in_background(0.0)
    assert waiting.wait(PATIENCE_S)
    bench.check(bench.read(0, 4))
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    firsts = [start for start, _ in bench.blob.requests]
    assert len(firsts) == len(set(firsts)), "a span was asked for twice"


def test_a_reader_far_behind_a_flight_does_not_wait_for_it(bench: Bench) -> None:
    """It gets a flight of its own; the one under way ends before, and nothing comes twice."""
    hold = bench.blob.hold(bench.span_range(0, 1)[0] + 8192)
    bench.layer.fill_in_background(0.0)
    hold.await_stream()
    [(_, end)] = bench.blob.requests
    far = next(span for span in range(2, 9) if bench.span_range(span, span + 1)[1] <= end)
    block, _ = bench.span_blocks(far)
    bench.check(bench.read(block, block + 1))
    assert bench.blob.requests[1] == bench.span_range(far, far + 1)
    assert bench.blob.served[0] == 8192
    hold.release()
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert set(bench.landings.values()) == {1}


def test_a_reader_just_behind_a_flight_waits_for_it(bench: Bench) -> None:
    hold = bench.blob.hold(bench.span_range(0, 1)[0] + 8192)
    bench.layer.fill_in_background(0.0)
    hold.await_stream()
    block, _ = bench.span_blocks(1)
    read = bench.read(block, block + 1)
    assert "1 urgent" in repr(bench.host)
    hold.release()
    bench.check(read)
    assert bench.layer.tally.demand_fetches == 0
    assert bench.layer.completed.wait(PATIENCE_S)


# -- trouble ---------------------------------------------------------------------------------------------------------


def _failures(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith("fetch.failed")]


def test_a_span_that_broke_off_is_fetched_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    start, end = bench.span_blocks(3)
    blob_start, blob_end = bench.span_range(3, 4)
    bench.blob.break_off((blob_start + blob_end) // 2, Transient("connection reset"))
    bench.check(bench.read(start, end))
    bench.settle()
    assert bench.blob.requests == [(blob_start, blob_end)] * 2
    assert bench.layer.tally.failures == 1
    [record] = _failures(caplog)
    assert record.levelno == logging.WARNING and "connection reset" in record.getMessage()


def test_failures_in_a_row_get_louder_and_readers_only_wait(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    start, end = bench.span_blocks(3)
    for _ in range(5):
        bench.blob.break_off(bench.span_range(3, 4)[0], Transient("503"))
    bench.check(bench.read(start, end))
    bench.settle()
    levels = [record.levelno for record in _failures(caplog)]
    assert levels == [logging.WARNING] * 3 + [logging.ERROR] * 2
    # a success ends the row
    bench.blob.break_off(bench.span_range(7, 8)[0], Transient("503"))
    bench.check(bench.read(*bench.span_blocks(7)))
    assert _failures(caplog)[-1].levelno == logging.WARNING


def test_a_server_that_names_a_time_is_left_alone_until_then(bench: Bench) -> None:
    start, end = bench.span_blocks(3)
    bench.blob.break_off(bench.span_range(3, 4)[0], Transient("429", retry_after_s=0.2))
    started = time.monotonic()
    bench.check(bench.read(start, end))
    assert time.monotonic() - started >= 0.2


def test_a_named_time_beyond_reason_is_not_believed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "_ASKED_MAX_S", 0.05)
    bench.blob.break_off(bench.span_range(3, 4)[0], Transient("429", retry_after_s=86400.0))
    bench.check(bench.read(*bench.span_blocks(3)))


def test_the_background_takes_failures_and_goes_on(bench: Bench) -> None:
    for span in (0, 2, 5):
        bench.blob.break_off(bench.span_range(span, span + 1)[0] + 5000, Transient("reset"))
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    assert bench.layer.tally.failures == 3


def test_wrong_bytes_are_never_stored_and_fetched_again(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    start, end = bench.span_blocks(5)
    blob_start, blob_end = bench.span_range(5, 6)
    bench.blob.falsify((blob_start + blob_end) // 2)
    bench.check(bench.read(start, end))
    bench.settle()
    assert bench.layer.tally.failures == 1 and len(bench.blob.requests) == 2
    said = _failures(caplog)[0].getMessage()
    assert bench.layer.files.record.digest in said and f"bytes={blob_start}-{blob_end} " in said and "attempt=1" in said
    assert "do not match their digest" in said and len(bench.blob.refutations) == 1


def test_whoever_waited_too_long_gets_an_error(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    start, end = bench.span_blocks(2)
    hold = bench.blob.hold(bench.span_range(2, 3)[0] + 100)
    now = time.monotonic()
    old, new = bench.read(start, end, since=now - 60), bench.read(start, end, since=now)
    hold.await_stream()
    bench.layer.expire(now - 30)
    assert old.answers == [errno.EIO] and new.waits
    [record] = [record for record in caplog.records if record.getMessage().startswith("read.timed_out")]
    assert record.levelno == logging.ERROR
    hold.release()
    bench.check(new)
    bench.settle()
    assert old.answers == [errno.EIO], "answered twice"


def _full(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A disk that takes no bytes until the event is set."""
    room, fill = threading.Event(), LayerFiles.fill

    def filling(files: LayerFiles, start: int, end: int, data: bytes | memoryview) -> None:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        fill(files, start, end, data)

    monkeypatch.setattr(LayerFiles, "fill", filling)
    return room


def test_a_full_disk_keeps_no_reader_from_its_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They come from the network, once for all readers of a span, and are stored when there is room."""
    room = _full(monkeypatch)
    start, end = bench.span_blocks(3)
    bench.check(bench.read(start, end))
    bench.settle()
    bench.check(bench.read(start + 1, end))
    bench.check(bench.read(start, start + 2))
    assert len(bench.blob.requests) == 1 and bench.files.blocks_present() == 0
    assert bench.layer.tally.failures == 0
    assert [it.getMessage().split()[0] for it in caplog.records if it.levelno == logging.ERROR] == ["store.full"]
    caplog.clear()
    bench.layer.tend()
    assert bench.files.blocks_present() == 0 and bench.layer.overflow.refusing
    room.set()
    bench.layer.tend()
    assert bench.files.has(start, end) and not bench.layer.overflow.refusing and not bench.layer.overflow.size
    bench.check(bench.read(start, end))
    assert len(bench.blob.requests) == 1


def test_a_reader_of_much_is_served_however_little_memory_there_is(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps what has come for it; of some blocks the store has the bytes, of others only it."""
    room = _full(monkeypatch)
    bench.layer.overflow = Overflow(4 * BLOCK)
    room.set()
    bench.check(bench.read(*bench.span_blocks(2)))
    bench.settle()
    room.clear()
    start, end = bench.span_blocks(1)[0] + 1, bench.span_blocks(4)[1] - 1
    bench.check(bench.read(start, end))
    assert bench.layer.overflow.size == 4 * BLOCK
    assert "store.full" in caplog.text
    caplog.clear()


def test_a_background_that_ended_while_the_disk_was_full_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it would have fetched was on its way for readers, and came neither into the store nor stayed in memory."""
    room = _full(monkeypatch)
    bench.layer.overflow = Overflow(BLOCK)
    hold = bench.blob.hold(0)
    read = bench.read(0, bench.index.block_count)
    hold.await_stream()
    bench.layer.fill_in_background(0.0)
    assert not bench.layer.background, "everything is on its way"
    hold.release()
    bench.check(read)
    bench.settle()
    room.set()
    bench.layer.tend()
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    caplog.clear()


def test_on_a_full_disk_nothing_is_fetched_that_nobody_waits_for(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until there is room: then the layer completes."""
    monkeypatch.setattr(layer_module, "_NO_ROOM_S", 0.02)
    room = _full(monkeypatch)
    asked: list[None] = []
    bench.layer.fetch_hot([(0, bench.index.block_count)], 1, lambda: asked.append(None))
    bench.settle()
    assert asked and len(bench.blob.requests) == 1, "an order for hot blocks ends"
    bench.layer.fill_in_background(0.0)
    deadline = time.monotonic() + PATIENCE_S
    while len(bench.blob.requests) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert sum(bench.blob.served) < len(bench.blob.requests) * (SPAN + 65536), "a request ends with its first piece"
    bench.check(bench.read(*bench.span_blocks(5)))
    room.set()
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.layer.tend()
    bench.settle()
    assert not bench.layer.overflow.size
    caplog.clear()


def test_a_reader_that_comes_as_a_flight_fails_is_served_and_holds_nobody_back(bench: Bench) -> None:
    """The flight is over, but the layer does not know it yet."""
    over, go = threading.Event(), threading.Event()
    landed = bench.layer.landed

    def stopped(flight: Flight) -> None:
        over.set()
        assert go.wait(PATIENCE_S)
        landed(flight)

    bench.layer.landed = stopped  # type: ignore[method-assign]
    start, end = bench.span_blocks(2)
    bench.blob.break_off(bench.span_range(2, 3)[0], Transient("reset"))
    first = bench.read(start, end)
    assert over.wait(PATIENCE_S)
    second = bench.read(start, end)
    go.set()
    bench.check(first)
    bench.check(second)  # `close` sees whether the host still counts it as urgent


# -- after a power cut -----------------------------------------------------------------------------------------------


def _distrust(bench: Bench, start: int, end: int) -> None:
    with (bench.files.directory / "present").open("r+b") as present:
        present.seek(start)
        present.write(bytes([UNVERIFIED]) * (end - start))


def test_bytes_in_doubt_are_served_without_fetching_if_they_are_right(bench: Bench) -> None:
    start, end = bench.span_blocks(3)
    bench.check(bench.read(start, end))
    bench.settle()
    requests = len(bench.blob.requests)
    _distrust(bench, start, end)
    read = bench.read(start, end)
    bench.check(read)
    bench.settle()
    assert len(bench.blob.requests) == requests
    assert bench.files.present[start:end] == bytes([PRESENT]) * (end - start)


def _takes_no_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk on which each write needs new room, as on btrfs."""

    def trusting(files: LayerFiles, start: int, end: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(LayerFiles, "trust", trusting)


def test_bytes_in_doubt_come_anew_where_nothing_can_be_noted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, end = bench.span_blocks(3)
    bench.check(bench.read(start, end))
    bench.settle()
    requests = len(bench.blob.requests)
    _distrust(bench, start, end)
    with monkeypatch.context() as refusing:
        _takes_no_marks(refusing)
        bench.check(bench.read(start, end))
        bench.settle()
        assert len(bench.blob.requests) == requests + 1 and not bench.files.has(start, end)
    assert [it.getMessage().split()[0] for it in caplog.records if it.levelno == logging.ERROR] == ["store.full"]
    caplog.clear()
    bench.layer.tend()
    assert bench.files.has(start, end)


def test_holes_wait_for_room_where_nothing_can_be_noted(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LayerIndex, "hole_blocks", lambda index: [range(2), range(5, 6)])
    with monkeypatch.context() as refusing:
        _takes_no_marks(refusing)
        again = LayerFetch(bench.files, bench.index, [bench.blob], bench.host, 1 << 30, 1.0)
        again.tend()
        assert not bench.files.blocks_present()
    caplog.clear()
    again.tend()
    assert bench.files.has(0, 2) and bench.files.has(5, 6)


def test_only_wrong_bytes_in_doubt_are_fetched_again(bench: Bench) -> None:
    start, end = bench.span_blocks(3)
    good, bad = bench.index.pieces(3)[:2]
    bench.check(bench.read(start, end))
    bench.settle()
    _distrust(bench, start, end)
    with (bench.directory / "data").open("r+b") as file:
        file.seek(bad.block_start * BLOCK + 5)
        file.write(b"what the power cut left")
    hold = bench.blob.hold(bench.span_range(3, 4)[0])
    of_good = bench.read(good.block_start, good.block_end)
    of_bad = bench.read(bad.block_start, bad.block_end)
    hold.await_stream()
    bench.check(of_good)
    assert of_bad.waits
    hold.release()
    bench.check(of_bad)


def test_the_background_checks_what_is_in_doubt(bench: Bench) -> None:
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    requests = len(bench.blob.requests)
    _distrust(bench, 0, bench.index.block_count)
    again = LayerFetch(bench.files, bench.index, [bench.blob], bench.host, 1 << 30, 1.0)
    again.fill_in_background(0.0)
    assert again.completed.wait(PATIENCE_S)
    bench.settle()
    assert len(bench.blob.requests) == requests


def test_a_flight_shows_what_it_does(bench: Bench) -> None:
    assert repr(Flight(bench.layer, 1, 4, flight_module.Lane.DEMAND)) == "<Flight DEMAND spans 1..1..4>"


def test_what_the_disk_cannot_read_back_after_a_power_cut_is_fetched_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, end = bench.span_blocks(4)
    _distrust(bench, start, end)

    def broken(fd: int, size: int, offset: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(latecheck_module.os, "pread", broken)
        read = bench.read(start, start + 1)
        bench.check(read)
        bench.settle()
    assert bench.blob.requests == [bench.span_range(4, 5)]
    assert "layer.unreadable" in caplog.text
    caplog.clear()


# -- registries ------------------------------------------------------------------------------------------------------


def test_what_one_registry_does_not_give_another_does(
    bench: Bench, layer: Layer, caplog: pytest.LogCaptureFixture
) -> None:
    """The layer was pulled through two images, and one has been deleted since."""
    start, _ = bench.span_blocks(4)
    bench.blob.break_off(bench.span_range(4, 5)[0], NotFound("deleted"))
    mirror = FakeBlob(layer.blob)
    bench.layer.sources.append(mirror)
    bench.check(bench.read(start, start + 1))
    bench.settle()
    assert bench.blob.requests == mirror.requests == [bench.span_range(4, 5)]
    assert bench.layer.sources == [mirror, bench.blob]  # stays with what works
    caplog.clear()


def test_the_registry_of_the_newest_image_comes_first(bench: Bench, layer: Layer) -> None:
    newest = FakeBlob(layer.blob)
    bench.layer.add_source(newest)
    bench.layer.add_source(newest)
    assert bench.layer.sources == [newest, bench.blob]
    start, _ = bench.span_blocks(4)
    bench.check(bench.read(start, start + 1))
    assert bench.blob.requests == []
