"""The upgrade in place: the supervisor becomes the code that is installed now, and keeps all it holds.

On SIGHUP three steps, of which only the last cannot be taken back:

  trial     `bootseer serve --check`, with the daemon's own command line, is started beside the daemon. The new code
            reads the configuration, loads every module, and looks whether it can go on with the descriptors. Until
            it says yes nothing has changed; if it says no, or nothing for `_PATIENCE_S`, nothing will. With the
            descriptors it holds the locks, too, so it dies with the supervisor, from its first moment on: the next
            daemon could not start.
  exec      the supervisor executes the same command line. Process id, descriptors and locks stay, and so do the
            workers, which go on answering: a child does not notice that its parent has become another program.
  replacing the new supervisor ends the old workers one after the other, each once the one before has a successor.

The command line is the program as it was called, so a link in it (`/opt/bootseer/current`) leads to the new version.
"""

import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from snapshotter.killpoints import reach

from .kept import Handover

__all__ = ["Trial", "become", "command_line"]

_log = logging.getLogger(__name__)

_PATIENCE_S = 60.0
_PR_SET_PDEATHSIG = 1


def command_line() -> list[str]:
    """How this program is started again, now: by its script, so that the script's first line names the interpreter of
    the version that is installed then; without a script as it was started."""
    program = sys.argv[0]
    if Path(program).is_file() and os.access(program, os.X_OK):
        return [os.path.abspath(program), *sys.argv[1:]]
    return [shutil.which(sys.orig_argv[0]) or sys.executable, *sys.orig_argv[1:]]


class Trial:
    """The new code, while it finds out whether it could take over."""

    def __init__(self, argv: Sequence[str], handover: Handover) -> None:
        """Start it; OSError when there is no such program, or no process to be had."""
        environment = handover.environment(os.environ)
        environment.pop("NOTIFY_SOCKET", None)
        supervisor = os.getpid()

        def die_with_it() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != supervisor:  # it died before that
                os._exit(1)

        with handover.inheritable():  # one thread here, so code may run between fork and exec
            self._process = subprocess.Popen(
                [*argv, "--check"], env=environment, close_fds=False, preexec_fn=die_with_it
            )
        reach("supervisor.trying")
        self.pidfd = os.pidfd_open(self._process.pid)
        self._until = time.monotonic() + _PATIENCE_S

    def outcome(self) -> str | None:
        """None while it runs; then what is wrong, or "" if it can take over."""
        status = self._process.poll()
        if status is None:
            if time.monotonic() < self._until:
                return None
            self.cancel()
            return f"the installed version does not answer within {_PATIENCE_S:.0f} s"
        os.close(self.pidfd)
        if status:
            return "the installed version cannot take over: it says why in the lines before"
        return ""

    def cancel(self) -> None:
        """The daemon ends meanwhile."""
        self._process.kill()
        self._process.wait()
        os.close(self.pidfd)


def become(argv: Sequence[str], handover: Handover) -> None:
    """Execute the new code in the place of this process. Returns only if it cannot be done: all is as before then."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the new code has a handler of its own
    try:
        with handover.inheritable():
            reach("supervisor.executing")
            os.execve(argv[0], list(argv), handover.environment(os.environ))
    except OSError as error:
        _log.error("upgrade.not_executed program=%s error=%r", argv[0], str(error))
        signal.signal(signal.SIGHUP, ignored)
