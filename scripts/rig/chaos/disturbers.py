"""What is done to the daemon and to all around it. Each disturber has a name, a mean pause, and `act`.

`act(source)` does one thing, chosen with `source` only, and says what it was, or "" if there was nothing to do it to.
One thread calls them, one after the other. `calm` takes back what lasts.
"""

import contextlib
import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from scripts.rig.chaos.faultproxy import KINDS, FaultProxy
from scripts.rig.chaos.record import Record
from scripts.rig.chaos.site import Site
from scripts.rig.node import Node

__all__ = ["Disturber", "all_of"]

_CHOICES = (*[("block",), ("fetch",)] * 3, ("service",), ("block", "fetch"), ("fetch", "block", "service"))
"""The service more rarely: after its end containerd does not connect again for up to 3 s, and nothing new arrives."""


class Disturber(Protocol):
    """See the module. `every_s`: mean pause between two acts."""

    name: str
    every_s: float

    def act(self, source: random.Random) -> str:
        """Disturb."""

    def calm(self) -> None:
        """Undo what lasts."""


class _Once:
    """A disturber whose acts leave nothing to undo."""

    def calm(self) -> None:
        """Nothing."""


@dataclass
class KillWorkers(_Once):
    """SIGKILL of one, two or all three at once."""

    node: Node
    record: Record
    name: str = "kill"
    every_s: float = 2.0

    def act(self, source: random.Random) -> str:
        killed = [name for name in source.choice(_CHOICES) if self.kill(name)]
        self.record.counts.kills += len(killed)
        return f"SIGKILL to {', '.join(killed)}" if killed else ""

    def kill(self, worker: str) -> bool:
        """Kill it, by a descriptor of the process, whose name is looked at: its number may be another's by now."""
        pid = _workers(self.node).get(worker, 0)
        if not pid:
            return False
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return False
        try:
            if Path(f"/proc/{pid}/comm").read_text().strip() != f"bootseer-{worker}"[:15]:
                return False
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True


@dataclass
class KillAtPoint:
    """Whoever comes next to one of some named points between two steps dies there: moments that are too short to be hit
    by chance. The daemon is armed in the directory `points`, and has written there which points it has."""

    points: Path
    record: Record
    name: str = "point"
    every_s: float = 1.5

    def act(self, source: random.Random) -> str:
        died = self._disarm()
        names = (self.points / "points").read_text().split()
        armed = {name: source.choice((1, 1, 2, 8)) for name in source.sample(names, _ARMED)}
        for name, times in armed.items():
            unfinished = self.points / f".{name}"
            unfinished.write_text(str(times))
            unfinished.rename(self.points / name)
        text = ", ".join(f"{name} ({times})" for name, times in armed.items())
        return f"died at {', '.join(died) or 'none'}; now armed: {text}"

    def calm(self) -> None:
        """Nobody dies any more."""
        self.record.note(f"{self.name}: died at {', '.join(self._disarm()) or 'none'}")

    def _disarm(self) -> list[str]:
        """Where somebody has died."""
        for path in self.points.iterdir():
            if path.suffix != _REACHED and path.name != "points":
                path.unlink(missing_ok=True)
        died = sorted(self.points.glob(f"*{_REACHED}"))
        for path in died:
            path.unlink()
        self.record.counts.kills += len(died)
        return [path.stem for path in died]


_ARMED = 8  # at once: most are not come to within the pause
_REACHED = ".reached"


@dataclass
class Restart(_Once):
    """The whole daemon, by SIGKILL or in order, as a service manager does it that keeps the descriptors."""

    node: Node
    record: Record
    name: str = "restart"
    every_s: float = 15.0

    def act(self, source: random.Random) -> str:
        number = source.choice((signal.SIGKILL, signal.SIGTERM))
        assert self.node.manager is not None
        self.node.manager.restart(number)
        self.record.counts.kills += 1
        return f"daemon restarted by {number.name}"


@dataclass
class Upgrade(_Once):
    """SIGHUP. As a service manager would, only when the last start or upgrade is over."""

    node: Node
    name: str = "upgrade"
    every_s: float = 6.0

    def act(self, source: random.Random) -> str:
        manager = self.node.manager
        assert manager is not None
        told = [line for text in manager.messages for line in text.splitlines()]
        last = next((line for line in reversed(told) if line in ("READY=1", "RELOADING=1", "STOPPING=1")), "")
        if last != "READY=1" or manager.process.poll() is not None:
            return ""
        manager.process.send_signal(signal.SIGHUP)
        return "SIGHUP: upgrade in place"


@dataclass
class RestartContainerd(_Once):
    """By SIGKILL or in order."""

    node: Node
    name: str = "containerd"
    every_s: float = 25.0

    def act(self, source: random.Random) -> str:
        number = source.choice((signal.SIGKILL, signal.SIGTERM))
        self.node.restart_containerd(number)
        return f"containerd restarted by {number.name}"


@dataclass
class RegistryFaults:
    """A window in which most requests for layers meet one kind of fault; each kind once before one comes again."""

    proxy: FaultProxy
    record: Record
    name: str = "registry"
    every_s: float = 3.0

    def __post_init__(self) -> None:
        self._left: list[str] = []

    def act(self, source: random.Random) -> str:
        if not self._left:
            self._left = source.sample(list(KINDS), len(KINDS))
        kind, share, seconds = self._left.pop(), source.choice((0.3, 0.7, 1.0)), source.uniform(0.5, 3.0)
        self.proxy.begin(kind, share, seconds, source.randrange(1 << 30))
        return f"{kind} for {share:.0%} of the requests, {seconds:.1f} s"

    def calm(self) -> None:
        """Close the window."""
        self.proxy.begin("reset", 0.0, 0.0, 0)


@dataclass
class FullDisk:
    """Fills the daemon's disk to its last page, and frees it with its next act."""

    node: Node
    record: Record
    name: str = "disk"
    every_s: float = 4.0

    def act(self, source: random.Random) -> str:
        ballast = self._ballast
        if ballast.exists():
            ballast.unlink()
            return "disk freed"
        left = source.choice((0, 4096, 1 << 20))
        taken = 0
        with ballast.open("wb") as file:
            for size in (1 << 20, 1 << 16, 1 << 12):
                with contextlib.suppress(OSError):  # full
                    while True:
                        os.posix_fallocate(file.fileno(), taken, size)
                        taken += size
            os.ftruncate(file.fileno(), max(0, taken - left))
        self.record.counts.faults += 1
        return f"disk full: {taken / 1e6:.1f} MB of ballast, {left} bytes left free"

    def calm(self) -> None:
        """Free it."""
        self._ballast.unlink(missing_ok=True)

    @property
    def _ballast(self) -> Path:
        return Path(f"/proc/{self.node.pid}/root{self.node.daemon_root}/ballast")


def all_of(site: Site) -> Sequence[Disturber]:
    """All disturbers of a site."""
    node, record = site.node, site.record
    return (
        KillWorkers(node, record),
        KillAtPoint(site.points, record),
        Restart(node, record),
        Upgrade(node),
        RestartContainerd(node),
        RegistryFaults(site.proxy, record),
        FullDisk(node, record),
    )


def _workers(node: Node) -> dict[str, int]:
    """Process ids by name, as the supervisor has published them."""
    try:
        rows = json.loads((node.run_directory / "processes.json").read_text())
    except (OSError, ValueError):
        return {}
    return {row["name"]: row["pid"] for row in rows}
