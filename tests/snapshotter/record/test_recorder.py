"""Recordings by a real daemon: private mounts, what they show, and that no killed process spoils a record.

No containerd here: the daemon cannot ask it, so recordings end by time. `test_recorder_containerd` has the rest.
"""

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest

from blockindex.hotset import HotSet, image_key
from blockindex.model import BLOCK
from proto import snapshots_pb2
from snapshotter.blockstore import node_name
from snapshotter.hotstore import HotStore
from snapshotter.kernel.mountapi import mounts
from snapshotter.rpc import call
from tests.snapshotter.daemon import Daemon, Layer, drop_caches, expected, make_layer, origin, reader, write_index

pytestmark = pytest.mark.system

FILES, SIZE = 16, 128 << 10
BASE, LEFT, RIGHT = (make_layer(FILES, SIZE, seed) for seed in (11, 12, 13))
TOML = (
    '[containerd]\naddress = ""\n[fetch]\nbackground = {background}\n[record]\nquiet_s = {quiet}\nwindow_s = {window}\n'
)


@contextlib.contextmanager
def node(
    home: Path, quiet: float = 0.5, window: float = 60, background: bool = True, indexed: bool = True, more: str = ""
) -> Iterator[Daemon]:
    """A daemon that records."""
    toml = TOML.format(background=str(background).lower(), quiet=quiet, window=window)
    if indexed:
        for layer in (BASE, LEFT, RIGHT):
            write_index(home / "indexes", layer)
        toml += f'[index]\nurl = "{home}/indexes"\n'
    with origin(BASE, LEFT, RIGHT) as registry, Daemon(home, registry, toml + more) as daemon:
        yield daemon


def container(daemon: Daemon, key: str, *layers: Layer) -> dict[str, Path]:
    """Pull the image and prepare a container on it: the mount point of each of its layers by digest."""
    daemon.prepare(*layers)
    with daemon.snapshots() as snapshots:
        request = snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=f"default/1/{key}", parent=_top(layers))
        return _lowers(snapshots.Prepare(request).mounts, layers)


def again(daemon: Daemon, key: str, *layers: Layer) -> dict[str, Path]:
    """What `Mounts` says of the container."""
    with daemon.snapshots() as snapshots:
        request = snapshots_pb2.MountsRequest(snapshotter="b", key=f"default/1/{key}")
        return _lowers(snapshots.Mounts(request, wait_for_ready=True).mounts, layers)


def remove(daemon: Daemon, key: str) -> None:
    with daemon.snapshots() as snapshots:
        request = snapshots_pb2.RemoveSnapshotRequest(key=key if "/" in key else f"default/1/{key}")
        snapshots.Remove(request, wait_for_ready=True)


def _top(layers: tuple[Layer, ...]) -> str:
    name = ""
    for layer in layers:
        name = "sha256:" + hashlib.sha256(f"{name}{layer.digest}".encode()).hexdigest()
    return name


def _lowers(found: Any, layers: tuple[Layer, ...]) -> dict[str, Path]:
    (mount,) = found
    [option] = [it for it in mount.options if it.startswith("lowerdir=")]
    paths = [Path(it) for it in option.removeprefix("lowerdir=").split(":")]
    lowers = {layer.digest: path for layer, path in zip(reversed(layers), paths, strict=True)}
    for layer in layers:
        assert lowers[layer.digest].name.startswith(node_name(layer.digest))
    return lowers


def read(path: Path, *names: str) -> list[str]:
    """sha256 of files of a layer, read by another process."""
    return reader("read", *(path / name for name in names)).communicate(timeout=60)[0].split()


