"""`bootseer hotset ls` and `show`: which hot sets there are, and which files their blocks belong to."""

import argparse
import json
import time
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from blockindex.codec import decode_index
from blockindex.erofs import walk
from blockindex.errors import BlockIndexError
from blockindex.hotset import HotExtent, HotLayer, HotSet
from blockindex.layerindex import LayerIndex
from blockindex.model import BLOCK, block_ceil
from snapshotter.blockstore import node_name
from snapshotter.cli.hotsetfind import Found, find, images_of, read_file, store_images
from snapshotter.cli.table import megabytes, table
from snapshotter.config import load_config
from snapshotter.errors import InvalidArgument, SnapshotterError, UserError
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from snapshotter.registry import IndexDirectory

__all__ = ["ls", "show"]

_ROWS = 20  # directories that are printed; --json has all
_NO_FILE = "(files that the layer itself replaces)"


@dataclass(frozen=True, slots=True)
class _Share:
    """Hot bytes of all bytes, in whole blocks; `name` is a layer's digest or a directory."""

    name: str
    hot_bytes: int
    bytes: int


def ls(args: argparse.Namespace) -> int:
    """List the node's own sets."""
    config = load_config(args.config)
    images = store_images(config.root_path)
    rows: list[dict[str, object]] = []
    for key, workload, path in HotStore(config.root_path).entries():
        row: dict[str, object] = {"image_key": key, "workload": workload, "path": str(path)}
        try:
            pack = read_file(path).pack
            row |= {
                "records": pack.hotset.records,
                "carried_from": pack.hotset.carried_from,
                "extents": len(pack.hotset.extents),
                "hot_bytes": pack.hotset.hot_bytes,
                "codec": pack.codec.value,
                "file_bytes": pack.size,
                "written_s": path.stat().st_mtime,
                "images": sorted(images_of(pack.hotset, images)),
                "problem": "",
            }
        except (SnapshotterError, OSError) as error:
            row["problem"] = str(error)
        rows.append(row)
    if args.json:
        print(json.dumps({"sets": rows}, indent=2))
        return 0
    head = ("IMAGE KEY", "WORKLOAD", "RECORDS", "HOT", "CODEC", "FILE", "WRITTEN", "IMAGES")
    print(table(head, [_cells(row) for row in rows]) if rows else "no hot sets")
    return 0


def _cells(row: dict[str, object]) -> tuple[str, ...]:
    start = (str(row["image_key"])[7:19], str(row["workload"]))
    if row["problem"]:
        return (*start, "-", "-", "damaged", "-", "-", "-")
    hot, size, written, images = (row[name] for name in ("hot_bytes", "file_bytes", "written_s", "images"))
    assert isinstance(hot, int) and isinstance(size, int) and isinstance(written, float) and isinstance(images, list)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
    names = ", ".join(images) or "-"
    carried = f" (carried from {str(row['carried_from'])[7:19]})" if row["carried_from"] else ""
    return (*start, f"{row['records']}{carried}", megabytes(hot), str(row["codec"]), megabytes(size), when, names)


def show(args: argparse.Namespace) -> int:
    """Print what the sets hold."""
    config = load_config(args.config)
    found = find(config, args.image, args.workload)
    with ExitStack() as closing:
        directory = None
        location = args.indexes or config.index.url
        if location:
            try:
                directory = IndexDirectory(location, timeout_s=10.0)
            except InvalidArgument as error:
                raise UserError(str(error)) from error
            closing.callback(directory.close)
        layers = {layer: None for item in found for layer in item.pack.hotset.layers}
        indexes = {layer: _index(config.root_path, directory, layer) for layer in layers}
    documents = [_document(item, indexes, args.depth) for item in found]
    if args.json:
        print(json.dumps({"sets": documents}, indent=2))
    else:
        print("\n\n".join(_text(document) for document in documents))
    return 0


def _index(root: Path, directory: IndexDirectory | None, layer: HotLayer) -> LayerIndex | None:
    """The layer's index, of the layout that the set speaks of."""
    candidates: list[bytes | None] = []
    with suppress(OSError):
        candidates.append((root / "layers" / node_name(Digest(layer.digest)) / "index").read_bytes())
    if directory is not None:
        candidates.append(directory.get(Digest(layer.digest)))
    for data in candidates:
        try:
            index = decode_index(data) if data else None
        except BlockIndexError:
            continue
        if index is not None and (index.blob_digest, index.layout()) == (layer.digest, layer.layout):
            return index
    return None


