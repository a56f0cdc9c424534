"""The process that holds what must outlive every other, and starts the others again.

It keeps the FUSE connection, its mount, the request ring and the doorbell (`supervise.kept`), and forks workers:
  block    reads the FUSE connection, answers hits                      (`fuse.server`)
  fetch    brings missing blocks, answers misses                        (`fetch.process`)
  service  containerd's snapshots service, mounts layers, answers the CLI   (`containerd.process`)
Any of them may be killed at any moment: the ring holds the requests in flight, readers wait some milliseconds. Workers
are forked, not executed, so a successor runs the very code of its predecessor whatever has been put on disk since, and
is at work within milliseconds. So all they run is loaded here before the first fork of each; gRPC too, which survives a
fork as long as nobody has used it. The supervisor has one thread, and does nothing but watch. A worker whose leader is
a zombie while a thread is stuck in the kernel counts as dead; a block server or fetch process with a heart that stands
still for `_STUCK_S` is killed.

Block server and fetch process are made to be killed, and so they are ended; SIGTERM, which a service manager sends to
the whole group, means nothing to them. On SIGHUP the supervisor becomes the code that is installed now
(`supervise.upgrade`): it is executed, finds the workers of the old code among its children, and replaces them.
"""

import contextlib
import ctypes
import enum
import gc
import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .fuse.ring import Ring
from .kernel import sdnotify
from .killpoints import reach
from .supervise.kept import Handover, Resources, Worker
from .supervise.upgrade import Trial, command_line

__all__ = ["Ended", "Supervisor", "Task"]

_log = logging.getLogger(__name__)

