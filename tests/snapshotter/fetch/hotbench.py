"""Images of some layers in a real store, with hot packs that stop, break and lie where a test wants it.

bench = HotBench(root, layers); bench.publish(extents); prefetch = bench.start(); bench.over(prefetch)

`bench.pack` is the file of the hot set as a `FakeBlob`, `bench.blobs[n]` the blob of layer n.
"""

import io
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from blockindex.codec import decode_index
from blockindex.hotpack import Codec, HotPack, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, image_key
from blockindex.model import BLOCK, Piece
from snapshotter.blockstore import BlockStore, LayerFiles
from snapshotter.errors import SnapshotterError
from snapshotter.fetch.arrival import Arrivals, FoundIndex
from snapshotter.fetch.host import Host, Lane
from snapshotter.fetch.layer import LayerFetch, Waiter
from snapshotter.fetch.prefetch import Prefetch, State
from snapshotter.model import Digest
from snapshotter.registry.hotfile import HotFile, HotStream
from tests.snapshotter.daemon import Layer, encoded_index
from tests.snapshotter.fetch.blobs import PATIENCE_S, FakeBlob

IMAGE = "registry.test/app:1"
SPAN = 1 << 16
FIRST = 40 << 10
"""What the look-up's request brings: the head and a first frame."""


@dataclass
class Finder:
    """A HotFinder. The look-up waits for `go`."""

    recorded_set: HotSet | None = None
    open_file: Callable[[], HotFile] | None = None
    looks: int = 0

    def __post_init__(self) -> None:
        self.looking, self.go = threading.Event(), threading.Event()
        self.go.set()

    def recorded(self, key: str, workload: str) -> HotSet | None:
        return self.recorded_set

    def find(self, image: str, key: str, workload: str) -> HotFile | None:
        self.looks += 1
        self.looking.set()
        assert self.go.wait(PATIENCE_S)
        return self.open_file() if self.open_file is not None else None


class HotRead:
    """A reader of the blocks `[start, end)` of a layer."""

    def __init__(self, bench: "HotBench", layer: int, start: int, end: int, since: float) -> None:
        self.errors: list[int] = []
        self._files = bench.fetches[layer].files
        self._right = bench.region(layer, start, end)
        self._answered = threading.Event()
        self._data = b""
        offset = self._files.meta_size + start * BLOCK
        bench.fetches[layer].wait_for(Waiter(offset, (end - start) * BLOCK, start, end, since, self._answer))

    def _answer(self, waiter: Waiter, error: int) -> None:
        buffer = bytearray(waiter.size)
        self._files.read_into(memoryview(buffer), waiter.offset)
        self._data = bytes(buffer)
        self.errors.append(error)
        self._answered.set()

    @property
    def waits(self) -> bool:
        return not self.errors

    def check(self) -> None:
        """The reader gets, once, what the layer holds."""
        assert self._answered.wait(PATIENCE_S), "the reader was not answered"
        assert self.errors == [0]
        assert self._data == self._right


