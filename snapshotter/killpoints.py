"""Named points at which a process of the daemon kills itself, so that a test can have it die between two steps.

A protocol that survives `kill -9` is a matter of what has been written when the process dies. Such moments are too
short to be hit by chance, so each that a docstring speaks of has a name here, and one call of `reach` in the code.

Armed is a daemon that is started with BOOTSEER_KILL_AT=<directory> in its environment, and no other: the directory must
exist, and be writable by nobody but its owner, who is the daemon's user; the daemon says at its start that it is armed.
It writes the names into `<directory>/points`. From then on a file `<directory>/<name>` has whichever process reaches
that point first, for as many times as the file says (empty: once), rename the file to `<name>.reached` and end itself
with SIGKILL. So it dies once for each file, in all lives of all processes, and the file's new name proves that it did.

The first part of a name is the process that it belongs to. Where a name stands, the comment or docstring beside it says
what has been done by then. Unarmed, `reach` costs a call and a comparison.
"""

import logging
import os
import signal
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

from .errors import UserError

__all__ = ["POINTS", "VARIABLE", "KillPoints", "reach", "use"]

_log = logging.getLogger(__name__)

VARIABLE = "BOOTSEER_KILL_AT"

POINTS = (
    # one request, from the kernel to its answer: `fuse.ring`, `fuse.server`
    "block.recovered",
    "block.claimed",
    "block.came",
    "block.agreed",
    "block.noted",
    "block.handed",
    "block.rung",
    "block.answered",
    "block.forgetting",
    "fetch.inherited",
    "fetch.taken",
    "fetch.answered",
    # bytes of a layer, and of a hot pack: `blockstore`, `fetch.layer`, `unproven`, `fetch.latecheck`, `alarms`
    "fetch.written",
    "fetch.present",
    "fetch.compared",
    "fetch.pack-named",
    "fetch.pack-noted",
    "fetch.pack-stored",
    "fetch.doubted",
    "fetch.alarm-written",
    "fetch.alarmed",
    "fetch.quarantined",
    # a layer on its way in: `blockstore.Staging`, `fetch.arrival`, `judgement`
    "fetch.staged",
    "fetch.streamed",
    "fetch.layer-written",
    "fetch.record-written",
    "fetch.layer-described",
    "fetch.layer-published",
    "fetch.layer-arrived",
    "fetch.ensured",
    "fetch.judged",
    # and out: `layers`
    "service.evicting",
    "service.removing",
    "fetch.set-aside",
    "fetch.forgotten",
    "fetch.doomed",
    "fetch.deleted",
    "service.removed",
    # mounts: `attach`, `kernel.loop`
    "service.loop-attached",
    "service.loop-changed",
    "service.attached",
    "service.unmounted",
    "service.detached",
    # snapshots: `containerd.snapshots`, `containerd.dirs`, `containerd.metadata`, `containerd.salvage`
    "service.layer-mounted",
    "service.dirs-made",
    "service.dirs-adopted",
    "service.committing",
    "service.committed",
    "service.discarded",
    "service.cleaning",
    "service.copying",
    "service.salvaging",
    "service.salvaged",
    # recordings: `record.recorder`, `record.log`, `record.records`, `hotstore`
    "service.slot-taken",
    "service.log-made",
    "service.log-opened",
    "service.recording",
    "service.log-closed",
    "service.record-added",
    "service.default-stamped",
    "service.hotset-written",
    "service.record-kept",
    "service.record-ended",
    "service.slot-unmounted",
    "service.slot-cleared",
    # publishing: `publish.rounds`, `publish.state`
    "publish.put",
    "publish.state-written",
    # what outlives all others: `supervisor`, `supervise.kept`, `supervise.upgrade`
    "supervisor.listening",
    "supervisor.storing",
    "supervisor.stored",
    "supervisor.forgetting",
    "supervisor.taken",
    "supervisor.forked",
    "supervisor.trying",
    "supervisor.executing",
    "supervisor.executed",
    "supervisor.replacing",
)
"""All there are; each is reached at one place in the code."""


class KillPoints:
    """Those that are armed in a directory. Thread-safe."""

    def __init__(self, directory: Path) -> None:
        """UserError when it is no directory of ours alone, or arms a point that there is not."""
        self._directory = directory
        self._lock = threading.Lock()
        self._times: dict[str, tuple[tuple[int, int], int]] = {}  # which file arms it, and how often it was reached
        try:
            status = directory.stat()
            names = os.listdir(directory)
        except OSError as error:
            raise UserError(f"{VARIABLE}: {directory}: {error.strerror}") from error
        if not directory.is_absolute() or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise UserError(f"{VARIABLE}: {directory} must be absolute, and writable by the daemon's user alone")
        for name in names:
            if name != "points":
                _require_known(name.removesuffix(".reached"))

    def __repr__(self) -> str:
        return f"<KillPoints {self._directory}: {', '.join(sorted(os.listdir(self._directory)))}>"

    def arm(self, name: str, times: int = 1) -> None:
        """Have the process die that reaches the point for that many times. UserError for a name that there is not."""
        _require_known(name)
        temporary = self._directory / f".{name}"
        temporary.write_text(str(times))
        (self._directory / f"{name}.reached").unlink(missing_ok=True)
        temporary.rename(self._directory / name)

    def disarm(self, name: str) -> bool:
        """Have nobody die there any more; whether somebody did."""
        (self._directory / name).unlink(missing_ok=True)
        return self.was_reached(name)

    def was_reached(self, name: str) -> bool:
        """Whether somebody has died at the point since it was armed."""
        return (self._directory / f"{name}.reached").exists()

    def reached(self, name: str) -> None:
        """Die if it is time."""
        path = self._directory / name
        try:
            with self._lock, path.open("rb") as file:
                status = os.fstat(file.fileno())
                this = status.st_ino, status.st_mtime_ns
                known, times = self._times.get(name, (this, 0))
                times = times + 1 if known == this else 1
                self._times[name] = (this, times)
                if times < int(file.read() or b"1"):
                    return
                path.rename(self._directory / f"{name}.reached")
        except (FileNotFoundError, ValueError):  # not armed, or somebody else was faster
            return
        _log.warning("killpoint.reached name=%s pid=%d", name, os.getpid())
        os.kill(os.getpid(), signal.SIGKILL)


_armed: KillPoints | None = None
"""Set once, before the workers are forked; a global since the points lie deep in code that is given no context."""


def reach(name: str) -> None:
    """The process has come to this point."""
    if _armed is not None:
        _armed.reached(name)


def use(environ: Mapping[str, str]) -> None:
    """Arm this process and those that it forks, if the environment says so. UserError when it says nonsense."""
    global _armed
    directory = environ.get(VARIABLE, "")
    if directory:
        _armed = KillPoints(Path(directory))
        (Path(directory) / "points").write_text("".join(f"{name}\n" for name in POINTS))
        _log.warning("killpoint.armed directory=%s processes of this daemon kill themselves", directory)


def _require_known(name: str) -> None:
    if name not in POINTS:
        raise UserError(f"{VARIABLE}: there is no kill point {name!r}, see `points` there for those that there are")
