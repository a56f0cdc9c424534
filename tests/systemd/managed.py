"""A daemon, as in `tests.snapshotter.daemon`, whose process is a service manager's."""

import os
import signal
import subprocess
from pathlib import Path

from scripts.rig.servicemanager import Manager
from tests.snapshotter.daemon import BOOTSEER, Daemon
from tests.snapshotter.rangeserver import RangeServer

__all__ = ["Managed", "as_installed"]

_PATIENCE_S = 150.0


def as_installed(home: Path) -> None:
    """From now on programs find their modules compiled, as those of an installation are, even where this process was
    told to write nothing."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(home / "compiled")


class Managed(Daemon):
    """`start` and `stop` are those of the manager; what it keeps is lost with `stop` only."""

    def __init__(self, home: Path, registry: RangeServer, toml: str, program: str = BOOTSEER) -> None:
        super().__init__(home, registry, toml)
        self.manager = Manager([program, "serve", "--config", str(home / "config.toml")], home / "log")

    def start(self) -> None:
        self.manager.__enter__()
        self.manager.until("READY=1")

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.manager.__exit__()

    def reload(self) -> subprocess.CompletedProcess[str]:
        """`bootseer reload`."""
        words = [BOOTSEER, "reload", "--config", str(self.home / "config.toml")]
        return subprocess.run(words, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)

    def restarted(self, number: int) -> None:
        """End the whole daemon by this signal; back when the next one says that it is ready."""
        self.manager.restart(number)
        self.manager.until("READY=1")

    def upgraded(self) -> None:
        """Back when `reload` says that it is done."""
        assert self.reload().returncode == 0, self.manager.log
