"""Bringing a layer into the store, once, however many ask at the same time.

With a layer index the layer is ready as soon as the index has come: nothing of the blob is needed yet. Without one the
blob is streamed through `LayerBuilder`, which writes the data region and makes the index in the same pass; the layer
then is complete when it becomes ready. Layers of one image arrive side by side: the first `ensure` of an image starts
them all, in the order in which containerd will ask. Whatever fails leaves nothing behind, and the next `ensure` tries
anew. Small layers may be streamed although they have an index: one request for all costs less than some for parts.
Each registry has its own threads for look-ups and for streams, so that one that hangs holds up no other's layers.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Protocol

from blockindex.builder import LayerBuilder
from blockindex.codec import decode_index, decode_unjudged, encode_index
from blockindex.errors import BlockIndexError
from blockindex.layerindex import LayerIndex
from snapshotter.blockstore import BlockStore, LayerRecord, Staging, node_name
from snapshotter.errors import Precondition, SnapshotterError, Transient
from snapshotter.judgement import Judgements
from snapshotter.killpoints import reach
from snapshotter.model import BlobSource, Digest
from snapshotter.registry.resumed import resumed

__all__ = ["Arrivals", "FoundIndex", "IndexSource"]

_log = logging.getLogger(__name__)

_STREAMS = 8
_LOOKUPS = 16
_FRESH = 32  # indexes of layers that have come in and are not opened yet; a pull opens them in moments


class _KeptOut(Transient):
    """The layer was kept out, and may come now."""


@dataclass(frozen=True, slots=True)
class FoundIndex:
    """An encoded index, as yet unread, and where it was found. `vouched`: its writer is known and trusted, so that its
    metadata may be mounted before they are judged (`snapshotter.judgement`)."""

    encoded: bytes
    where: str
    vouched: bool = False


class IndexSource(Protocol):
    """Where layer indexes of others can be found."""

    def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
        """The indexes of a layer that are to be had now, the best first; whoever takes one asks for no more. `layers`
        are all of the image's, empty where these are not known. Never raises, bounded in time."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A layer that is to come in, and all layers of the image for which it does (empty: not known)."""

    image: str
    digest: Digest
    layers: tuple[Digest, ...]


