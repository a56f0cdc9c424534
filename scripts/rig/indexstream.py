"""A gzip layer of any size that exists only while it is sent, and the registry that sends it: for memory measurements.

The layer is one gzip member of equally large files. Their contents are pieces of the extension modules of this Python,
so that windows are as large as in real layers, each compressed once; each file has a name, and so a header, of its own.
Making the blob costs next to nothing, indexing it all that a real one costs.
"""

import hashlib
import itertools
import json
import sysconfig
import tarfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from isal import isal_zlib

from scripts.rig.errors import RigError

__all__ = ["StreamedLayer", "serving"]

_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_FILE_SIZE = 100_352  # 100 kB, in whole tar records
_FILES_PER_DIRECTORY = 1000
_PIECES = 64
_CHUNK = 1 << 20
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = b"{}"


class StreamedLayer:
    """A layer with about `tar_size` bytes of tar; `digest` and `size` are its blob's, found by making it once, which
    takes a second a gigabyte."""

    def __init__(self, tar_size: int) -> None:
        self.files = max(tar_size // (_FILE_SIZE + 512), 1)
        self._pieces = [(piece, _deflated(piece, level=6)) for piece in _pieces()]
        digest = hashlib.sha256()
        self.size = 0
        for chunk in self.chunks():
            digest.update(chunk)
            self.size += len(chunk)
        self.digest = f"sha256:{digest.hexdigest()}"

    def __repr__(self) -> str:
        return f"<StreamedLayer {self.digest[:19]} {self.size} bytes, {self.files} files>"

    def chunks(self) -> Iterator[bytes]:
        """The blob's bytes, made anew."""
        out, crc, tar_size = bytearray(_HEAD), 0, 0
        for header, piece in self._entries():
            out += _deflated(header)
            crc = isal_zlib.crc32(header, crc)
            tar_size += len(header)
            if piece is not None:
                data, deflated = piece
                out += deflated
                crc = isal_zlib.crc32(data, crc)
                tar_size += len(data)
            if len(out) >= _CHUNK:
                yield bytes(out)
                out.clear()
        end = bytes(1024)
        out += _deflated(end, flush=zlib.Z_FINISH)
        crc, tar_size = isal_zlib.crc32(end, crc), tar_size + len(end)
        yield bytes(out) + crc.to_bytes(4, "little") + (tar_size % (1 << 32)).to_bytes(4, "little")

    def _entries(self) -> Iterator[tuple[bytes, tuple[bytes, bytes] | None]]:
        """Headers, each with the contents that follow, plain and deflated."""
        pieces = itertools.cycle(self._pieces)
        for number in range(self.files):
            directory = f"usr/lib/directory{number // _FILES_PER_DIRECTORY:03}/"
            if number % _FILES_PER_DIRECTORY == 0:
                yield _header(directory, tarfile.DIRTYPE, 0), None
            yield _header(f"{directory}file{number:07}.so", tarfile.REGTYPE, _FILE_SIZE), next(pieces)


def _pieces() -> list[bytes]:
    directory = Path(sysconfig.get_config_var("DESTSHARED") or "")
    data = b"".join(path.read_bytes() for path in sorted(directory.glob("*.so")))
    pieces = [data[start : start + _FILE_SIZE] for start in range(0, len(data) - _FILE_SIZE, _FILE_SIZE)][:_PIECES]
    if not pieces:
        raise RigError(f"{directory} has no extension modules to make a layer of")
    return pieces


def _header(name: str, kind: bytes, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size, info.mtime, info.mode = kind, size, 1_700_000_000 + size, 0o755
    return info.tobuf(tarfile.GNU_FORMAT)


def _deflated(data: bytes, level: int = 1, flush: int = zlib.Z_SYNC_FLUSH) -> bytes:
    """A piece of a raw deflate stream that ends at a byte and refers to nothing before itself."""
    compressor = zlib.compressobj(level, zlib.DEFLATED, -15)
    return compressor.compress(data) + compressor.flush(flush)


@contextmanager
def serving(layer: StreamedLayer) -> Iterator[str]:
    """A registry on this machine with an image of this layer; its reference."""
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", **_descriptor(_CONFIG)}
    row = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": layer.digest, "size": layer.size}
    manifest = json.dumps({"schemaVersion": 2, "mediaType": _MANIFEST, "config": config, "layers": [row]}).encode()
    handler = type("Handler", (_Handler,), {"layer": layer, "manifest": manifest})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="stream registry")
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}/stream:1"
        finally:
            server.shutdown()
            thread.join()


def _descriptor(data: bytes) -> dict[str, object]:
    return {"digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


class _Handler(BaseHTTPRequestHandler):
    """Answers for one image, without ranges: a client that begins in the middle reads over what comes before."""

    protocol_version = "HTTP/1.1"
    layer: StreamedLayer
    manifest: bytes

    def do_HEAD(self) -> None:
        """The head of what GET answers."""
        self._answer(body=False)

    def do_GET(self) -> None:
        """The API's root, manifest, configuration or layer."""
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if "/manifests/" in self.path:
            self._send(_MANIFEST, len(self.manifest), iter((self.manifest,)) if body else iter(()))
        elif self.path.endswith(self.layer.digest):
            self._send("application/octet-stream", self.layer.size, self.layer.chunks() if body else iter(()))
        else:
            self._send("application/json", len(_CONFIG), iter((_CONFIG,)) if body else iter(()))

    def _send(self, kind: str, size: int, chunks: Iterator[bytes]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        try:
            for chunk in chunks:
                self.wfile.write(chunk)
        except (BrokenPipeError, ConnectionResetError):  # the client failed, and says why
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""
