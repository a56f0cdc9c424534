"""An image copied from a source to a target: all of its documents and blobs, byte for byte.

Order: blobs, several at once; then documents, children before those that name them; the root, under the image's name,
last. So whoever finds the image finds all of it, and a copy that was cut short goes on where it stopped: what is there
is not sent again. Every blob is checked against its digest on its way.

Knows nothing of artifacts: what refers to an image is not part of it.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from snapshotter.errors import InvalidArgument, NotFound
from snapshotter.imagesource.model import ImageSource
from snapshotter.imagesource.steady import steady
from snapshotter.imagesource.targets import ImageTarget
from snapshotter.model import Digest
from snapshotter.registry import Document, parse_digest

__all__ = ["Copied", "ImageCopy", "Parts", "parts_of"]

_DEPTH = 4
_AT_ONCE = 4  # blobs; a registry takes them one connection each


@dataclass(slots=True)
class Parts:
    """All that an image consists of: documents, children first; the size of each blob. `elsewhere`: layers whose bytes
    are not in the source's registry, but at URLs of their own."""

    documents: list[Document] = field(default_factory=list)
    blobs: dict[Digest, int] = field(default_factory=dict)
    elsewhere: set[Digest] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Copied:
    """How many blobs were sent, taken over by the registry from another repository, or there before; bytes sent."""

    sent: int
    mounted: int
    there: int
    bytes: int


def parts_of(source: ImageSource, root: Document | None = None) -> Parts:
    """What there is to copy below `root` (the source's own by default). NotFound where a part is missing."""
    parts = Parts()
    _walk(source, root or source.document(), parts, set(), _DEPTH)
    return parts


def _walk(source: ImageSource, document: Document, parts: Parts, seen: set[Digest], depth: int) -> None:
    if document.digest in seen:
        return
    seen.add(document.digest)
    if not depth:
        raise InvalidArgument(f"{source.name}: image indexes nested deeper than {_DEPTH}")
    content = json.loads(document.body)
    for entry in _descriptors(content.get("manifests"), source.name):
        try:
            child = source.document(_digest(entry))
        except NotFound as error:
            raise NotFound(f"{error}: for the platforms that are there use --platform") from error
        _walk(source, child, parts, seen, depth - 1)
    for entry in _descriptors([content[key] for key in ("config",) if key in content], source.name):
        parts.blobs[_digest(entry)] = _size(entry, source.name)
    for entry in _descriptors(content.get("layers"), source.name):
        if entry.get("urls"):
            parts.elsewhere.add(_digest(entry))
        else:
            parts.blobs[_digest(entry)] = _size(entry, source.name)
    parts.documents.append(document)


def _descriptors(value: object, name: str) -> list[dict[str, object]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise InvalidArgument(f"{name}: a manifest whose parts are not described")
    return value


def _digest(entry: dict[str, object]) -> Digest:
    return parse_digest(str(entry.get("digest")))


def _size(entry: dict[str, object], name: str) -> int:
    size = entry.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidArgument(f"{name}: a descriptor without a valid size")
    return size


class ImageCopy:
    """One copy under way. `done` bytes of its blobs are behind it."""

    def __init__(self, source: ImageSource, target: ImageTarget, parts: Parts) -> None:
        self._source = source
        self._target = target
        self._parts = parts
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._counts = {"sent": 0, "mounted": 0, "there": 0, "bytes": 0}
        self.done = 0

    def run(self, tick: Callable[[int, int], None], interval_s: float) -> Copied:
        """Copy. `tick(blobs done, bytes done)` is called every `interval_s` seconds by this thread. What a blob raises
        ends the copy, once the blobs that are on their way have ended too; KeyboardInterrupt as well."""
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copy") as pool:
            futures = [pool.submit(self._blob, digest, size) for digest, size in self._parts.blobs.items()]
            try:
                left = set(futures)
                while left:
                    done, left = wait(left, interval_s, FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    tick(len(futures) - len(left), self.done)
            except BaseException:
                self._stopped.set()
                pool.shutdown(cancel_futures=True)
                raise
        for document in self._parts.documents[:-1]:
            self._target.put(document, root=False)
        self._target.put(self._parts.documents[-1], root=True)
        return Copied(**self._counts)

    def _blob(self, digest: Digest, size: int) -> None:
        if self._target.has(digest, size):
            self._count("there", 0, size)
        elif self._source.home is not None and self._target.mount(digest, self._source.home):
            self._count("mounted", 0, size)
        else:
            self._target.write(digest, size, lambda: self._read(digest, size))
            self._count("sent", size, 0)

    def _read(self, digest: Digest, size: int) -> Iterator[bytes]:
        sent = 0
        try:
            for chunk in steady(self._source.blob(digest), digest, size, self._source.name):
                if self._stopped.is_set():
                    raise InvalidArgument(f"{self._target.name}: the copy was stopped")
                yield chunk
                sent += len(chunk)
                self._add(len(chunk))
        finally:
            if sent != size:  # the next attempt begins anew
                self._add(-sent)

    def _count(self, what: str, sent: int, passed: int) -> None:
        with self._lock:
            self._counts[what] += 1
            self._counts["bytes"] += sent
            self.done += passed

    def _add(self, size: int) -> None:
        with self._lock:
            self.done += size