class Arrivals:
    """Layers on their way into the store. Thread-safe."""

    def __init__(
        self,
        store: BlockStore,
        indexes: IndexSource,
        open_blob: Callable[[str, Digest], BlobSource],
        min_lazy_bytes: int = 0,
        hurry: Callable[[str], AbstractContextManager[None]] = lambda image: nullcontext(),
    ) -> None:
        """`open_blob(image, digest)` gives the blob at its registry. Layers whose blob is shorter than `min_lazy_bytes`
        are streamed whole. While an index of an image comes in, `hurry(image)` keeps other traffic back: containerd
        waits for the mount, which needs nothing but the index."""
        self._store = store
        self._judgements = Judgements(store.layers.parent)
        self._indexes = indexes
        self._open_blob = open_blob
        self._min_lazy_bytes = min_lazy_bytes
        self._hurry = hurry
        self._lock = Lock()
        self._under_way: dict[Digest, Future[Path]] = {}
        self._fresh: dict[str, tuple[int, LayerIndex]] = {}  # by node name; the inode of the directory it belongs to
        self._pools: dict[str, ThreadPoolExecutor] = {}  # by their names: what for, and the images' registry

    def __repr__(self) -> str:
        return f"<Arrivals {len(self._under_way)} layers under way>"

    def ensure(self, image: str, digest: Digest, siblings: Sequence[Digest], layers: Sequence[Digest] = ()) -> Path:
        """The layer's directory in the store, once it is ready. Starts the siblings too and does not wait for them.
        `layers`: all layers of the image, from the bottom up; empty where they are not known. Raises SnapshotterError
        or BlockIndexError when this layer cannot be served from the store."""
        while True:
            wanted = [_Wanted(image, layer, tuple(layers)) for layer in dict.fromkeys((digest, *siblings))]
            futures = [self._start(layer) for layer in wanted]
            try:
                directory = futures[0].result()
            except _KeptOut:  # it was being removed: now it may come
                continue
            self._store.add_image(directory, image)
            return directory

    @contextmanager
    def kept_out(self, digest: Digest) -> Iterator[None]:
        """The layer does not come in for the length of the block; whoever wants it meanwhile waits. Raises Precondition
        when it is on its way already."""
        future = Future[Path]()
        with self._lock:
            if digest in self._under_way:
                raise Precondition(f"{digest} is on its way in: try again later")
            self._under_way[digest] = future
        try:
            yield
        finally:
            self._end(digest, future)
            future.set_exception(_KeptOut(f"{digest} was kept out"))

    def fresh(self, directory: Path) -> LayerIndex | None:
        """The index of a layer that has come in just now, as it was decoded for that, without its metadata; to be had
        once. None for any other: whoever opens it decodes it from its directory."""
        with self._lock:
            inode, index = self._fresh.pop(directory.name, (0, None))
        return index if inode == directory.stat().st_ino else None

    def under_way(self) -> list[Digest]:
        """Layers that are being brought in."""
        return list(self._under_way)

    def close(self) -> None:
        """Start nothing more."""
        with self._lock:
            pools = list(self._pools.values())
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, wanted: _Wanted) -> Future[Path]:
        with self._lock:
            known = self._under_way.get(wanted.digest)
            if known is not None:
                return known
            future = self._under_way[wanted.digest] = Future[Path]()
        self._submit(self._pool("arrival", _LOOKUPS, wanted.image), future, wanted, self._look_up)
        return future

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        future: Future[Path],
        wanted: _Wanted,
        step: Callable[[_Wanted], Path | None],
    ) -> None:
        """Have a thread take the step; where there is none to be had the arrival fails, so that nobody waits for it."""
        try:
            pool.submit(self._settle, future, wanted, step)
        except RuntimeError as error:
            _log.error("arrival.no_thread layer=%s error=%r", wanted.digest, str(error))
            self._end(wanted.digest, future)
            future.set_exception(SnapshotterError(f"{wanted.digest}: {error}"))

    def _pool(self, purpose: str, threads: int, image: str) -> ThreadPoolExecutor:
        """The threads for this purpose of the image's registry."""
        name = f"{purpose}-{image.partition('/')[0]}"
        with self._lock:
            pool = self._pools.get(name)
            if pool is None:
                pool = self._pools[name] = ThreadPoolExecutor(threads, thread_name_prefix=purpose)
        return pool

    def _settle(self, future: Future[Path], wanted: _Wanted, step: Callable[[_Wanted], Path | None]) -> None:
        """Run one step of an arrival; the look-up step hands on to the stream step when it finds nothing."""
        if future.done():  # given up for want of a thread, and then one came
            return
        digest = wanted.digest
        try:
            directory = step(wanted)
        except (SnapshotterError, BlockIndexError) as error:
            self._end(digest, future)
            future.set_exception(error)
        except OSError as error:  # the disk is full or broken: the layer goes the ordinary way, everyone learns it
            _log.error("arrival.failed layer=%s error=%r", digest, str(error))
            self._end(digest, future)
            future.set_exception(SnapshotterError(f"{digest}: cannot be stored: {error}"))
        except Exception as error:  # a bug: the same
            _log.exception("arrival.failed layer=%s", digest)
            self._end(digest, future)
            future.set_exception(SnapshotterError(f"{digest}: {type(error).__name__}: {error}"))
        else:
            if directory is None:
                self._submit(self._pool("stream", _STREAMS, wanted.image), future, wanted, self._stream)
                return
            reach("fetch.layer-arrived")
            self._end(digest, future)
            future.set_result(directory)

    def _end(self, digest: Digest, future: Future[Path]) -> None:
        with self._lock:
            if self._under_way.get(digest) is future:
                del self._under_way[digest]

    def _look_up(self, wanted: _Wanted) -> Path | None:
        directory = self._store.find(wanted.digest)
        if directory is not None:
            return directory
        chosen = self._usable(wanted)
        if chosen is None or chosen[0].blob_size < self._min_lazy_bytes:
            return None
        index, found, judged = chosen
        staging = self._store.stage(wanted.digest)
        if not judged:
            self._judgements.owe(staging.directory)
        directory = self._publish(staging, index, found.encoded, wanted.image, _stored_runs(index), found.where)
        if judged:  # after it: killed in between, the layer is judged once more, and never once less
            self._judgements.renewed(directory.name)
        return directory

    def _usable(self, wanted: _Wanted) -> tuple[LayerIndex, FoundIndex, bool] | None:
        """The first index that is sound, and the layer's; whether its metadata have been judged too."""
        for found in self._found(wanted):
            try:
                judged = not found.vouched or bool(self._judgements.unsound(node_name(wanted.digest)))
                index = decode_index(found.encoded) if judged else decode_unjudged(found.encoded)
                if index.blob_digest == wanted.digest:
                    return index, found, judged
                reason = f"it describes {index.blob_digest}"
            except BlockIndexError as error:
                reason = str(error)
            _log.warning("index.refused layer=%s from=%s reason=%r", wanted.digest, found.where, reason)
        return None

    def _found(self, wanted: _Wanted) -> Iterator[FoundIndex]:
        """The indexes that sources have. Other traffic waits while they are fetched, not while they are decoded."""
        source = iter(self._indexes.find(wanted.image, wanted.layers, wanted.digest))
        while True:
            with self._hurry(wanted.image):
                found = next(source, None)
            if found is None:
                return
            yield found

    def _stream(self, wanted: _Wanted) -> Path:
        image, digest = wanted.image, wanted.digest
        started = time.monotonic()
        blob = self._open_blob(image, digest)
        staging = self._store.stage(digest)
        try:
            builder = LayerBuilder(digest)
            for chunk in _whole(blob, digest):
                for offset, data in builder.feed(chunk):
                    staging.write(offset, data)
                    reach("fetch.streamed")
            index = builder.finish()
            directory = self._publish(staging, index, encode_index(index), image, [])
            self._judgements.renewed(directory.name)
        except BaseException:
            staging.discard()
            raise
        _log.info("layer.streamed layer=%s bytes=%d seconds=%.1f", digest, index.blob_size, time.monotonic() - started)
        return directory

    def _publish(
        self,
        staging: Staging,
        index: LayerIndex,
        encoded: bytes,
        image: str,
        absent: list[tuple[int, int]],
        found: str = "",
    ) -> Path:
        record = LayerRecord(
            digest=Digest(index.blob_digest),
            blob_size=index.blob_size,
            meta_size=len(index.metadata),
            data_size=index.data_size,
            images=(image,),
            implied_dirs=index.implied_dirs,
            layout=index.layout(),
            index_from=found,
        )
        name = node_name(record.digest)
        with self._lock:  # before it can be opened. If another one is kept in its place, the inode says so
            while len(self._fresh) >= _FRESH:
                del self._fresh[next(iter(self._fresh))]
            self._fresh[name] = staging.directory.stat().st_ino, index.without_metadata()
        try:
            return staging.publish(record, index.metadata, encoded, absent)
        except BaseException:
            with self._lock:
                self._fresh.pop(name, None)
            staging.discard()
            raise


def _stored_runs(index: LayerIndex) -> list[tuple[int, int]]:
    """The runs of blocks that hold stored bytes: all but the holes."""
    runs, start = [], 0
    for hole in index.hole_blocks():
        runs.append((start, hole.start))
        start = hole.stop
    runs.append((start, index.block_count))
    return [run for run in runs if run[0] < run[1]]


def _whole(blob: BlobSource, digest: Digest) -> Iterator[bytes]:
    """The blob from its first byte to its last; a broken stream is taken up where it stopped."""

    def retrying(offset: int, failures: int, error: Transient) -> None:
        _log.warning("stream.retry layer=%s at=%d attempt=%d error=%r", digest, offset, failures, str(error))

    return resumed(blob, None, retrying=retrying)
