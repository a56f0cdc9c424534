"""`bootseer serve`: the process that holds what must outlive every other, and starts the others again.

It keeps the FUSE connection, its mount, the request ring and the doorbell, and forks three workers:
  block    reads the FUSE connection, answers hits                      (`fuse.server`)
  fetch    brings missing blocks, answers misses                        (`fetch.process`)
  service  containerd's snapshots service, mounts layers, answers the CLI   (`containerd.process`)
Any of them may be killed at any moment: the ring holds the requests in flight, readers wait some milliseconds. Workers
are forked, not executed, so a successor runs the very code of its predecessor even while the package is being replaced
on disk, and is at work within milliseconds; the supervisor therefore has one thread, imports what the first two need
before it forks (never gRPC, which does not survive a fork), and does nothing but watch. A worker whose
leader is a zombie while a thread is stuck in the kernel counts as dead; a block server whose heart does not beat for
`_STUCK_S` is killed. One daemon a run directory and a root, by locks that the workers inherit: they are free once all
have ended. A connection that was aborted is replaced: all workers end, and start again with a new one.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from .attach import unmount_dead
from .blockstore import BlockStore
from .config import Config
from .errors import UserError
from .fuse.device import Connection, connect
from .fuse.ring import Ring
from .kernel.heap import limit_arenas
from .record import log as record_log

__all__ = ["Resources", "Supervisor", "run"]

_log = logging.getLogger(__name__)

_STUCK_S = 15.0
_TICK_S = 1.0
_STOP_S = 5.0
_BACKOFF_MAX_S = 0.5
_SHORT_LIFE_S = 1.0
_AT_ONCE = 5
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True, slots=True)
class Resources:
    """What outlives the workers: descriptors of the FUSE connection, of the ring's memory and of the doorbell."""

    connection: Connection
    ring: int
    doorbell: int

    @staticmethod
    def create() -> "Resources":
        """Open them all; the daemon's start needs root and /dev/fuse."""
        try:
            connection = connect()
        except OSError as error:
            raise UserError(f"cannot open a FUSE connection: {error} (modprobe fuse; /dev/fuse must exist)") from error
        return Resources(connection, Ring.create(), os.eventfd(0, os.EFD_CLOEXEC))

    def close(self) -> None:
        """Close them all."""
        for fd in (self.connection.device, self.connection.mount, self.ring, self.doorbell):
            os.close(fd)


@dataclass(slots=True)
class _Worker:
    name: str
    main: Callable[[], None]
    pid: int = 0
    pidfd: int = -1
    started: float = 0.0
    restarts: int = -1
    short_lives: int = 0
    not_before: float = field(default=0.0)


class Supervisor:
    """Runs the workers until it is told to stop."""

    def __init__(self, resources: Resources, run_dir: Path, mains: dict[str, Callable[[], None]]) -> None:
        """`mains`: what each worker runs, in the order in which they are started. Returning ends the worker; the block
        server's returns when the connection has ended, and nothing else ends it without an error."""
        self._ring = Ring(resources.ring)
        self._processes = run_dir / "processes.json"
        self._workers = [_Worker(name, main) for name, main in mains.items()]
        self._stopping = False
        self.connection_ended = False
        self._beats = (0, time.monotonic())

    def run(self) -> int:
        """Start the workers, watch them, and end them on SIGTERM or SIGINT, or when the block server has found that
        the connection is no more (`connection_ended`). Returns the exit code."""
        wake, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            while not self._stopping:
                self._tend()
                ready = [wake, *(worker.pidfd for worker in self._workers if worker.pidfd >= 0)]
                with contextlib.suppress(BlockingIOError):
                    select.select(ready, [], [], self._patience())
                    os.read(wake, 64)
            return 0
        finally:
            self._end_workers()
            signal.set_wakeup_fd(previous)
            os.close(wake)
            os.close(waker)

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _patience(self) -> float:
        waits = [worker.not_before - time.monotonic() for worker in self._workers if not worker.pid]
        return max(0.0, min([_TICK_S, *waits]))

    def _tend(self) -> None:
        changed = False
        for worker in self._workers:
            if worker.pid and self._is_dead(worker):
                self._bury(worker)
                changed = True
            if not worker.pid and time.monotonic() >= worker.not_before:
                self._spawn(worker)
                changed = True
        self._kill_stuck()
        if changed:
            self._publish()

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
            _log.warning("worker.died name=%s pid=%d status=%d", worker.name, worker.pid, status)
            if worker.name == "block" and pid and not status:
                self.connection_ended = self._stopping = True
        if worker.pidfd >= 0:
            os.close(worker.pidfd)
        lived_s = time.monotonic() - worker.started
        worker.short_lives = worker.short_lives + 1 if lived_s < _SHORT_LIFE_S else 0
        # the first restarts are at once, for readers are waiting; a worker that cannot live must not eat the CPU
        wait_s = 0.0 if worker.short_lives < _AT_ONCE else min(_BACKOFF_MAX_S, 0.01 * worker.short_lives)
        worker.pid, worker.pidfd, worker.not_before = 0, -1, time.monotonic() + wait_s

    def _spawn(self, worker: _Worker) -> None:
        supervisor = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:  # out of processes or memory: the connection must live on until there are some again
            _log.error("worker.not_started name=%s error=%r", worker.name, str(error))
            worker.not_before = time.monotonic() + _BACKOFF_MAX_S
            return
        if pid == 0:
            _become(worker.name, worker.main, supervisor)
        worker.pid, worker.pidfd = pid, _pidfd(pid)
        worker.started = time.monotonic()
        worker.restarts += 1
        if worker.name == "block":
            self._beats = (self._ring.beats(), time.monotonic())
        _log.info("worker.started name=%s pid=%d restarts=%d", worker.name, pid, worker.restarts)

    def _kill_stuck(self) -> None:
        beats, now = self._ring.beats(), time.monotonic()
        if beats != self._beats[0]:
            self._beats = (beats, now)
        elif now - self._beats[1] > _STUCK_S:
            for worker in self._workers:
                if worker.name == "block" and worker.pid:
                    _log.error("worker.stuck name=%s pid=%d seconds=%.0f", worker.name, worker.pid, _STUCK_S)
                    os.kill(worker.pid, signal.SIGKILL)
            self._beats = (beats, now)

    def _publish(self) -> None:
        rows = [{"name": worker.name, "pid": worker.pid, "restarts": worker.restarts} for worker in self._workers]
        temporary = self._processes.with_suffix(".new")
        try:
            temporary.write_text(json.dumps([{"name": "supervisor", "pid": os.getpid(), "restarts": 0}, *rows]))
            temporary.rename(self._processes)
        except OSError as error:  # it is for `bootseer status` only
            _log.error("processes.not_written file=%s error=%r", self._processes, str(error))

    def _end_workers(self) -> None:
        """The service first, so that nothing new begins; then those that answer reads."""
        for worker in reversed(self._workers):
            if worker.pid:
                self._end(worker)
        self._processes.unlink(missing_ok=True)

    def _end(self, worker: _Worker) -> None:
        for number, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, 1.0)):
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


