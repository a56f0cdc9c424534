"""A supervisor with toy workers, as a program: `python -m tests.snapshotter.supervised CASE DIRECTORY`.

Each worker notes its starts in `<directory>/<name>.starts`, one line with the time each.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from snapshotter import log, supervisor
from snapshotter.fuse.device import Connection
from snapshotter.fuse.ring import Ring
from snapshotter.supervise.kept import Handover, Resources
from snapshotter.supervisor import Ended, Supervisor, Task

supervisor._TICK_S = 0.05
supervisor._STUCK_S["block"] = 0.2
supervisor._STOP_S = 0.2

Main = Callable[[], None]


def main(case: str, directory: Path) -> int:
    """Run the case's workers until SIGTERM."""
    ring = Ring.create()
    resources = Resources(Connection(-1, -1), ring, -1)
    mains = {"block": _beating(ring), "fetch": _sleeping, "service": _sleeping}
    if case == "ends at once":
        mains["fetch"] = lambda: None
    elif case == "raises":
        mains["fetch"] = _raising
    elif case == "stuck":
        mains["block"] = _beating(ring, 3)
    elif case in ("no sweep", "nothing taken", "idle"):
        supervisor._STUCK_S["fetch"] = 0.2
        mains["fetch"] = _sweeping(ring, 3 if case == "no sweep" else 1 << 30)
        if case == "nothing taken":
            view = Ring(ring)
            view.hand(view.claim(), time.monotonic())
    elif case == "connection ends":
        mains["block"] = lambda: None
    elif case == "cannot fork":
        supervisor.os.fork = _failing_at_first(os.fork)  # type: ignore[attr-defined]  # the module's own os
    elif case == "deaf":
        mains["service"] = _deaf
    noted = {name: _noted(directory / f"{name}.starts", toy) for name, toy in mains.items()}
    tasks = [Task(name, noted[name], orderly=name == "service") for name in noted]
    ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    running = Supervisor(resources, directory, tasks, ready, {}, Handover())
    return 99 if running.run() is Ended.CONNECTION else 0


def _noted(file: Path, toy: Main) -> Main:
    def run() -> None:
        with file.open("a") as starts:
            starts.write(f"{time.monotonic()}\n")
        toy()

    return run


def _beating(ring: int, beats: int = 1 << 30) -> Main:
    def run() -> None:
        view = Ring(ring)
        for _ in range(beats):
            view.beat()
            time.sleep(0.02)
        _sleeping()

    return run


def _sweeping(ring: int, beats: int) -> Main:
    def run() -> None:
        view = Ring(ring)
        for _ in range(beats):
            view.sweeps()
            time.sleep(0.02)
        _sleeping()

    return run


def _failing_at_first(fork: Callable[[], int]) -> Callable[[], int]:
    failures = [BlockingIOError("out of processes")] * 4

    def failing() -> int:
        if failures:
            raise failures.pop()
        return fork()

    return failing


def _sleeping() -> None:
    time.sleep(3600)


def _deaf() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)
    _sleeping()


def _raising() -> None:
    raise ValueError("a bug in a worker")


if __name__ == "__main__":
    log.configure("info", "kv")
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
