"""A registry of made-up layers: a server process on the far side, and its handle.

It answers what a lazy pull and `bootseer index build` ask for: `/v2/`, manifests by tag, blobs whole or by one range.
Blobs are put together from their parts while they are sent. The process (`main`) reads the catalogue at its start.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from scripts.rig.delayline import FAR
from scripts.rig.link import CHECKOUT
from scripts.rig.namespace import Ends
from scripts.rig.process import end, spawn
from scripts.rig.registry import wait_for_port
from scripts.rig.synthetic import Part, SyntheticLayer
from scripts.rig.workspace import Workspace

__all__ = ["ADDRESS", "TAG", "BlobServer", "Catalogue", "catalogue_of", "make_server", "pieces"]

PORT = 5001
TAG = "1"
ADDRESS = f"{FAR}:{PORT}"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class BlobServer:
    """A running registry at `ADDRESS` of the images, by name, each a list of layers: `<ADDRESS>/<name>:<TAG>`."""

    def __init__(self, workspace: Workspace, ends: Ends, images: Mapping[str, Sequence[SyntheticLayer]]) -> None:
        directory = workspace.directory(f"blobserver-{os.urandom(3).hex()}")
        catalogue = directory / "catalogue.json"
        catalogue.write_text(json.dumps(catalogue_of(directory, images)))
        argv = [sys.executable, "-m", "scripts.rig.blobserver", "--catalogue", str(catalogue), "--address", FAR]
        with (directory / "log").open("wb") as log:
            env = {**workspace.env, "PYTHONPATH": str(CHECKOUT)}
            self._process = spawn(ends.far.command(argv), env, stdout=log, stderr=log)
        try:
            wait_for_port(ends.far.pid, PORT, self._process, "starting the server of made-up layers")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the server."""
        end(self._process, grace_s=2)

    def __repr__(self) -> str:
        return f"<BlobServer {ADDRESS} pid {self._process.pid}>"


def catalogue_of(directory: Path, images: Mapping[str, Sequence[SyntheticLayer]]) -> dict[str, object]:
    """The catalogue as JSON: blobs by digest, each a list of (file, count); digests of manifests by image name."""
    blobs: dict[str, list[tuple[str, int]]] = {}
    tags = {}

    def put(document: object) -> dict[str, object]:
        data = json.dumps(document).encode()
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        path = directory / digest
        path.write_bytes(data)
        blobs[digest] = [(str(path), 1)]
        return {"digest": digest, "size": len(data)}

    for name, layers in images.items():
        for layer in layers:
            blobs[layer.digest] = [(str(part.path), part.count) for part in layer.parts]
        rows = [{"mediaType": _LAYER, "digest": layer.digest, "size": layer.size} for layer in layers]
        config = {"mediaType": _CONFIG, **put({"os": "linux", "rootfs": {"type": "layers", "diff_ids": []}})}
        manifest = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": config, "layers": rows}
        tags[name] = put(manifest)["digest"]
    return {"blobs": blobs, "tags": tags}


_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_CONFIG = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True, slots=True)
class Catalogue:
    """What is served: parts by digest, digests of manifests by image name."""

    blobs: Mapping[str, Sequence[Part]]
    tags: Mapping[str, str]

    @staticmethod
    def load(path: Path) -> "Catalogue":
        """Read what `BlobServer` wrote."""
        document = json.loads(path.read_text())
        blobs = {
            digest: [Part(Path(file), count) for file, count in parts] for digest, parts in document["blobs"].items()
        }
        return Catalogue(blobs, document["tags"])

    def size(self, digest: str) -> int:
        """Bytes of a blob."""
        return sum(part.path.stat().st_size * part.count for part in self.blobs[digest])


def pieces(parts: Iterable[Part], start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
    """Where the bytes `[start, stop)` of a blob are: files, each with its own range of bytes."""
    position = 0
    for part in parts:
        size = part.path.stat().st_size
        whole = size * part.count
        at = max(start - position, 0)
        while at < whole and position + at < stop:
            offset = at % size
            length = min(size - offset, stop - position - at)
            yield part.path, offset, offset + length
            at += length
        position += whole


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    catalogue: Catalogue

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        words = self.path.strip("/").split("/")
        digest, kind = words[-1], "application/octet-stream"
        if words[-2:-1] == ["manifests"]:
            kind = _MANIFEST
            if digest == TAG:
                digest = self.catalogue.tags.get("/".join(words[1:-2]), "")
        if words == ["v2"]:
            self._head(200, 0, {})
        elif digest not in self.catalogue.blobs:
            self._head(404, 0, {})
        else:
            self._send(digest, kind, body)

    def _send(self, digest: str, kind: str, body: bool) -> None:
        size = self.catalogue.size(digest)
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        start, stop = (int(asked[1]), min(int(asked[2] or size) + 1, size)) if asked else (0, size)
        headers = {"Content-Type": kind, "Docker-Content-Digest": digest}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self._head(206 if asked else 200, stop - start, headers)
        if body:
            try:
                self._copy(self.catalogue.blobs[digest], start, stop)
            except (BrokenPipeError, ConnectionResetError):  # the client has what it wanted
                self.close_connection = True

    def _copy(self, parts: Iterable[Part], start: int, stop: int) -> None:
        """Send the bytes without reading them."""
        for path, offset, last in pieces(parts, start, stop):
            with path.open("rb") as file:
                while offset < last:
                    sent = os.sendfile(self.connection.fileno(), file.fileno(), offset, last - offset)
                    if not sent:
                        raise OSError(f"{path} is shorter than it was")
                    offset += sent

    def _head(self, status: int, size: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


def make_server(catalogue: Catalogue, address: str, port: int) -> ThreadingHTTPServer:
    """A server of the catalogue, bound but not yet running."""
    handler = type("Handler", (_Handler,), {"catalogue": catalogue})
    return ThreadingHTTPServer((address, port), handler)


def main() -> int:
    """Serve until ended by a signal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--catalogue", type=Path, required=True)
    parser.add_argument("--address", required=True)
    options = parser.parse_args()
    make_server(Catalogue.load(options.catalogue), options.address, PORT).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
