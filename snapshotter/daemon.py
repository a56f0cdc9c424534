"""`bootseer serve`: the daemon put together, from locks, descriptors, block store and workers.

One daemon a run directory and a root, by locks. The workers that read the connection or write the store inherit them,
so that they are free once all of these have ended; the service does not, because it may be stuck for as long as nobody
answers its read, and would keep out the very daemon that is to answer it. A connection that was aborted is replaced:
all workers end, and start again with a new one.
"""

import ctypes
import logging
import os
import resource
import signal
import time
from importlib import import_module
from pathlib import Path

from . import killpoints
from .blockstore import BlockStore
from .config import Config
from .errors import UserError
from .fuse.ring import Ring
from .kernel import sdnotify
from .kernel.heap import limit_arenas
from .listening import POLLER
from .record import log as record_log
from .supervise import sockets
from .supervise.kept import Handover, Resources, lock, require_same
from .supervise.memory import PassedMemory
from .supervise.upgrade import become, command_line
from .supervisor import Ended, Supervisor, Task

__all__ = ["check", "run"]

_log = logging.getLogger(__name__)

_PAUSE_S = 0.5
_PASSED = "passed"
_PR_SET_PDEATHSIG = 1
_LATE = ("channel", "interceptor", "server", "simple_stubs")
"""What of gRPC is imported only when it is used."""


def run(config: Config) -> int:
    """Be the daemon of this configuration until SIGTERM or SIGINT. Layers stay mounted when it ends."""
    before = Handover.received(os.environ)
    killpoints.use(os.environ)
    locks = _locks(config, before)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    limit_arenas(1)  # the interpreter lock lets threads allocate one at a time anyway
    store = BlockStore(config.root_path)
    if not before.workers:  # else they are at work on it
        store.recover(Path("/proc/sys/kernel/random/boot_id").read_text())
        (Path(config.run) / "reload.json").unlink(missing_ok=True)
    record_log.create(record_log.directory(config.root_path))
    resources = Resources.taken_from(before.descriptors)
    listening = sockets.wanted(config)
    held = sockets.kept_of(listening, before.descriptors)
    passed = PassedMemory.taken_from(before.descriptors.get(_PASSED, -1))
    used = {*locks.values(), *held.values(), passed, *(resources.named().values() if resources else ())}
    before.close_but(used)
    sockets.complete(listening, held)
    if passed < 0:
        passed = PassedMemory.create()
        sdnotify.store(_PASSED, passed)
    ready = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    while True:
        if resources is None:
            from .attach import unmount_dead  # here: who takes a connection over has readers waiting

            unmount_dead(config.root_path)
            resources = Resources.create()
            resources.keep()
        else:
            _log.info("connection.taken tag=%s", resources.tag)
            killpoints.reach("supervisor.taken")
        tasks = _tasks(config, resources, store, ready, locks, held, passed)
        given_on = {**locks, **held, _PASSED: passed}
        supervisor = Supervisor(resources, Path(config.run), tasks, ready, given_on, before)
        if before.workers:
            killpoints.reach("supervisor.executed")
        while (ended := supervisor.run()) is Ended.UPGRADE:
            become(command_line(), supervisor.handover())
            supervisor.refused("the installed version cannot be executed")
        if ended is Ended.STOPPED:
            sockets.let_go(listening, held)
            return 0
        # aborted, by an administrator or by the kernel: with a new one the mounts come back, as at any start
        _log.error("connection.ended a new one is opened")
        resources.close()
        resources, before = None, Handover()
        time.sleep(_PAUSE_S)


def check(config: Config) -> None:
    """Whether this code could be the daemon of this configuration, after the one that started it: UserError if not.
    Loads all that a daemon loads, and changes nothing."""
    before = Handover.received(os.environ)
    if before.workers:  # with its descriptors we hold its locks, too: not for longer than it lives
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for option, path, file in _locked(config):
        require_same(path, file, option, before.descriptors)
    if before.workers and Resources.taken_from(before.descriptors) is None:
        raise UserError("this version cannot go on with the requests of the one that runs: that needs a restart")
    _load_block()
    _load_fetch(config)
    _load_service()
    from .grpcsocket import check as check_grpc

    check_grpc()


def _locked(config: Config) -> list[tuple[str, Path, str]]:
    """Option, directory and lock of what one daemon has for itself."""
    return [("run", Path(config.run), "lock"), ("root", config.root_path, "store.lock")]


def _locks(config: Config, before: Handover) -> dict[str, int]:
    """The daemon's locks, by option; the directories are made."""
    if os.geteuid() != 0:
        raise UserError("serve needs root: it mounts file systems")
    for _, path, _ in _locked(config):
        path.mkdir(mode=0o711, parents=True, exist_ok=True)
    return {option: lock(path, file, option, before.descriptors) for option, path, file in _locked(config)}


def _tasks(
    config: Config,
    resources: Resources,
    store: BlockStore,
    ready: int,
    locks: dict[str, int],
    held: dict[str, int],
    passed: int,
) -> list[Task]:
    """The workers. Each lets go of the descriptors it must not hold: a copy of the mount in the block server, or of the
    connection in the service, would keep a dead connection alive; a copy of a socket (`held`), who connects to it."""
    connection, ring, doorbell = resources.connection, resources.ring, resources.doorbell

    def block() -> None:
        from .fuse.server import BlockServer

        for fd in (connection.mount, passed, *held.values()):
            os.close(fd)
        notes = record_log.Notes(record_log.directory(config.root_path))
        resend = config.resend == "auto"
        BlockServer(Ring(ring), connection.device, doorbell, store.layers, notes, resend).run()

    def fetch() -> None:
        from .fetch.process import main

        for fd in (connection.mount, *held.values()):
            os.close(fd)
        main(config, Ring(ring), connection.device, doorbell, passed)

    def service() -> None:
        from .containerd.process import main

        for fd in (connection.device, ring, doorbell, *locks.values()):
            os.close(fd)
        main(config, connection.mount, lambda: os.eventfd_write(ready, 1), held, passed)

    return [
        Task("block", block, _load_block),
        Task("fetch", fetch, lambda: _load_fetch(config)),
        Task("service", service, _load_service, orderly=True),
    ]


def _load_block() -> None:
    from .fuse import server  # noqa: F401


def _load_fetch(config: Config) -> None:
    """UserError where the configuration names what cannot be asked: known only now, for what looks it through takes
    longer to load than the block server."""
    from blockindex.inflatelib import inflate_library

    from .fetch import process  # noqa: F401
    from .fetch.sources import check_sources

    inflate_library()
    check_sources(config)


def _load_service() -> None:
    os.environ.update(POLLER)
    from .containerd import process  # noqa: F401

    for name in ("encodings.ascii", "grpc.experimental", *(f"grpc._{part}" for part in _LATE)):
        import_module(name)
