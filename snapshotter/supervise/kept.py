"""The descriptors that outlive every process of the daemon, and the ways by which they do.

Four belong together, one FUSE connection with its requests: `device` (/dev/fuse), `mount`, `ring`, `doorbell`. While
they are open somewhere, a read that nobody answers waits; when the last copy of `device` is closed, it fails. So they
are given on

  to the workers          by fork
  to the next supervisor  by the service manager's store of descriptors (`keep`, `kernel.sdnotify`), or, when the
                          supervisor executes newer code in its own place, by exec (`Handover`)

In the store each is named `<what>.<tag>`, with a tag of the connection: a set that is whole is of one connection. A set
that is not whole, or whose ring is of another layout, is of no use; it is closed, and a new connection is opened. The
locks on the two directories are handed over by exec too, but never stored: a daemon that is stopped must not keep
another one out.
"""

import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from snapshotter.errors import UserError
from snapshotter.fuse.device import Connection, connect
from snapshotter.fuse.ring import Ring
from snapshotter.kernel import sdnotify
from snapshotter.killpoints import reach

__all__ = ["Handover", "Resources", "Worker", "lock", "require_same"]

_log = logging.getLogger(__name__)

_VARIABLE = "BOOTSEER_HANDOVER"
_WHAT = ("device", "mount", "ring", "doorbell")


@dataclass(frozen=True, slots=True)
class Resources:
    """What outlives the workers: descriptors of the FUSE connection, of the ring's memory and of the doorbell. `taken`:
    they are those of a supervisor before this one."""

    connection: Connection
    ring: int
    doorbell: int
    tag: str = ""
    taken: bool = False

    @staticmethod
    def create() -> "Resources":
        """Open them all; the daemon's start needs root and /dev/fuse."""
        try:
            connection = connect()
        except OSError as error:
            raise UserError(f"cannot open a FUSE connection: {error} (modprobe fuse; /dev/fuse must exist)") from error
        return Resources(connection, Ring.create(), os.eventfd(0, os.EFD_CLOEXEC), secrets.token_hex(4))

    @staticmethod
    def taken_from(kept: Mapping[str, int]) -> "Resources | None":
        """The set among the `kept` descriptors, by their names in the store; None if there is none of use."""
        for tag in sorted({name.partition(".")[2] for name in kept}):
            fds = [kept.get(f"{what}.{tag}", -1) for what in _WHAT]
            if -1 not in fds and Ring.fits(fds[2]):
                return Resources(Connection(fds[0], fds[1]), fds[2], fds[3], tag, taken=True)
        return None

    def named(self) -> dict[str, int]:
        """The descriptors by their names in the store."""
        fds = (self.connection.device, self.connection.mount, self.ring, self.doorbell)
        return {f"{what}.{self.tag}": fd for what, fd in zip(_WHAT, fds, strict=True)}

    def keep(self) -> None:
        """Have the service manager keep them, if there is one."""
        if all(self._is_stored(name, fd) for name, fd in self.named().items()):
            reach("supervisor.stored")
            _log.info("connection.stored tag=%s", self.tag)

    @staticmethod
    def _is_stored(name: str, fd: int) -> bool:
        reach("supervisor.storing")
        return sdnotify.store(name, fd)

    def close(self) -> None:
        """Close them all, and have the manager do so: the connection ends."""
        for name, fd in self.named().items():
            sdnotify.forget(name)
            reach("supervisor.forgetting")
            os.close(fd)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that lives on while the supervisor becomes newer code."""

    name: str
    pid: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Handover:
    """What a supervisor leaves to the one that comes: descriptors, and after exec also workers and how often a reload
    was asked for. Empty at a first start."""

    descriptors: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()
    reloads: int = 0

    @staticmethod
    def received(environ: MutableMapping[str, str]) -> "Handover":
        """What this process was started with; taken out of `environ`, so that no child finds it."""
        text = environ.pop(_VARIABLE, "")
        stored = sdnotify.stored(environ)
        if not text:
            return Handover(stored)
        told = json.loads(text)
        for fd in told["descriptors"].values():
            os.set_inheritable(fd, False)
        return Handover(told["descriptors"], tuple(Worker(**row) for row in told["workers"]), told["reloads"])

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` for a program that is to receive this."""
        return {**environ, _VARIABLE: json.dumps(asdict(self))}

    @contextlib.contextmanager
    def inheritable(self) -> Iterator[None]:
        """Its descriptors are inherited by exec inside the block."""
        try:
            for fd in self.descriptors.values():
                os.set_inheritable(fd, True)
            yield
        finally:
            for fd in self.descriptors.values():
                os.set_inheritable(fd, False)

    def close_but(self, used: Iterable[int]) -> None:
        """Close what nobody uses, and have the service manager do so."""
        for name, fd in self.descriptors.items():
            if fd not in used:
                sdnotify.forget(name)
                os.close(fd)


def lock(directory: Path, file: str, option: str, kept: Mapping[str, int]) -> int:
    """Lock `<directory>/<file>` for this daemon: its descriptor, which may be one of the `kept` (by the name `option`).
    UserError when another daemon holds it, or when the kept one is of another directory. A command that works on the
    store while no daemon runs holds it for a moment: that is waited for, since readers wait for us."""
    if option in kept:
        require_same(directory, file, option, kept)
        return kept[option]
    fd = os.open(directory / file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    give_up = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(0.02)
                continue
        os.close(fd)
        raise UserError(f"another daemon runs with {directory}: stop it, or give this one its own `{option}`")


_LOCK_S = 1.0


def require_same(directory: Path, file: str, option: str, kept: Mapping[str, int]) -> None:
    """UserError when a lock that was kept is not of this directory."""
    path = directory / file
    if option in kept and not (path.exists() and os.path.samestat(os.fstat(kept[option]), path.stat())):
        raise UserError(f"`{option}` was another directory than {directory}: that needs a restart of the daemon")
