"""The supervisor of real processes: toys in the place of its workers, no FUSE, no root."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.errors import UserError
from snapshotter.supervise.kept import lock

PATIENCE_S = 20.0
WORKERS = ("block", "fetch", "service")


class Supervised:
    """`supervised.py` running; its log is in `log`."""

    def __init__(self, case: str, directory: Path) -> None:
        self.directory = directory
        self._log = directory / "log"
        with self._log.open("wb") as log:
            argv = [sys.executable, "-m", "tests.snapshotter.supervised", case, str(directory)]
            self.process = subprocess.Popen(argv, stderr=log)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def rows(self) -> dict[str, dict[str, int]]:
        """What `processes.json` says, by worker."""
        rows = json.loads((self.directory / "processes.json").read_text())
        return {row["name"]: row for row in rows}

    def pids(self) -> dict[str, int]:
        return {name: row["pid"] for name, row in self.rows().items()}

    def starts(self, worker: str) -> list[float]:
        """When the worker was started, monotonic seconds."""
        file = self.directory / f"{worker}.starts"
        return [float(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what must happen."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.process.poll() is None, f"the supervisor ended:\n{self.log}"
            assert time.monotonic() < deadline, f"did not happen in time:\n{self.log}"
            time.sleep(0.005)


@contextlib.contextmanager
def supervised(case: str, directory: Path) -> Iterator[Supervised]:
    """Workers at work, each started at least once."""
    running = Supervised(case, directory)
    try:
        running.until(lambda: all(running.starts(worker) for worker in WORKERS))
        running.until((directory / "processes.json").exists)
        yield running
    finally:
        running.process.send_signal(signal.SIGTERM)
        running.process.wait(PATIENCE_S)


def _alive(pid: int) -> bool:
    """Whether it runs: who inherits it may be slow to bury it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_killed_worker_is_back_at_once_and_the_others_stay(tmp_path: Path) -> None:
    with supervised("plain", tmp_path) as running:
        before = running.pids()
        assert set(before) == {"supervisor", *WORKERS} and before["supervisor"] == running.process.pid
        for worker in WORKERS:
            os.kill(before[worker], signal.SIGKILL)
            running.until(lambda worker=worker: running.rows()[worker]["restarts"] == 1)
        after = running.pids()
        assert all(after[worker] != before[worker] and _alive(after[worker]) for worker in WORKERS)
        running.until(lambda: [len(running.starts(worker)) for worker in WORKERS] == [2, 2, 2])
        assert running.log.count("worker.died") == 3


def test_sigterm_ends_all_the_service_first(tmp_path: Path) -> None:
    with supervised("plain", tmp_path) as running:
        pids = running.pids()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(PATIENCE_S) == 0
        assert not any(_alive(pid) for pid in pids.values())
        assert not (tmp_path / "processes.json").exists()


def test_a_worker_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    with supervised("deaf", tmp_path) as running:
        pids = running.pids()
        started = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(PATIENCE_S) == 0
        assert time.monotonic() - started >= 0.2
        assert not any(_alive(pid) for pid in pids.values())


