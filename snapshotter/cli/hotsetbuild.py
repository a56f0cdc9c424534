"""`bootseer hotset build` and `export`: packs out of what this node has.

A layer's blocks are read from the block store where they are present (so they have been verified), and through the
layer's mount where they are not: then the daemon fetches and verifies them. What came in somebody's pack, and has not
been compared with the layer yet, is not packed again.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from blockindex.codec import index_name
from blockindex.hotpack import Codec, HotPack, encode_hotset, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, coalesced, without
from blockindex.model import BLOCK
from snapshotter.blockstore import PRESENT, LayerFiles, node_name
from snapshotter.cli.hotsetfind import Found, find, one_line
from snapshotter.cli.progress import Progress
from snapshotter.cli.table import megabytes, table
from snapshotter.config import Config, load_config
from snapshotter.errors import NotFound, Precondition, SnapshotterError, UserError
from snapshotter.hotstore import HotStore
from snapshotter.kernel.mountapi import mounts
from snapshotter.model import Digest
from snapshotter.unproven import Unproven

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
    packs: list[HotPack] = []
    with one_line(out), ExitStack() as closing:
        layers = [
            _open(config, layer, used, closing) for layer, used in zip(hotset.layers, hotset.by_layer(), strict=True)
        ]
        unreadable = [layer.unreadable() if layer is not None else None for layer in layers]
        _refuse_missing(hotset, unreadable)
        chosen = without(coalesced(hotset, gap), unreadable)  # a gap whose blocks are not here stays open
        progress = Progress(chosen.hot_bytes)
        done = 0

        def read(extent: HotExtent) -> bytes:
            nonlocal done
            layer = layers[extent.layer]
            assert layer is not None
            data = layer.read(extent.start, extent.end)
            done += len(data)
            progress.show(done, f"packing {hotset.workload}")
            return data

        def write(file: BinaryIO) -> None:
            packs.append(write_pack(chosen, read, codec, file, mapper=_on_all_cpus))

        try:
            path = HotStore(out).put(hotset.image_key, hotset.workload, write)
        finally:
            progress.end()
    pack = packs[0]
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


def _on_all_cpus(function: Callable[[bytes], bytes], items: Iterator[bytes]) -> Iterator[bytes]:
    """`map` with a thread for each CPU, which has at most one more item in hand than there are threads."""
    threads = os.cpu_count() or 1
    with ThreadPoolExecutor(threads, thread_name_prefix="pack") as pool:
        ahead: deque[Future[bytes]] = deque()
        for item in items:
            ahead.append(pool.submit(function, item))
            if len(ahead) > threads:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


class _LayerBlocks:
    """The blocks of one layer on this node. `device` is what its mount reads, "" when it has none."""

    def __init__(self, files: LayerFiles, device: str, closing: ExitStack) -> None:
        self._files = files
        self._unproven = Unproven(files.directory, files.record.blocks)
        closing.callback(self._unproven.close)
        self._device = -1
        if device:
            self._device = os.open(device, os.O_RDONLY | os.O_CLOEXEC)
            closing.callback(os.close, self._device)
            os.posix_fadvise(self._device, 0, 0, os.POSIX_FADV_RANDOM)  # no block beyond those that are asked for

    def unreadable(self) -> bytes | None:
        """One byte a block, 1 for those that cannot be had; None when all can."""
        blocks = self._files.record.blocks
        unproven = self._unproven.marks(0, blocks).translate(_UNPROVEN)
        if self._device >= 0:
            return unproven if 1 in unproven else None
        absent = self._files.present[:blocks].translate(_UNREADABLE)
        return bytes(map(max, absent, unproven)) if 1 in unproven else absent

    def read(self, start: int, end: int) -> bytes:
        """Verified bytes of the blocks. OSError when the daemon could not fetch them."""
        size = (end - start) * BLOCK
        offset = start * BLOCK
        if self._files.has(start, end):
            data = os.pread(self._files.data_fd, size, offset)
        else:
            data = os.pread(self._device, size, self._files.meta_size + offset)
        if len(data) != size:
            raise SnapshotterError(f"layer {self._files.record.digest}: blocks [{start}, {end}) are cut short")
        return data


def _open(config: Config, layer: HotLayer, used: Sequence[HotExtent], closing: ExitStack) -> _LayerBlocks | None:
    """The layer's blocks; None for a layer of which none are hot. NotFound when the block store does not have it."""
    if not used:
        return None
    name = node_name(Digest(layer.digest))
    try:
        files = LayerFiles(config.root_path / "layers" / name)
    except NotFound as error:
        raise NotFound(
            f"layer {layer.digest} is not in the block store of this node ({config.root}): pull the image here first"
        ) from error
    closing.callback(files.close)
    if files.record.digest != layer.digest or files.record.layout != layer.layout:
        raise Precondition(
            f"layer {layer.digest} is laid out differently in the block store: record the image again on this node"
        )
    target = str((config.mounts_path / name).resolve())
    device = next((it.source for it in mounts() if it.target == target and it.source.startswith("/dev/loop")), "")
    return _LayerBlocks(files, device, closing)


def _refuse_missing(hotset: HotSet, unreadable: Sequence[bytes | None]) -> None:
    """NotFound when hot blocks cannot be read, naming layers and what to do."""
    lacking = []
    for number, (states, extents) in enumerate(zip(unreadable, hotset.by_layer(), strict=True)):
        missing = sum(states[it.start : it.end].count(1) for it in extents) if states is not None else 0
        if missing:
            lacking.append(f"{missing} of layer {hotset.layers[number].digest[7:19]}")
    if lacking:
        raise NotFound(
            f"of {hotset.block_count} hot blocks these are not on this node, or not checked yet: "
            f"{', '.join(lacking)}: build while the daemon runs and the image is pulled, then they are fetched"
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
