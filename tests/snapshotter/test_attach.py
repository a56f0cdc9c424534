"""Which way layers are attached on which kernel, and what is undone when the kernel refuses.

The kernel's part is played here; `test_daemon` runs it for real.
"""

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from snapshotter import attach as attach_module
from snapshotter.attach import Attacher, Capabilities, file_backed_ok, unmount_all, unmount_dead
from snapshotter.blockstore import LayerRecord, node_name
from snapshotter.errors import Precondition
from snapshotter.kernel import mountapi
from snapshotter.kernel.loop import LoopStatus
from snapshotter.kernel.mountapi import MountEntry
from snapshotter.model import Digest

DIGEST = Digest("sha256:" + "0123456789abcdef" * 4)
RECORD = LayerRecord(
    DIGEST, 1000, meta_size=8192, data_size=1 << 20, images=("registry.test/app:1",), implied_dirs=(), layout=""
)
SAFE, UNSAFE = (7, 1, 0), (6, 12, 43)


@pytest.mark.parametrize(
    ("release", "safe"),
    [
        ((5, 15, 0), False),
        ((6, 1, 200), False),
        ((6, 12, 71), False),
        ((6, 12, 72), True),
        ((6, 12, 95), True),
        ((6, 16, 99), False),
        ((6, 18, 10), False),
        ((6, 18, 11), True),
        ((6, 19, 0), False),
        ((6, 19, 1), True),
        ((7, 0, 0), True),
        ((8, 3, 1), True),
    ],
)
def test_file_backed_mounts_need_a_fixed_kernel(release: tuple[int, int, int], safe: bool) -> None:
    assert file_backed_ok(release) is safe


def test_the_running_kernel_is_probed() -> None:
    can = Capabilities.probe()
    assert ".".join(map(str, can.release[:2])) in os.uname().release


@dataclass
class Kernel:
    """Mounts and loop devices as the kernel would keep them; `refuses` is raised by the next mount."""

    device: Path
    table: list[MountEntry] = field(default_factory=list)
    calls: list[tuple[str, ...]] = field(default_factory=list)
    refuses: OSError | None = None
    backing_device: int = 0
    is_direct: bool = True

    def mounts(self, prefix: str = "") -> list[MountEntry]:
        return [entry for entry in self.table if entry.target.startswith(prefix)]

    def mount(self, source: str, target: str, kind: str, options: str = "") -> None:
        self.calls.append(("mount", source, target, kind, options))
        if self.refuses:
            raise self.refuses
        self.table.append(MountEntry(target=target, source=source, fstype=kind, major=7, minor=0))

    def umount(self, target: str, lazy: bool = False) -> None:
        self.calls.append(("umount", target, "lazy" if lazy else ""))
        if self.refuses:
            raise self.refuses
        self.table = [entry for entry in self.table if entry.target != target]

    def open_file(self, mount_fd: int, name: str) -> int:
        self.calls.append(("open", name))
        return os.open(os.devnull, os.O_RDONLY)

    def loop(self, file_fd: int, name: str) -> int:
        self.calls.append(("loop", name))
        return os.open(self.device, os.O_RDONLY)

    def read_ahead(self, major: int, minor: int, kib: int) -> None:
        self.calls.append(("read_ahead", str(kib)))

    def status(self, device: int) -> LoopStatus:
        return LoopStatus(self.backing_device, 1, self.is_direct)

    def change_file(self, device: int, file_fd: int) -> None:
        self.calls.append(("change_file",))

    def set_direct_io(self, device: int) -> None:
        self.calls.append(("set_direct_io",))


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    device = tmp_path / "device"
    device.write_bytes(bytes(1 << 16))
    kernel = Kernel(device)
    for name in ("mounts", "mount", "umount", "open_file"):
        monkeypatch.setattr(attach_module, name, getattr(kernel, name))
    monkeypatch.setattr(attach_module.loop, "attach", kernel.loop)
    monkeypatch.setattr(attach_module.loop, "set_read_ahead", kernel.read_ahead)
    monkeypatch.setattr(attach_module.loop, "status", kernel.status)
    monkeypatch.setattr(attach_module.loop, "change_file", kernel.change_file)
    monkeypatch.setattr(attach_module.loop, "set_direct_io", kernel.set_direct_io)
    return kernel


@pytest.fixture
def fuse(tmp_path: Path) -> Iterator[int]:
    """A directory in the place of the FUSE mount."""
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def _attacher(
    root: Path, fuse: int, way: str, release: tuple[int, int, int] = SAFE, erofs: bool = True, loop: bool = True
) -> Attacher:
    return Attacher(root / "root", fuse, way, 16, 1024, Capabilities(release, erofs, loop))


