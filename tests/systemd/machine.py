"""A machine of its own under real systemd: `systemd-nspawn --boot` of the tree, with our unit as an operator has it.

/dev/fuse and loop devices are the host's, and so are the network, the interpreter and the checkout (read-only). What it
writes is gone with it. It needs no systemd on the host: nothing is registered there.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.systemd.tree import tree

__all__ = ["Machine"]

_CHECKOUT = Path(__file__).resolve().parents[2]
_CGROUPS = [Path("/sys/fs/cgroup") / name for name in ("", "systemd", "unified")]
_PATIENCE_S = 120.0
_LOOPS = 1024


class Machine:
    """One booted machine, with the daemon installed as `/opt/bootseer/current`, but not started."""

    def __init__(self, home: Path) -> None:
        self._log = home / "console"
        self._groups = [
            root / f"bootseer-machine-{os.getpid()}" for root in _CGROUPS if (root / "cgroup.procs").exists()
        ]
        for group in self._groups:
            group.mkdir(exist_ok=True)
        join = "".join(f"echo $$ >{group}/cgroup.procs\n" for group in self._groups)
        argv = ["systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--volatile=overlay", "--console=pipe"]
        argv += [f"--directory={tree()}", "--machine=bootseer-test", "--capability=all", "--boot"]
        argv += ["--bind=/dev/fuse", "--bind=/dev/loop-control", f"--bind-ro={_CHECKOUT}"]
        argv += [f"--bind-ro={place}" for place in _interpreter()]
        script = f'{join}exec setpriv --pdeathsig KILL -- "$@"'
        with self._log.open("wb") as log:
            words = ["sh", "-c", script, "sh", *argv]
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            self.until(lambda: self._find_init() > 0)
            self.init = self._find_init()
            self.until(lambda: self._call("systemctl", "is-system-running").stdout.strip() in ("running", "degraded"))
            self._install()
        except BaseException:
            self.close()
            raise

    @property
    def root(self) -> Path:
        """Its root directory, seen from here."""
        return Path(f"/proc/{self.init}/root")

    def systemctl(self, *words: str) -> str:
        """What systemctl prints there; it must work."""
        done = self._call("systemctl", *words)
        assert done.returncode == 0, (
            f"systemctl {' '.join(words)}: {done.stdout}{done.stderr}\n{self.journal()[-6000:]}"
        )
        return done.stdout.strip()

    def show(self, name: str) -> str:
        """A property of the daemon's unit."""
        return self.systemctl("show", "--value", "--property", name, "bootseer")

    def version(self) -> int:
        """Of its systemd."""
        return int(self.systemctl("--version").split()[1])

    def journal(self) -> str:
        """What the daemon has written, and systemd about it."""
        return self._call("journalctl", "--no-pager", "--unit", "bootseer").stdout

    def reader(self, *paths: Path) -> subprocess.Popen[str]:
        """A process that prints the sha256 of each file, in a mount namespace of its own as a container has it."""
        words = ["nsenter", f"--mount=/proc/{self.init}/ns/mnt", "unshare", "--mount", "sha256sum", *map(str, paths)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what must happen."""
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert self._process.poll() is None, f"the machine ended:\n{self._log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"did not happen in time:\n{self._log.read_text()[-4000:]}"
            time.sleep(0.05)

    def close(self) -> None:
        """Switch it off."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)  # nspawn has its init end everything
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        deadline = time.monotonic() + 10
        for group in self._groups:
            for below in [*sorted(group.rglob("*/"), reverse=True), group]:
                while below.is_dir():
                    try:
                        below.rmdir()
                    except OSError:  # its last process is about to go
                        assert time.monotonic() < deadline, f"{below} does not become empty"
                        time.sleep(0.02)

    def _find_init(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return next((int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "systemd\n"), 0)

    def _call(self, *words: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self.init}", "--mount", "--uts", "--ipc", "--pid"]
        return subprocess.run([*enter, *words], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)

    def _install(self) -> None:
        """The unit, word by word, and a program where it expects one."""
        for number in range(_LOOPS):
            node = self.root / f"dev/loop{number}"
            if not node.exists():
                os.mknod(node, 0o600 | 0o060000, os.makedev(7, number))
        # nspawn has it read-only, for its init would set up the host otherwise; read-ahead of loop devices is set there
        writable = self._call("mount", "-o", "remount,bind,rw", "/sys")
        assert writable.returncode == 0, writable.stderr
        program = self.root / "opt/bootseer/one/bin/bootseer"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!{sys.executable}\nfrom snapshotter.cli import entry\nentry()\n")
        program.chmod(0o755)
        (self.root / "opt/bootseer/current").symlink_to("one")
        unit = self.root / "etc/systemd/system/bootseer.service"
        unit.write_text((_CHECKOUT / "deploy" / "bootseer.service").read_text())
        (self.root / "etc/bootseer").mkdir()
        self.systemctl("daemon-reload")


def _interpreter() -> list[str]:
    """What the interpreter of these tests needs beside the checkout and a Debian."""
    return [path for path in {sys.base_prefix, sys.prefix} if path != "/usr" and not path.startswith(f"{_CHECKOUT}/")]
