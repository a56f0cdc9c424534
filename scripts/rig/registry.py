"""A registry of our own on the far side of the link: Debian's docker-registry with a private root, and its access log.

Images are pushed to it from the far side, without the link. A request is in its log when it has ended.
"""

import re
import socket
import subprocess
import time
from pathlib import Path

from scripts.rig.delayline import FAR
from scripts.rig.errors import RigError
from scripts.rig.namespace import Ends, inside_network
from scripts.rig.oci import TAG, Layout
from scripts.rig.process import end, run, spawn, tail, wait_for
from scripts.rig.workspace import Workspace

__all__ = ["ADDRESS", "PORT", "Registry", "blob_reads", "count_requests", "wait_for_port", "warm"]

PORT = 5000
ADDRESS = f"{FAR}:{PORT}"

_CONFIG = """\
version: 0.1
log:
  accesslog:
    disabled: false
  level: error
storage:
  filesystem:
    rootdirectory: {root}
  cache:
    blobdescriptor: inmemory
http:
  addr: {address}
"""

_REQUEST = re.compile(r'"(GET|HEAD|POST|PUT|PATCH|DELETE) (\S+) HTTP/[0-9.]+" (\d{3}) (\d+)')


class Registry:
    """A running registry at `ADDRESS` of the far side; `log` is its access log. With `like` it has the images of that
    other registry, now and later."""

    def __init__(
        self, workspace: Workspace, link: Ends, name: str = "registry", like: "Registry | None" = None
    ) -> None:
        directory = workspace.directory(name)
        self._root: Path = directory / "root" if like is None else like._root
        self.log = directory / "access.log"
        self._errors = directory / "log"
        self._workspace = workspace
        self._far = link.far
        config = directory / "config.yml"
        config.write_text(_CONFIG.format(root=self._root, address=ADDRESS))
        with self.log.open("wb") as out, self._errors.open("wb") as errors:
            argv = self._far.command(["docker-registry", "serve", str(config)])
            self._process = spawn(argv, workspace.env, stdout=out, stderr=errors)
        try:
            wait_for_port(self._far.pid, PORT, self._process, "starting docker-registry")
        except BaseException as error:
            self.close()
            if isinstance(error, RigError):
                raise RigError(f"{error}\n{tail(self._errors)}") from None
            raise

    def push(self, layout: Layout, repository: str) -> str:
        """Push an image and return its reference; the registry then has the same digests as the layout."""
        reference = f"{ADDRESS}/{repository}:{TAG}"
        options = ["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
        argv = ["skopeo", *options, f"oci:{layout.path}:{TAG}", f"docker://{reference}"]
        run(self._far.command(argv), self._workspace.env, "pushing the image to the registry")
        return reference

    def warm(self) -> None:
        """Read all blobs, so that the link and not this side's disk is the bottleneck."""
        warm(self._root)

    def requests(self) -> int:
        """Requests ended since the registry began."""
        return count_requests(self.log)

    def settled_requests(self, quiet_s: float = 0.15, timeout_s: float = 3.0) -> int:
        """`requests`, once none has ended for `quiet_s`: a broken-off stream is logged a moment after its break."""
        count, deadline = self.requests(), time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            time.sleep(quiet_s)
            now = self.requests()
            if now == count:
                break
            count = now
        return count

    def blob_reads(self) -> list[tuple[str, int]]:
        """The digest and the bytes of each answer with bytes of a blob, ended since the registry began."""
        return blob_reads(self.log)

    def close(self) -> None:
        """End the registry."""
        end(self._process)

    def __repr__(self) -> str:
        return f"<Registry {ADDRESS} {self.requests()} requests>"


def count_requests(log: Path) -> int:
    """Requests in an access log in combined format."""
    with log.open(errors="replace") as lines:
        return sum(1 for line in lines if _REQUEST.search(line))


def blob_reads(log: Path) -> list[tuple[str, int]]:
    """Digest and bytes of every GET of a blob in an access log that was answered with bytes of it."""
    found = []
    with log.open(errors="replace") as lines:
        for line in lines:
            match = _REQUEST.search(line)
            if match is not None and match[1] == "GET" and match[3] in ("200", "206") and "/blobs/" in match[2]:
                found.append((match[2].rpartition("/")[2].partition("?")[0], int(match[4])))
    return found


def warm(root: Path) -> None:
    """Read every file below `root` into the page cache."""
    for path in root.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 20):
                    pass


def wait_for_port(pid: int, port: int, process: subprocess.Popen[bytes], what: str) -> None:
    """Wait until `port` of the far side accepts connections; asked from the network namespace of `pid`."""

    def accepts() -> bool:
        try:
            inside_network(pid, lambda: socket.create_connection((FAR, port), timeout=1)).close()
        except OSError:
            return False
        return True

    wait_for(accepts, what, process, timeout_s=15)
