"""The HTTP directory from which a node takes its indexes: a server process on the far side, and its handle.

HTTP/1.1 with kept-alive connections, GET (also of one range of bytes) and HEAD of files below one directory; everything
else is 404. The process (`main`) writes one line a request, `METHOD PATH STATUS BYTES`, to its standard output when the
request has ended. It knows nothing of what the files mean.
"""

import argparse
import re
import shutil
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

from scripts.rig.delayline import FAR
from scripts.rig.link import CHECKOUT, Link
from scripts.rig.process import end, spawn
from scripts.rig.registry import wait_for_port, warm
from scripts.rig.workspace import Workspace

__all__ = ["PORT", "IndexServer", "make_server"]

PORT = 8080


class IndexServer:
    """A running directory server at `url`; `directory` may be filled and emptied while it runs."""

    url = f"http://{FAR}:{PORT}"

    def __init__(self, workspace: Workspace, link: Link) -> None:
        self.directory = workspace.directory("index/files")
        self._log = workspace.root / "index" / "access.log"
        argv = [sys.executable, "-m", "scripts.rig.indexserver", "--root", str(self.directory), "--address", FAR]
        with self._log.open("wb") as log:
            env = {**workspace.env, "PYTHONPATH": str(CHECKOUT)}
            self._process = spawn(link.far.command(argv), env, stdout=log, stderr=log)
        try:
            wait_for_port(link.far.pid, PORT, self._process, "starting the index server")
        except BaseException:
            self.close()
            raise

    def offer(self, source: Path | None) -> None:
        """Serve a copy of `source` from now on; nothing if it is None."""
        for item in self.directory.iterdir():
            shutil.rmtree(item)
        if source is not None:
            shutil.copytree(source, self.directory, dirs_exist_ok=True)

    def warm(self) -> None:
        """Read all files into the page cache."""
        warm(self.directory)

    def requests(self) -> int:
        """Requests ended since the server began."""
        return sum(1 for line in self._log.read_text().splitlines() if len(line.split(" ")) == 4)

    def close(self) -> None:
        """End the server."""
        end(self._process, grace_s=2)

    def __repr__(self) -> str:
        return f"<IndexServer {self.url} {self.requests()} requests>"


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
        data = path.read_bytes() if found else b""
        status, size = 200 if found else 404, len(data)
        wanted = _RANGE.fullmatch(self.headers.get("Range", ""))
        if found and wanted is not None:
            start = int(wanted[1])
            data = data[start : int(wanted[2]) + 1]
            status = 206 if data else 416
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{size}")
        elif status == 416:
            self.send_header("Content-Range", f"bytes */{size}")
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)
        print(self.command, self.path, status, len(data), flush=True)

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