def status(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = daemon.status()["recordings"]
    return found


def wait(daemon: Daemon, limit_s: float = 20, **counts: int) -> None:
    """Until the counters are these."""
    end = time.monotonic() + limit_s
    while not counts.items() <= (now := status(daemon)).items():
        assert time.monotonic() < end, now
        time.sleep(0.02)


def hotset(daemon: Daemon, *layers: Layer, workload: str = "default") -> HotSet:
    """What was recorded of the image."""
    pack = HotStore(daemon.root).load(image_key([layer.digest for layer in layers]), workload)
    assert pack is not None
    pack.hotset.validate()
    return pack.hotset


def hot_files(found: HotSet, *layers: Layer) -> dict[str, list[str]]:
    """Names of the files of which every block is hot, by layer; no file may be hot in part. Files lie in the data
    region one after the other, in the order of the tar."""
    files: dict[str, list[str]] = {layer.digest: [] for layer in layers}
    blocks = SIZE // BLOCK
    for row, layer in enumerate(found.layers):
        hot = {b for it in found.extents if it.layer == row for b in range(it.start, it.end)}
        for number in range(FILES):
            own = set(range(number * blocks, (number + 1) * blocks))
            assert not own & hot or own <= hot, "read in part"
            if own <= hot:
                files[layer.digest].append(f"f{number:04}")
    return files


def private_mounts(daemon: Daemon) -> list[str]:
    return [
        entry.target for entry in mounts() if entry.target.startswith(f"{daemon.root}/m/") and "." in entry.target[-4:]
    ]


def slot_files(daemon: Daemon) -> list[str]:
    return sorted(path.name for path in (daemon.root / "record").iterdir() if path.name != "slots")


def all_gone(daemon: Daemon) -> None:
    """Until nothing of any slot is left."""
    limit = time.monotonic() + 10
    while found := private_mounts(daemon) + slot_files(daemon):
        assert time.monotonic() < limit, found
        time.sleep(0.02)


# -- what is recorded --------------------------------------------------------------------------------------------------


def test_two_images_that_share_a_layer_each_have_their_own_blocks(tmp_path: Path) -> None:
    """Recorded at once; a third container of one of them, and readers of the shared mounts, leave no trace."""
    with node(tmp_path, quiet=1.5) as daemon:
        left = container(daemon, "left", BASE, LEFT)
        right = container(daemon, "right", BASE, RIGHT)
        third = container(daemon, "third", BASE, LEFT)
        shared = daemon.root / "m" / node_name(BASE.digest)
        assert left[BASE.digest] != right[BASE.digest] != shared == third[BASE.digest]
        assert status(daemon)["opened"] == 2
        assert read(third[BASE.digest], "f0009") == expected(BASE, "f0009")
        assert read(left[BASE.digest], "f0001", "f0003") == expected(BASE, "f0001", "f0003")
        assert read(right[RIGHT.digest], "f0007") == expected(RIGHT, "f0007")
        assert read(right[BASE.digest], "f0003", "f0002") == expected(BASE, "f0003", "f0002")
        assert read(left[LEFT.digest], "f0000") == expected(LEFT, "f0000")
        wait(daemon, kept=2)
        found = hotset(daemon, BASE, LEFT)
        assert hot_files(found, BASE, LEFT) == {BASE.digest: ["f0001", "f0003"], LEFT.digest: ["f0000"]}
        order = [(it.layer, it.start) for it in found.extents]
        assert order == sorted(order), "in the order of the reads"
        assert found.records == 1 and 0 < found.extents[-1].time_ms < 20000
        found = hotset(daemon, BASE, RIGHT)
        assert hot_files(found, BASE, RIGHT) == {BASE.digest: ["f0002", "f0003"], RIGHT.digest: ["f0007"]}
        assert found.extents[0].layer == 1
        assert len(private_mounts(daemon)) == 4, "for as long as the snapshots live"
        read(left[BASE.digest], "f0005")  # nobody listens any more
        for key in ("left", "right", "third"):
            remove(daemon, key)
        all_gone(daemon)
        again_left = container(daemon, "left", BASE, LEFT)
        assert again_left[BASE.digest] == shared, "there is a hot set now"
        assert hot_files(hotset(daemon, BASE, LEFT), BASE, LEFT)[BASE.digest] == ["f0001", "f0003"]


def test_warm_pages_and_complete_layers_hide_nothing(tmp_path: Path) -> None:
    with node(tmp_path, indexed=False) as daemon:
        shared = daemon.prepare(BASE)
        names = sorted(BASE.contents)
        assert read(shared, *names) == expected(BASE, *names)
        assert [row["state"] for row in daemon.status()["layers"]] == ["complete"]
        own = container(daemon, "c", BASE)[BASE.digest]
        assert read(own, "f0004", "f0002") == expected(BASE, "f0004", "f0002")
        assert read(own, "f0004") == expected(BASE, "f0004")
        wait(daemon, kept=1)
        assert hot_files(hotset(daemon, BASE), BASE) == {BASE.digest: ["f0002", "f0004"]}
        remove(daemon, "c")


def test_the_window_ends_a_recording_that_is_never_quiet(tmp_path: Path) -> None:
    with node(tmp_path, quiet=50, window=1.5) as daemon:
        own = container(daemon, "c", BASE)[BASE.digest]
        read(own, "f0000")
        assert [row["open"] for row in status(daemon)["open"]] == [True]
        wait(daemon, kept=1)
        assert hot_files(hotset(daemon, BASE), BASE) == {BASE.digest: ["f0000"]}
        remove(daemon, "c")


def test_a_snapshot_that_goes_early_or_reads_nothing_is_no_evidence(tmp_path: Path) -> None:
    with node(tmp_path, window=2) as daemon:
        own = container(daemon, "young", BASE)[BASE.digest]
        read(own, "f0000")
        remove(daemon, "young")
        wait(daemon, discarded=1)
        container(daemon, "idle", BASE)
        wait(daemon, discarded=2)
        remove(daemon, "idle")
        assert list(HotStore(daemon.root).entries()) == []
        all_gone(daemon)


def test_nothing_is_recorded_where_it_is_switched_off_or_known(tmp_path: Path) -> None:
    with node(tmp_path, more="auto = false\n", indexed=False) as daemon:
        own = container(daemon, "c", BASE)[BASE.digest]
        assert own.name == node_name(BASE.digest) and status(daemon)["opened"] == 0
        remove(daemon, "c")


def test_an_unpacking_prepare_and_a_view_are_no_containers(tmp_path: Path) -> None:
    with node(tmp_path) as daemon:
        daemon.prepare(BASE)
        with daemon.snapshots() as snapshots:
            unpacked = "default/7/extract-1-abc sha256:00"
            snapshots.Prepare(snapshots_pb2.PrepareSnapshotRequest(key=unpacked, parent=_top((BASE,))))
            snapshots.View(snapshots_pb2.ViewSnapshotRequest(key="default/8/view", parent=_top((BASE,))))
            snapshots.Prepare(snapshots_pb2.PrepareSnapshotRequest(key="default/9/empty"))
            assert status(daemon)["opened"] == 0
            with pytest.raises(grpc.RpcError):  # of a key that is taken, nothing stays
                snapshots.Prepare(snapshots_pb2.PrepareSnapshotRequest(key="default/8/view", parent=_top((BASE,))))
        assert private_mounts(daemon) == []
        for key in ("default/8/view", "default/9/empty", unpacked):
            remove(daemon, key)


def test_a_committed_snapshot_is_no_container_any_more(tmp_path: Path) -> None:
    with node(tmp_path) as daemon:
        read(container(daemon, "c", BASE)[BASE.digest], "f0000")
        with daemon.snapshots() as snapshots:
            snapshots.Commit(snapshots_pb2.CommitSnapshotRequest(name="made", key="default/1/c"))
        wait(daemon, discarded=1)
        all_gone(daemon)


# -- misses, and killed processes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("attach", ["loop", "file"])
def test_misses_come_through_private_files(tmp_path: Path, attach: str) -> None:
    with node(tmp_path, background=False, more=f'[mount]\nattach = "{attach}"\n') as daemon:
        own = container(daemon, "c", BASE)[BASE.digest]
        readers = [reader(how, own / f"f{number:04}") for number, how in enumerate(("read", "mmap", "read"))]
        for number, process in enumerate(readers):
            assert process.communicate(timeout=60)[0].split() == expected(BASE, f"f{number:04}")
        wait(daemon, kept=1)
        assert hot_files(hotset(daemon, BASE), BASE) == {BASE.digest: ["f0000", "f0001", "f0002"]}
        remove(daemon, "c")


@pytest.mark.parametrize("worker", ["block", "fetch", "service"])
def test_killed_workers_spoil_no_record(tmp_path: Path, worker: str) -> None:
    with node(tmp_path, quiet=3, background=False) as daemon:
        lowers = container(daemon, "c", BASE, LEFT)
        names = sorted(BASE.contents)[:12]
        process = reader("read", *(lowers[BASE.digest] / name for name in names))
        for _ in range(4):
            daemon.kill(worker)
            time.sleep(0.05)
        assert process.communicate(timeout=60)[0].split() == expected(BASE, *names)
        assert read(lowers[LEFT.digest], "f0003") == expected(LEFT, "f0003")
        assert again(daemon, "c", BASE, LEFT) == lowers
        wait(daemon, kept=1)
        assert hot_files(hotset(daemon, BASE, LEFT), BASE, LEFT) == {BASE.digest: names, LEFT.digest: ["f0003"]}
        remove(daemon, "c")
        all_gone(daemon)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_recording_goes_on_over_a_restart_of_the_daemon(tmp_path: Path, number: int) -> None:
    """And a container keeps its private mounts, on the new connection, also when its recording has ended."""
    with node(tmp_path, quiet=4) as daemon:
        lowers = container(daemon, "c", BASE, LEFT)
        assert read(lowers[BASE.digest], "f0001") == expected(BASE, "f0001")
        daemon.stop(number)
        daemon.start()
        assert again(daemon, "c", BASE, LEFT) == lowers
        assert read(lowers[LEFT.digest], "f0002") == expected(LEFT, "f0002")
        wait(daemon, kept=1)
        assert hot_files(hotset(daemon, BASE, LEFT), BASE, LEFT) == {BASE.digest: ["f0001"], LEFT.digest: ["f0002"]}
        daemon.stop(number)
        daemon.start()
        drop_caches()
        assert again(daemon, "c", BASE, LEFT) == lowers
        assert read(lowers[BASE.digest], "f0008") == expected(BASE, "f0008")
        remove(daemon, "c")
        all_gone(daemon)


def test_after_a_reboot_the_shared_mounts_are_used(tmp_path: Path) -> None:
    """Played by another boot id, and no mounts left."""
    with node(tmp_path, quiet=60) as daemon:
        lowers = container(daemon, "c", BASE, LEFT)
        read(lowers[BASE.digest], "f0001")
        daemon.stop()
        [path] = (daemon.root / "record").glob("*.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), "boot_id": "another"}))
        for lower in lowers.values():
            subprocess.run(["umount", "-l", str(lower)], check=True)
        daemon.start()
        shared = {layer.digest: daemon.root / "m" / node_name(layer.digest) for layer in (BASE, LEFT)}
        assert again(daemon, "c", BASE, LEFT) == shared
        assert status(daemon) == {"open": [], "opened": 0, "kept": 0, "discarded": 0}
        all_gone(daemon)
        assert container(daemon, "d", BASE, LEFT) != shared, "another container is recorded again"
        for key in ("c", "d"):
            remove(daemon, key)


def test_what_a_killed_service_left_is_cleared_away(tmp_path: Path) -> None:
    """Slots whose snapshot was removed, or never came to be; mounts of no slot; a recording that was just ending."""
    with node(tmp_path, quiet=60) as daemon:
        for key, layer in (("gone", LEFT), ("ending", RIGHT)):
            read(container(daemon, key, BASE, layer)[layer.digest], "f0001")
        daemon.stop(signal.SIGKILL)
        record = daemon.root / "record"
        files = {json.loads(path.read_text())["key"]: path for path in record.glob("*.json")}
        gone, ending = files["default/1/gone"], files["default/1/ending"]
        gone.write_text(gone.read_text().replace("default/1/gone", "default/1/never"))
        (record / "55.log").write_bytes(b"")
        with (record / "slots").open("r+b") as slots:
            slots.seek(int(ending.stem, 16))
            slots.write(b"\0")
        daemon.start()
        assert slot_files(daemon) == [ending.name]
        limit = time.monotonic() + 10  # on a slow machine containerd is served before all is mounted
        while {Path(target).name[-2:] for target in private_mounts(daemon)} != {ending.stem}:
            assert time.monotonic() < limit
            time.sleep(0.02)
        assert status(daemon)["discarded"] == 1
        for key in ("gone", "ending"):
            remove(daemon, key)
        all_gone(daemon)


def test_a_full_disk_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(disk)], check=True)
    try:
        with node(tmp_path, quiet=60) as daemon:
            (daemon.root / "record").rename(tmp_path / "before")
            daemon.stop()
            (daemon.root / "record").symlink_to(disk)
            daemon.start()
            own = container(daemon, "c", BASE)[BASE.digest]
            (disk / "filler").write_bytes(b"x" * _free(disk))
            for _ in range(3):
                names = sorted(BASE.contents)
                assert read(own, *names) == expected(BASE, *names)
                drop_caches()
            wait(daemon, discarded=1)
            remove(daemon, "c")
            assert list(HotStore(daemon.root).entries()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


# -- removal, commands -------------------------------------------------------------------------------------------------


def test_cache_removal_knows_of_private_mounts(tmp_path: Path) -> None:
    with node(tmp_path) as daemon:
        own = container(daemon, "c", BASE)[BASE.digest]
        read(own, "f0001")
        name, control = node_name(BASE.digest), daemon.run / "control.sock"
        with pytest.raises(Exception, match="in use"):
            call(control, "cache-remove", 60, name=name)
        wait(daemon, kept=1)
        held = os.open(own / "f0001", os.O_RDONLY)
        remove(daemon, "c")
        with daemon.snapshots() as snapshots:
            snapshots.Remove(snapshots_pb2.RemoveSnapshotRequest(key=_top((BASE,))))
        with pytest.raises(Exception, match="loop"):
            call(control, "cache-remove", 60, name=name)
        os.close(held)
        call(control, "cache-remove", 60, name=name)
        assert not (daemon.root / "layers" / name).exists()
        HotStore(daemon.root).remove(image_key([BASE.digest]), "default")
        own = container(daemon, "c", BASE)[BASE.digest]
        assert read(own, "f0003") == expected(BASE, "f0003")
        remove(daemon, "c")


def _ask(daemon: Daemon, op: str, name: str, **fields: object) -> Mapping[str, Any]:
    answer: Mapping[str, Any] = call(daemon.run / "control.sock", op, 30, namespace="default", name=name, **fields)
    return answer


def test_a_command_decides(tmp_path: Path) -> None:
    with node(tmp_path, quiet=0.3, window=1) as daemon:
        for name, workload in (("first", "train"), ("second", "serve")):
            _ask(daemon, "record-arm", name, workload=workload, manifest="sha256:" + "cd" * 32, window_s=60)
            own = container(daemon, name, BASE)[BASE.digest]
            read(own, "f0001" if name == "first" else "f0002")
            time.sleep(1.5)  # neither quiet nor the window ends it
            assert _ask(daemon, "record-progress", name)["open"]
        ended = _ask(daemon, "record-end", "first", keep=True, why="it is ready")
        assert (ended["kept"], ended["blocks"], ended["bytes"]) == (True, 32, SIZE)
        assert _ask(daemon, "record-end", "first", keep=False, why="twice") == ended
        assert not _ask(daemon, "record-end", "second", keep=False, why="it failed")["kept"]
        found = hotset(daemon, BASE, workload="train")
        assert found.manifest == "sha256:" + "cd" * 32
        assert hot_files(found, BASE) == {BASE.digest: ["f0001"]}
        assert set(HotStore(daemon.root).find(found.image_key)) == {"train", "default"}
        for name in ("first", "second"):
            remove(daemon, name)
        with pytest.raises(Exception, match="no recording of first"):
            _ask(daemon, "record-progress", "first")
        with pytest.raises(Exception, match="workload"):
            _ask(daemon, "record-arm", "x", workload="../x", manifest="", window_s=1)