class HotBench:
    """See the module."""

    def __init__(
        self,
        root: Path,
        layers: Sequence[Layer],
        streams: int = 2,
        there: Sequence[int] | None = None,
        far_streams: int = 0,
    ) -> None:
        """The layers `there` (default: all) are in the store from the beginning."""
        self.layers = list(layers)
        self.digests = [layer.digest for layer in layers]
        self.indexes = [decode_index(encoded_index(layer, SPAN)) for layer in layers]
        self.blobs = [FakeBlob(layer.blob) for layer in layers]
        self.pack = FakeBlob(b"")
        self.first_end = FIRST
        self.ask_errors: list[SnapshotterError] = []
        self.head: HotPack | None = None
        self.finder = Finder()
        self.host = Host("registry.test", demand_threads=4, hot_threads=streams, background_threads=2)
        self.fetches: dict[int, LayerFetch] = {}
        self.landings = [Counter[int]() for _ in layers]  # of pieces that flights brought, by their first block
        self.broken: dict[Digest, Exception] = {}
        self.prefetches: list[Prefetch] = []
        self._root = root
        self._streams = streams
        self._far_streams = far_streams
        for number in range(len(layers)) if there is None else there:
            self.come_in(number)

    # -- layers ------------------------------------------------------------------------------------------------------

    def come_in(self, number: int) -> LayerFetch:
        """The layer is in the store from now on."""
        layer, index = self.layers[number], self.indexes[number]

        class Index:
            def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
                yield FoundIndex(encoded_index(layer, SPAN), "")

        def no_blob(image: str, digest: str) -> FakeBlob:
            raise AssertionError("the index was refused")

        arrivals = Arrivals(BlockStore(self._root), Index(), no_blob)
        files = LayerFiles(arrivals.ensure("registry.test/app:1", layer.digest, ()), writable=True)
        arrivals.close()
        fetch = LayerFetch(files, index, [self.blobs[number]], self.host, 1, 1.0)
        self.fetches[number] = fetch
        land = fetch.land

        def count(piece: Piece, lane: Lane = Lane.DEMAND) -> None:
            self.landings[number][piece.block_start] += 1
            land(piece, lane)

        fetch.land = count  # type: ignore[method-assign]
        return fetch

    def layer_of(self, digest: Digest) -> LayerFetch | None:
        if digest in self.broken:
            raise self.broken[digest]
        return self.fetches.get(self.digests.index(digest))

    def region(self, layer: int, start: int, end: int) -> bytes:
        """What these blocks of the layer hold."""
        whole = b"".join(data + bytes(-len(data) % BLOCK) for data in self.layers[layer].contents.values())
        return whole[start * BLOCK : end * BLOCK]

    def present(self, layer: int, start: int, end: int) -> bool:
        return self.fetches[layer].files.has(start, end)

    def fill(self, layer: int, start: int, end: int) -> None:
        """Have blocks present."""
        self.fetches[layer].files.fill(start, end, self.region(layer, start, end))

    def blob_requests(self) -> int:
        return sum(len(blob.requests) for blob in self.blobs)

    # -- hot sets ----------------------------------------------------------------------------------------------------

    def hotset(self, extents: Sequence[tuple[int, int, int]]) -> HotSet:
        """Extents (layer, start, end) in this order."""
        layers = tuple(
            HotLayer(layer.digest, index.block_count, index.layout())
            for layer, index in zip(self.layers, self.indexes, strict=True)
        )
        rows = tuple(HotExtent(layer, start, end, time) for time, (layer, start, end) in enumerate(extents))
        return HotSet(image_key(self.digests), "", "default", layers, rows, 1)

    def publish(self, hotset: HotSet, codec: Codec = Codec.LZ4, frame: int = 64 << 10) -> HotPack:
        """The directory has a pack of the set."""
        out = io.BytesIO()
        pack = write_pack(
            hotset, lambda it: self.region(it.layer, it.start, it.end), codec, out, first_frame=32 << 10, frame=frame
        )
        self.serve(out.getvalue())
        self.head = pack
        return pack

    def serve(self, data: bytes) -> None:
        """The directory has this file."""
        self.pack = FakeBlob(data, chunk=16 << 10)
        self.finder.open_file = self._open

    def publish_with_known_head(self, hotset: HotSet, doubt: str = "", far: bool = False) -> HotPack:
        """A registry has a pack of the set: its head comes with the look-up. It may be far."""
        pack = self.publish(hotset)
        self.finder.open_file = lambda: HotFile(
            "fake", pack.size, None, self._stream, head=pack, doubt=doubt, round_trip_s=lambda: 0.1 if far else 0.0
        )
        return pack

    def _open(self) -> HotFile:
        return HotFile("fake", self.pack.size(), self._stream(0, self.first_end), self._stream)

    def _stream(self, start: int, end: int) -> HotStream:
        if start and self.ask_errors:
            raise self.ask_errors.pop()
        end = min(end, self.pack.size())
        stream = self.pack.stream(start, end)
        return HotStream(start, end, stream, stream.close)

    # -- course ------------------------------------------------------------------------------------------------------

    def prefetch(self, layers: Sequence[Digest] | None = None, finder: Finder | None = None) -> Prefetch:
        prefetch = Prefetch(
            IMAGE,
            layers or self.digests,
            self.host,
            finder or self.finder,
            self.layer_of,
            self._streams,
            far_streams=self._far_streams,
        )
        self.prefetches.append(prefetch)
        return prefetch

    def start(self) -> Prefetch:
        prefetch = self.prefetch()
        prefetch.start()
        return prefetch

    def read(self, layer: int, start: int, end: int, since: float | None = None) -> HotRead:
        return HotRead(self, layer, start, end, time.monotonic() if since is None else since)

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"does not happen: {self.prefetches} {self.fetches} {self.host}"
            time.sleep(0.001)

    def over(self, prefetch: Prefetch, state: State = State.OVER) -> None:
        """Return when the prefetch has ended, in this state."""
        self.until(lambda: prefetch.ended_at)
        assert prefetch.state is state

    def settle(self) -> None:
        """Return when nothing is in flight or queued."""
        self.until(lambda: "0 running, 0 queued" in repr(self.host))

    def once(self, blob: FakeBlob) -> Iterator[tuple[int, int]]:
        """What was taken of it, in order of place; no byte of it twice."""
        taken = sorted((start, start + size) for (start, _), size in zip(blob.requests, blob.served, strict=True))
        last = 0
        for start, end in taken:
            assert start >= last, f"bytes {start}-{last} came twice: {taken}"
            last = end
            yield start, end

    def close(self) -> None:
        """Nothing is left: no thread, stream, promise or traffic that others wait for."""
        self.finder.go.set()
        for blob in (self.pack, *self.blobs):
            blob.release_all()
        for fetch in self.fetches.values():
            fetch.stop_background()
        for prefetch in self.prefetches:
            if not prefetch.ended_at:
                prefetch._give_up("end of the test")
        try:
            self.settle()
            traffic = (self.host._urgent, self.host._prefetches)
            promises = [fetch._promises for fetch in self.fetches.values()]
            flights = [repr(fetch) for fetch in self.fetches.values()]
        finally:
            self.host.close()  # else a thread that waits for ever would keep the interpreter
        for fetch in self.fetches.values():
            fetch.close()
        assert traffic == (0, 0)
        assert not any(promises), "a promise was left behind"
        assert all("0 readers wait, 0 spans in flight" in flight for flight in flights)
        assert [blob.open for blob in (self.pack, *self.blobs)] == [0] * (1 + len(self.blobs))


def moved(hotset: HotSet, layer: int) -> HotSet:
    """The set, made for another layout of one layer."""
    layers = list(hotset.layers)
    layers[layer] = replace(layers[layer], layout="sha256:" + "9" * 64)
    return replace(hotset, layers=tuple(layers))


__all__ = ["FIRST", "SPAN", "Finder", "HotBench", "HotRead", "moved"]
