"""Containers that read every file of their image and print what they found, and the check of what they print.

A container is started detached and writes to a file through its shim, so that it needs no client and no containerd to
go on. A read that fails, a line that nobody expects, and an end before it is due are I/O errors; a wrong digest is a
mismatch. What a *client* is told (containerd restarts, the disk is full) is no error: it is tried again.
"""

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from scripts.rig.chaos.images import ChaosImage
from scripts.rig.chaos.record import Record
from scripts.rig.errors import RigError
from scripts.rig.node import SNAPSHOTTER, Node
from scripts.rig.process import run
from scripts.rig.workspace import Workspace

__all__ = ["Client", "Container", "told"]

_SUM = re.compile(r"sum ([0-9a-f]{64}) (\S+)")
_READ = """\
set -o pipefail
one() {
  if s=$(sha256sum $1); then echo "sum ${s%% *} $1"; else echo "failed $1"; fi
}
past() {
  if s=$(dd if=$1 iflag=direct bs=128k status=none | sha256sum); then echo "sum ${s%% *} $1"; else echo "failed $1"; fi
}
"""
_ONCE = _READ + "for f in /data/*/*; do one $f; done; echo finished"
_ALWAYS = _READ + "while :; do for f in /data/*/*; do past $f; one $f; sleep 0.01; done; done"
_CALL_S = 90.0


class Client:
    """containerd's client on a node. Calls that fail are tried again until `patience_s` is over."""

    def __init__(self, workspace: Workspace, node: Node, record: Record) -> None:
        self._workspace, self.node, self.record = workspace, node, record

    def ctr(self, *words: str, tool: str = "ctr") -> str:
        """One call; RigError if it fails."""
        return run(self.node.ctr(*words, tool=tool), self._workspace.env, f"{tool} {words[0]} {words[1]}", _CALL_S)

    def bootseer(self, *words: str) -> str:
        """One of our commands."""
        return run(self.node.bootseer(*words), self._workspace.env, f"bootseer {words[0]}", _CALL_S)

    def insist(self, what: str, call: Callable[[], object], patience_s: float = 60.0) -> bool:
        """Repeat the call until it works; whether it did. Each failure is noted."""
        give_up = time.monotonic() + patience_s
        while True:
            try:
                call()
                return True
            except RigError as error:
                self.record.note(f"{what}: not yet: {told(error)}")
            if time.monotonic() > give_up:
                return False
            time.sleep(0.2)

    def pull(self, reference: str) -> None:
        """Pull lazily."""
        self.ctr("images", "rpull", "--plain-http", "--snapshotter", SNAPSHOTTER, reference, tool="ctr-remote")

    def remove_leases(self) -> None:
        """Those of clients that containerd's end has cut off: they hold what they had pulled for a day."""
        for lease in self.ctr("leases", "ls", "-q").split():
            self.ctr("leases", "rm", "--sync", lease)

    def tasks(self) -> dict[str, str]:
        """State of each container's task."""
        rows = [line.split() for line in self.ctr("tasks", "ls").splitlines()[1:]]
        return {row[0]: row[2] for row in rows}

    def remove_image(self, reference: str) -> None:
        """Remove an image, and what only it used."""
        if reference in self.ctr("images", "ls", "-q").split():
            self.ctr("images", "rm", "--sync", reference)

    def __repr__(self) -> str:
        return f"<Client of {self.node!r}>"


class Container:
    """One container. Used by one thread."""

    def __init__(self, client: Client, image: ChaosImage, reference: str, name: str, log: Path, always: bool) -> None:
        self.name = name
        self.right = 0
        self.finished = False
        self.failed = False
        self._client, self._image, self._reference, self._log = client, image, reference, log
        self._script = _ALWAYS if always else _ONCE
        self._offset = 0

    def start(self) -> None:
        """RigError if it could not be started: then nothing is left of it."""
        # No cgroup of its own: a new parent group named after the namespace would stay on the machine.
        words = ["run", "--detach", "--cgroup", "", "--log-uri", f"file://{self._log}", "--snapshotter", SNAPSHOTTER]
        self._log.write_bytes(b"")
        self._offset = 0
        try:
            self._client.ctr(*words, self._reference, self.name, "/bin/sh", "-c", self._script)
        except RigError:
            if not self._client.insist(f"removing {self.name}", self._remove):
                self._client.record.leak(f"container {self.name} cannot be removed")
            raise

    def harvest(self) -> None:
        """Look at what it has printed since the last call."""
        with self._log.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._judge(line.strip())

    def stop(self) -> None:
        """Kill and remove it."""
        if not self._client.insist(f"removing {self.name}", self._remove):
            self._client.record.leak(f"container {self.name} cannot be removed")
        self.harvest()

    def _judge(self, line: str) -> None:
        record = self._client.record
        found = _SUM.fullmatch(line)
        if found is None:
            self.finished = self.finished or line == "finished"
            if line and line != "finished":
                self.failed = True
                record.io_error(f"{self.name} said: {line}")
        elif self._image.digests.get(found[2]) == found[1]:
            self.right += 1
            record.read()
        else:
            record.mismatch(f"{self.name} read {found[2]} with sha256 {found[1]}")

    def _remove(self) -> None:
        tasks = self._client.tasks()
        if tasks.get(self.name, "STOPPED") != "STOPPED":
            self._client.ctr("tasks", "kill", "--signal", "SIGKILL", self.name)
            give_up = time.monotonic() + 5
            while self._client.tasks().get(self.name, "STOPPED") != "STOPPED" and time.monotonic() < give_up:
                time.sleep(0.05)
        if self.name in tasks:
            self._client.ctr("tasks", "rm", "--force", self.name)
        if self.name in self._listed("containers", "ls", "-q"):
            self._client.ctr("containers", "rm", self.name)
        if self.name in self._listed("snapshots", "--snapshotter", SNAPSHOTTER, "ls"):
            self._client.ctr("snapshots", "--snapshotter", SNAPSHOTTER, "rm", self.name)

    def _listed(self, *words: str) -> Sequence[str]:
        return self._client.ctr(*words).split()

    def __repr__(self) -> str:
        return f"<Container {self.name} {self.right} files right>"


def told(error: RigError) -> str:
    """What the client said was wrong, in one line: progress may follow it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith(("ctr:", "ctr-remote:", "bootseer:", "time="))]
    return (said or lines)[-1][-300:]
