"""A directory over HTTP: a server process on the far side, and its handle.

HTTP/1.1 with kept-alive connections, GET (also of one range of bytes) and HEAD of files below one directory; everything
else is 404. The process (`main`) writes one line a request, `METHOD PATH STATUS BYTES`, to its standard output when the
request has ended. It knows nothing of what the files mean.
"""

import argparse
import contextlib
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scripts.rig.delayline import FAR
from scripts.rig.link import CHECKOUT, Link
from scripts.rig.process import end, spawn
from scripts.rig.registry import wait_for_port
from scripts.rig.workspace import Workspace

__all__ = ["PORT", "FileServer", "make_server"]

PORT = 8080


class FileServer:
    """A running directory server at `url`; `directory` may be filled and emptied while it runs. `log` is its access
    log."""

    url = f"http://{FAR}:{PORT}"

    def __init__(self, workspace: Workspace, link: Link, name: str = "files") -> None:
        self.directory = workspace.directory(f"{name}/root")
        self.log = workspace.root / name / "access.log"
        argv = [sys.executable, "-m", "scripts.rig.fileserver", "--root", str(self.directory), "--address", FAR]
        with self.log.open("wb") as log:
            env = {**workspace.env, "PYTHONPATH": str(CHECKOUT)}
            self._process = spawn(link.far.command(argv), env, stdout=log, stderr=log)
        try:
            wait_for_port(link.far.pid, PORT, self._process, "starting the file server")
        except BaseException:
            self.close()
            raise

    def requests(self) -> int:
        """Requests ended since the server began."""
        return sum(1 for line in self.log.read_text().splitlines() if len(line.split(" ")) == 4)

    def close(self) -> None:
        """End the server."""
        end(self._process, grace_s=2)

    def __repr__(self) -> str:
        return f"<FileServer {self.url} {self.requests()} requests>"


_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # head and body are two writes: with Nagle the second waits an RTT for its ACK
    root: Path

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        path = (self.root / unquote(urlsplit(self.path).path).lstrip("/")).resolve()
        found = path.is_file() and path.is_relative_to(self.root)
        size = path.stat().st_size if found else 0
        status, start, end = (200, 0, size) if found else (404, 0, 0)
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if found and wanted is not None:
            start, end = int(wanted[1]), min(int(wanted[2]) + 1, size)
            status = 206 if start < end else 416
        length = max(0, end - start)
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        elif status == 416:
            self.send_header("Content-Range", f"bytes */{size}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if body and length:
            with path.open("rb") as file, contextlib.suppress(ConnectionError):  # a client that has enough breaks off
                self.connection.sendfile(file, start, length)
        print(self.command, self.path, status, length, flush=True)

    def log_message(self, format: str, *args: object) -> None:
        """Silent: `_answer` writes the access log."""


def make_server(root: Path, address: str, port: int) -> ThreadingHTTPServer:
    """A server of the files below `root`, bound but not yet running."""
    handler = type("Handler", (_Handler,), {"root": root.resolve()})
    return ThreadingHTTPServer((address, port), handler)


def main() -> int:
    """Serve until ended by a signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args()
    make_server(options.root, options.address, PORT).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
