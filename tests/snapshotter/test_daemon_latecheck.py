"""A hot pack that lies, end to end: the real daemon, real mounts, the kernel's page cache, what an operator does."""

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from blockindex.codec import decode_index, index_name
from blockindex.hotpack import Codec, write_pack
from blockindex.hotset import HotExtent, HotLayer, HotSet, hotset_name, image_key
from blockindex.model import BLOCK
from snapshotter.trust.quarantine import Quarantine
from tests.snapshotter.daemon import BOOTSEER, Daemon, Layer, encoded_index, expected, make_layer, origin, reader
from tests.snapshotter.rangeserver import RangeServer

pytestmark = pytest.mark.system

_LIE = 2  # of the four blocks that are hot


def _lying_pack(layer: Layer, index: bytes) -> tuple[str, bytes, str]:
    """A pack of the layer's first blocks, consistent in itself: its path in a directory, its bytes, its digest."""
    decoded = decode_index(index)
    row = HotLayer(layer.digest, decoded.block_count, decoded.layout())
    hotset = HotSet(image_key([layer.digest]), "", "default", (row,), (HotExtent(0, 0, 4, 0),), 1)

    def read(extent: HotExtent) -> bytes:
        data = bytearray(layer.contents["f0000"][extent.start * BLOCK : extent.end * BLOCK])
        data[_LIE * BLOCK : (_LIE + 1) * BLOCK] = b"evil" * (BLOCK // 4)
        return bytes(data)

    out = io.BytesIO()
    pack = write_pack(hotset, read, Codec.ZSTD, out)
    return hotset_name(hotset.image_key, "default"), out.getvalue(), pack.digest


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.02)


def _read_one(path: Path) -> str:
    """The beginning of the block that lies, read alone, in a process of its own."""
    code = (
        "import os, sys; fd = os.open(sys.argv[1], os.O_RDONLY); os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM);"
        f"sys.stdout.buffer.write(os.pread(fd, 4, {_LIE * BLOCK}))"
    )
    return subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=60).stdout


def _bootseer(daemon: Daemon, *argv: str) -> str:
    words = [str(BOOTSEER), *argv, "--config", str(daemon.home / "config.toml")]
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout


def test_a_lie_raises_an_alarm_and_a_restart_after_it_reads_what_is_right(tmp_path: Path) -> None:
    layer = make_layer(files=6, size=256 << 10, seed=21)
    index = encoded_index(layer)
    name, pack, digest = _lying_pack(layer, index)
    files = {f"/d/{index_name(layer.digest)}": index, f"/d/{name}": pack}
    with origin(layer) as registry, RangeServer(files) as directory:
        url = f"{directory.url}/d"
        toml = f'[index]\nurl = "{url}"\n[hotset]\nurl = "{url}"\n[fetch]\nbackground = false\n'
        with Daemon(tmp_path, registry, toml) as daemon:
            mount = daemon.prepare(layer)
            _until(lambda: any(it["state"] == "over" for it in daemon.status()["prefetches"]), "the prefetch's end")
            assert daemon.status()["layers"][0]["blocks_present"] == 4 and daemon.status()["alarms"] == []
            daemon.kill("fetch")  # its successor knows which blocks are not proven
            assert _read_one(mount / "f0000") == "evil", "it cannot be known yet"
            victim = reader("read", mount / "f0000")  # all that is in the piece, so the layer's own bytes come
            assert victim.communicate(timeout=60)[0].split() != expected(layer, "f0000"), "the kernel has the lie"
            _until(lambda: daemon.status()["alarms"], "the alarm")
            [alarm] = daemon.status()["alarms"]
            assert alarm["runs"] == [[_LIE, _LIE + 1]] and alarm["files"] == ["/f0000"] and alarm["served"]
            assert alarm["images"] == [f"{registry.host}/app:1"] and alarm["pack"]["digest"] == digest

            def is_right() -> bool:
                again = reader("read", mount / "f0000")
                return again.communicate(timeout=60)[0].split() == expected(layer, "f0000")

            _until(is_right, "the kernel drops what is in doubt, where no program has it mapped")
            shown = _bootseer(daemon, "status")
            assert "ALARM" in shown and alarm["id"] in shown and "/f0000" in shown
            cleared = json.loads(_bootseer(daemon, "alarm", "clear", "--json"))
            assert cleared == {"cleared": [alarm["id"]], "files_dropped": 1}
            again = reader("read", *(mount / name for name in sorted(layer.contents)))
            assert again.communicate(timeout=60)[0].split() == expected(layer, *sorted(layer.contents))
            assert daemon.status()["alarms"] == [] and Quarantine(daemon.root).is_quarantined(digest)