def _become(name: str, main: Callable[[], None], supervisor: int) -> None:
    """In the forked child: be the worker, and never return into the supervisor's code."""
    code = 1
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before it could take us along
            return
        libc.prctl(_PR_SET_NAME, f"bootseer-{name}".encode())
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor decides
        main()
        code = 0
    except BaseException:
        _log.exception("worker.failed name=%s", name)
    finally:
        with contextlib.suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


def run(config: Config) -> int:
    """Be the daemon of this configuration until SIGTERM or SIGINT. Layers stay mounted when it ends."""
    if os.geteuid() != 0:
        raise UserError("serve needs root: it mounts file systems")
    run_dir = Path(config.run)
    run_dir.mkdir(mode=0o711, parents=True, exist_ok=True)
    Path(config.root).mkdir(mode=0o711, parents=True, exist_ok=True)
    with (run_dir / "lock").open("a+") as run_lock, (Path(config.root) / "store.lock").open("a+") as store_lock:
        _lock(run_lock, run_dir, "run")
        _lock(store_lock, Path(config.root), "root")
        soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, soft_limit))
        limit_arenas(1)  # the interpreter lock lets threads allocate one at a time anyway
        store = BlockStore(Path(config.root))
        store.recover(Path("/proc/sys/kernel/random/boot_id").read_text())
        record_log.create(record_log.directory(config.root_path))
        while True:
            unmount_dead(Path(config.root))
            resources = Resources.create()
            supervisor = Supervisor(resources, run_dir, _mains(config, resources, store))
            code = supervisor.run()
            if not supervisor.connection_ended:
                return code
            # aborted, by an administrator or by the kernel: with a new one the mounts come back, as at any start
            _log.error("connection.ended a new one is opened")
            resources.close()
            time.sleep(_BACKOFF_MAX_S)


def _lock(file: IO[str], directory: Path, option: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another daemon runs with {directory}: stop it, or give this one its own `{option}`") from None


def _mains(config: Config, resources: Resources, store: BlockStore) -> dict[str, Callable[[], None]]:
    """What each worker runs. Each lets go of the descriptors it must not hold: a copy of the mount in the block server,
    or of the connection in the service, would keep a dead connection alive."""
    from .fetch.process import main as fetch_main  # here: only a daemon needs it, and before it forks
    from .fuse.server import BlockServer

    connection, ring, doorbell = resources.connection, resources.ring, resources.doorbell

    def block() -> None:
        os.close(connection.mount)
        notes = record_log.Notes(record_log.directory(config.root_path))
        resend = config.resend == "auto"
        BlockServer(Ring(ring), connection.device, doorbell, store.layers, notes, resend).run()

    def fetch() -> None:
        os.close(connection.mount)
        fetch_main(config, Ring(ring), connection.device, doorbell)

    def service() -> None:
        from .containerd.process import main

        os.close(connection.device)
        os.close(ring)
        os.close(doorbell)
        main(config, connection.mount)

    return {"block": block, "fetch": fetch, "service": service}
