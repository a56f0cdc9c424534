"""Hot sets of an earlier image as those of the image that took its place: what this node knows of both, and no more.

An earlier image is one of the same repository, with hot sets in the node's own directory, whose hot layers are in the
block store. Of several the one counts that was recorded here (rather than carried over itself), that shares most
layers, and of these the newest.

As a program (`python -m snapshotter.carryover ROOT IMAGE LAYER...`) this is what the fetch process runs beside itself:
trees of 100,000 files are a second of Python, which readers must not wait for. It prints what it made as JSON.

Invariant: a set that is there is never replaced.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from blockindex.carry import Carried, Carrier, LayerTree
from blockindex.errors import BlockIndexError
from blockindex.hotset import HotLayer, HotSet, image_key

from .blockstore import LayerRecord, node_name
from .errors import Precondition, SnapshotterError
from .hotstore import HotStore, read_head
from .model import Digest

__all__ = ["Summary", "carry_over", "stored_tree"]

_NICE = 10
_MOST_S = 60
_MOST_METADATA = 32 << 20
"""Bytes of both images' trees. Twice 101,002 names, 16 MB, take 2 s and 174 MB of memory."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What became of one set; `kept` to `lost` count blocks, see `Carried`."""

    image_key: str
    workload: str
    carried_from: str
    extents: int
    blocks: int
    kept: int
    changed: int
    moved: int
    lost: int

    @staticmethod
    def of(carried: Carried) -> "Summary":
        """Of what `carry` has made."""
        hotset = carried.hotset
        return Summary(
            hotset.image_key,
            hotset.workload,
            hotset.carried_from,
            len(hotset.extents),
            hotset.block_count,
            carried.kept,
            carried.changed,
            carried.moved,
            carried.lost,
        )


def stored_tree(root: Path, digest: Digest) -> LayerTree | None:
    """The layer's names, if it is in the block store."""
    directory = root / "layers" / node_name(digest)
    try:
        record = LayerRecord.load(directory)
        metadata = (directory / "meta").read_bytes()
    except (SnapshotterError, OSError):
        return None
    if record.digest != digest or len(metadata) != record.meta_size:
        return None
    return LayerTree(HotLayer(record.digest, record.blocks, record.layout), metadata)


def carry_over(root: Path, image: str, layers: Sequence[Digest]) -> list[Summary]:
    """Give the image with these layers, all of them in the store, the hot sets of an earlier one, as far as it has none
    of that workload. Empty when there is no earlier one. SnapshotterError, BlockIndexError, OSError; Precondition when
    the images have too many files to do it by the way."""
    store, key = HotStore(root), image_key(layers)
    new = list(_stored(root, layers))
    sets = [it for it in _earlier(root, image, layers) if store.load(key, it.workload) is None]
    if len(new) != len(set(layers)) or not sets:
        return []
    old = list(_stored(root, [Digest(layer.digest) for layer in sets[0].layers]))
    size = sum({tree.layer: len(tree.metadata) for tree in (*old, *new)}.values())
    if size > _MOST_METADATA:
        raise Precondition(f"{size} bytes of names are more than {_MOST_METADATA}: use `bootseer hotset carry`")
    carrier = Carrier(old, new)
    results = [carrier.carry(hotset) for hotset in sets]
    return [Summary.of(it) for it in results if it.hotset.extents and store.add(it.hotset)]


def _stored(root: Path, layers: Sequence[Digest]) -> Iterator[LayerTree]:
    for digest in dict.fromkeys(layers):
        tree = stored_tree(root, digest)
        if tree is not None:
            yield tree


def _earlier(root: Path, image: str, layers: Sequence[Digest]) -> list[HotSet]:
    """The hot sets of the earlier image."""
    wanted, new = _repository(image), set(layers)
    found: dict[tuple[bool, int, float, str], list[HotSet]] = {}
    for key, paths in _sets(HotStore(root)):
        try:
            sets = [read_head(path).hotset for path in paths]
            newest = max(path.stat().st_mtime for path in paths)
        except (BlockIndexError, OSError):  # damaged, or removed meanwhile
            continue
        digests = {Digest(layer.digest) for layer in sets[0].layers}
        hot = {Digest(it.layers[extent.layer].digest) for it in sets for extent in it.extents}
        if key != image_key(layers) and hot and wanted in _repositories(root, hot):
            is_recorded = any(not it.carried_from for it in sets)
            found[is_recorded, len(digests & new), newest, key] = sets
    return found[max(found)] if found else []


def _sets(store: HotStore) -> Iterator[tuple[str, list[Path]]]:
    by_key: dict[str, list[Path]] = {}
    for key, _, path in store.entries():
        by_key.setdefault(key, []).append(path)
    yield from by_key.items()


def _repositories(root: Path, digests: set[Digest]) -> set[str]:
    """The repositories of which all of these layers were pulled; none when one of them is not in the store."""
    found: list[set[str]] = []
    for digest in digests:
        try:
            record = LayerRecord.load(root / "layers" / node_name(digest))
        except SnapshotterError:
            return set()
        found.append({_repository(image) for image in record.images if record.digest == digest})
    return set.intersection(*found)


def _repository(image: str) -> str:
    """Of a reference as containerd gives it. `parse_reference` would bring all of `registry` with it, which takes
    longer to import than most images to carry over."""
    above, slash, last = image.partition("@")[0].rpartition("/")
    return above + slash + last.partition(":")[0]


def main(argv: Sequence[str]) -> int:
    """See the module."""
    root, image, *layers = argv
    try:
        made = carry_over(Path(root), image, [Digest(layer) for layer in layers])
    except (SnapshotterError, BlockIndexError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([asdict(summary) for summary in made]))
    return 0


if __name__ == "__main__":
    os.nice(_NICE)
    signal.alarm(_MOST_S)  # whoever waits for it may have been killed
    sys.exit(main(sys.argv[1:]))
