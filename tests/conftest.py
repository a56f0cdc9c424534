"""Rules for every test: nothing may leak, and tests marked `system` need root.

After each test there must be no new open descriptor, thread or process; after a `system` test also no new mount, loop
device or named network namespace. Processes are found by a marker in their environment, so that one that was handed to
init is seen too; a test that started none, which an audit hook knows, is spared the search. What is still closing gets
`GRACE_S`, and what only a reference cycle keeps open a garbage collection; what is there after that is a leak.
"""

import contextlib
import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.listening import POLLER

os.environ.update(POLLER)  # before any test imports gRPC

GRACE_S = 3.0
_MARKER = "BOOTSEER_TEST"
_GRPC_DESCRIPTORS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]", "anon_inode:[timerfd]")

_OTHERS = ("/tmp/pytest-of-", "/var/tmp/bootseer-")
"""Where files lie of test runs, and of the test bench, which sees to its own: another may run beside us."""

Leaks = set[str]

_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn"}
_started: list[str] = []


def _note_starts(event: str, _: object) -> None:
    if event in _STARTS:
        _started.append(event)


sys.addaudithook(_note_starts)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without root, skip the tests marked `system`, each with its reason in the summary."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("system"):
            item.add_marker(pytest.mark.skip(reason="needs root (run: sudo ./scripts/test)"))


@pytest.fixture(autouse=True)
def no_leaks(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Fail the test that leaves something behind."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARKER, mark)
    looks: dict[str, Callable[[], Leaks]] = {"descriptor": _descriptors, "thread": _threads, "child": _children}
    if request.node.get_closest_marker("system"):
        ours = tmp_path_factory.getbasetemp()
        looks |= {"mount": _mounts, "loop device": lambda: _loops(ours), "network namespace": _namespaces}
    before = {kind: look() for kind, look in looks.items()}
    _started.clear()
    yield
    if _started:
        looks["process"], before["process"] = (lambda: _processes(mark)), set()
    deadline = time.monotonic() + GRACE_S
    while leaked := [f"{kind} {it}" for kind, look in looks.items() for it in sorted(look() - before[kind])]:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(leaked))
        gc.collect()
        time.sleep(0.02)


def _descriptors() -> Leaks:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except OSError:  # the descriptor of this very listing
            continue
        # gRPC's pollers live as long as the Python process.
        if not ("grpc" in sys.modules and target in _GRPC_DESCRIPTORS):
            found.add(f"{number} -> {target}")
    return found


def _threads() -> Leaks:
    return {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}


def _processes(mark: str) -> Leaks:
    found = set()
    wanted = f"{_MARKER}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            if wanted in _environment(entry).split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.add(f"{entry.name} {words[:120]}")
        except OSError:
            continue
    return found


def _environment(process: Path) -> bytes:
    """It is empty for a moment while a process executes another program: looked at again then."""
    for _ in range(10):
        environment = (process / "environ").read_bytes()
        if environment:
            return environment
        os.readlink(process / "exe")  # OSError for a kernel thread or a zombie, which never have any
        time.sleep(0.002)
    return b""


def _children() -> Leaks:
    """Direct children by pid: zombies, which have no environment any more, are seen here."""
    found: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # the thread ended between the listing and the reading
            found.update(Path(f"/proc/self/task/{task}/children").read_text().split())
    return found


def _mounts() -> Leaks:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {" ".join(line.split(" ")[:1] + line.split(" ")[4:5]) for line in lines}


def _loops(directory: Path) -> Leaks:
    """Loop devices on files below `directory`, and those that nothing will ever free. A device that frees itself with
    its last user (all of the daemon's do) is seen by that user: a mount or a process. Other runs have loops too."""
    found = set()
    for device in Path("/sys/block").glob("loop*/loop"):
        try:
            file = (device / "backing_file").read_text().strip()
            ours = file.startswith(f"{directory}/")
            if ours or (not file.startswith(_OTHERS) and (device / "autoclear").read_text().strip() == "0"):
                found.add(f"{device.parts[3]} on {file}")
        except OSError:  # detached between the listing and the reading
            continue
    return found


def _namespaces() -> Leaks:
    directory = Path("/run/netns")
    return set(os.listdir(directory)) if directory.is_dir() else set()
