"""Packs out of what this node has: the blocks of a hot set, compressed, in a file of a directory of hot sets.

A layer's blocks are read from the block store where they are present (so they have been verified), and through the
layer's mount where they are not: then the daemon fetches and verifies them. What came in somebody's pack, and has not
been compared with the layer yet, is not packed again.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from blockindex.hotpack import Codec, HotPack, decode_frame, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, coalesced, without
from blockindex.model import BLOCK
from snapshotter.blockstore import PRESENT, LayerFiles, node_name
from snapshotter.config import Config
from snapshotter.errors import NotFound, Precondition, SnapshotterError
from snapshotter.hotstore import HotStore
from snapshotter.kernel.mountapi import mounts
from snapshotter.model import Digest
from snapshotter.unproven import Unproven

__all__ = ["check_frames", "on_all_cpus", "write_packed"]

_UNREADABLE = bytes(0 if state == PRESENT else 1 for state in range(256))
_UNPROVEN = bytes(1 if number else 0 for number in range(256))


def write_packed(
    config: Config,
    hotset: HotSet,
    out: Path,
    codec: Codec,
    gap: int,
    show: Callable[[int], object],
    *,
    fetch: bool = True,
) -> tuple[Path, HotPack]:
    """Write the pack of a set into the directory of hot sets `out`. `show` is told the bytes read so far. NotFound or
    Precondition, and nothing written, when not all of its blocks are here; without `fetch` blocks that only the daemon
    could bring are not."""
    packs: list[HotPack] = []
    with ExitStack() as closing:
        layers = [
            _open(config, layer, used, fetch, closing)
            for layer, used in zip(hotset.layers, hotset.by_layer(), strict=True)
        ]
        unreadable = [layer.unreadable() if layer is not None else None for layer in layers]
        _refuse_missing(hotset, unreadable)
        chosen = without(coalesced(hotset, gap), unreadable)  # a gap whose blocks are not here stays open
        done = 0

        def read(extent: HotExtent) -> bytes:
            nonlocal done
            layer = layers[extent.layer]
            assert layer is not None
            data = layer.read(extent.start, extent.end)
            done += len(data)
            show(done)
            return data

        def write(file: BinaryIO) -> None:
            packs.append(write_pack(chosen, read, codec, file, mapper=on_all_cpus))

        path = HotStore(out).put(hotset.image_key, hotset.workload, write)
    return path, packs[0]


def check_frames(pack: HotPack, file: BinaryIO, show: Callable[[int], object]) -> None:
    """Corrupt unless every frame of the file decodes. `show` is told the bytes of the file looked at so far."""
    for frame in pack.frames:
        file.seek(frame.offset)
        decode_frame(pack, frame, file.read(frame.size))
        show(frame.offset + frame.size)


def on_all_cpus(function: Callable[[bytes], bytes], items: Iterator[bytes]) -> Iterator[bytes]:
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


def _open(
    config: Config, layer: HotLayer, used: Sequence[HotExtent], fetch: bool, closing: ExitStack
) -> _LayerBlocks | None:
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
    device = ""
    if fetch:
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
