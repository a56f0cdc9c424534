"""What a node has that other nodes may not: hot sets that its recordings agree on, and indexes that it has made itself.

A hot set is offered when the newest `min_records` recordings of its workload agree. `default`, where it is mixed here,
is offered as it would be without the workloads that do not: a shell that somebody opened once is not to hold it back.
What was carried over, imported or found elsewhere never is: all is made of the recordings themselves, not read from
where such sets lie. Changes nothing.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blockindex.hotset import DEFAULT_WORKLOAD, HotSet, fitted
from snapshotter.blockstore import LayerRecord, node_name
from snapshotter.config import Config
from snapshotter.errors import SnapshotterError
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.publish.agreement import agree
from snapshotter.record.records import Records
from snapshotter.workload.mixing import own_set

__all__ = ["HotOffer", "IndexOffer", "hot_offers", "index_offers", "layer_records"]


@dataclass(frozen=True, slots=True)
class HotOffer:
    """A hot set without bytes, and the reference that its image was pulled through last."""

    hotset: HotSet
    image: str


@dataclass(frozen=True, slots=True)
class IndexOffer:
    """An image of whose layers, those that are here, at least one was indexed here. `fingerprint` of these layers."""

    image: str
    fingerprint: str


def layer_records(root: Path) -> dict[str, LayerRecord]:
    """The layers of the block store, by digest."""
    found: dict[str, LayerRecord] = {}
    for directory in sorted((root / "layers").glob("[!.]*")):
        try:
            record = LayerRecord.load(directory)
        except SnapshotterError:  # removed meanwhile, or broken
            continue
        if directory.name == node_name(record.digest):
            found[record.digest] = record
    return found


def hot_offers(config: Config, layers: dict[str, LayerRecord]) -> Iterator[HotOffer]:
    """The sets, `default` before the others of its image, which may be in it."""
    root = config.root_path
    records = Records(root, HotStore(root), config.workload)
    for directory in sorted((root / "records").glob("[0-9a-f]*")):
        key = f"sha256:{directory.name}"
        sets = list(_agreed(records, key, config.publish.min_records))
        for hotset in sorted(sets, key=lambda it: (it.workload != DEFAULT_WORKLOAD, it.workload)):
            image = _image_of([Digest(layer.digest) for layer in hotset.layers], layers)
            if image and hotset.extents and not hotset.carried_from:
                yield HotOffer(hotset, image)


def _agreed(records: Records, key: str, least: int) -> Iterator[HotSet]:
    own = records.of(key)
    agreed = {
        workload: found
        for workload, found in own.items()
        if agree(found, least) and records.hotsets.path(key, workload).exists()  # what was removed counts no more
    }
    for workload in agreed.keys() - {DEFAULT_WORKLOAD}:
        yield fitted(own_set(agreed[workload]))
    if not agreed:
        return
    if records.mixes_default(key):
        yield fitted(records.mixture(agreed))
    elif DEFAULT_WORKLOAD in agreed and _is_own(records, key, own[DEFAULT_WORKLOAD]):
        yield fitted(own_set(own[DEFAULT_WORKLOAD]))


def _is_own(records: Records, key: str, own: list[HotSet]) -> bool:
    """Whether the `default` here, which is no mixture, is that of a command's recordings."""
    there = records.hotsets.load(key, DEFAULT_WORKLOAD)
    return there is not None and there.hotset.extents == fitted(own_set(own)).extents


def index_offers(layers: dict[str, LayerRecord]) -> Iterator[IndexOffer]:
    """The images."""
    of_image: dict[str, list[LayerRecord]] = {}
    for record in layers.values():
        for image in record.images:
            of_image.setdefault(image, []).append(record)
    for image, records in sorted(of_image.items()):
        if any(not record.index_from for record in records):
            text = "\n".join(sorted(f"{record.digest} {record.seal}" for record in records))
            yield IndexOffer(image, hashlib.sha256(text.encode()).hexdigest())


def _image_of(digests: list[Digest], layers: dict[str, LayerRecord]) -> str:
    """The newest image that all of these layers were pulled for; "" where not all are here, or there is none."""
    if not digests or any(digest not in layers for digest in digests):
        return ""
    common = set.intersection(*(set(layers[digest].images) for digest in digests))
    return next((image for image in reversed(layers[digests[-1]].images) if image in common), "")
