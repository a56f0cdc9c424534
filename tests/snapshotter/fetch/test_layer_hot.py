"""One layer: what is promised, what is asked for in an order, what runs two abreast."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockindex.codec import decode_index
from blockindex.layerindex import LayerIndex
from snapshotter.errors import Transient
from snapshotter.fetch import host as host_module
from snapshotter.fetch import layer as layer_module
from snapshotter.unproven import Pack
from tests.snapshotter.daemon import Layer, encoded_index, make_layer
from tests.snapshotter.fetch.blobs import PATIENCE_S
from tests.snapshotter.fetch.test_layer import SPAN, Bench

PACK = Pack("sha256:" + "c" * 64, "the test", "", "sha256:" + "d" * 64)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=12, size=256 << 10)


@pytest.fixture(scope="module")
def index(layer: Layer) -> LayerIndex:
    return decode_index(encoded_index(layer, SPAN))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_QUIET_S", 0.0)
    monkeypatch.setattr(host_module, "_AFTER_HOT_S", 0.0)
    monkeypatch.setattr(layer_module, "_BACKOFF_S", 0.005)


def make_bench(root: Path, layer: Layer, index: LayerIndex, spans: int) -> Bench:
    """A bench whose requests grow to so many spans."""
    return Bench(root, layer, index, growth=spans * index.blob_size // len(index.spans))


@pytest.fixture
def bench(tmp_path: Path, layer: Layer, index: LayerIndex) -> Iterator[Bench]:
    bench = Bench(tmp_path, layer, index)
    yield bench
    bench.close()


class Promised:
    """Promises blocks `[start, end)` as long as it is asked to."""

    def __init__(self, start: int, end: int) -> None:
        self.kept = True
        self.asked: list[int] = []
        self._blocks = range(start, end)

    def keeps(self, block: int) -> bool:
        self.asked.append(block)
        return self.kept and block in self._blocks


# -- readers that read on --------------------------------------------------------------------------------------------


def test_a_reader_that_reads_on_keeps_two_requests_in_the_air(tmp_path: Path, layer: Layer, index: LayerIndex) -> None:
    bench = make_bench(tmp_path, layer, index, 2)
    for span in (0, 1):  # the run grows to two spans with the second
        bench.check(bench.read(*bench.span_blocks(span)))
        bench.settle()
    assert bench.blob.requests == [bench.span_range(0, 1), bench.span_range(1, 3)]
    hold = bench.blob.hold(bench.span_range(3, 4)[0] + 20_000)
    start, end = bench.span_blocks(3)
    first = bench.read(start, start + 1)
    hold.await_stream()
    assert len(bench.blob.requests) == 3, "one read of what is missing is one request"
    second = bench.read(end - 1, end)  # it reads on where the request is: it will want what follows
    bench_requests = [bench.span_range(3, 5), bench.span_range(5, 7)]
    deadline = threading.Event()
    while len(bench.blob.requests) < 4:
        assert not deadline.wait(0.001)
    assert bench.blob.requests[2:] == bench_requests
    third = bench.read(end - 2, end - 1)
    assert len(bench.blob.requests) == 4, "two are enough"
    hold.release()
    for read in (first, second, third):
        bench.check(read)
    bench.settle()
    assert set(bench.landings.values()) == {1} and len(bench.blob.requests) == 4
    bench.close()


def test_one_that_has_not_grown_to_its_most_asks_once(bench: Bench) -> None:
    for span in (0, 1):
        start, end = bench.span_blocks(span)
        hold = bench.blob.hold(bench.span_range(span, span + 1)[0] + 20_000)
        reads = [bench.read(start, start + 1)]
        hold.await_stream()
        reads.append(bench.read(end - 1, end))
        hold.release()
        for read in reads:
            bench.check(read)
        bench.settle()
    assert bench.blob.requests == [bench.span_range(0, 1), bench.span_range(1, 3)]


# -- background ------------------------------------------------------------------------------------------------------


def test_two_requests_fill_the_layer(bench: Bench) -> None:
    """The first stands still, the second goes on."""
    hold = bench.blob.hold(bench.span_range(0, 1)[0] + 1000)
    bench.layer.fill_in_background(0.0)
    hold.await_stream()
    last = len(bench.index.spans) - 1
    give_up = threading.Event()
    while not bench.files.has(*bench.span_blocks(last)):
        assert not give_up.wait(0.001)
    assert not bench.layer.completed.is_set() and bench.layer.background
    hold.release()
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert set(bench.landings.values()) == {1} and not bench.layer.background


def test_a_layer_of_one_request_is_filled(tmp_path: Path) -> None:
    """The second of the two finds nothing to do, and does not take the first one's work away."""
    small = make_layer(files=2, size=64 << 10, seed=3)
    bench = Bench(tmp_path, small, decode_index(encoded_index(small, SPAN)))
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert len(bench.blob.requests) == 1 and not bench.layer.background
    bench.close()


