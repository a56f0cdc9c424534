"""A small true service manager: what of systemd the daemon sees, and no more. It takes sd_notify(3) messages, keeps the
descriptors that come with FDSTORE=1, and starts the service again with them, as descriptors 3 and up.

    with Manager(argv, log) as manager:
        manager.until("READY=1")
        manager.restart(signal.SIGKILL)      # as `systemctl kill -s KILL`, with Restart=always

The service ends with the thread that started it last.
"""

import array
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.process import spawn, tail

__all__ = ["Manager"]

_PATIENCE_S = 60.0

_LAUNCH = """
import os, sys
count, names, *argv = sys.argv[1:]
high = [os.dup(int(fd)) for fd in os.environ.pop("GIVEN").split(",") if fd]
aside = [os.dup2(fd, 200 + number) for number, fd in enumerate(high)]
for number, fd in enumerate(aside):
    os.dup2(fd, 3 + number)
os.closerange(3 + len(aside), 300)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=count, LISTEN_FDNAMES=names)
os.execvp(argv[0], argv)
"""


class Manager:
    """Runs one service. `messages` are those of the process that runs now; `stored` what it has had kept, by name."""

    def __init__(self, argv: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self._argv, self._log, self._env = list(argv), log, env
        self._directory = tempfile.TemporaryDirectory(prefix="bs-notify-")
        self.socket = f"{self._directory.name}/notify"
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(self.socket)
        self.messages: list[str] = []
        self.stored: dict[str, int] = {}
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._listen, name="manager")
        self.process: subprocess.Popen[bytes]

    def __enter__(self) -> "Manager":
        self._thread.start()
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.socket)
        self._thread.join()
        self._channel.close()
        self.drop()
        self._directory.cleanup()

    def start(self) -> None:
        """Start it with what is stored."""
        self.messages.clear()
        fds = list(self.stored.values())
        environment = {**(self._env or os.environ), "NOTIFY_SOCKET": self.socket, "GIVEN": ",".join(map(str, fds))}
        words = [sys.executable, "-c", _LAUNCH, str(len(fds)), ":".join(self.stored), *self._argv]
        with self._log.open("ab") as log:
            self.process = spawn(words, environment, stdout=log, stderr=log, pass_fds=fds)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End it; what it has had stored stays."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        self.process.wait(_PATIENCE_S)

    def restart(self, number: int = signal.SIGTERM) -> None:
        """End it and start it again."""
        self.stop(number)
        self.start()

    def drop(self) -> None:
        """Close what is stored, as systemd does when a service is not to come back."""
        while self.stored:
            os.close(self.stored.popitem()[1])

    def until(self, message: str, count: int = 1) -> None:
        """Wait until the running process has sent the line so often; RigError if it ends first, or does not."""
        deadline = time.monotonic() + _PATIENCE_S
        with self._changed:
            while sum(message in text.splitlines() for text in self.messages) < count:
                if self.process.poll() is not None:
                    raise RigError(f"the service ended:\n{tail(self._log, 40)}")
                if time.monotonic() > deadline:
                    raise RigError(f"{message} did not come:\n{tail(self._log, 40)}")
                self._changed.wait(0.1)

    @property
    def log(self) -> str:
        """What the service has written."""
        return self._log.read_text()

    def _listen(self) -> None:
        while True:
            text, rights, _, _ = self._channel.recvmsg(4096, socket.CMSG_SPACE(4 * 16), socket.MSG_CMSG_CLOEXEC)
            if not text:
                return
            lines = text.decode().splitlines()
            told = dict(line.partition("=")[::2] for line in lines)
            fds = array.array("i")
            for level, kind, data in rights:
                assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
                fds.frombytes(data)
            with self._changed:
                if told.get("FDSTORE") == "1":
                    assert len(fds) == 1 and told["FDNAME"] not in self.stored and told["FDPOLL"] == "0"
                    self.stored[told["FDNAME"]] = fds[0]
                elif told.get("FDSTOREREMOVE") == "1" and told["FDNAME"] in self.stored:
                    os.close(self.stored.pop(told["FDNAME"]))
                self.messages.append(text.decode())
                self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Manager {self.process.pid} keeps {len(self.stored)} descriptors>"