_STUCK_S = {"block": 15.0, "fetch": 30.0}  # the latter also opens layers: seconds each, on a slow disk
_TICK_S = 1.0
_STOP_S = 5.0
_SETTLE_S = 0.2
_BACKOFF_MAX_S = 0.5
_SHORT_LIFE_S = 1.0
_AT_ONCE = 5
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker is: `load` imports all that `main` runs, in the supervisor; `main` runs in the worker. `orderly`:
    it is asked to end, and has `_STOP_S` for it; others are killed."""

    name: str
    main: Callable[[], None]
    load: Callable[[], None] = lambda: None
    orderly: bool = False


class Ended(enum.Enum):
    """Why `Supervisor.run` returned; only in the last case the workers live on."""

    STOPPED = "stopped"
    CONNECTION = "connection"
    UPGRADE = "upgrade"


@dataclass(slots=True)
class _Worker:
    task: Task
    pid: int = 0
    pidfd: int = -1
    started: float = 0.0
    restarts: int = -1
    short_lives: int = 0
    not_before: float = 0.0
    loaded: bool = False
    old: bool = False  # runs the code from before an upgrade
    kill_at: float = 0.0  # has been told to end, because it was old

    @property
    def name(self) -> str:
        return self.task.name


class Supervisor:
    """Runs the workers until it is told to stop."""

    def __init__(
        self,
        resources: Resources,
        run_dir: Path,
        tasks: Sequence[Task],
        ready: int,
        locks: dict[str, int],
        before: Handover,
    ) -> None:
        """`tasks` in the order in which they are started. `ready`: an eventfd that is written when the service serves.
        `before`: from it come the workers of the old code. Main returning ends the worker; the block server's returns
        when the connection has ended, and nothing else ends it without an error."""
        self._ring = Ring(resources.ring)
        self._kept = {**resources.named(), **locks}
        self._ready = ready
        self._processes, self._reloaded = run_dir / "processes.json", run_dir / "reload.json"
        self._workers = [_Worker(task) for task in tasks]
        for row in before.workers:
            self._adopt(row)
        self._reloads, self._to_tell = before.reloads, bool(before.workers)
        self._ended: Ended | None = None
        self._asked = False
        self._trial: Trial | None = None
        self._beats: dict[tuple[str, str], tuple[int, float]] = {}  # of a worker's heart: its count, since when

    def run(self) -> Ended:
        """Start the workers, watch them, and end them on SIGTERM or SIGINT, or when the block server has found that
        the connection is no more. They are not ended when newer code is to take over: `handover` has them then."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGHUP, self._ask)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._ended = None
        try:
            while self._ended is None:
                self._tend()
                ready = [wake, self._ready, *(worker.pidfd for worker in self._workers if worker.pidfd >= 0)]
                ready += [self._trial.pidfd] if self._trial else []
                readable, _, _ = select.select(ready, [], [], 0.0 if self._ended else self._patience())
                with contextlib.suppress(BlockingIOError):
                    os.read(wake, 64)
                if self._ready in readable:
                    self._serves()
            return self._ended
        finally:
            if self._ended is not Ended.UPGRADE:
                sdnotify.notify("STOPPING=1")
                self._end_workers()
            signal.set_wakeup_fd(previous)
            os.close(wake)
            os.close(waker)

    def handover(self) -> Handover:
        """What newer code needs in order to go on."""
        workers = [Worker(worker.name, worker.pid, worker.restarts) for worker in self._workers if worker.pid]
        return Handover(self._kept, tuple(workers), self._reloads)

    def _stop(self, *_: object) -> None:
        self._ended = Ended.STOPPED

    def _ask(self, *_: object) -> None:
        self._asked = True

    def _patience(self) -> float:
        moments = [worker.not_before for worker in self._workers if not worker.pid]
        if self._upgrading() and not any(worker.kill_at for worker in self._workers):
            moments.append(max(worker.started for worker in self._workers) + _SETTLE_S)
        now = time.monotonic()
        return max(0.0, min([_TICK_S, *(moment - now for moment in moments)]))

    def _upgrading(self) -> bool:
        """Whether a worker of the old code is left."""
        return any(worker.old for worker in self._workers)

    # -- one look at everything --------------------------------------------------------------------------------------

    def _tend(self) -> None:
        changed = False
        for worker in self._workers:
            if worker.pid and self._is_dead(worker):
                self._bury(worker)
                changed = True
            elif worker.kill_at and time.monotonic() >= worker.kill_at:
                os.kill(worker.pid, signal.SIGKILL)
            if not worker.pid and time.monotonic() >= worker.not_before and self._ended is None:
                self._spawn(worker)
                changed = True
        self._kill_stuck()
        if changed:
            self._publish()
        self._replace()
        self._consider()
        if "WATCHDOG_USEC" in os.environ:
            sdnotify.notify("WATCHDOG=1")

    @staticmethod
    def _is_dead(worker: _Worker) -> bool:
        try:
            with open(f"/proc/{worker.pid}/stat", encoding="ascii", errors="replace") as stat:
                return stat.read().rpartition(")")[2].split()[0] in ("Z", "X")
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError as error:  # out of descriptors: looked at again with the next tick
            _log.error("worker.not_seen name=%s error=%r", worker.name, str(error))
            return False

    def _bury(self, worker: _Worker) -> None:
        """Take note of a dead worker. waitpid may not return yet while one of its threads is stuck: not waited for."""
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if worker.kill_at:
                _log.info("worker.replaced name=%s pid=%d", worker.name, worker.pid)
            else:
                _log.warning("worker.died name=%s pid=%d status=%d", worker.name, worker.pid, status)
            if worker.name == "block" and pid and not status:
                self._ended = Ended.CONNECTION
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
        lived_s = time.monotonic() - worker.started
        worker.short_lives = worker.short_lives + 1 if lived_s < _SHORT_LIFE_S and not worker.kill_at else 0
        worker.restarts -= bool(worker.kill_at)  # that was no death
        # the first restarts are at once, for readers are waiting; a worker that cannot live must not eat the CPU
        wait_s = 0.0 if worker.short_lives < _AT_ONCE else min(_BACKOFF_MAX_S, 0.01 * worker.short_lives)
        worker.pid, worker.pidfd, worker.not_before = 0, -1, time.monotonic() + wait_s
        worker.old, worker.kill_at = False, 0.0

    def _spawn(self, worker: _Worker) -> None:
        self._load(worker)
        supervisor = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory: the connection must live on until there are some again
            _log.error("worker.not_started name=%s error=%r", worker.name, str(error))
            worker.not_before = time.monotonic() + _BACKOFF_MAX_S
            return
        if pid == 0:
            _become(worker.task, supervisor)
        reach("supervisor.forked")
        worker.pid, worker.pidfd = pid, _pidfd(pid)
        worker.started = time.monotonic()
        worker.restarts += 1
        self._beats = {heart: beats for heart, beats in self._beats.items() if heart[0] != worker.name}
        _log.info("worker.started name=%s pid=%d restarts=%d", worker.name, pid, worker.restarts)

    @staticmethod
    def _load(worker: _Worker) -> None:
        """Load what the worker runs, once. The collector would go through all of it again and again meanwhile, which is
        a sixth of the time (0.60 against 0.72 s, medians, n = 7); afterwards it leaves it alone, in the workers too."""
        if not worker.loaded:
            gc.disable()
            try:
                worker.task.load()
            finally:
                gc.freeze()
                gc.enable()
            worker.loaded = True

    def _kill_stuck(self) -> None:
        now = time.monotonic()
        sweeps, takings = self._ring.fetch_beats()
        counts = {("block", "serving"): self._ring.beats(), ("fetch", "sweep"): sweeps, ("fetch", "taking"): takings}
        for heart, count in counts.items():
            last, since = self._beats.get(heart, (-1, now))
            if count != last:
                self._beats[heart] = (count, now)
            elif now - since > _STUCK_S[heart[0]]:
                self._beats[heart] = (count, now)
                self._kill(*heart)

    def _kill(self, name: str, heart: str) -> None:
        for worker in self._workers:
            if worker.name == name and worker.pid and not worker.old:  # old code may beat otherwise; it goes anyway
                _log.error("worker.stuck name=%s pid=%d heart=%s seconds=%.0f", name, worker.pid, heart, _STUCK_S[name])
                os.kill(worker.pid, signal.SIGKILL)

    def _publish(self) -> None:
        rows = [{"name": worker.name, "pid": worker.pid, "restarts": worker.restarts} for worker in self._workers]
        self._write(self._processes, [{"name": "supervisor", "pid": os.getpid(), "restarts": 0}, *rows])

    @staticmethod
    def _write(file: Path, value: object) -> None:
        temporary = file.with_suffix(".new")
        try:
            temporary.write_text(json.dumps(value))
            temporary.rename(file)
        except OSError as error:  # they are for `bootseer status` and `bootseer reload` only
            _log.error("%s.not_written file=%s error=%r", file.stem, file, str(error))

    # -- upgrade -----------------------------------------------------------------------------------------------------

    def _consider(self) -> None:
        """Try the installed code when somebody has asked for it; give way to it when it is good."""
        if self._asked and self._trial is None and not self._upgrading():
            self._asked = False
            self._reloads += 1
            sdnotify.notify("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")
            try:
                self._trial = Trial(command_line(), self.handover())
            except OSError as error:
                self.refused(f"the installed version cannot be started: {error}")
        if self._trial is not None and (problem := self._trial.outcome()) is not None:
            self._trial = None
            if problem:
                self.refused(problem)
            elif self._ended is None:
                self._ended = Ended.UPGRADE

    def refused(self, problem: str) -> None:
        """The installed code did not take over; this one goes on."""
        _log.error("upgrade.refused reason=%r", problem)
        self._write(self._reloaded, {"count": self._reloads, "problem": problem})
        sdnotify.notify("READY=1")

    def _adopt(self, row: Worker) -> None:
        for worker in self._workers:
            if worker.name == row.name:
                worker.pid, worker.pidfd, worker.restarts = row.pid, _pidfd(row.pid), row.restarts
                worker.old = True

    def _replace(self) -> None:
        """Once all code is loaded, tell the first worker of the old code to end, if nothing else is changing."""
        if not self._upgrading():
            return
        now = time.monotonic()
        for worker in self._workers:
            self._load(worker)
        if any(not worker.pid or worker.kill_at or now - worker.started < _SETTLE_S for worker in self._workers):
            return
        worker = next(worker for worker in self._workers if worker.old)
        worker.kill_at = now + _STOP_S
        os.kill(worker.pid, signal.SIGTERM if worker.task.orderly else signal.SIGKILL)
        reach("supervisor.replacing")

    def _serves(self) -> None:
        """The service is at work: of the new code, if there was an upgrade."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._ready)
        sdnotify.notify("READY=1")
        if self._to_tell and not self._upgrading():
            from .version import VERSION  # loaded long since, with the service

            self._to_tell = False
            _log.info("upgrade.done version=%s", VERSION)
            self._write(self._reloaded, {"count": self._reloads, "problem": ""})

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end_workers(self) -> None:
        """The service first, so that nothing new begins; then those that answer reads."""
        if self._trial is not None:
            self._trial.cancel()
            self._trial = None
        for worker in reversed(self._workers):
            if worker.pid:
                self._end(worker)
                worker.pid = 0
        self._processes.unlink(missing_ok=True)
        self._reloaded.unlink(missing_ok=True)

    def _end(self, worker: _Worker) -> None:
        orderly = [(signal.SIGTERM, _STOP_S)] if worker.task.orderly else []
        for number, patience_s in (*orderly, (signal.SIGKILL, 1.0)):
            os.kill(worker.pid, number)
            give_up = time.monotonic() + patience_s
            while time.monotonic() < give_up:
                if self._is_dead(worker):
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(worker.pid, os.WNOHANG)
                    return
                select.select([worker.pidfd] if worker.pidfd >= 0 else [], [], [], 0.05)
        _log.error("worker.unkillable name=%s pid=%d", worker.name, worker.pid)


def _pidfd(pid: int) -> int:
    """Wakes the supervisor when the process ends; -1 when there is no descriptor left: then it looks every second."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        _log.error("worker.no_pidfd pid=%d error=%r", pid, str(error))
        return -1


def _become(task: Task, supervisor: int) -> None:
    """In the forked child: be the worker, and never return into the supervisor's code."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before it could take us along
            return
        libc.prctl(_PR_SET_NAME, f"bootseer-{task.name}".encode())
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in (signal.SIGINT, signal.SIGHUP):  # they reach the whole group; the supervisor decides
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if task.orderly else signal.SIG_IGN)
        task.main()
        code = 0
    except BaseException:
        _log.exception("worker.failed name=%s", task.name)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)
