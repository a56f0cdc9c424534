"""The fetch process without its kernel: a ring of our own, and a pipe in the place of /dev/fuse."""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.codec import decode_stored
from blockindex.hotset import image_key
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK
from snapshotter.blockstore import LayerRecord, node_id, node_name
from snapshotter.config import Config, FetchConfig, HotSetConfig
from snapshotter.errors import InvalidArgument
from snapshotter.fetch import process as process_module
from snapshotter.fetch.arrival import FoundIndex
from snapshotter.fetch.hotsources import HotSources
from snapshotter.fetch.process import FetchProcess
from snapshotter.fuse.abi import OUT_HEADER, READ_REQUEST
from snapshotter.fuse.ring import Ring
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.unproven import Pack
from tests.snapshotter.daemon import Layer, encoded_index, make_layer
from tests.snapshotter.fetch.blobs import FakeBlob

TIMEOUT_S = 60.0
IMAGE, OTHER = "registry.test/app:1", "other.test/app:1"


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=4, size=100_000)


class Bench:
    """A fetch process that knows one layer, at two registries."""

    def __init__(self, root: Path, layer: Layer) -> None:
        self.layer = layer
        self.blobs = {IMAGE: FakeBlob(layer.blob), OTHER: FakeBlob(layer.blob)}
        self._memory = Ring.create()
        self.ring = Ring(self._memory)
        self._replies, self._device = os.pipe()
        self.config = Config(root=str(root), fetch=FetchConfig(background=False, read_timeout_s=TIMEOUT_S))
        self.process = self.start()
        self._unique = 0

    def start(self) -> FetchProcess:
        """The process, or its successor."""
        encoded = encoded_index(self.layer)

        class Index:
            def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
                yield FoundIndex(encoded, "")

        def host_of(image: str) -> str:
            return image.partition("/")[0]

        hot = HotSources(HotStore(Path(self.config.root)))
        return FetchProcess(self.config, self.ring, self._device, -1, Index(), self._blob, host_of, hot, lambda _: [])

    def _blob(self, image: str, digest: Digest) -> FakeBlob:
        if image not in self.blobs:
            raise InvalidArgument(f"{image} is no reference")
        return self.blobs[image]

    def ensure(self, image: str) -> None:
        self.process.ensure({"image": image, "digest": self.layer.digest, "siblings": []})

    def record(self) -> LayerRecord:
        return LayerRecord.load(Path(self.config.root) / "layers" / node_name(self.layer.digest))

    def hand(self, name: str, offset: int, now: float) -> None:
        """What the block server does with a read of one block that is missing."""
        self._unique += 1
        slot = self.ring.claim()
        head, _ = self.ring.buffers(slot)
        head[:] = READ_REQUEST.pack(80, 15, self._unique, node_id(name), 0, 0, 0, 0, 0, 0, offset, BLOCK, 0, 0, 0, 0)
        head.release()
        self.ring.hand(slot, now)

    def reply(self) -> tuple[int, bytes]:
        """The answer to the read that was handed over last: error, bytes."""
        for slot in self.ring.take():
            self.process._take(slot)
        answer = os.read(self._replies, OUT_HEADER.size + BLOCK)
        size, error, unique = OUT_HEADER.unpack_from(answer)
        assert (size, unique) == (len(answer), self._unique)
        return error, answer[OUT_HEADER.size :]

    def close(self) -> None:
        self.process._arrivals.close()
        for fetch in self.process._layers.values():
            fetch.close()
        for host in self.process._hosts.values():
            host.close()
        self.ring.close()
        for fd in (self._memory, self._replies, self._device):
            os.close(fd)


@pytest.fixture
def bench(tmp_path: Path, layer: Layer) -> Iterator[Bench]:
    bench = Bench(tmp_path, layer)
    yield bench
    bench.close()


def test_a_read_that_was_handed_over_is_answered_and_its_slot_free(bench: Bench) -> None:
    bench.ensure(IMAGE)
    first = next(iter(bench.layer.contents.values()))
    bench.hand(node_name(bench.layer.digest), bench.record().meta_size, time.monotonic())
    assert bench.reply() == (0, first[:BLOCK])
    _wait_until_free(bench.ring)


