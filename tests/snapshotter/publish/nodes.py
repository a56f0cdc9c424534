"""Nodes without a daemon: roots with the layers of an image, its indexes, and recordings of it."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from blockindex.builder import LayerBuilder
from blockindex.codec import encode_index
from blockindex.hotset import HotLayer, HotSet, from_touches
from snapshotter.blockstore import BlockStore, LayerRecord, Staging
from snapshotter.config import Config, PublishConfig, RegistryConfig
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.publish.rounds import Round
from snapshotter.publish.state import Done
from snapshotter.record.records import Records
from snapshotter.registry import Registry

Touches = Iterable[tuple[int, int, int, int]]


class Node:
    """One node, at a time of its own."""

    def __init__(self, root: Path, image: str, layers: dict[Digest, bytes], index_from: str = "") -> None:
        self.root = root
        self.image = image
        self.now = 1_796_082_424.0
        registry = RegistryConfig(hosts_dir="", docker_config="/nonexistent/config.json")
        self.config = replace(
            Config(), root=str(root), registry=registry, publish=PublishConfig(enabled=True, jitter_s=0.0)
        )
        store = BlockStore(root)
        self.layers = [_stored(store, digest, blob, image, index_from) for digest, blob in layers.items()]

    def set(self, **options: object) -> None:
        """Change options of [publish]."""
        self.config = replace(self.config, publish=replace(self.config.publish, **options))  # type: ignore[arg-type]

    def hotset(self, touches: Touches, workload: str) -> HotSet:
        """A recording of the image: (layer, first block, end, time)."""
        return from_touches(self.layers, list(touches), workload=workload)

    def record(self, touches: Touches, workload: str = "train", times: int = 1) -> None:
        """Have the workload recorded so often."""
        records = Records(self.root, HotStore(self.root), self.config.workload)
        for _ in range(times):
            records.keep(self.hotset(touches, workload), commanded=False)

    def round(self) -> tuple[list[Done], list[str]]:
        """What a round does."""
        with closing(Registry(self.config.registry)) as registry:
            return Round(self.config, registry, lambda: self.now).run()

    def done(self) -> dict[str, str]:
        """The status of each artifact of a round that does not fail, by workload; "" is the layer index's."""
        rows, failed = self.round()
        assert not failed, failed
        return {row.workload: row.status for row in rows}


def _stored(store: BlockStore, digest: Digest, blob: bytes, image: str, index_from: str) -> HotLayer:
    builder = LayerBuilder(digest)
    region = {offset: bytes(data) for offset, data in builder.feed(blob)}
    index = builder.finish()
    staging = Staging(store.layers, digest)
    for offset, data in region.items():
        staging.write(offset, data)
    record = LayerRecord(
        digest=digest,
        blob_size=index.blob_size,
        meta_size=len(index.metadata),
        data_size=index.data_size,
        images=(image,),
        implied_dirs=index.implied_dirs,
        layout=index.layout(),
        index_from=index_from,
    )
    staging.publish(record, index.metadata, encode_index(index), ())
    staging.discard()
    return HotLayer(digest, index.block_count, index.layout())