def test_the_table_of_mounts_is_read_as_far_as_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        "40 27 7:3 / /a\\040b/m/one ro,relatime shared:7 master:2 - erofs /dev/loop3 ro\n"
        "41 27 0:50 / /a\\040bc ro - overlay overlay ro,lowerdir=/x\n"
    )

    def opened(path: str, encoding: str, errors: str) -> IO[str]:
        assert path == "/proc/self/mountinfo"
        return table.open(encoding=encoding, errors=errors)

    monkeypatch.setattr(mountapi, "open", opened, raising=False)
    one = MountEntry(7, 3, "/a b/m/one", "erofs", "/dev/loop3")
    assert list(mountapi.mounts("/a b/")) == [one]
    assert [entry.target for entry in mountapi.mounts()] == ["/proc", "/a b/m/one", "/a bc"]
    assert list(mountapi.mounts("/b")) == []


# -- what the kernel can do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["loop", "file"])
def test_without_erofs_nothing_can_be_mounted(tmp_path: Path, fuse: int, way: str) -> None:
    with pytest.raises(Precondition, match="modprobe erofs"):
        _attacher(tmp_path, fuse, way, erofs=False)
    assert not (tmp_path / "root").exists()


def test_without_loop_devices(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    with pytest.raises(Precondition, match="modprobe loop"):
        _attacher(tmp_path, fuse, "loop", loop=False)
    _attacher(tmp_path, fuse, "file", loop=False).attach(RECORD)  # a fixed kernel needs none
    with pytest.raises(Precondition, match="modprobe loop"):
        _attacher(tmp_path, fuse, "file", release=UNSAFE, loop=False)


def test_a_kernel_that_is_not_fixed_gets_a_loop_device_whatever_was_asked(
    tmp_path: Path, fuse: int, kernel: Kernel, caplog: pytest.LogCaptureFixture
) -> None:
    attacher = _attacher(tmp_path, fuse, "file", release=UNSAFE)
    [record] = caplog.records
    assert record.getMessage() == "attach.file_backed_unsafe release=6.12.43 using=loop"
    target = attacher.attach(RECORD)
    assert ("loop", node_name(DIGEST)) in kernel.calls
    assert kernel.calls[-1][2:4] == (str(target), "erofs") and "directio" not in kernel.calls[-1]


def test_file_backed_mounts_are_always_direct(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    """Buffered ones serve zeros after a reader was killed."""
    target = _attacher(tmp_path, fuse, "file").attach(RECORD)
    source = f"/proc/self/fd/{fuse}/{node_name(DIGEST)}"
    assert kernel.calls == [("mount", source, str(target), "erofs", "directio")]


# -- mounting ----------------------------------------------------------------------------------------------------------


def test_a_loop_device_is_made_ready_and_then_mounted(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    target = attacher.attach(RECORD)
    assert target == attacher.path(DIGEST) == tmp_path / "root" / "m" / node_name(DIGEST)
    assert [call[0] for call in kernel.calls] == ["open", "loop", "read_ahead", "mount"]
    assert ("read_ahead", "16") in kernel.calls
    assert attacher.mounted() == {node_name(DIGEST): str(target)}
    kernel.calls.clear()
    attacher.warm(DIGEST)
    assert kernel.calls == [("read_ahead", "1024")]


def test_only_root_comes_by_the_mounts(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    """Images hold set-user-ID programs; also where an older daemon left the directory open."""
    (tmp_path / "root" / "m").mkdir(mode=0o755, parents=True)
    assert _attacher(tmp_path, fuse, "loop").mounts_dir.stat().st_mode & 0o077 == 0


def test_attaching_twice_mounts_once(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    kernel.backing_device = os.fstat(fuse).st_dev
    _fake_loop(attacher, kernel)
    calls = len(kernel.calls)
    attacher.attach(RECORD)
    assert len(kernel.calls) == calls


def test_a_mount_of_an_earlier_daemon_gets_the_new_file(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    kernel.backing_device = os.fstat(fuse).st_dev + 1
    _fake_loop(attacher, kernel)
    kernel.calls.clear()
    attacher.attach(RECORD)
    assert kernel.calls == [("open", node_name(DIGEST)), ("change_file",), ("set_direct_io",)]


def test_direct_io_that_a_killed_service_had_not_asked_for_again(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    kernel.backing_device, kernel.is_direct = os.fstat(fuse).st_dev, False
    _fake_loop(attacher, kernel)
    attacher.attach(RECORD)
    assert kernel.calls == [("set_direct_io",)]


def test_mount_points_that_a_killed_service_has_left_go_with_the_next_start(
    tmp_path: Path, fuse: int, kernel: Kernel
) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    _fake_loop(attacher, kernel)
    names = {"0123456789abcd", "0123456789abcd.07", attacher.path(DIGEST).name, "full"}
    for name in names:
        (attacher.mounts_dir / name).mkdir()
    (attacher.mounts_dir / "full" / "somebody's").touch()
    _attacher(tmp_path, fuse, "loop")
    assert {path.name for path in attacher.mounts_dir.iterdir()} == {attacher.path(DIGEST).name, "full"}


def _fake_loop(attacher: Attacher, kernel: Kernel) -> None:
    """A mount of the layer from a loop device that may be opened without root."""
    entry = MountEntry(target=str(attacher.path(DIGEST)), source="/dev/loop77", fstype="erofs", major=7, minor=77)
    kernel.table.append(entry)


@pytest.fixture(autouse=True)
def no_loop_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/loop77 opens as /dev/null."""
    real = os.open
    monkeypatch.setattr(
        attach_module.os, "open", lambda path, *flags: real("/dev/null" if path == "/dev/loop77" else path, *flags)
    )


@pytest.mark.parametrize("way", ["loop", "file"])
def test_a_refused_mount_leaves_no_descriptor_and_can_be_tried_again(
    tmp_path: Path, fuse: int, kernel: Kernel, way: str
) -> None:
    attacher = _attacher(tmp_path, fuse, way)
    kernel.refuses = OSError(errno.EINVAL, "wrong fs type")
    with pytest.raises(OSError, match="wrong fs type"):
        attacher.attach(RECORD)
    assert attacher.mounted() == {}
    kernel.refuses = None
    assert attacher.attach(RECORD) == attacher.path(DIGEST)


def test_detaching_unmounts_and_removes_the_mount_point(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    target = attacher.attach(RECORD)
    attacher.detach(DIGEST)
    assert kernel.calls[-1] == ("umount", str(target), "lazy")  # containers that still run keep it
    assert not target.exists() and attacher.mounted() == {}


def test_detaching_what_was_never_mounted_is_no_failure(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    _attacher(tmp_path, fuse, "loop").detach(DIGEST)
    assert kernel.calls == []


def test_below_a_symbolic_link_mounts_are_found_again(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    """The kernel's table names the place itself: else each restart would mount once more on top."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    target = _attacher(tmp_path / "link", fuse, "loop").attach(RECORD)
    assert target == tmp_path / "disk" / "root" / "m" / node_name(DIGEST)
    assert kernel.table[0].target == str(target)


def test_a_new_daemon_takes_away_the_file_backed_mounts_of_an_earlier_one(
    tmp_path: Path, fuse: int, kernel: Kernel
) -> None:
    attacher = _attacher(tmp_path, fuse, "file")
    target = attacher.attach(RECORD)
    loop = MountEntry(target=f"{target}0", source="/dev/loop9", fstype="erofs", major=7, minor=9)
    other = MountEntry(target=str(tmp_path / "elsewhere/m/x"), source="/x", fstype="erofs", major=0, minor=9)
    kernel.table += [loop, other]
    unmount_dead(tmp_path / "root")
    assert kernel.calls[-1] == ("umount", str(target), "lazy") and kernel.table == [loop, other]
    attacher.attach(RECORD)
    assert attacher.mounted()[target.name] == str(target)


# -- private mounts ----------------------------------------------------------------------------------------------------


def test_a_private_mount_has_its_own_file_and_reads_little_ahead(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    shared, private = attacher.attach(RECORD), attacher.attach(RECORD, 0x1F)
    name = node_name(DIGEST)
    assert (shared.name, private.name) == (name, f"{name}.1f")
    assert ("open", private.name) in kernel.calls and ("loop", private.name) in kernel.calls
    assert kernel.calls.count(("read_ahead", "16")) == 2
    attacher.warm(DIGEST)
    assert kernel.calls.count(("read_ahead", "1024")) == 1
    attacher.warm(DIGEST, 0x1F)
    assert kernel.calls.count(("read_ahead", "1024")) == 2
    assert attacher.mounted() == {name: str(shared)} and attacher.private() == [private.name]
    attacher.detach(DIGEST)
    assert attacher.private() == [private.name]
    attacher.attach(RECORD, 0x20)
    attacher.detach_private("*.1f")
    assert attacher.private() == [f"{name}.20"] and not private.exists()
    assert unmount_all(tmp_path / "root") == [str(attacher.path(DIGEST, 0x20))]


def test_a_private_mount_point_without_a_mount_is_taken_away(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    """A service was killed between the two."""
    attacher = _attacher(tmp_path, fuse, "loop")
    left = attacher.path(DIGEST, 0x1F)
    left.mkdir()
    assert attacher.private() == [left.name]
    attacher.detach_private(f"{node_name(DIGEST)}.*")
    assert not left.exists() and kernel.calls == []


# -- the daemon is gone ------------------------------------------------------------------------------------------------


def test_unmount_all_takes_the_layers_of_its_root_only(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    attacher = _attacher(tmp_path, fuse, "loop")
    target = attacher.attach(RECORD)
    other = MountEntry(target=str(tmp_path / "elsewhere/m/x"), source="/dev/loop9", fstype="erofs", major=7, minor=9)
    kernel.table.append(other)
    assert unmount_all(tmp_path / "root") == [str(target)]
    assert kernel.table == [other] and not target.exists()


def test_unmount_all_says_what_to_do_about_a_layer_in_use(tmp_path: Path, fuse: int, kernel: Kernel) -> None:
    target = _attacher(tmp_path, fuse, "loop").attach(RECORD)
    kernel.refuses = OSError(errno.EBUSY, "busy")
    with pytest.raises(Precondition, match=f"{target} is in use: stop the containers"):
        unmount_all(tmp_path / "root")
    kernel.refuses = OSError(errno.EPERM, "not permitted")
    with pytest.raises(PermissionError):
        unmount_all(tmp_path / "root")
    assert target.exists()
