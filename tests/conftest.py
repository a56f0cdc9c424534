"""Rules for every test: nothing may leak, and tests marked `system` need root.

After each test there must be no new open descriptor, thread or process; after a `system` test also no new mount, loop
device or named network namespace. Processes are found by a marker in their environment, so that one that was handed to
init is seen too. What is still closing gets `GRACE_S`; only what is there after that is a leak.
"""

import gc
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GRACE_S = 3.0
_MARKER = "BOOTSEER_TEST"
_GRPC_DESCRIPTORS = ("anon_inode:[eventfd]", "anon_inode:[eventpoll]", "anon_inode:[timerfd]")

Leaks = set[str]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Without root, skip the tests marked `system`, each with its reason in the summary."""
    if os.geteuid() == 0:
        return
    for item in items:
        if item.get_closest_marker("system"):
            item.add_marker(pytest.mark.skip(reason="needs root (run: sudo ./scripts/test)"))


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail the test that leaves something behind."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(_MARKER, mark)
    looks: dict[str, Callable[[], Leaks]] = {"descriptor": _descriptors, "thread": _threads, "child": _children}
    if request.node.get_closest_marker("system"):
        looks |= {"mount": _mounts, "loop device": _loops, "network namespace": _namespaces}
    before = {kind: look() for kind, look in looks.items()}
    yield
    looks["process"], before["process"] = (lambda: _processes(mark)), set()
    gc.collect()
    deadline = time.monotonic() + GRACE_S
    while leaked := [f"{kind} {it}" for kind, look in looks.items() for it in sorted(look() - before[kind])]:
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + "; ".join(leaked))
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
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.add(f"{entry.name} {words[:120]}")
        except OSError:
            continue
    return found


def _children() -> Leaks:
    """Direct children by pid: zombies, which have no environment any more, are seen here."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


def _mounts() -> Leaks:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return {" ".join(line.split(" ")[:1] + line.split(" ")[4:5]) for line in lines}


def _loops() -> Leaks:
    found = set()
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            found.add(f"{file.parts[3]} on {file.read_text().strip()}")
        except OSError:  # detached between the listing and the reading
            continue
    return found


def _namespaces() -> Leaks:
    directory = Path("/run/netns")
    return set(os.listdir(directory)) if directory.is_dir() else set()
