"""What the kernel must be able to do. `KernelFacts` are looked up once and passed in, so that the checks can be tested
with the answers of other kernels. Looking changes nothing: the FUSE connection made for it is gone at its end.
"""

import os
import re
import select
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.attach import file_backed_ok
from snapshotter.fuse.abi import IN_HEADER, REQUEST_BUFFER
from snapshotter.fuse.device import connect

from .model import Check, fail, ok, warn

__all__ = ["FuseFacts", "KernelFacts", "check_kernel"]

_OLDEST = (5, 8, 0)  # LOOP_CONFIGURE; FUSE 7.31 came with 5.4, fsopen(2) with 5.2
_FUSE_MINOR = 31
_INIT = struct.Struct("=IIII")  # major, minor, max_readahead, flags
_ASYNC_DIO = 1 << 15
_MODULES = {"erofs", "loop", "fuse", "overlay"}
_INIT_WAIT_MS = 1000


@dataclass(frozen=True, slots=True)
class FuseFacts:
    """What a new connection said of itself; with `problem` there was none."""

    minor: int = 0
    async_dio: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """One kernel's answers. `filesystems` are registered now, `modules` can be loaded or are built in; `timeouts` are
    the sysctls `fs.fuse.*_request_timeout`, in seconds; `loops`: for each loop device on one of our layers, whether it
    does direct I/O."""

    release: str
    filesystems: frozenset[str]
    modules: frozenset[str]
    loop_control: bool
    fuse_device: bool
    fuse: FuseFacts
    timeouts: Mapping[str, int] = field(default_factory=dict)
    loops: Mapping[str, bool] = field(default_factory=dict)

    @staticmethod
    def probe() -> "KernelFacts":
        """Ask the running kernel."""
        release = os.uname().release
        filesystems = Path("/proc/filesystems").read_text(encoding="ascii").split("\n")
        return KernelFacts(
            release=release,
            filesystems=frozenset(line.split()[-1] for line in filesystems if line),
            modules=_modules(Path("/lib/modules", release)),
            loop_control=Path("/dev/loop-control").exists(),
            fuse_device=Path("/dev/fuse").exists(),
            fuse=_fuse(),
            timeouts=_timeouts(Path("/proc/sys/fs/fuse")),
            loops=_loops(Path("/sys/block")),
        )


def check_kernel(facts: KernelFacts, attach: str) -> list[Check]:
    """The checks; `attach` is what the configuration asks for (`loop` or `file`)."""
    return [
        _release(facts, attach),
        _filesystem(facts, "erofs", "EROFS", "layers are mounted as EROFS, without it every pull is an ordinary one"),
        _filesystem(facts, "overlay", "overlayfs", "containers are overlay mounts"),
        _loop(facts),
        _direct_io(facts),
        _fuse_protocol(facts),
        _fuse_timeouts(facts),
    ]


def _release(facts: KernelFacts, attach: str) -> Check:
    numbers = [int(number) for number in re.findall(r"\d+", facts.release)[:3]] + [0, 0, 0]
    release = (numbers[0], numbers[1], numbers[2])
    if release < _OLDEST:
        oldest = ".".join(map(str, _OLDEST[:2]))
        why = "the loop and mount calls that bootseer makes came with later kernels"
        return fail("kernel", f"Linux {facts.release}", why, f"boot Linux {oldest} or later (6.1 or later is better)")
    if attach == "file" and not file_backed_ok(release):
        why = "file-backed EROFS with direct I/O is unsafe here (CVE-2026-23224), loop devices are used instead"
        fix = 'boot 6.12.72, 6.18.11, 6.19.1, 7.0 or later, or set attach = "loop" in [mount], then bootseer reload'
        return warn("kernel", f"Linux {facts.release}", why, fix)
    return ok("kernel", f"Linux {facts.release}")


def _filesystem(facts: KernelFacts, name: str, title: str, why: str) -> Check:
    if name in facts.filesystems:
        return ok(name, f"{title} is in the kernel")
    if name in facts.modules:
        return ok(name, f"{title} is a module, loaded when first used")
    fix = f"modprobe {name}; if there is no such module, use a kernel with CONFIG_{name.upper()}_FS"
    return fail(name, f"this kernel has no {title}", why, fix)


