"""Hot blocks end to end: the real daemon, a directory with indexes and a hot pack behind HTTP, real mounts."""

import contextlib
import ctypes
import hashlib
import mmap
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from blockindex.codec import decode_index, index_name
from blockindex.hotpack import Codec, HotPack, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, hotset_name, image_key
from blockindex.model import BLOCK
from snapshotter.blockstore import node_name
from snapshotter.workload.judging import blocks_read
from tests.snapshotter.daemon import Daemon, Layer, encoded_index, expected, make_layer, origin, reader
from tests.snapshotter.rangeserver import Action, Hold, RangeServer, Request

pytestmark = pytest.mark.system

_FILES, _SIZE = 24, 256 << 10
_HOT_FILES = 8  # a third of each layer: more would be downloaded as it is
_BLOCKS = _SIZE // BLOCK
_NO_BACKGROUND = "[fetch]\nbackground = false\n[lookup]\nregistry = false\n"


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=_FILES, size=_SIZE, seed=seed) for seed in (11, 12)]


@pytest.fixture(scope="module")
def indexes(layers: list[Layer]) -> list[bytes]:
    return [encoded_index(layer) for layer in layers]


@pytest.fixture(scope="module")
def pack(layers: list[Layer], indexes: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> tuple[HotPack, bytes]:
    """The first files of both layers, in turns."""
    digests = [layer.digest for layer in layers]
    decoded = [decode_index(index) for index in indexes]
    rows = tuple(
        HotLayer(it.digest, index.block_count, index.layout()) for it, index in zip(layers, decoded, strict=True)
    )
    extents = tuple(
        HotExtent(layer, number * _BLOCKS, (number + 1) * _BLOCKS, 0)
        for number in range(_HOT_FILES)
        for layer in range(len(layers))
    )
    hotset = HotSet(image_key(digests), "", "default", rows, extents, 1)

    def read(extent: HotExtent) -> bytes:
        names = sorted(layers[extent.layer].contents)
        whole = b"".join(layers[extent.layer].contents[name] for name in names)
        return whole[extent.start * BLOCK : extent.end * BLOCK]

    path = tmp_path_factory.mktemp("pack") / "pack"
    with path.open("wb") as file:
        written = write_pack(hotset, read, Codec.LZ4, file)
    return written, path.read_bytes()


class Site:
    """A registry and a directory of indexes and hot packs, two servers."""

    def __init__(self, registry: RangeServer, directory: RangeServer) -> None:
        self.registry, self.directory = registry, directory

    def toml(self) -> str:
        url = f"{self.directory.url}/d"
        return f'[index]\nurl = "{url}"\n[hotset]\nurl = "{url}"\n'

    def pack_requests(self) -> list[Request]:
        return [it for it in self.directory.requests if it.path.endswith(".bsh")]

    def blob_requests(self) -> list[Request]:
        return [it for it in self.registry.requests if "/blobs/" in it.path]


@pytest.fixture
def site(layers: list[Layer], indexes: list[bytes], pack: tuple[HotPack, bytes]) -> Iterator[Site]:
    files = {f"/d/{index_name(it.digest)}": index for it, index in zip(layers, indexes, strict=True)}
    files[f"/d/{hotset_name(pack[0].hotset.image_key, 'default')}"] = pack[1]
    with origin(*layers) as registry, RangeServer(files) as directory:
        yield Site(registry, directory)


def _hot_names(layer: Layer) -> list[str]:
    return sorted(layer.contents)[:_HOT_FILES]


def _read_all(daemon: Daemon, layers: list[Layer], names: Callable[[Layer], list[str]]) -> None:
    for layer in layers:
        mount = daemon.root / "m" / layer.digest.partition(":")[2][:14]
        process = reader("read", *(mount / name for name in names(layer)))
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and out.split() == expected(layer, *names(layer))


def _layer_rows(daemon: Daemon) -> list[dict[str, object]]:
    return sorted(daemon.status()["layers"], key=lambda row: str(row["digest"]))


def _prefetches(daemon: Daemon) -> list[dict[str, object]]:
    with contextlib.suppress(Exception):  # while the fetch process is being started again
        found: list[dict[str, object]] = daemon.status()["prefetches"]
        return found
    return []


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.02)


def _over(daemon: Daemon) -> bool:
    rows = _prefetches(daemon)
    return bool(rows) and all(row["state"] == "over" for row in rows)