def test_the_last_request_goes_on_when_the_other_has_nothing_left(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """One that failed is made again although the other one has ended meanwhile."""
    bench.blob.break_off(bench.span_range(0, 1)[0] + 8192, Transient("reset"))
    bench.layer.fill_in_background(0.0)
    assert bench.layer.completed.wait(PATIENCE_S)
    caplog.clear()


def test_there_are_never_more_than_two(bench: Bench) -> None:
    hold = bench.blob.hold(bench.span_range(0, 1)[0])
    for _ in range(3):
        bench.layer.fill_in_background(0.0)
        hold.await_stream()
        bench.layer.stop_background()
    bench.layer.fill_in_background(0.0)
    assert bench.layer._streams <= 2
    hold.release()
    assert bench.layer.completed.wait(PATIENCE_S)


# -- promises --------------------------------------------------------------------------------------------------------


def test_what_is_promised_is_not_fetched(bench: Bench) -> None:
    start, end = bench.span_blocks(2)
    promise = Promised(start, end)
    bench.layer.add_promise(promise)
    read = bench.read(start, start + 4)
    cold = bench.read(end, end + 1)
    bench.check(cold)
    bench.settle()
    assert read.waits and promise.asked[:4] == [start, start + 1, start + 2, start + 3]
    data = bench.region[start * 4096 : (start + 4) * 4096]
    bench.layer.land_hot(start, start + 4, memoryview(data), PACK)
    bench.check(read)
    assert bench.layer.tally.hot_blocks == 4 and bench.layer.tally.demand_fetches == 1
    bench.layer.drop_promise(promise)
    bench.settle()
    assert len(bench.blob.requests) == 1


def test_a_read_of_which_only_a_part_is_promised_fetches_the_rest(bench: Bench) -> None:
    start, end = bench.span_blocks(2)
    promise = Promised(start, end)
    bench.layer.add_promise(promise)
    read = bench.read(end - 1, end + 1)
    bench.settle()
    assert read.waits and bench.blob.requests == [bench.span_range(3, 4)]
    bench.layer.land_hot(end - 1, end, memoryview(bench.region[(end - 1) * 4096 : end * 4096]), PACK)
    bench.check(read)
    bench.layer.drop_promise(promise)


@pytest.mark.parametrize("how", ["drop_promise", "reconsider", "insist"])
@pytest.mark.parametrize("background", [False, True])
def test_readers_of_a_promise_that_is_not_kept_get_flights(bench: Bench, how: str, background: bool) -> None:
    """Also where the background has the span already, and waits for the end of the very prefetch."""
    bench.host.prefetch(+1)
    promise = Promised(0, 1 << 30)
    bench.layer.add_promise(promise)
    reads = [bench.read(*bench.span_blocks(span), since=float(span)) for span in (1, 4)]
    if background:
        bench.layer.fill_in_background(0.0)
    assert bench.blob.requests == []
    if how == "drop_promise":
        bench.layer.drop_promise(promise)
    elif how == "reconsider":
        promise.kept = False
        bench.layer.reconsider()
    else:
        bench.layer.insist(0.5)
        assert bench.blob.requests == []
        bench.layer.insist(10.0)
        bench.layer.insist(10.0)  # each second again
    for read in reads:
        bench.check(read)
    bench.host.prefetch(-1)
    bench.layer.stop_background()
    bench.settle()
    assert bench.layer.tally.demand_fetches == 2 and set(bench.landings.values()) == {1}
    bench.layer.drop_promise(promise)


def test_a_reader_that_has_just_relied_on_a_promise_is_not_forgotten(bench: Bench) -> None:
    """The promise falls between its answer and the reader's being on the list."""
    asked, go = threading.Event(), threading.Event()

    class Falls(Promised):
        def keeps(self, block: int) -> bool:
            kept = super().keeps(block)
            asked.set()
            assert go.wait(PATIENCE_S)
            return kept

    promise = Falls(0, 1 << 30)
    bench.layer.add_promise(promise)
    reads = []
    reader = threading.Thread(target=lambda: reads.append(bench.read(0, 1)))
    reader.start()
    assert asked.wait(PATIENCE_S)
    promise.kept = False
    helper = threading.Thread(target=bench.layer.reconsider)
    helper.start()
    helper.join(0.1)  # it waits for whoever is being taken on, or has gone by
    go.set()
    reader.join(PATIENCE_S)
    helper.join(PATIENCE_S)
    bench.check(reads[0])
    bench.layer.drop_promise(promise)


def test_landing_what_is_there_writes_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.check(bench.read(0, 4))
    bench.settle()
    bench.layer.land_hot(0, 4, memoryview(bytes(4 * 4096)), PACK)
    bench.check(bench.read(0, 4))


# -- in an order -----------------------------------------------------------------------------------------------------


class Done:
    """Counts the calls."""

    def __init__(self) -> None:
        self.calls = 0
        self._called = threading.Event()

    def __call__(self) -> None:
        self.calls += 1
        self._called.set()

    def wait(self) -> None:
        assert self._called.wait(PATIENCE_S)


def test_spans_come_in_the_order_that_is_asked_for(bench: Bench) -> None:
    done = Done()
    order = [7, 2, 3, 9]
    bench.layer.fetch_hot([bench.span_blocks(span) for span in order], 1, done)
    done.wait()
    bench.settle()
    assert bench.blob.requests == [bench.span_range(7, 8), bench.span_range(2, 4), bench.span_range(9, 10)]
    assert bench.layer.tally.hot_fetches == 3 and done.calls == 1


def test_two_requests_at_once_if_asked_so(bench: Bench) -> None:
    done = Done()
    hold = bench.blob.hold(bench.span_range(7, 8)[0] + 100)
    bench.layer.fetch_hot([bench.span_blocks(span) for span in (7, 2, 9)], 2, done)
    hold.await_stream()
    give_up = threading.Event()
    while not bench.files.has(*bench.span_blocks(9)):
        assert not give_up.wait(0.001)
    assert done.calls == 0
    hold.release()
    done.wait()
    bench.settle()
    assert done.calls == 1 and set(bench.landings.values()) == {1}


def test_no_run_is_longer_than_a_request_should_be(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    done = Done()
    monkeypatch.setattr(bench.layer, "_background_run", 3)
    bench.layer.fetch_hot([(0, bench.files.record.blocks)], 2, done)
    done.wait()
    bench.settle()
    assert bench.files.complete() and bench.layer.completed.is_set()
    assert set(bench.landings.values()) == {1}
    assert len(bench.blob.requests) == -(-len(bench.index.spans) // 3)


def test_what_is_there_already_is_done_at_once(bench: Bench) -> None:
    bench.check(bench.read(*bench.span_blocks(3)))
    bench.settle()
    done = Done()
    bench.layer.fetch_hot([bench.span_blocks(3)], 2, done)
    assert done.calls == 1 and len(bench.blob.requests) == 1


def test_what_the_background_has_put_off_is_taken_from_it(bench: Bench) -> None:
    bench.host.prefetch(+1)
    bench.layer.fill_in_background(0.0)
    done = Done()
    bench.layer.fetch_hot([bench.span_blocks(2)], 2, done)
    done.wait()
    assert bench.blob.requests == [bench.span_range(2, 3)]
    bench.host.prefetch(-1)
    assert bench.layer.completed.wait(PATIENCE_S)
    bench.settle()
    assert set(bench.landings.values()) == {1}


def test_a_failure_is_left_to_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.blob.break_off(bench.span_range(7, 8)[0], Transient("reset"))
    done = Done()
    bench.layer.fetch_hot([bench.span_blocks(7), bench.span_blocks(2)], 1, done)
    done.wait()
    bench.settle()
    assert bench.files.has(*bench.span_blocks(2)) and not bench.files.has(*bench.span_blocks(7))
    assert done.calls == 1
    caplog.clear()


def test_a_layer_that_is_given_back_meanwhile_is_done_with(bench: Bench) -> None:
    done = Done()
    hold = bench.blob.hold(bench.span_range(7, 8)[0] + 100)
    bench.layer.fetch_hot([bench.span_blocks(span) for span in (7, 2, 9)], 1, done)
    hold.await_stream()
    bench.layer.stop_background()
    assert done.calls == 0, "one is still under way"
    hold.release()
    done.wait()
    bench.settle()
    assert done.calls == 1 and len(bench.blob.requests) == 1


def test_a_reader_cuts_what_is_asked_for_in_an_order(bench: Bench) -> None:
    """Its span is last in a long run."""
    done = Done()
    hold = bench.blob.hold(bench.span_range(0, 1)[0] + 100)
    bench.layer.fetch_hot([(0, bench.files.record.blocks)], 1, done)
    hold.await_stream()
    bench.check(bench.read(*bench.span_blocks(3)))
    hold.release()
    done.wait()
    bench.settle()
    assert bench.files.complete() and bench.layer.tally.demand_fetches >= 1