def _loop(facts: KernelFacts) -> Check:
    if facts.loop_control:
        return ok("loop", "loop devices can be made")
    fix = "modprobe loop; if there is no such module, use a kernel with CONFIG_BLK_DEV_LOOP"
    if "loop" not in facts.modules:
        fix = "use a kernel with CONFIG_BLK_DEV_LOOP; in a container, pass in /dev/loop-control and the loop devices"
    return fail("loop", "/dev/loop-control is missing", "each mounted layer stands on a loop device", fix)


def _direct_io(facts: KernelFacts) -> Check:
    buffered = sorted(name for name, direct in facts.loops.items() if not direct)
    if buffered:
        what = f"{len(buffered)} of {len(facts.loops)} layers' loop devices without direct I/O ({', '.join(buffered)})"
        why = "one missing block then stalls all other reads of its layer"
        return warn("loop-direct-io", what, why, f"losetup --direct-io=on /dev/{buffered[0]}")
    if not facts.loops:
        return ok("loop-direct-io", "no layer is mounted now; loop devices are made with direct I/O")
    return ok("loop-direct-io", f"on for all {len(facts.loops)} mounted layers")


def _fuse_protocol(facts: KernelFacts) -> Check:
    if not facts.fuse_device:
        why = "missing blocks are asked for by FUSE"
        fix = "modprobe fuse; in a container, pass in /dev/fuse"
        return fail("fuse", "/dev/fuse is missing", why, fix)
    if facts.fuse.problem:
        fix = "run as root, with CAP_SYS_ADMIN; modprobe fuse"
        return fail("fuse", "no FUSE connection can be made", facts.fuse.problem, fix)
    what = f"protocol 7.{facts.fuse.minor}"
    if facts.fuse.minor < _FUSE_MINOR:
        return fail("fuse", what, f"bootseer needs 7.{_FUSE_MINOR}", "boot Linux 5.4 or later")
    if not facts.fuse.async_dio:
        why = "no asynchronous direct I/O: one missing block stalls all other reads of its layer"
        return fail("fuse", what, why, "use a kernel that offers FUSE_ASYNC_DIO")
    return ok("fuse", f"{what}, asynchronous direct I/O")


def _fuse_timeouts(facts: KernelFacts) -> Check:
    armed = {name: value for name, value in facts.timeouts.items() if value}
    if armed:
        what = ", ".join(f"fs.fuse.{name} = {value}" for name, value in sorted(armed.items()))
        why = "a read that waits longer for the registry ends the whole connection: all lazy containers get I/O errors"
        return fail("fuse-time-outs", what, why, "; ".join(f"sysctl -w fs.fuse.{name}=0" for name in sorted(armed)))
    return ok("fuse-time-outs", "no FUSE request time-out is set" if facts.timeouts else "this kernel has none")


def _modules(directory: Path) -> frozenset[str]:
    """Which of the modules that matter are built in, or on disk."""
    found = set()
    for table in ("modules.builtin", "modules.dep"):
        try:
            lines = (directory / table).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        found |= {Path(line.split(":")[0]).name.split(".")[0] for line in lines}
    return frozenset(found & _MODULES)


def _fuse() -> FuseFacts:
    """Open a connection, read the kernel's INIT, and let both go."""
    try:
        connection = connect()
    except OSError as error:
        return FuseFacts(problem=str(error.strerror or error))
    try:
        poll = select.poll()
        poll.register(connection.device, select.POLLIN)
        if not poll.poll(_INIT_WAIT_MS):
            return FuseFacts(problem="the kernel sends no INIT")
        request = os.read(connection.device, REQUEST_BUFFER)
        _, minor, _, flags = _INIT.unpack_from(request, IN_HEADER.size)
        return FuseFacts(minor, bool(flags & _ASYNC_DIO))
    except (OSError, struct.error) as error:
        return FuseFacts(problem=str(error))
    finally:
        os.close(connection.device)
        os.close(connection.mount)


def _timeouts(directory: Path) -> dict[str, int]:
    found = {}
    for path in directory.glob("*_request_timeout"):
        found[path.name] = int(path.read_text(encoding="ascii"))
    return found


def _loops(block: Path) -> dict[str, bool]:
    """Loop devices whose file has a layer's name; files of a mount that hangs on no path are shown as `/<name>`."""
    found = {}
    for directory in block.glob("loop*/loop"):
        try:
            file = (directory / "backing_file").read_text(encoding="utf-8", errors="replace").strip()
            if re.fullmatch(r"/[0-9a-f]{14}", file):
                found[directory.parent.name] = (directory / "dio").read_text(encoding="ascii").strip() == "1"
        except OSError:  # detached between the listing and the reading
            continue
    return found