def test_hot_blocks_come_without_any_reader_and_save_every_demand_fetch(
    tmp_path: Path, layers: list[Layer], pack: tuple[HotPack, bytes], site: Site
) -> None:
    with Daemon(tmp_path, site.registry, site.toml() + _NO_BACKGROUND) as daemon:
        daemon.prepare(*layers)
        _until(lambda: _over(daemon), "the end of the prefetch")
        rows = _layer_rows(daemon)
        assert [row["blocks_present"] for row in rows] == [_HOT_FILES * _BLOCKS] * 2
        assert [row["hot_blocks"] for row in rows] == [_HOT_FILES * _BLOCKS] * 2
        [prefetch] = _prefetches(daemon)
        assert prefetch["blocks"] == prefetch["hot_blocks"] == 2 * _HOT_FILES * _BLOCKS
        assert prefetch["bytes"] == pack[0].size
        _read_all(daemon, layers, _hot_names)
        assert [row["demand_fetches"] for row in _layer_rows(daemon)] == [0, 0]
        assert site.blob_requests() == []
        taken = sorted(it.range for it in site.pack_requests() if it.range)
        for (_, end), (start, _) in pairwise(taken):
            assert end == start, "each byte once"


def _is_cached(path: Path) -> bool:
    """Whether the page cache has the whole file; asks for none of it."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as view:
        pages = (ctypes.c_ubyte * -(-len(view) // mmap.PAGESIZE))()
        place = ctypes.addressof(ctypes.c_char.from_buffer(view))
        assert libc.mincore(ctypes.c_void_p(place), ctypes.c_size_t(len(view)), pages) == 0
        return all(page & 1 for page in pages)


def test_what_has_landed_is_in_the_page_cache_before_anyone_reads_it(
    tmp_path: Path, layers: list[Layer], site: Site
) -> None:
    with Daemon(tmp_path, site.registry, site.toml() + _NO_BACKGROUND) as daemon:
        daemon.prepare(*layers)
        mounts = [daemon.root / "m" / node_name(layer.digest) for layer in layers]
        hot = [mount / name for mount, layer in zip(mounts, layers, strict=True) for name in _hot_names(layer)]
        _until(lambda: all(_is_cached(path) for path in hot), "the kernel's reads")
        before = [blocks_read(it) for it in mounts]
        _read_all(daemon, layers, _hot_names)
        assert [blocks_read(it) for it in mounts] == before, "programs find it there"
        assert [row["demand_fetches"] for row in _layer_rows(daemon)] == [0, 0], "and not a block more was read"


def test_one_request_on_a_new_connection_brings_the_first_hot_blocks(
    tmp_path: Path, layers: list[Layer], site: Site
) -> None:
    """No request precedes the first one for the pack: it does not wait for the index, a token or a manifest."""
    begun: list[int] = []
    with Daemon(tmp_path, site.registry, site.toml() + _NO_BACKGROUND) as daemon:

        def behaviour(request: Request) -> Action | None:
            # The index is not answered before the pack has been asked for: if that waited for the index, nothing came.
            if request.path.endswith(".bsi"):
                _until(lambda: site.pack_requests(), "the request for the pack")
            else:
                begun.append(request.number)
            return None

        site.directory.behaviour = behaviour
        daemon.prepare(*layers)
        _until(lambda: _over(daemon), "the end of the prefetch")
        first = site.pack_requests()[0]
        assert first.range == (0, 256 << 10) and first.method == "GET"
        assert [it.path for it in site.registry.requests] == []
        assert begun[0] == first.number


def test_a_fetch_process_killed_in_the_middle_of_the_stream(
    tmp_path: Path, layers: list[Layer], pack: tuple[HotPack, bytes], site: Site
) -> None:
    """Readers get right bytes all the same, and its successor takes the prefetch up again."""
    held = 0

    def behaviour(request: Request) -> Action | None:
        nonlocal held
        if request.path.endswith(".bsh") and request.range and request.range[0] and held < 2:
            held += 1
            return Hold(10_000)
        return None

    with Daemon(tmp_path, site.registry, site.toml() + _NO_BACKGROUND) as daemon:
        site.directory.behaviour = behaviour
        daemon.prepare(*layers)
        _until(lambda: held, "a stream under way")
        mounts = [daemon.root / "m" / layer.digest.partition(":")[2][:14] for layer in layers]
        readers = [
            reader("read", *(mount / name for name in _hot_names(layer)))
            for mount, layer in zip(mounts, layers, strict=True)
        ]
        os.kill(daemon.pid("fetch"), signal.SIGKILL)
        held = 2
        for process, layer in zip(readers, layers, strict=True):
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0 and out.split() == expected(layer, *_hot_names(layer))
        _until(lambda: _over(daemon), "the end of the successor's prefetch")
        assert all(int(str(row["blocks_present"])) >= _HOT_FILES * _BLOCKS for row in _layer_rows(daemon))


def test_the_rest_streams_in_behind(tmp_path: Path, layers: list[Layer], site: Site) -> None:
    with Daemon(tmp_path, site.registry, site.toml()) as daemon:
        daemon.prepare(*layers)
        _read_all(daemon, layers, lambda layer: sorted(layer.contents))
        _until(lambda: all(row["state"] == "complete" for row in _layer_rows(daemon)), "completion")
        for layer in layers:
            data = (daemon.root / "layers" / layer.digest.partition(":")[2][:14] / "data").read_bytes()
            whole = b"".join(layer.contents[name] for name in sorted(layer.contents))
            assert hashlib.sha256(data).digest() == hashlib.sha256(whole).digest()
