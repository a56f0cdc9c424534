"""What the arguments of `bootseer hotset` mean: a file, an image key, or an image reference.

A reference is looked for first among the images of the block store's layers, then asked of its registry; only the list
of its layers matters. Nothing here changes anything.
"""

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from blockindex.errors import BlockIndexError, Corrupt
from blockindex.hotpack import HotPack
from blockindex.hotset import HotSet, image_key
from snapshotter.blockstore import LayerRecord
from snapshotter.config import Config
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, UserError
from snapshotter.hotstore import HotStore, read_head
from snapshotter.registry import Registry, parse_reference

__all__ = ["Found", "find", "images_of", "one_line", "own_key", "read_file", "store_images"]

_KEY = re.compile(r"(sha256:)?([0-9a-f]{6,64})")


@dataclass(frozen=True, slots=True)
class Found:
    """A hot set's file and what its head says."""

    path: Path
    pack: HotPack


@contextmanager
def one_line(where: object) -> Iterator[None]:
    """Whatever is wrong with the file `where` becomes a SnapshotterError that names it."""
    try:
        yield
    except BlockIndexError as error:
        raise SnapshotterError(f"{where}: {error}") from error
    except FileNotFoundError as error:
        raise NotFound(f"{error.filename or where}: no such file") from error
    except OSError as error:
        raise SnapshotterError(f"{error.filename or where}: {error.strerror}") from error


def read_file(path: Path) -> Found:
    """The hot set in a file; SnapshotterError in one line for whatever is wrong with it."""
    with one_line(path):
        return Found(path, read_head(path))


def find(config: Config, text: str, workload: str | None) -> list[Found]:
    """The hot sets that an argument means: the file, or the image's on this node, of one workload or (None) of all.
    NotFound, saying what to do, when there are none."""
    if Path(text).is_file():
        return [read_file(Path(text))]
    if text.endswith(".bsh"):
        raise NotFound(f"{text}: no such file")
    key = own_key(config, text)
    files = HotStore(config.root_path).find(key)
    chosen = [path for name, path in files.items() if workload in (None, name)]
    if not chosen:
        what = f"of workload {workload!r} (there are: {', '.join(files)})" if files else "on this node"
        raise NotFound(
            f"{text}: no hot set {what}: its first container is recorded while [record] auto is on, or take one with "
            "`bootseer hotset import`"
        )
    return [read_file(path) for path in chosen]


def own_key(config: Config, text: str) -> str:
    """The image key of a key, the beginning of one that has hot sets here, or an image reference."""
    store = HotStore(config.root_path)
    match = _KEY.fullmatch(text)
    if match is not None:
        if len(match[2]) == 64:
            return f"sha256:{match[2]}"
        keys = {key for key, _, _ in store.entries() if key.removeprefix("sha256:").startswith(match[2])}
        if len(keys) == 1:
            return keys.pop()
        if keys:
            raise NotFound(f"{text}: {len(keys)} images of this node have keys that begin like this: give more digits")
    try:
        reference = str(parse_reference(text))
    except InvalidArgument as error:
        raise UserError(f"{text}: neither a file, nor an image key, nor an image reference: {error}") from error
    images = store_images(config.root_path)
    known = {key for key, hotset in _own_sets(store) if reference in images_of(hotset, images)}
    if len(known) == 1:
        return known.pop()
    with closing(Registry(config.registry)) as registry:
        try:
            return image_key([layer.digest for layer in registry.resolve(text).layers])
        except InvalidArgument as error:
            raise UserError(str(error)) from error


def store_images(root: Path) -> dict[str, frozenset[str]]:
    """For each layer of the block store the images that it was pulled for, by its digest."""
    found: dict[str, frozenset[str]] = {}
    for directory in (root / "layers").glob("[!.]*"):
        try:
            record = LayerRecord.load(directory)
        except SnapshotterError:  # not there any more, or broken: `bootseer cache ls` says so
            continue
        found[record.digest] = frozenset(_canonical(record.images))
    return found


def images_of(hotset: HotSet, images: dict[str, frozenset[str]]) -> frozenset[str]:
    """The images that all layers of the set were pulled for."""
    names = [images.get(layer.digest, frozenset()) for layer in hotset.layers]
    return frozenset.intersection(*names) if names else frozenset()


def _canonical(references: tuple[str, ...]) -> Iterator[str]:
    for text in references:
        try:
            yield str(parse_reference(text))
        except InvalidArgument:
            yield text


def _own_sets(store: HotStore) -> Iterator[tuple[str, HotSet]]:
    for key, _, path in store.entries():
        try:
            yield key, read_head(path).hotset
        except (BlockIndexError, Corrupt, OSError):
            continue
