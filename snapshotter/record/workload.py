"""A container that is run to be recorded, and the moment at which it is ready.

It is run by `ctr`, which comes with every containerd and makes the container that operators know from it: defaults of
the OCI spec, users, arguments and output are all its business. So the command's own arguments take the place of the
image's CMD, behind its ENTRYPOINT. The container's output goes to stderr, line by line. Whatever happens, container,
task and snapshot are gone when `Container` is closed.

Readiness is one of: a regular expression that fits a line of output; exit code 0; a URL that answers 2xx, asked every
20 ms; or, where nothing is said, exit code 0 or silence: no new block for a while.
"""

import contextlib
import http.client
import logging
import re
import secrets
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from snapshotter.errors import UserError

__all__ = ["Container", "Ctr", "HttpProbe"]

_log = logging.getLogger(__name__)

_HTTP_EVERY_S = 0.02
_HTTP_TIMEOUT_S = 1.0
_CALL_S = 30.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Ctr:
    """How to call `ctr`."""

    address: Path
    namespace: str
    snapshotter: str

    def words(self, *words: str) -> list[str]:
        """A command line."""
        return ["ctr", "--address", str(self.address), "--namespace", self.namespace, *words]

    def run(self, *words: str) -> str:
        """Call it; what it says on stderr if it fails, else nothing."""
        try:
            done = subprocess.run(
                self.words(*words), capture_output=True, text=True, errors="replace", timeout=_CALL_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return done.stderr.strip() or f"exit code {done.returncode}" if done.returncode else ""


class Container:
    """A container of the image, from its start until it is closed. `matched` is set by the first line that fits."""

    def __init__(
        self, ctr: Ctr, image: str, name: str, command: Sequence[str], ready: re.Pattern[str] | None, net_host: bool
    ) -> None:
        """Start it. UserError when there is no `ctr`."""
        self._ctr = ctr
        self._name = name
        self._ready = ready
        self.matched = threading.Event()
        # No cgroup of its own: a parent group named after the namespace would stay on the machine.
        options = ["--snapshotter", ctr.snapshotter, "--cgroup", "", *(["--net-host"] if net_host else [])]
        try:
            self._process = subprocess.Popen(
                ctr.words("run", *options, image, name, *command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for us alone: `ctr` would pass it on to the container
            )
        except FileNotFoundError as error:
            raise UserError("there is no `ctr` on PATH; it comes with containerd", exit_code=1) from error
        self._copying = threading.Thread(target=self._copy, name="output", daemon=True)
        self._copying.start()

    @staticmethod
    def new_name() -> str:
        """A name that no other container has."""
        return f"bootseer-record-{secrets.token_hex(6)}"

    def ended(self) -> int | None:
        """The container's exit code (or that of `ctr`, where it could not start it), with all output seen; None while
        it runs."""
        code = self._process.poll()
        if code is not None:
            self._copying.join(_END_S)
        return code

    def close(self) -> None:
        """Kill the container if it runs, and remove it. What cannot be removed is said as a warning."""
        try:
            if self._process.poll() is None:
                self._ctr.run("task", "kill", "--signal", "SIGKILL", self._name)
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._copying.join(_END_S)
        finally:
            self._ctr.run("task", "rm", "--force", self._name)  # fails where it is gone, as it should be
            left = self._ctr.run("container", "rm", self._name)
            if left and "not found" not in left:
                _log.warning("record.container_left name=%s reason=%r", self._name, left)
            if self._process.stdout is not None and not self._copying.is_alive():
                self._process.stdout.close()

    def _copy(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            text = line.decode(errors="replace").rstrip("\r\n")
            if self._ready is not None and self._ready.search(text):
                self.matched.set()
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                print(text, file=sys.stderr, flush=True)


class HttpProbe:
    """Asks a URL until it answers 2xx; `answered` is set then."""

    def __init__(self, url: str) -> None:
        """Begin to ask. UserError when that is no http(s) URL."""
        if not re.fullmatch(r"https?://[^\s/]+\S*", url):
            raise UserError(f"--ready-http {url}: not an http(s) URL")
        self._url = url
        self._stop = threading.Event()
        self.answered = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the container is here
        while not self._stop.wait(_HTTP_EVERY_S):
            try:
                with direct.open(self._url, timeout=_HTTP_TIMEOUT_S):
                    self.answered.set()  # other answers than 2xx are raised
                    return
            except (OSError, urllib.error.URLError, http.client.HTTPException, ValueError):
                continue
