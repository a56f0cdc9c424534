"""A rebuilt image's first start, end to end: what the image before it read is there before anybody reads it."""

import contextlib
import gzip
import hashlib
import io
import random
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from blockindex.hotset import HotSet, image_key
from blockindex.model import BLOCK
from proto import snapshots_pb2
from snapshotter.blockstore import ABSENT, node_name
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from tests.snapshotter.daemon import Daemon, Layer, expected, origin, reader, write_index

pytestmark = pytest.mark.system

_COLD = 1 << 20
"""Bytes of a file that no start reads, between any two that are read: their spans are not the same."""


def made_layer(files: Mapping[str, bytes], mtime: int) -> Layer:
    """A layer of these files, each with a cold one behind it."""
    stream = io.BytesIO()
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files.items():
            cold = random.Random(f"{name} {mtime}").randbytes(_COLD)
            for path, content in ((name, data), (f"cold/{name}", cold)):
                info = tarfile.TarInfo(path)
                info.size, info.mtime = len(content), mtime
                tar.addfile(info, io.BytesIO(content))
                contents[path] = content
    blob = gzip.compress(stream.getvalue(), 1, mtime=0)
    return Layer(blob, contents, Digest("sha256:" + hashlib.sha256(blob).hexdigest()))


def package(name: str, version: int, files: int = 4) -> dict[str, bytes]:
    """Files of a package; those of a later version hold something else, and are some blocks larger."""
    made = {}
    for number in range(files):
        size = (20 + 7 * number + 5 * version) * BLOCK + 100 * version
        made[f"opt/{name}/m{number}.so"] = random.Random(f"{name} {version} {number}").randbytes(size)
    return made


def built() -> tuple[list[Layer], list[Layer]]:
    """The layers of an image, and of the same built again: all times of its upper layer are others, `tool` has a new
    version, with one file more, and `model.bin` was moved."""
    base = made_layer(package("base", 1), 1)
    kept = {**package("numpy", 1), **package("web", 1)}
    model = random.Random(7).randbytes(50 * BLOCK)
    old = made_layer({**kept, **package("tool", 1, files=2), "opt/one/model.bin": model}, 1)
    new = made_layer({"srv/two/model.bin": model, **package("tool", 2, files=3), **kept}, 2)
    return [base, old], [base, new]


def starts_with(layer: Layer) -> list[str]:
    """The files that a start reads, from their first byte to their last."""
    return [name for name in layer.contents if not name.startswith("cold/")]


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def node(tmp_path: Path, *layers: Layer) -> Iterator[Daemon]:
    """A node with indexes of the layers, without background (what nobody asks for does not come) and containerd (how
    long a recording goes on is a matter of time)."""
    for layer in layers:
        write_index(tmp_path / "indexes", layer)
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n[fetch]\nbackground = false\n'
    toml += '[record]\nquiet_s = 1\n[containerd]\naddress = ""\n'
    with origin(*layers) as registry, Daemon(tmp_path, registry, toml) as daemon:
        yield daemon


def pull(daemon: Daemon, layers: list[Layer]) -> str:
    """The image with these layers; the name of the snapshot of the uppermost."""
    daemon.prepare(*layers)
    name = ""
    for layer in layers:
        name = "sha256:" + hashlib.sha256(f"{name}{layer.digest}".encode()).hexdigest()
    return name


def start(daemon: Daemon, image: str, key: str, layers: list[Layer]) -> None:
    """A container that reads what a start reads; it is compared with what was packed."""
    with daemon.snapshots() as snapshots:
        request = snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=f"default/1/{key}", parent=image)
        [mount] = snapshots.Prepare(request).mounts
    lowers = mount.options[-1].removeprefix("lowerdir=").split(":")
    files, wanted = [], []
    for layer in layers:
        [directory] = [Path(lower) for lower in lowers if Path(lower).name.startswith(node_name(layer.digest))]
        files += [directory / name for name in starts_with(layer)]
        wanted += expected(layer, *starts_with(layer))
    process = reader("read", *files)  # one for all: between two of them a recording might find it quiet
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and out.split() == wanted


def hotset_of(daemon: Daemon, layers: list[Layer]) -> HotSet | None:
    pack = HotStore(daemon.root).load(image_key([layer.digest for layer in layers]), "default")
    return None if pack is None else pack.hotset


def blocks_on_demand(daemon: Daemon, layers: list[Layer]) -> tuple[int, int]:
    """Of the blocks that a start reads, those that are not on the node yet, and all."""
    missing = read = 0
    for layer in layers:
        present = (daemon.root / "layers" / node_name(layer.digest) / "present").read_bytes()
        block = 0
        for name, content in layer.contents.items():
            end = block + -(-len(content) // BLOCK)
            if name in starts_with(layer):
                missing += present[block:end].count(ABSENT)
                read += end - block
            block = end
        assert present.count(ABSENT) > 0.4 * block, "the cold files have come, too: nothing is shown by what is there"
    return missing, read


def test_the_first_start_of_a_rebuilt_image(tmp_path: Path) -> None:
    """One package changed and one file moved: at most a tenth of what the first start reads is fetched on demand. It is
    recorded all the same."""
    old, new = built()
    with node(tmp_path, *old, new[-1]) as daemon:
        start(daemon, pull(daemon, old), "old", old)
        _until(lambda: hotset_of(daemon, old), "the end of the recording")
        recorded = hotset_of(daemon, old)
        assert recorded is not None and not recorded.carried_from

        image, key = pull(daemon, new), image_key([layer.digest for layer in new])
        ended = {"image_key": key, "state": "over"}
        _until(lambda: any(ended.items() <= it.items() for it in daemon.status()["prefetches"]), "the prefetch")
        carried = hotset_of(daemon, new)
        assert carried is not None and carried.carried_from == recorded.image_key
        missing, read = blocks_on_demand(daemon, new)
        assert 0 < missing <= 0.1 * read, f"{missing} of {read} blocks on demand"
        start(daemon, image, "new", new)
        assert daemon.status()["recordings"]["opened"] == 2
