"""`bootseer hotset build` and `export`: packs out of what this node has (`hotpacking`)."""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from blockindex.codec import index_name
from blockindex.hotpack import Codec, encode_hotset
from blockindex.hotset import HotSet
from snapshotter.blockstore import PRESENT, node_name
from snapshotter.cli.hotsetfind import Found, find, one_line
from snapshotter.cli.progress import Progress
from snapshotter.cli.table import megabytes, table
from snapshotter.config import Config, load_config
from snapshotter.errors import NotFound, Precondition, UserError
from snapshotter.hotpacking import write_packed
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest

__all__ = ["build", "export", "exported"]

_UNREADABLE = bytes(0 if state == PRESENT else 1 for state in range(256))
_UNPROVEN = bytes(1 if number else 0 for number in range(256))


@dataclass(frozen=True, slots=True)
class Written:
    """One file that was written. `codec` is "none" for a set without bytes, `problem` then says why."""

    image_key: str
    workload: str
    path: str
    codec: str
    extents: int
    frames: int
    hot_bytes: int
    file_bytes: int
    seconds: float
    problem: str


def build(args: argparse.Namespace) -> int:
    """Make one pack."""
    config = load_config(args.config)
    found = find(config, args.image, args.workload)
    _prepare(args.out)
    result = _written(config, found[0].pack.hotset, args.out, Codec(args.codec), args.gap)
    if args.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        size, hot = megabytes(result.file_bytes), megabytes(result.hot_bytes)
        print(f"{result.path}\n{size}: {hot} in {result.extents} extents and {result.frames} {result.codec} frames")
    return 0


def export(args: argparse.Namespace) -> int:
    """Make packs of all hot sets of the images, and put the indexes of their layers beside them."""
    config = load_config(args.config)
    found = [item for image in args.images for item in find(config, image, None)]
    _prepare(args.to)
    results = [exported(config, item, args.to, Codec(args.codec), args.gap) for item in _each_once(found)]
    digests = dict.fromkeys(layer.digest for item in found for layer in item.pack.hotset.layers)
    indexes = [digest for digest in digests if _copy_index(config.root_path, args.to, Digest(digest))]
    without_index = [digest for digest in digests if digest not in indexes]
    if args.json:
        rows = [asdict(result) for result in results]
        print(json.dumps({"sets": rows, "indexes": indexes, "without_index": without_index}, indent=2))
    else:
        cells = [
            (it.image_key[7:19], it.workload, it.codec if it.frames else "no bytes", megabytes(it.file_bytes), it.path)
            for it in results
        ]
        print(table(("IMAGE KEY", "WORKLOAD", "FRAMES", "SIZE", "FILE"), cells))
        print(f"\n{len(indexes)} of {len(digests)} layers with their index")
    for result in results:
        if result.problem:
            print(f"bootseer: {result.image_key[7:19]} {result.workload}: {result.problem}", file=sys.stderr)
    return 1 if any(result.problem for result in results) else 0


def _each_once(found: Iterable[Found]) -> list[Found]:
    return list({item.path: item for item in found}.values())


def exported(config: Config, found: Found, out: Path, codec: Codec, gap: int) -> Written:
    """Write the pack of a set, or the set without bytes where not all of its blocks are here."""
    hotset = found.pack.hotset
    try:
        return _written(config, hotset, out, codec, gap)
    except (NotFound, Precondition) as error:
        data = encode_hotset(hotset)
        started = time.monotonic()
        path = HotStore(out).put(hotset.image_key, hotset.workload, lambda file: file.write(data))
        problem = f"written without bytes: {error}"
        return Written(
            hotset.image_key,
            hotset.workload,
            str(path),
            Codec.NONE.value,
            len(hotset.extents),
            0,
            hotset.hot_bytes,
            len(data),
            round(time.monotonic() - started, 3),
            problem,
        )


def _written(config: Config, hotset: HotSet, out: Path, codec: Codec, gap: int) -> Written:
    """Write the pack of a set. NotFound or Precondition, and nothing written, when not all of its blocks are here."""
    started = time.monotonic()
    progress = Progress(hotset.hot_bytes)
    try:
        with one_line(out):
            path, pack = write_packed(
                config, hotset, out, codec, gap, lambda done: progress.show(done, f"packing {hotset.workload}")
            )
    finally:
        progress.end()
    return Written(
        hotset.image_key,
        hotset.workload,
        str(path),
        pack.codec.value,
        len(pack.hotset.extents),
        len(pack.frames),
        pack.hotset.hot_bytes,
        pack.size,
        round(time.monotonic() - started, 3),
        "",
    )


def _copy_index(root: Path, out: Path, digest: Digest) -> bool:
    """Put the layer's index into a directory of indexes, unless one is there; whether there is one now."""
    target = out / index_name(digest)
    if target.exists():
        return True
    source = root / "layers" / node_name(digest) / "index"
    with one_line(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        return _copied(source, target)


def _copied(source: Path, target: Path) -> bool:
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with source.open("rb") as file:
            _copy_synced(temporary, lambda out: shutil.copyfileobj(file, out))
        temporary.rename(target)
    except FileNotFoundError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _copy_synced(path: Path, copy: Callable[[BinaryIO], object]) -> None:
    with path.open("wb") as out:
        copy(out)
        out.flush()
        os.fsync(out.fileno())


def _prepare(out: Path) -> None:
    """Meet a wrong directory before anything is read."""
    try:
        (out / "hot").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: {error.strerror}") from error