def test_a_killed_supervisor_takes_its_workers_along(tmp_path: Path) -> None:
    with supervised("plain", tmp_path) as running:
        pids = [running.pids()[worker] for worker in WORKERS]
        running.process.kill()
        assert running.process.wait(PATIENCE_S) == -signal.SIGKILL
        deadline = time.monotonic() + PATIENCE_S
        while any(_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, "a worker outlived its supervisor"
            time.sleep(0.005)


def test_a_worker_that_cannot_live_does_not_eat_the_processor(tmp_path: Path) -> None:
    """Five restarts at once, for readers wait; each later one waits longer."""
    with supervised("ends at once", tmp_path) as running:
        running.until(lambda: len(running.starts("fetch")) >= 10)
        starts = running.starts("fetch")
        gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
        assert all(gap >= 0.01 * number for number, gap in enumerate(gaps, 1) if number >= 5)
        assert [len(running.starts(worker)) for worker in ("block", "service")] == [1, 1]


def test_a_worker_that_fails_says_where(tmp_path: Path) -> None:
    with supervised("raises", tmp_path) as running:
        running.until(lambda: len(running.starts("fetch")) >= 2)
        assert "worker.failed name=fetch" in running.log and "ValueError: a bug in a worker" in running.log
        assert running.process.poll() is None


def test_a_block_server_whose_heart_stands_still_is_killed(tmp_path: Path) -> None:
    with supervised("stuck", tmp_path) as running:
        running.until(lambda: len(running.starts("block")) >= 3)
        first, second, third = running.starts("block")[:3]
        assert second - first >= 0.2 and third - second >= 0.2
        assert "worker.stuck name=block" in running.log
        assert [len(running.starts(worker)) for worker in ("fetch", "service")] == [1, 1]


@pytest.mark.parametrize(("case", "heart"), [("no sweep", "sweep"), ("nothing taken", "taking")])
def test_a_fetch_process_that_stands_still_is_killed(case: str, heart: str, tmp_path: Path) -> None:
    with supervised(case, tmp_path) as running:
        running.until(lambda: len(running.starts("fetch")) >= 3)
        assert f"heart={heart}" in running.log
        assert [len(running.starts(worker)) for worker in ("block", "service")] == [1, 1]


def test_a_fetch_process_without_anything_to_do_is_left_alone(tmp_path: Path) -> None:
    with supervised("idle", tmp_path) as running:
        started = running.starts("fetch")[0]
        running.until(lambda: time.monotonic() - started > 0.7)  # three times what counts as stuck
        assert len(running.starts("fetch")) == 1 and "worker.stuck" not in running.log


def test_a_block_server_whose_heart_beats_is_left_alone(tmp_path: Path) -> None:
    with supervised("plain", tmp_path) as running:
        started = running.starts("block")[0]
        running.until(lambda: time.monotonic() - started > 0.7)  # three times what counts as stuck
        assert len(running.starts("block")) == 1 and "worker.stuck" not in running.log


def test_a_node_out_of_processes_for_a_moment_does_not_end_the_daemon(tmp_path: Path) -> None:
    """Its end would be the end of every container on the node: the connection goes with it."""
    with supervised("cannot fork", tmp_path) as running:
        assert running.log.count("worker.not_started") == 4
        assert set(running.pids()) == {"supervisor", *WORKERS}


def test_a_full_run_directory_does_not_end_the_daemon(tmp_path: Path) -> None:
    with supervised("plain", tmp_path) as running:
        before = running.pids()
        (tmp_path / "processes.new").mkdir()  # nothing can be written there
        os.kill(before["fetch"], signal.SIGKILL)
        running.until(lambda: len(running.starts("fetch")) == 2)
        running.until(lambda: "processes.not_written" in running.log)
        (tmp_path / "processes.new").rmdir()
        os.kill(before["service"], signal.SIGKILL)
        running.until(lambda: running.rows()["service"]["restarts"] == 1)


def test_a_directory_is_one_daemons(tmp_path: Path) -> None:
    """Another one would sweep what this one is bringing in."""
    ours = lock(tmp_path, "lock", "root", {})
    with pytest.raises(UserError, match=r"another daemon runs with .* its own `root`"):
        lock(tmp_path, "lock", "root", {})
    assert lock(tmp_path, "lock", "root", {"root": ours}) == ours, "what the code before held"
    os.close(ours)
    os.close(lock(tmp_path, "lock", "root", {}))


def test_the_end_of_the_connection_ends_all_workers(tmp_path: Path) -> None:
    """Whoever runs the supervisor opens a new connection then."""
    running = Supervised("connection ends", tmp_path)
    assert running.process.wait(PATIENCE_S) == 99, running.log
    assert not (tmp_path / "processes.json").exists()