def test_an_index_is_decoded_once_for_its_arrival_and_again_by_a_successor(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []

    def counted(data: bytes) -> LayerIndex:
        decoded.append(data)
        return decode_stored(data)

    monkeypatch.setattr(process_module, "decode_stored", counted)
    bench.ensure(IMAGE)
    assert decoded == []
    for fetch in bench.process._layers.values():
        fetch.close()
    bench.process._arrivals.close()
    bench.process = bench.start()
    bench.ensure(IMAGE)
    assert len(decoded) == 1


def test_a_read_of_no_layer_is_an_error_and_the_next_one_is_served(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.ensure(IMAGE)
    bench.hand("0123456789abcd", 0, time.monotonic())
    assert bench.reply() == (-errno.EIO, b"")
    assert bench.ring.in_flight() == 0
    caplog.clear()
    bench.hand(node_name(bench.layer.digest), 0, time.monotonic())
    assert bench.reply()[0] == 0


def test_the_wait_of_a_reader_is_bounded_over_all_processes_that_it_waits_for(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """One that kills each fetch process that takes it would otherwise be taken up for ever."""
    bench.ensure(IMAGE)
    long_ago = time.monotonic() - TIMEOUT_S
    bench.hand(node_name(bench.layer.digest), bench.record().meta_size, long_ago)
    assert bench.reply() == (-errno.EIO, b"")
    assert bench.blobs[IMAGE].requests == [] and "TimeoutError" in caplog.text
    caplog.clear()
    bench.hand(node_name(bench.layer.digest), 0, long_ago)  # what is there is given, however late
    assert bench.reply()[0] == 0


def test_a_new_process_sweeps_what_a_killed_one_had_staged(bench: Bench) -> None:
    staging = bench.process._store.stage(bench.layer.digest)
    bench.process._arrivals.close()
    bench.process = bench.start()
    assert not staging.directory.exists()
    staging.discard()


def test_a_second_image_makes_its_registry_known(bench: Bench) -> None:
    bench.ensure(IMAGE)
    bench.ensure(OTHER)
    assert bench.record().images == (IMAGE, OTHER)
    bench.hand(node_name(bench.layer.digest), bench.record().meta_size, time.monotonic())
    assert bench.reply()[0] == 0
    assert bench.blobs[IMAGE].requests == [] and len(bench.blobs[OTHER].requests) == 1


def test_a_reference_that_is_none_is_refused_before_it_is_written_down(bench: Bench) -> None:
    bench.ensure(IMAGE)
    with pytest.raises(InvalidArgument):
        bench.ensure("nonsense")
    assert bench.record().images == (IMAGE,)


def test_a_layer_that_is_being_opened_holds_up_no_reader_of_another(bench: Bench) -> None:
    bench.ensure(IMAGE)
    name = node_name(bench.layer.digest)
    with bench.process._lock:  # as whoever opens one
        looking = threading.Thread(target=bench.process._layer, args=(name,), daemon=True)
        looking.start()
        looking.join(5.0)
        assert not looking.is_alive()


def _keys(bench: Bench) -> list[str]:
    return [row["image_key"] for row in bench.process._prefetches.status()]


def _await_end_of_look_up(bench: Bench, layers: list[str]) -> None:
    deadline = time.monotonic() + 5.0
    while bench.process.hot({"image": IMAGE, "layers": layers})["state"] == "unknown":
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_pull_begins_to_look_for_the_hot_set_of_its_image(bench: Bench) -> None:
    layers = [str(bench.layer.digest)]
    bench.process.ensure({"image": IMAGE, "digest": bench.layer.digest, "siblings": [], "layers": layers})
    assert _keys(bench) == [image_key(layers)]
    _await_end_of_look_up(bench, layers)
    assert bench.process.hot({"image": IMAGE, "layers": layers}) == {"state": "none"}


def test_a_process_that_has_lost_its_prefetches_takes_them_up_when_it_is_told_of_the_image(bench: Bench) -> None:
    bench.ensure(IMAGE)
    name, layers = node_name(bench.layer.digest), [str(bench.layer.digest)]
    assert not bench.process.complete({"name": name, "wait_s": 0.0})
    assert _keys(bench) == []
    assert not bench.process.complete({"name": name, "wait_s": 0.0, "image": IMAGE, "layers": layers})
    assert _keys(bench) == [image_key(layers)]
    _await_end_of_look_up(bench, layers)


def test_without_prefetching_nothing_is_looked_for(bench: Bench) -> None:
    bench.process._config = replace(bench.config, hotset=HotSetConfig(prefetch=False))
    bench.process.ensure({"image": IMAGE, "digest": bench.layer.digest, "siblings": [], "layers": ["sha256:x"]})
    assert bench.process.hot({"image": IMAGE, "layers": ["sha256:x"]}) == {"state": "none"}
    assert _keys(bench) == []


def test_a_pack_that_one_layer_refutes_is_doubted_in_all(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """In those too that a successor has not opened yet; what another pack brought stays."""
    packs = [Pack(f"sha256:{digit * 64}", "registry.test/app", "", "") for digit in "cd"]
    bench.ensure(IMAGE)
    name = node_name(bench.layer.digest)
    first = next(iter(bench.layer.contents.values()))
    for start, pack in zip((2, 6), packs, strict=True):
        data = memoryview(first[start * BLOCK : (start + 1) * BLOCK])
        bench.process._layer(name).land_hot(start, start + 1, data, pack)
    assert bench.process.status({})["alarms"] == []
    bench.process._arrivals.close()
    bench.process._layers.pop(name).close()
    bench.process = bench.start()
    bench.process._alarms.raise_("sha256:other", "other", [OTHER], packs[0], [(0, 1)], ["/bin/sh"], True)
    deadline = time.monotonic() + 20.0
    while name not in bench.process._layers or bench.process._layers[name].files.has(2, 3):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bench.process._layers[name].files.has(6, 7)
    bench.hand(name, bench.record().meta_size + 2 * BLOCK, time.monotonic())
    assert bench.reply() == (0, first[2 * BLOCK : 3 * BLOCK])
    [alarm] = bench.process.status({})["alarms"]
    assert (alarm["layer"], alarm["images"], alarm["files"]) == ("sha256:other", (OTHER,), ("/bin/sh",))
    caplog.clear()


def test_an_image_has_one_host_whoever_names_it_first(bench: Bench) -> None:
    """Two would not know of each other's readers."""
    with ThreadPoolExecutor(8) as pool:
        hosts = list(pool.map(lambda _: bench.process._host("registry.test"), range(64)))
    assert len(set(map(id, hosts))) == 1


def _wait_until_free(ring: Ring) -> None:
    deadline = time.monotonic() + 5.0
    while ring.in_flight():  # the slot is freed just after the answer
        assert time.monotonic() < deadline
        time.sleep(0.001)
