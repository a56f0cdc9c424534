"""`scripts/bench index`: building layer indexes and decoding through them, by the product's own commands.

Nothing is emulated here and nothing installed: it measures this machine, which should have nothing else to do.

`--stream-gb` measures the memory that a huge layer takes: one that is made while it is sent (see `indexstream`).
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from scripts.rig.arguments import positive
from scripts.rig.errors import RigError
from scripts.rig.image import CACHE
from scripts.rig.indexstream import StreamedLayer, serving
from scripts.rig.node import BOOTSEER

__all__ = ["IndexFigures", "layers_of", "main", "table"]

_LAYER_MAGICS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
_MIN_LAYER = 1_000_000
_IMAGE = "numpy"


@dataclass(frozen=True, slots=True)
class IndexFigures:
    """One layer: bytes of blob, tar and index; inodes, and extents of stored bytes; seconds of building the index (the
    whole pass: read, inflate, tar, digests, EROFS, writing the index; not the interpreter's start), of decoding every
    span alone in `threads` threads with all digests checked (None where the blob is nowhere), and of `gzip -dc` (None
    where it is no gzip); CPU seconds and peak memory in bytes of the process that built the index, interpreter
    included: CPU seconds say something even where neighbours disturb."""

    layer: str
    blob_bytes: int
    tar_bytes: int
    index_bytes: int
    inodes: int
    extents: int
    build_s: float
    build_cpu_s: float
    build_rss_bytes: int
    decode_s: float | None
    threads: int
    gunzip_s: float | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run one measurement; exit code 1 and one line if it cannot be made."""
    parser = argparse.ArgumentParser(prog="scripts/bench index", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("layers", nargs="*", type=Path, help="layer blobs (default: those of the demo's cached image)")
    parser.add_argument("--stream-gb", type=positive, metavar="GB", help="a made-up layer with so much tar, instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    args = parser.parse_args(argv)
    if args.stream_gb is not None and args.layers:
        parser.error("--stream-gb takes no layers beside it")
    try:
        if args.stream_gb is not None:
            figures = [_measure_stream(int(args.stream_gb * 1e9))]
        else:
            figures = [_measured(layer) for layer in args.layers or _cached()]
        if args.json:
            args.json.write_text(json.dumps([asdict(each) for each in figures], indent=1) + "\n")
    except (RigError, OSError) as error:
        print(f"scripts/bench index: {error}", file=sys.stderr)
        return 1
    print(table(figures))
    return 0


def _cached() -> list[Path]:
    layers = layers_of(CACHE)
    if not layers:
        raise RigError(f"no layers in {CACHE}: run scripts/demo once, or name some")
    return layers


def layers_of(cache: Path) -> list[Path]:
    """The compressed blobs of the demo's cached image that are worth measuring, the largest first."""
    found = {path.name: path for path in cache.glob(f"{_IMAGE}-*/blobs/sha256/*") if path.stat().st_size >= _MIN_LAYER}
    layers = []
    for path in found.values():
        with path.open("rb") as file:
            if file.read(4).startswith(_LAYER_MAGICS):
                layers.append(path)
    return sorted(layers, key=lambda path: path.stat().st_size, reverse=True)


def table(figures: Sequence[IndexFigures]) -> str:
    """A Markdown table, as docs/performance.md has it."""
    head = "| layer | blob | tar | inodes | index | build | CPU | files/s | memory | decode | gunzip |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    for each in figures:
        tar_mb = each.tar_bytes / 1e6
        gunzip = f"{tar_mb / each.gunzip_s:.0f} MB/s" if each.gunzip_s else "-"
        decode = f"{tar_mb / each.decode_s:.0f} MB/s" if each.decode_s else "-"
        lines.append(
            f"| {each.layer[:12]} | {each.blob_bytes / 1e6:.1f} MB | {tar_mb:.1f} MB | {each.inodes} "
            f"| {each.index_bytes / 1e6:.2f} MB, {100 * each.index_bytes / each.blob_bytes:.2f} % "
            f"| {each.build_s:.2f} s, {tar_mb / each.build_s:.0f} MB/s | {each.build_cpu_s:.2f} s "
            f"| {each.inodes / each.build_s:.0f} "
            f"| {each.build_rss_bytes / 1e6:.0f} MB | {decode} | {gunzip} |"
        )
    return "\n".join(lines)


def _measured(layer: Path) -> IndexFigures:
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name:
        with layer.open("rb") as blob:  # into the page cache, not into our memory: Linux counts ours as the child's too
            while blob.read(1 << 20):
                pass
        figures, index = _built(str(layer), name)
        verified, _ = _bootseer("index", "verify", index, "--blob", str(layer), "--json")
    print(f"{layer.name[:12]} done", file=sys.stderr)
    return replace(
        figures,
        decode_s=verified["blob"]["decode_s"],
        threads=verified["blob"]["threads"],
        gunzip_s=_gunzip(layer) if _is_gzip(layer) else None,
    )


def _measure_stream(tar_size: int) -> IndexFigures:
    with tempfile.TemporaryDirectory(prefix="bootseer-bench-") as name:
        layer = StreamedLayer(tar_size)
        print(f"{layer.files} files, a blob of {layer.size / 1e6:.0f} MB: indexing", file=sys.stderr)
        with serving(layer) as reference:
            figures, _ = _built(reference, name)
    return figures


def _built(what: str, out: str) -> tuple[IndexFigures, str]:
    """Index `what`, one layer, into the directory `out`: the figures of building, and where the index is."""
    built, usage = _bootseer("index", "build", what, "--out", out, "--json")
    (result,) = built["layers"]
    shown, _ = _bootseer("index", "show", result["path"], "--json")
    (numbers,) = shown["layers"]
    kinds = ("files", "directories", "symlinks", "whiteouts", "others")
    figures = IndexFigures(
        layer=numbers["blob_digest"].removeprefix("sha256:"),
        blob_bytes=numbers["blob_bytes"],
        tar_bytes=numbers["tar_bytes"],
        index_bytes=numbers["index_bytes"],
        inodes=sum(numbers[kind] for kind in kinds),
        extents=numbers["extents"],
        build_s=result["seconds"],
        build_cpu_s=round(usage.ru_utime + usage.ru_stime, 3),
        build_rss_bytes=usage.ru_maxrss << 10,
        decode_s=None,
        threads=0,
        gunzip_s=None,
    )
    return figures, result["path"]


def _bootseer(*words: str) -> tuple[Any, resource.struct_rusage]:
    """The JSON document a command prints, and what it used; RigError if it fails."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen([BOOTSEER, *words], stdout=out, stderr=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    if process.returncode:
        raise RigError(f"`bootseer {' '.join(words)}` ended with exit code {process.returncode}")
    return json.loads(text), usage


def _is_gzip(layer: Path) -> bool:
    with layer.open("rb") as blob:
        return blob.read(2) == _LAYER_MAGICS[0]


def _gunzip(layer: Path) -> float:
    started = time.monotonic()
    with layer.open("rb") as blob:
        subprocess.run(["gzip", "-dc"], stdin=blob, stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started
