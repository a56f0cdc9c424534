"""A real containerd and a container of a lazily mounted image, while the daemon is upgraded and restarted, and
containerd too: the container sees no error and the right bytes; then another one starts, and all can be removed."""

import hashlib
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from snapshotter.cli import main
from tests.snapshotter.containerd.containerd_node import NEEDED, SNAPSHOTTER, Node, runnable_layer, tar_of
from tests.snapshotter.containerd.test_pull import image_files
from tests.snapshotter.daemon import drop_caches
from tests.snapshotter.rangeserver import RangeServer
from tests.systemd.managed import Managed

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        any(shutil.which(program) is None for program in NEEDED), reason=f"needs {', '.join(NEEDED)}: run scripts/setup"
    ),
]

_PATIENCE_S = 150.0
_PROGRAM = f"#!{sys.executable}\nfrom snapshotter.cli import entry\nentry()\n"
_CHECK = "while true; do sha256sum -c --quiet /sums >>/out/log 2>&1 && echo right >>/out/log; done"


class Site:
    """The daemon under its manager, containerd, and one container that reads all its files again and again."""

    def __init__(self, home: Path, daemon: Managed, node: Node, image: str) -> None:
        self.home, self.daemon, self.node, self.image = home, daemon, node, image

    def run(self, container: str) -> None:
        """Start a container that checks its files and notes what it finds."""
        out = self.home / container
        out.mkdir()
        mount = f"type=bind,src={out},dst=/out,options=rbind:rw"
        words = ["run", "-d", "--snapshotter", SNAPSHOTTER, "--mount", mount, self.image, container]
        self.node.ctr(*words, "/bin/sh", "-c", _CHECK)

    def said(self, container: str) -> list[str]:
        """What it has noted, a line for each time that it has read all of its files."""
        log = self.home / container / "log"
        return log.read_text().splitlines() if log.exists() else []

    def goes_on(self, container: str, times: int = 2) -> None:
        """Come back when it has read all its files so often again, past the page cache."""
        before = len(self.said(container))
        for more in range(1, times + 1):
            drop_caches()
            _until(lambda more=more: len(self.said(container)) >= before + more)  # type: ignore[misc]  # a default
        assert set(self.said(container)) == {"right"}, self.said(container)

    def remove(self, container: str) -> None:
        self.node.ctr("tasks", "rm", "--force", container)
        self.node.ctr("containers", "rm", container)

    def restart(self, number: int) -> None:
        self.daemon.manager.restart(number)
        self.daemon.manager.until("READY=1")

    def upgrade(self) -> None:
        """To the other version directory, as deploy/install turns the link."""
        current = self.home / "current"
        other = "two" if current.readlink() == Path("one") else "one"
        (self.home / "next").symlink_to(other)
        (self.home / "next").rename(current)
        done = self.daemon.reload()
        assert done.returncode == 0, done.stderr


@contextmanager
def _site(home: Path) -> Iterator[Site]:
    """The image has one layer to run and one with 6 MB to read, and their checksums."""
    source = random.Random(71)
    contents = {f"data/{number}": source.randbytes(256 << 10) for number in range(24)}
    layers = [runnable_layer(Path("/usr/bin/sha256sum")), tar_of(contents)]
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  /{name}\n" for name, data in contents.items())
    files = image_files([*layers, tar_of({"sums": sums.encode()})], False, "1")
    for name in ("one", "two"):
        (home / name).mkdir()
        (home / name / "bootseer").write_text(_PROGRAM)
        (home / name / "bootseer").chmod(0o755)
    (home / "current").symlink_to("one")
    with RangeServer(files) as server:
        node = Node(home, home / "run" / "bootseer.sock")
        try:
            with Managed(home, server, "", f"{home}/current/bootseer") as daemon:
                node.start()
                made = Site(home, daemon, node, f"{server.host}/app:1")
                where = ["--containerd-address", f"{home}/c.sock", "--config", str(home / "config.toml")]
                assert main(["pull", made.image, *where]) == 0
                yield made
                node.stop()
        finally:
            node.stop()


def test_a_container_goes_on_whatever_is_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="bc", dir="/tmp") as directory, _site(Path(directory)) as site:
        site.run("reader")
        try:
            site.goes_on("reader")
            _at_once(site.upgrade, lambda: site.node.restart_containerd(signal.SIGKILL))
            assert "upgrade.done" in site.daemon.manager.log
            site.goes_on("reader")
            _at_once(lambda: site.restart(signal.SIGTERM), site.node.restart_containerd)
            site.goes_on("reader")
            _at_once(lambda: site.restart(signal.SIGKILL), lambda: site.node.restart_containerd(signal.SIGKILL))
            site.upgrade()
            site.goes_on("reader")

            site.node.wait_for_snapshotter()
            site.run("another")
            site.goes_on("another")
        finally:
            for container in ("reader", "another"):
                if (site.home / container).exists():
                    site.remove(container)
        site.node.ctr("images", "rm", "--sync", site.image)
        assert site.node.snapshots() == []
        assert [row["mount"] for row in site.daemon.status()["layers"]] == [""] * 3
        assert "attach.healed" not in site.daemon.manager.log, "the mounts were the same all the while"


def _at_once(act: Callable[[], object], other: Callable[[], object]) -> None:
    """Do both, the first in this thread, with whose end the daemon's manager ends what it has started; meanwhile caches
    are dropped, so that all that is read has to be asked for."""
    over = threading.Event()

    def drop() -> None:
        while not over.wait(0.05):
            drop_caches()

    with ThreadPoolExecutor(2) as pool:
        dropping, another = pool.submit(drop), pool.submit(other)
        try:
            act()
            another.result(_PATIENCE_S)
        finally:
            over.set()
        dropping.result(_PATIENCE_S)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
