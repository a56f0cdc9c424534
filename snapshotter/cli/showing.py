"""`bootseer index show` and `index verify`: what an index says, what a read costs through it, whether it is right.

What `verify --blob` finds is found twice, by ways that share no table: every span decodes alone to pieces with the
index's digests, and an index made anew from the blob says the same of files, metadata and digests.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from blockindex.builder import LayerBuilder
from blockindex.codec import decode_index
from blockindex.decoder import SpanDecoder
from blockindex.erofs import Entry, walk
from blockindex.errors import BlockIndexError
from blockindex.layerindex import LayerIndex
from blockindex.summary import Cost, Summary, cost_of, summarise
from snapshotter.cli.progress import Progress
from snapshotter.cli.table import megabytes, table
from snapshotter.cli.tree import registry_config
from snapshotter.config import load_config
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError, UserError
from snapshotter.model import Digest
from snapshotter.registry import FileBlob, IndexDirectory, OciLayout, Registry, parse_platform

__all__ = ["show", "verify"]

_SAME = ("diff_id", "tar_size", "compression", "data_size", "files", "implied_dirs", "metadata")


@dataclass(frozen=True, slots=True)
class _Found:
    """One layer of the argument; `data` is None where it has no index."""

    digest: str
    data: bytes | None


@dataclass(frozen=True, slots=True)
class _Checked:
    """How long it took to index the blob anew, and to decode every span alone in so many threads."""

    read_s: float
    decode_s: float
    threads: int


def show(args: argparse.Namespace) -> int:
    """Print the numbers of each layer's index, or what one file costs."""
    if args.bytes and not args.path:
        raise UserError("--bytes START-END needs --path: a range of which file?")
    found = _find(args)
    indexes = {layer.digest: _decoded(layer.digest, layer.data) for layer in found if layer.data is not None}
    if args.path:
        return _show_cost(args, list(indexes.values()))
    sizes = {layer.digest: len(layer.data or b"") for layer in found}
    summaries = {digest: summarise(index) for digest, index in indexes.items()}
    if args.json:
        documents = [
            {**(asdict(summaries[digest]) if digest in summaries else {"blob_digest": digest}), "index_bytes": size}
            for digest, size in sizes.items()
        ]
        print(json.dumps({"layers": documents}, indent=2))
    else:
        texts = [
            _text(size, summaries[digest]) if digest in summaries else f"{'layer':8}  {digest}\n{'index':8}  none"
            for digest, size in sizes.items()
        ]
        print("\n\n".join(texts))
    return 0


def verify(args: argparse.Namespace) -> int:
    """Check an index by itself, and against its layer with --blob."""
    index = _decoded(str(args.index), _read(args.index))
    try:
        for _ in index.spans:  # decompresses each window
            pass
        checked = _verify_blob(index, FileBlob(args.blob)) if args.blob else None
    except BlockIndexError as error:
        raise SnapshotterError(f"{args.index}: {error}") from error
    spans, pieces = len(index.spans), index.piece_count
    if args.json:
        blob = asdict(checked) if checked else None
        print(json.dumps({"index": str(args.index), "spans": spans, "pieces": pieces, "blob": blob}, indent=2))
    elif checked:
        what = f"in {checked.read_s:.1f} s, each span alone in {checked.decode_s:.1f} s with {checked.threads} threads"
        print(f"{args.index}: sound, {spans} spans and {pieces} pieces match the blob (read {what})")
    else:
        print(f"{args.index}: sound, {spans} spans (its layer was not looked at: --blob)")
    return 0


def _find(args: argparse.Namespace) -> list[_Found]:
    """What the argument means: an index file, an OCI layout, or an image reference."""
    path = Path(args.image)
    if path.is_file():
        data = _read(path)
        return [_Found(_decoded(str(path), data).blob_digest, data)]
    location = args.indexes or load_config(args.config).index.url
    if not location:
        raise UserError("where are the image's indexes? Name --indexes DIR|URL, or `url` in [index] of --config")
    try:
        digests = _layers(args, path)
        directory = IndexDirectory(location, timeout_s=10.0)
    except InvalidArgument as error:
        raise UserError(str(error)) from error
    with closing(directory):
        found = [_Found(digest, _encoded(directory, digest)) for digest in digests]
    if all(layer.data is None for layer in found):
        raise NotFound(f"{location} has no index of any of the image's {len(found)} layers: bootseer index build")
    return found


def _encoded(directory: IndexDirectory, digest: Digest) -> bytes | None:
    """The layer's index; None where the directory has none. SnapshotterError where it cannot be asked."""
    with suppress(NotFound):
        return directory.read(digest)
    return None


def _layers(args: argparse.Namespace, path: Path) -> list[Digest]:
    platform = parse_platform(args.platform) if args.platform else None
    if path.is_dir():
        layers = OciLayout(path).resolve(platform).layers
    else:
        with closing(Registry(registry_config(args))) as registry:
            layers = registry.resolve(args.image, platform).layers
    return list(dict.fromkeys(layer.digest for layer in layers))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from error


def _decoded(what: str, data: bytes) -> LayerIndex:
    try:
        return decode_index(data)
    except BlockIndexError as error:
        raise SnapshotterError(f"{what}: {error}") from error