def _document(found: Found, indexes: dict[HotLayer, LayerIndex | None], depth: int) -> dict[str, object]:
    hotset, pack = found.pack.hotset, found.pack
    layers = [
        _Share(layer.digest, sum(it.end - it.start for it in extents) * BLOCK, layer.blocks * BLOCK)
        for layer, extents in zip(hotset.layers, hotset.by_layer(), strict=True)
    ]
    return {
        "path": str(found.path),
        "image_key": hotset.image_key,
        "manifest": hotset.manifest,
        "workload": hotset.workload,
        "records": hotset.records,
        "carried_from": hotset.carried_from,
        "seconds": hotset.extents[-1].time_ms / 1000 if hotset.extents else 0.0,
        "extents": len(hotset.extents),
        "hot_bytes": hotset.hot_bytes,
        "codec": pack.codec.value,
        "frames": [asdict(frame) | {"digest": f"sha256:{frame.digest.hex()}"} for frame in pack.frames],
        "head_bytes": pack.head_size,
        "file_bytes": pack.size,
        "layers": [asdict(share) for share in layers],
        "directories": [asdict(share) for share in _directories(hotset, indexes, depth)],
        "without_index": [layer.digest for layer in hotset.layers if indexes[layer] is None],
    }


def _directories(hotset: HotSet, indexes: dict[HotLayer, LayerIndex | None], depth: int) -> list[_Share]:
    """Hot directories by their hot bytes, most first; names are cut after `depth` parts."""
    hot: dict[str, int] = {}
    total: dict[str, int] = {}
    for layer, extents in zip(hotset.layers, hotset.by_layer(), strict=True):
        index = indexes[layer]
        if index is not None:
            _count(index, extents, depth, hot, total)
    shares = [_Share(name, blocks * BLOCK, total.get(name, blocks) * BLOCK) for name, blocks in hot.items()]
    return sorted(shares, key=lambda share: (-share.hot_bytes, share.name))


def _count(
    index: LayerIndex, extents: Iterable[HotExtent], depth: int, hot: dict[str, int], total: dict[str, int]
) -> None:
    """Add a layer's blocks, by directory."""
    starts: list[int] = []
    files: list[tuple[int, str]] = []  # (end block, directory), one for each of `starts`
    entries = {e.nid: e for e in walk(index.metadata) if e.data_offset is not None}
    for entry in sorted(entries.values(), key=lambda entry: entry.data_offset or 0):
        first = (entry.data_offset or 0) // BLOCK
        end = first + block_ceil(entry.size) // BLOCK
        directory = _cut(entry.path, depth)
        starts.append(first)
        files.append((end, directory))
        total[directory] = total.get(directory, 0) + end - first
    for extent in extents:
        block = extent.start
        while block < extent.end:
            row = bisect_right(starts, block) - 1
            if row >= 0 and block < files[row][0]:
                end, name = files[row]
            else:
                end, name = (starts[row + 1] if row + 1 < len(starts) else extent.end), _NO_FILE
            step = min(end, extent.end)
            hot[name] = hot.get(name, 0) + step - block
            block = step


def _cut(path: bytes, depth: int) -> str:
    """The directory of a path, with at most `depth` names."""
    names = path.split(b"/")[1:-1][:depth]
    return "/" + b"/".join(names).decode("utf-8", "backslashreplace")


def _text(document: dict[str, object]) -> str:
    frames, layers, shares = document["frames"], document["layers"], document["directories"]
    hot, seconds, lacking = document["hot_bytes"], document["seconds"], document["without_index"]
    assert isinstance(frames, list) and isinstance(layers, list) and isinstance(shares, list)
    assert isinstance(hot, int) and isinstance(seconds, float) and isinstance(lacking, list)
    size = document["file_bytes"]
    assert isinstance(size, int)
    total = sum(row["bytes"] for row in layers)
    held = f"{len(frames)} {document['codec']} frames" if frames else "no frames"
    rows = [
        ("image key", document["image_key"]),
        ("manifest", document["manifest"] or "not known"),
        *([("carried", f"from {document['carried_from']}")] if document["carried_from"] else []),
        ("workload", f"{document['workload']}, {document['records']} recordings, {seconds:.1f} s"),
        ("hot", f"{megabytes(hot)} of {megabytes(total)} in {document['extents']} extents"),
        (
            "file",
            f"{megabytes(size)}: {document['head_bytes']} bytes of head, {held}",
        ),
    ]
    lines = [f"{name:9}  {text}" for name, text in rows]
    lines += ["", table(("LAYER", "HOT", "TOTAL", "SHARE"), [_share_cells(row, row["name"][7:19]) for row in layers])]
    if shares:
        cells = [_share_cells(row, row["name"]) for row in shares[:_ROWS]]
        lines += ["", table(("DIRECTORY", "HOT", "TOTAL", "SHARE"), cells)]
        if len(shares) > _ROWS:
            lines.append(f"and {len(shares) - _ROWS} more (--json has them)")
    if lacking:
        lines += ["", f"{len(lacking)} layers without an index here: their directories are not known (--indexes)"]
    return "\n".join(lines)


def _share_cells(row: dict[str, int], name: str) -> tuple[str, ...]:
    percent = 100 * row["hot_bytes"] / row["bytes"] if row["bytes"] else 0.0
    return (name, megabytes(row["hot_bytes"]), megabytes(row["bytes"]), f"{percent:.1f} %")
