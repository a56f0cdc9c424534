"""`bootseer hotset merge`, `import` and `rm`: hot sets as files."""

import argparse
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from blockindex.hotpack import encode_hotset
from blockindex.hotset import HotSet, fitted, merge
from snapshotter.cli.hotsetfind import Found, find, one_line, read_file
from snapshotter.cli.progress import Progress
from snapshotter.cli.table import megabytes, table
from snapshotter.config import load_config
from snapshotter.errors import NotFound, UserError
from snapshotter.hotpacking import check_frames
from snapshotter.hotstore import HotStore

__all__ = ["import_sets", "merge_files", "remove", "write_file"]


def merge_files(args: argparse.Namespace) -> int:
    """Merge the files into one set without bytes."""
    sets = [read_file(path).pack.hotset for path in args.files]
    with one_line(args.out):
        merged = fitted(merge(sets, min_share=args.min_share))
        write_file(args.out, merged)
    if args.json:
        document = {
            "path": str(args.out),
            "image_key": merged.image_key,
            "workload": merged.workload,
            "records": merged.records,
            "extents": len(merged.extents),
            "hot_bytes": merged.hot_bytes,
        }
        print(json.dumps(document, indent=2))
    else:
        hot = megabytes(merged.hot_bytes)
        print(f"{args.out}: {hot} in {len(merged.extents)} extents, of {merged.records} recordings")
    return 0


def write_file(path: Path, hotset: HotSet) -> None:
    """Write a set without its bytes into a file of any name, whole or not at all."""
    data = encode_hotset(hotset)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def import_sets(args: argparse.Namespace) -> int:
    """Take sets in, each after all of its frames were decoded."""
    store = HotStore(load_config(args.config).root_path)
    found = _sources(args.source)
    progress = Progress(sum(item.pack.size for item in found))
    done = 0
    taken: list[tuple[Found, Path]] = []
    try:
        for item in found:
            hotset = item.pack.hotset
            with one_line(item.path), item.path.open("rb") as source:
                check_frames(item.pack, source, partial(_show, progress, hotset.workload, done))
                source.seek(0)
                copy = _copier(source)
                taken.append((item, store.put(hotset.image_key, hotset.workload, copy)))
            done += item.pack.size
    finally:
        progress.end()
    if args.json:
        rows = [
            {"image_key": it.pack.hotset.image_key, "workload": it.pack.hotset.workload, "path": str(path)}
            for it, path in taken
        ]
        print(json.dumps({"imported": rows}, indent=2))
    else:
        cells = [
            (it.pack.hotset.image_key[7:19], it.pack.hotset.workload, it.pack.codec.value, megabytes(it.pack.size))
            for it, _ in taken
        ]
        print(table(("IMAGE KEY", "WORKLOAD", "CODEC", "SIZE"), cells))
    return 0


def remove(args: argparse.Namespace) -> int:
    """Remove an image's sets, of one workload or all."""
    config = load_config(args.config)
    if Path(args.image).is_file():
        raise UserError(f"{args.image} is a file: remove it as such; `rm` takes an image key or a reference")
    store = HotStore(config.root_path)
    removed = []
    for item in find(config, args.image, args.workload):
        hotset = item.pack.hotset
        if store.remove(hotset.image_key, hotset.workload):
            removed.append({"image_key": hotset.image_key, "workload": hotset.workload, "path": str(item.path)})
    if args.json:
        print(json.dumps({"removed": removed}, indent=2))
    else:
        for row in removed:
            print(f"removed {row['path']}")
    return 0


def _sources(source: Path) -> list[Found]:
    if source.is_dir():
        found = [read_file(path) for _, _, path in HotStore(source).entries()]
        if not found:
            raise NotFound(f"{source}: no hot/<image key>/<workload>.bsh below it")
        return found
    return [read_file(source)]


def _show(progress: Progress, workload: str, before: int, done: int) -> None:
    progress.show(before + done, f"checking {workload}")


def _copier(source: BinaryIO) -> Callable[[BinaryIO], None]:
    return lambda target: shutil.copyfileobj(source, target)