def _text(index_bytes: int, summary: Summary) -> str:
    share = f" ({100 * index_bytes / summary.blob_bytes:.2f} % of the layer)" if summary.blob_bytes else ""
    rows = [
        ("layer", summary.blob_digest),
        ("diff ID", summary.diff_id),
        ("blob", f"{megabytes(summary.blob_bytes)} {summary.compression}, {megabytes(summary.tar_bytes)} of tar"),
        ("index", f"{megabytes(index_bytes)}{share}, of it {megabytes(summary.windows_bytes)} windows"),
        ("image", f"{megabytes(summary.metadata_bytes)} metadata, {megabytes(summary.data_bytes)} data region"),
        (
            "holds",
            f"{summary.files} files, {summary.directories} directories ({summary.implied_directories} implied), "
            f"{summary.symlinks} symlinks, {summary.links} hard links, {summary.whiteouts} whiteouts, "
            f"{summary.others} others",
        ),
        ("stored", f"{summary.extents} extents, {summary.pieces} pieces, {summary.hole_blocks} blocks in holes"),
        (
            "a miss",
            f"fetches {megabytes(summary.span_blob_bytes_median)} and decodes "
            f"{megabytes(summary.span_tar_bytes_median)} in the median of {summary.spans} spans, at most "
            f"{megabytes(summary.span_blob_bytes_max)} and {megabytes(summary.span_tar_bytes_max)}",
        ),
    ]
    return "\n".join(f"{name:8}  {text}" for name, text in rows)


def _show_cost(args: argparse.Namespace, indexes: Sequence[LayerIndex]) -> int:
    wanted = b"/" + args.path.encode("utf-8", "surrogateescape").strip(b"/")
    rows: list[tuple[LayerIndex, Entry, int, int, Cost]] = []
    for index in indexes:
        entry = next((entry for entry in walk(index.metadata) if entry.path == wanted), None)
        if entry is not None and entry.data_offset is not None:
            start, end = args.bytes or (0, entry.size)
            if not 0 <= start < end <= entry.size:
                raise UserError(f"--bytes {start}-{end}: {args.path} has {entry.size} bytes")
            cost = cost_of(index, entry.data_offset + start, entry.data_offset + end)
            rows.append((index, entry, start, end, cost))
    if not rows:
        raise NotFound(f"no layer has a file {args.path} with content")
    if args.json:
        documents = [
            {"layer": i.blob_digest, "path": args.path, "size": e.size, "start": start, "end": end, **asdict(cost)}
            for i, e, start, end, cost in rows
        ]
        print(json.dumps({"costs": documents}, indent=2))
        return 0
    head = ("LAYER", "FILE", "RANGE", "SPANS", "FETCHED", "DECODED", "BLOB RANGE")
    print(table(head, [_cost_row(*row) for row in rows]))
    return 0


def _cost_row(index: LayerIndex, entry: Entry, start: int, end: int, cost: Cost) -> list[str]:
    return [
        index.blob_digest.removeprefix("sha256:")[:12],
        f"{entry.size} bytes",
        f"{start}-{end}",
        str(cost.spans),
        f"{cost.blob_end - cost.blob_start} bytes",
        f"{cost.tar_bytes} bytes",
        f"{cost.blob_start}-{cost.blob_end}",
    ]


def _verify_blob(index: LayerIndex, blob: FileBlob) -> _Checked:
    """Raises BlockIndexError or SnapshotterError where blob and index differ."""
    if blob.size() != index.blob_size:
        raise SnapshotterError(f"the blob has {blob.size()} bytes, the index is of one of {index.blob_size}")
    progress = Progress(2 * index.blob_size)
    started = time.monotonic()
    try:
        fresh = _rebuilt(index, blob, progress)
        wrong = [name for name in _SAME if getattr(fresh, name) != getattr(index, name)]
        if wrong:
            raise SnapshotterError(f"the index says something else than its layer: {', '.join(wrong)}")
        read = time.monotonic()
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
            decoded = pool.map(lambda span: _decode_span(index, blob, span), range(len(index.spans)))
            for span, _ in enumerate(decoded):
                progress.show(index.blob_size + index.spans.columns.blob_ends[span], "decoding each span")
    finally:
        progress.end()
    return _Checked(round(read - started, 3), round(time.monotonic() - read, 3), threads)


def _rebuilt(index: LayerIndex, blob: FileBlob, progress: Progress) -> LayerIndex:
    builder = LayerBuilder(index.blob_digest)
    for chunk in blob.stream(0, None):
        for _ in builder.feed(chunk):
            pass
        progress.show(builder.blob_size, "reading the layer")
    return builder.finish()


def _decode_span(index: LayerIndex, blob: FileBlob, span: int) -> None:
    decoder = SpanDecoder(index, span, span + 1)
    for chunk in _chunks(blob, decoder.blob_start, decoder.blob_end):
        decoder.feed(chunk)
    if not decoder.done:
        raise SnapshotterError(f"span {span} does not yield all of its blocks")


def _chunks(blob: FileBlob, start: int, end: int) -> Iterator[bytes]:
    return blob.stream(start, end) if start < end else iter(())
