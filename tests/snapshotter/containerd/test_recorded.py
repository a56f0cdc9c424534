"""Containers of a real containerd that are recorded by a real daemon: by themselves, and by `bootseer record`."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from blockindex.hotset import HotSet
from snapshotter.cli import main
from snapshotter.hotstore import HotStore
from snapshotter.kernel.mountapi import mounts
from snapshotter.rpc import Unanswered
from tests.snapshotter.containerd.containerd_node import NEEDED, SNAPSHOTTER, Node, runnable_layer, tar_of
from tests.snapshotter.containerd.test_pull import image_files
from tests.snapshotter.daemon import Daemon
from tests.snapshotter.rangeserver import RangeServer

Out = pytest.CaptureFixture[str]
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
    ),
]
BOOTSEER = str(Path(sys.executable).parent / "bootseer")
FILE = 64 << 10
FILES = {f"data/f{number}": bytes([number]) * FILE for number in range(8)}
WAIT = "cat /dev/ptmx"
"""What blocks for ever, without a processor."""
LAYERS = (runnable_layer(), tar_of(FILES))


class Site:
    """A node whose containers are recorded."""

    def __init__(self, node: Node, daemon: Daemon, host: str) -> None:
        self.node, self.daemon, self.image = node, daemon, f"{host}/app:1"
        self.where = [
            "--containerd-address", f"{node.root}/c.sock", "--config", str(daemon.home / "config.toml"),
        ]  # fmt: skip

    def start(self, name: str, shell: str, *options: str) -> subprocess.Popen[bytes]:
        """`ctr run` of a shell command."""
        words = ["ctr", "-a", f"{self.node.root}/c.sock", "run", "--snapshotter", SNAPSHOTTER, "--cgroup", "", *options]
        words += [self.image, name, "/bin/sh", "-c", shell]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)

    def run(self, name: str, shell: str, *options: str) -> int:
        """Its exit code."""
        process = self.start(name, shell, *options)
        process.communicate(timeout=60)
        return process.returncode

    def record(self, *arguments: str) -> int:
        """`bootseer record` of the image; arguments from `--` on are the container's."""
        cut = arguments.index("--") if "--" in arguments else len(arguments)
        return main(["record", self.image, *arguments[:cut], *self.where, *arguments[cut:]])

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.daemon.status()["recordings"]
        return found

    def until(self, **counts: int) -> None:
        """Until the counters are these."""
        _until(lambda: counts.items() <= self.status().items())

    def hotset(self, workload: str = "default") -> HotSet:
        """The image's hot set."""
        [key] = {key for key, _, _ in HotStore(self.daemon.root).entries()}
        pack = HotStore(self.daemon.root).load(key, workload)
        assert pack is not None
        pack.hotset.validate()
        return pack.hotset

    def hot_data(self, workload: str = "default") -> set[int]:
        """Numbers of the data files that are hot."""
        blocks = FILE // 4096
        upper = [it for it in self.hotset(workload).extents if it.layer == 1]
        return {block // blocks for it in upper for block in range(it.start, it.end)}

    def leftovers(self) -> list[str]:
        """Private mounts, slots, containers, tasks, and loop devices of private files."""
        private = [
            it.target for it in mounts() if it.target.startswith(f"{self.daemon.root}/m/") and "." in it.target[-3:]
        ]
        slots = [path.name for path in (self.daemon.root / "record").iterdir() if path.name != "slots"]
        running = self.node.ctr("containers", "ls", "-q").split() + self.node.ctr("tasks", "ls", "-q").split()
        return [*private, *slots, *running]


def _until(holds: Callable[[], bool], limit_s: float = 30) -> None:
    """Until it holds; a service that is not there answers nothing."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(Unanswered):
            if holds():
                return
        assert time.monotonic() < end
        time.sleep(0.05)


@contextlib.contextmanager
def site(quiet: float = 1.5, window: float = 60, asked: bool = True) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="br", dir="/tmp") as directory:
        files = image_files(LAYERS, False, "1")
        with RangeServer(files) as server:
            root = Path(directory)
            node = Node(root, root / "run" / "bootseer.sock")
            address = f"{root}/c.sock" if asked else ""
            toml = f'[containerd]\naddress = "{address}"\n[record]\nquiet_s = {quiet}\nwindow_s = {window}\n'
            try:
                with Daemon(root, server, toml) as daemon:
                    node.start()
                    yield Site(node, daemon, server.host)
                    node.stop()
            finally:
                node.stop()


def _pull(made: Site) -> None:
    assert main(["pull", made.image, *made.where]) == 0


# -- by themselves -----------------------------------------------------------------------------------------------------


def test_a_job_that_did_its_work_is_kept_and_one_that_fails_is_not() -> None:
    with site(quiet=60) as made:
        _pull(made)
        assert made.run("bad", "cat /data/f1; exit 3", "--rm") == 3
        made.until(opened=1, discarded=1)
        dying = made.start("dead", f"cat /data/f1 >/dev/null; {WAIT}", "--rm")
        _until(lambda: [row["task"] for row in made.status()["open"]] == ["running"])
        made.node.ctr("task", "kill", "-s", "KILL", "dead")
        dying.communicate(timeout=60)
        made.until(opened=2, discarded=2)
        assert list(HotStore(made.daemon.root).entries()) == []
        assert made.run("good", "cat /data/f2 /data/f5", "--rm") == 0
        made.until(opened=3, kept=1)
        assert made.hot_data() == {2, 5}
        assert any(it.layer == 0 for it in made.hotset().extents), "shell and libraries"
        assert made.run("again", "cat /data/f2 /data/f5", "--rm") == 0
        _until(lambda: made.leftovers() == [])
        assert made.status()["opened"] == 3, "there is a hot set of this workload"


def test_a_service_is_recorded_until_it_is_quiet_and_keeps_its_mounts() -> None:
    """Killed daemon processes and a restart on the way; image and layers cannot be removed while it runs."""
    with site(quiet=3) as made:
        _pull(made)
        process = made.start("c", "cat /data/f3 >/dev/null; echo up; " + WAIT)
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        made.daemon.kill("service")
        made.daemon.kill("block")
        made.daemon.kill("fetch")
        made.daemon.stop(signal.SIGKILL)
        made.daemon.start()
        made.node.wait_for_snapshotter()
        assert made.node.ctr("task", "exec", "--exec-id", "e", "c", "/bin/cat", "/data/f4") == FILES["data/f4"].decode()
        made.until(kept=1)
        assert made.hot_data() == {3, 4}
        made.daemon.stop()
        made.daemon.start()
        made.node.wait_for_snapshotter()
        assert made.node.ctr("task", "exec", "--exec-id", "f", "c", "/bin/cat", "/data/f7") == FILES["data/f7"].decode()
        made.node.ctr("images", "rm", "--sync", made.image)
        names = [row["name"] for row in made.daemon.status()["layers"]]
        config = ["--config", str(made.daemon.home / "config.toml")]
        assert main(["cache", "rm", *names, *config]) == 1
        made.node.ctr("task", "kill", "-s", "KILL", "c")
        process.communicate(timeout=60)
        made.node.ctr("container", "rm", "c")
        _until(lambda: made.leftovers() == [] and made.node.snapshots() == [])
        assert main(["cache", "rm", *names, *config]) == 0


def test_a_container_that_starts_late_is_not_quiet_before() -> None:
    with site(quiet=0.5) as made:
        _pull(made)
        made.node.ctr("containers", "create", "--snapshotter", SNAPSHOTTER, made.image, "late", "/bin/cat", "/data/f1")
        time.sleep(2)
        [row] = made.status()["open"]
        assert row["task"] == "none"
        assert len(made.node.ctr("tasks", "start", "late")) == FILE
        made.until(kept=1)
        assert made.hot_data() == {1}
        made.node.ctr("containers", "rm", "late")


def test_where_containerd_cannot_be_asked_only_time_counts() -> None:
    with site(quiet=1, asked=False) as made:
        _pull(made)
        assert made.run("good", "cat /data/f2", "--rm") == 0
        made.until(discarded=1)
        process = made.start("c", "cat /data/f3 >/dev/null; echo up; " + WAIT, "--rm")
        made.until(kept=1)
        assert made.hot_data() == {3}
        made.node.ctr("task", "kill", "-s", "KILL", "c")
        process.communicate(timeout=60)


def test_an_end_that_came_while_the_service_was_down_is_no_evidence() -> None:
    with site(quiet=60) as made:
        _pull(made)
        process = made.start("c", f"cat /data/f3 >/dev/null; {WAIT}")
        _until(lambda: [row["task"] for row in made.status()["open"]] == ["running"])
        service, supervisor = made.daemon.pid("service"), made.daemon.pid("supervisor")
        os.kill(supervisor, signal.SIGSTOP)  # so that no successor comes yet
        try:
            os.kill(service, signal.SIGKILL)
            made.node.ctr("task", "kill", "-s", "KILL", "c")
            process.communicate(timeout=60)
        finally:
            os.kill(supervisor, signal.SIGCONT)
        made.until(discarded=1)
        made.node.wait_for_snapshotter()
        made.node.ctr("container", "rm", "c")
        _until(lambda: made.leftovers() == [])


# -- by command --------------------------------------------------------------------------------------------------------


def test_record_until_a_line_of_output(capsys: Out) -> None:
    with site(quiet=60) as made:
        shell = "cat /data/f2 >/dev/null; echo it is READY now; " + WAIT
        command = ["--", "/bin/sh", "-c", shell]
        assert made.record("--workload", "serve", "--ready-regex", "is [A-Z]+ now", "--json", *command) == 0
        out, err = capsys.readouterr()
        result = json.loads(out)
        assert "it is READY now" in err and result["workload"] == "serve"
        assert made.hot_data("serve") == {2}
        hotset = made.hotset("serve")
        assert (hotset.manifest, hotset.hot_bytes) == (result["manifest"], result["bytes"])
        assert result["blocks"] * 4096 == result["bytes"] and result["extents"] == len(hotset.extents)
        assert Path(result["path"]).is_file() and 0 < result["seconds"] < 60
        _until(lambda: made.leftovers() == [])

        # once more, although there is a hot set; it takes the place of the one before
        command[3] = command[3].replace("f2", "f5")
        assert made.record("--workload", "serve", "--ready-regex", "READY", *command) == 0
        out, _ = capsys.readouterr()
        assert made.hot_data("serve") == {5}
        assert "workload serve ready after" in out and f"bootseer hotset export {made.image} --to DIR" in out
        _until(lambda: made.leftovers() == [])
        assert made.run("auto", "cat /data/f1", "--rm") == 0
        assert made.status()["opened"] == 3, "other arguments are another workload"


def test_record_until_exit_and_what_is_no_evidence(capsys: Out) -> None:
    with site(quiet=60) as made:
        assert made.record("--ready-exit", "--", "/bin/cat", "/data/f4") == 0
        assert made.hot_data() == {4} and "exited with 0" in capsys.readouterr().out
        made.node.ctr("run", "--rm", "--snapshotter", SNAPSHOTTER, made.image, "same", "/bin/cat", "/data/f4")
        same = made.daemon.status()["workloads"][-1]
        assert (same["workload"], same["why"], same["recorded"]) == ("default", "recorded", False)
        for arguments, message in (
            (["--ready-exit", "--", "/bin/sh", "-c", "cat /data/f1; exit 7"], "exit code 7"),
            (["--ready-regex", "never", "--", "/bin/cat", "/data/f1"], "exit code 0 before it was ready"),
            (["--timeout", "1", "--ready-exit", "--", "/bin/cat", "/dev/ptmx"], "not ready within 1 s"),
            (["--ready-exit", "--", "/bin/none"], "before it was ready"),
        ):
            assert made.record("--workload", "other", *arguments) == 1
            last = capsys.readouterr().err.splitlines()[-1]
            assert message in last and last.startswith("bootseer: ")
            _until(lambda: made.leftovers() == [])
        assert {workload for _, workload, _ in HotStore(made.daemon.root).entries()} == {"default"}


def test_record_until_it_is_quiet_or_interrupted(capsys: Out) -> None:
    with site(quiet=2) as made:
        shell = "cat /data/f1 >/dev/null; " + WAIT
        assert made.record("--", "/bin/sh", "-c", shell) == 0
        assert made.hot_data() == {1}
        out, err = capsys.readouterr()
        assert "no new block for 2 s" in out and "recording: " in err
        _until(lambda: made.leftovers() == [])
        words = [BOOTSEER, "record", made.image, "--workload", "x", "--ready-exit", *made.where]
        process = subprocess.Popen(
            [*words, "--", "/bin/cat", "/dev/ptmx"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _until(lambda: [row["task"] for row in made.status()["open"]] != [])
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        _until(lambda: made.leftovers() == [])
        assert {workload for _, workload, _ in HotStore(made.daemon.root).entries()} == {"default"}


def test_record_until_a_url_answers(capsys: Out) -> None:
    """The server is outside of the container, which has the host's network: all that is told apart is when."""
    with site(quiet=60) as made, contextlib.closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        answers = [b"HTTP/1.0 503 No\r\n\r\n", b"nonsense\r\n\r\n", b"HTTP/1.0 204 Yes\r\n\r\n"]

        def serve() -> None:
            for answer in answers:
                if answer == answers[-1]:
                    _until(lambda: any(row["bytes"] > FILE for row in made.status()["open"]))
                connection, _ = listener.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(answer)

        server = threading.Thread(target=serve)
        server.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/ready"
        shell = "cat /data/f6 >/dev/null; " + WAIT
        try:
            assert made.record("--ready-http", url, "--", "/bin/sh", "-c", shell) == 0
        finally:
            server.join()
        assert made.hot_data() == {6}
        _until(lambda: made.leftovers() == [])


def test_record_says_what_is_wrong(capsys: Out, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (["--workload", "No"], "no name"),
        (["--ready-regex", "("], "no regular expression"),
        (["--timeout", "0"], "number of seconds"),
        (["--ready-exit", "--ready-http", "http://x/"], "not allowed with"),
    ):
        assert main(["record", "r.test/a:1", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert main(["record", "r.test/a:1", "--containerd-address", str(tmp_path / "none.sock")]) == 1
    assert "there is no such socket" in capsys.readouterr().err
    with site(quiet=60) as made:
        assert made.record("--ready-http", "ftp://x/", "--") == 2
        assert "not an http(s) URL" in capsys.readouterr().err
        monkeypatch.setenv("PATH", str(tmp_path))
        assert made.record("--ready-exit") == 1
        assert "there is no `ctr` on PATH" in capsys.readouterr().err
        monkeypatch.undo()
        assert made.status()["opened"] == 0
