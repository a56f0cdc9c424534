"""Build the indexes of one image's layers into a directory: stream each blob once, keep nothing but the index.

Layers run side by side, at most one per CPU. A layer that cannot be indexed is reported and stops no other. An index
appears under its name whole or not at all (written beside it, then renamed); one that is there and valid is kept.
"""

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from blockindex.builder import LayerBuilder
from blockindex.codec import decode_index, index_name, index_parts
from blockindex.errors import BlockIndexError
from blockindex.layerindex import LayerIndex
from snapshotter.cli.progress import Progress
from snapshotter.errors import SnapshotterError, Transient
from snapshotter.model import BlobSource, Digest
from snapshotter.registry import BlobStream

__all__ = ["Built", "Job", "build_all"]

_TRIES = 5  # without a byte of progress in between
_BACKOFF_S = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """One layer to index; `size` is its blob's in bytes."""

    digest: Digest
    size: int
    blob: BlobSource


@dataclass(frozen=True, slots=True)
class Built:
    """What became of a job. `status`: built, kept (a valid index was there), failed (with `reason`)."""

    digest: Digest
    status: str
    reason: str
    path: str
    blob_bytes: int
    tar_bytes: int
    index_bytes: int
    seconds: float


def build_all(jobs: Sequence[Job], out: Path) -> list[Built]:
    """Index all jobs into `out`, with progress on stderr; the results in the jobs' order. An exception,
    KeyboardInterrupt too, first stops the workers."""
    progress = Progress(sum(job.size for job in jobs))
    cancelled = threading.Event()
    workers = [_Worker(job, out, cancelled) for job in jobs]
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="index") as pool:
        futures: list[Future[Built]] = []
        try:
            futures = [pool.submit(worker.run) for worker in workers]
            left = set(futures)
            while left:
                _, left = wait(left, progress.interval_s, FIRST_COMPLETED)
                done = len(futures) - len(left)
                progress.show(sum(worker.done for worker in workers), f"{done} of {len(jobs)} layers")
        except BaseException:
            cancelled.set()
            for worker in workers:
                worker.cancel()
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            progress.end()
    return [future.result() for future in futures]


class _Worker:
    """Runs one job; `done` bytes of the blob are behind it."""

    def __init__(self, job: Job, out: Path, cancelled: threading.Event) -> None:
        self._job = job
        self._path = out / index_name(job.digest)
        self._cancelled = cancelled
        self._stream: Iterator[bytes] = iter(())
        self.done = 0

    def run(self) -> Built:
        started = time.monotonic()
        try:
            index = self._valid()
            status = "built" if index is None else "kept"
            if index is None:
                index = self._build()
                self._publish(index_parts(index))
        except (SnapshotterError, BlockIndexError, OSError) as error:
            self.done = self._job.size
            return self._result("failed", started, reason=str(error))
        self.done = self._job.size
        return self._result(status, started, index=index)

    def cancel(self) -> None:
        """Wake this worker if it waits for the network; `cancelled` must be set already."""
        if isinstance(self._stream, BlobStream):
            self._stream.close()

    def _valid(self) -> LayerIndex | None:
        """The index that is there already, or None where there is none or it is of no use."""
        try:
            index = decode_index(self._path.read_bytes())
        except (FileNotFoundError, BlockIndexError):
            return None
        return index if index.blob_digest == self._job.digest else None

    def _build(self) -> LayerIndex:
        builder = LayerBuilder(self._job.digest)
        tries = 0
        while True:
            before = builder.blob_size
            try:
                self._feed(builder)
                return builder.finish()
            except Transient as error:
                tries = 0 if builder.blob_size > before else tries + 1
                if tries == _TRIES or self._cancelled.is_set():
                    raise
                self._cancelled.wait(error.retry_after_s or _BACKOFF_S * 2**tries)

    def _feed(self, builder: LayerBuilder) -> None:
        """Give the builder the rest of the blob; what it would write to a data region is of no interest here."""
        if builder.blob_size == self._job.size:
            return
        self._stream = self._job.blob.stream(builder.blob_size, self._job.size)
        self._go_on()  # after the stream is known: `cancel` either finds it, or is found here
        for chunk in self._stream:
            for _ in builder.feed(chunk):
                pass
            self.done = builder.blob_size
            self._go_on()

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Transient(f"{self._job.digest}: cancelled")

    def _publish(self, parts: Iterable[bytes | bytearray]) -> None:
        """Put the index under its name; readable for a web server, as the umask says."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.writelines(parts)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._path)
        finally:
            temporary.unlink(missing_ok=True)

    def _result(self, status: str, started: float, index: LayerIndex | None = None, reason: str = "") -> Built:
        return Built(
            digest=self._job.digest,
            status=status,
            reason=reason,
            path=str(self._path) if index else "",
            blob_bytes=self._job.size,
            tar_bytes=index.tar_size if index else 0,
            index_bytes=self._path.stat().st_size if index else 0,
            seconds=round(time.monotonic() - started, 3),
        )
