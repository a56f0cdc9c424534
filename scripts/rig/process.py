"""Starting and stopping processes so that none is left behind.

Every process gets a session of its own (a Ctrl-C at the terminal reaches only the bench, which then stops the others in
order) and dies by SIGKILL when the thread that started it does. Processes that outlive their parent all the same
(containerd's shims do, by design) are found by the marker variable in their environment. Processes are only ever
ended by pid.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from scripts.rig.errors import RigError

__all__ = [
    "MARKER",
    "accepts",
    "descendants",
    "end",
    "kill_tree",
    "marked",
    "run",
    "spawn",
    "tail",
    "wait_for",
    "wait_for_socket",
]

MARKER = "BOOTSEER_RIG"
"""Environment variable that every process of a workspace carries; its value is the workspace's directory."""

File = int | IO[bytes]


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    stdin: File = subprocess.DEVNULL,
    stdout: File = subprocess.DEVNULL,
    stderr: File = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that cannot outlive the calling thread; the caller ends it with `end`."""
    return subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *argv],
        env=dict(env),
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
    )


def run(argv: Sequence[str], env: Mapping[str, str], what: str, timeout_s: float = 120.0) -> str:
    """Run a command to its end and return its standard output; RigError with the end of its output if it fails."""
    process = spawn(argv, env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RigError(f"{what}: no end within {timeout_s:.0f} s ({' '.join(argv)})") from None
    finally:
        if process.poll() is None:
            end(process, grace_s=0)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    if process.returncode != 0:
        text = (err.decode(errors="replace") + out.decode(errors="replace")).strip()[-2000:]
        raise RigError(f"{what}: exit code {process.returncode} of `{' '.join(argv)}`:\n{text}")
    return out.decode(errors="replace")


def end(process: subprocess.Popen[bytes], grace_s: float = 5.0) -> bool:
    """End a process: SIGTERM, after `grace_s` SIGKILL, and reap it. False if SIGKILL was needed after a real grace."""
    if process.poll() is not None:
        return True
    if grace_s > 0:
        process.terminate()
        try:
            process.wait(grace_s)
            return True
        except subprocess.TimeoutExpired:
            pass
    process.kill()
    process.wait(30)
    return grace_s <= 0


def wait_for(ready: Callable[[], bool], what: str, process: subprocess.Popen[bytes] | None, timeout_s: float) -> None:
    """Poll `ready` every 2 ms until it holds; RigError when the process ends first or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if process is not None and process.poll() is not None:
            raise RigError(f"{what}: the process ended with code {process.returncode}")
        if time.monotonic() > deadline:
            raise RigError(f"{what}: not ready after {timeout_s:.0f} s")
        time.sleep(0.002)


def wait_for_socket(path: Path, process: subprocess.Popen[bytes], what: str, timeout_s: float = 20.0) -> None:
    """Wait until the Unix socket `path` accepts connections."""
    wait_for(lambda: accepts(path), what, process, timeout_s)


def accepts(path: Path) -> bool:
    """Whether the Unix socket `path` accepts connections."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log, for an error message; empty when there is no log."""
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def marked(value: str | None = None) -> dict[int, str]:
    """Processes that carry the marker (with this value): pid -> value. Ended and foreign processes are not seen."""
    found = {}
    prefix = f"{MARKER}=".encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        for variable in variables:
            text = variable[len(prefix) :].decode(errors="replace")
            if variable.startswith(prefix) and value in (None, text):
                found[int(entry.name)] = text
    return found


def descendants(pid: int) -> Iterator[int]:
    """All processes below `pid` as they are now, parents first."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield child
        yield from descendants(child)


def kill_tree(pid: int) -> None:
    """SIGKILL a process that is not our child and everything below it; wait up to 10 s until they are gone.

    The tree is listed before the first kill: a dead shim's container would belong to init, and could not be found.
    """
    pids = [pid, *descendants(pid)]
    for each in pids:
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + 10
    while any(_running(each) for each in pids) and time.monotonic() < deadline:
        time.sleep(0.005)


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
