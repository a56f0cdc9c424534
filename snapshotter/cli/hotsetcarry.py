"""`bootseer hotset carry`: the hot sets of one image as those of another, which was built after it.

Of both images only the names of files are needed: from the block store, or from layer indexes elsewhere. What comes of
it has no bytes; `bootseer hotset build` adds them on a node that has the new image.
"""

import argparse
import json
import re
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

from blockindex.carry import Carrier, LayerTree
from blockindex.codec import decode_index
from blockindex.errors import BlockIndexError
from blockindex.hotset import HotLayer, HotSet, fitted
from blockindex.model import BLOCK
from snapshotter.carryover import Summary, stored_tree
from snapshotter.cli.hotsetfiles import write_file
from snapshotter.cli.hotsetfind import find, one_line
from snapshotter.cli.places import open_source
from snapshotter.cli.progress import Progress
from snapshotter.cli.table import megabytes, table
from snapshotter.config import Config, load_config
from snapshotter.errors import InvalidArgument, NotFound, Precondition, UserError
from snapshotter.hotstore import HotStore
from snapshotter.imagesource import Refused, platform_images
from snapshotter.model import Digest
from snapshotter.registry import IndexDirectory, Registry, host_platform, parse_platform

__all__ = ["carry"]

_KEY = re.compile(r"(sha256:)?[0-9a-f]{6,64}")


def carry(args: argparse.Namespace) -> int:
    """Run the command."""
    config = load_config(args.config)
    found = find(config, args.old, args.workload)
    sets = [item.pack.hotset for item in found]
    if args.out is not None and len(sets) > 1:
        names = ", ".join(hotset.workload for hotset in sets)
        raise UserError(f"--out takes one hot set, and {args.old} has {len(sets)} ({names}): choose with --workload")
    layers = _layers_of(config, args.new, args.platform)
    with _Trees(config, args.indexes or config.index.url) as trees:
        known = {layer: None for hotset in sets for layer in hotset.layers}
        old = [tree for layer in known if (tree := trees.find(Digest(layer.digest), layer)) is not None]
        new = [trees.must_find(digest) for digest in layers]
    progress = Progress(sum(len(tree.metadata) for tree in (*old, *new)))
    walked = 0

    def show(size: int) -> None:
        nonlocal walked
        walked += size
        progress.show(walked, "reading trees")

    try:
        with one_line(args.old):
            carrier = Carrier(old, new, show)
            results = [carrier.carry(hotset) for hotset in sets]
    finally:
        progress.end()
    if args.out is None:
        for it in results:
            _refuse_better(config, it.hotset)
    paths = [_write(config, fitted(it.hotset), args.out) for it in results]
    lacking = len(known) - len(old)
    rows = [Summary.of(it) for it in results]
    if args.json:
        documents = [asdict(row) | {"path": str(path)} for row, path in zip(rows, paths, strict=True)]
        print(json.dumps({"sets": documents, "without_index": lacking}, indent=2))
    else:
        print(_text(rows, paths))
    if lacking:
        print(
            f"bootseer: {lacking} layers of {args.old} have no index here: what is hot in them is lost (--indexes)",
            file=sys.stderr,
        )
    return 0


def _layers_of(config: Config, text: str, platform: str | None) -> list[Digest]:
    """The layers of NEW, from the bottom up: as a hot set that is here names them, or as its source does."""
    if Path(text).is_file() or _KEY.fullmatch(text):
        try:
            return [Digest(layer.digest) for layer in find(config, text, None)[0].pack.hotset.layers]
        except NotFound as error:
            raise NotFound(f"{text}: no hot set here says which layers that image has: give its reference") from error
    with closing(Registry(config.registry)) as registry:
        try:
            wanted = parse_platform(platform) if platform else host_platform()
            [image] = platform_images(open_source(text, registry), wanted)
        except InvalidArgument as error:
            raise UserError(str(error)) from error
    if isinstance(image, Refused):
        raise UserError(f"{text}: {image.reason}")
    return list(image.layers)


class _Trees:
    """The names in layers: from the block store, else from indexes at `location`."""

    def __init__(self, config: Config, location: str) -> None:
        self._root = config.root_path
        self._location = location
        self._closing = ExitStack()
        self._directory: IndexDirectory | None = None
        if location:
            try:
                self._directory = IndexDirectory(location, timeout_s=10.0)
            except InvalidArgument as error:
                raise UserError(str(error)) from error
            self._closing.callback(self._directory.close)

    def __enter__(self) -> "_Trees":
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def find(self, digest: Digest, wanted: HotLayer | None = None) -> LayerTree | None:
        """The layer's names, laid out as in `wanted` if that is given. SnapshotterError where the indexes' directory
        cannot be asked."""
        tree = stored_tree(self._root, digest)
        if tree is not None and wanted in (None, tree.layer):
            return tree
        if self._directory is None:
            return None
        try:
            index = decode_index(self._directory.read(digest))
        except (NotFound, BlockIndexError):
            return None
        if index.blob_digest != digest:
            return None
        tree = LayerTree(HotLayer(index.blob_digest, index.block_count, index.layout()), index.metadata)
        return tree if wanted in (None, tree.layer) else None

    def must_find(self, digest: Digest) -> LayerTree:
        """The same for a layer without which nothing can be done. NotFound."""
        tree = self.find(digest)
        if tree is None:
            where = f"the block store ({self._root})" + (f" or {self._location}" if self._location else "")
            raise NotFound(f"layer {digest} of the new image: no index in {where}: pull the image, or give --indexes")
        return tree


def _refuse_better(config: Config, hotset: HotSet) -> None:
    """Precondition where the new image has a hot set that is no guess."""
    store = HotStore(config.root_path)
    known = store.load(hotset.image_key, hotset.workload)
    if known is not None and not known.hotset.carried_from:
        raise Precondition(
            f"{store.path(hotset.image_key, hotset.workload)}: the new image has a hot set of its own for this"
            " workload, and it stays: write the other one elsewhere with --out, or choose with --workload"
        )


def _write(config: Config, hotset: HotSet, out: Path | None) -> Path:
    """Where the set has been written: the file, or the node's own directory."""
    if out is None:
        return HotStore(config.root_path).save(hotset)
    with one_line(out):
        write_file(out, hotset)
    return out


def _text(rows: list[Summary], paths: list[Path]) -> str:
    cells = [
        (
            row.workload,
            *(megabytes(count * BLOCK) for count in (row.blocks, row.kept, row.changed, row.moved, row.lost)),
        )
        for row in rows
    ]
    lines = [table(("WORKLOAD", "HOT", "KEPT", "CHANGED", "MOVED", "LOST"), cells), ""]
    return "\n".join((*lines, *map(str, paths)))
