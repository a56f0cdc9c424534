"""Images whose contents are known: a static program, and files of seeded noise whose digests the bench keeps.

One lower layer, with busybox, is shared by all. Each image has data layers of its own. Sizes of files are mixed, so
that there are files within one block, and such as many spans hold. A few bytes of each layer are random in truth: two
runs at once on one machine have no layer in common.
"""

import hashlib
import io
import os
import random
import shutil
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from scripts.rig.errors import RigError
from scripts.rig.image.recipes import architecture
from scripts.rig.layers import EPOCH_S, Blob, BlobWriter
from scripts.rig.oci import Layout, LayoutWriter

__all__ = ["ChaosImage", "make_images"]

_APPLETS = ("sh", "sha256sum", "dd", "sleep")
_SIZES = (300, 4096, 20_000, 150_000, 700_000, 1_500_000)


@dataclass(frozen=True, slots=True)
class ChaosImage:
    """`digests`: absolute path in the container -> sha256 of the file. `layers` from the lowest up."""

    name: str
    layout: Layout
    digests: Mapping[str, str]

    @property
    def layers(self) -> Sequence[str]:
        """Digests of the layers."""
        return self.layout.layers


def make_images(directory: Path, sizes: Mapping[str, Sequence[int]], source: random.Random) -> list[ChaosImage]:
    """One image for each name, with a data layer of about so many bytes for each size."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RigError("busybox is missing (run: sudo ./scripts/setup)")
    base = _tar({"bin/busybox": Path(busybox).read_bytes(), "salt": os.urandom(16)}, _APPLETS)
    return [_make(directory / name, name, base, layers, source) for name, layers in sizes.items()]


def _make(path: Path, name: str, base: bytes, sizes: Sequence[int], source: random.Random) -> ChaosImage:
    writer = LayoutWriter(path)
    writer.add_blob(lambda out: _compress(base, out))
    digests: dict[str, str] = {}
    for number, size in enumerate(sizes):
        files = _files(f"data/{number}", size, source)
        digests |= {f"/{path}": hashlib.sha256(data).hexdigest() for path, data in files.items()}
        tar = _tar({**files, f"salt-{number}": os.urandom(16)})
        writer.add_blob(lambda out, tar=tar: _compress(tar, out))  # type: ignore[misc]  # bound now
    layout = writer.finish(architecture(), ["/bin/sh"], (f"{name} {number}" for number in range(len(sizes) + 1)))
    return ChaosImage(name, layout, digests)


def _files(directory: str, size: int, source: random.Random) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    while (left := size - sum(map(len, files.values()))) > 0:
        length = min(left, source.choice(_SIZES) + source.randrange(4096))
        files[f"{directory}/{len(files):03}"] = source.randbytes(length)
    return files


def _tar(files: Mapping[str, bytes], applets: Sequence[str] = ()) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for applet in applets:
            link = tarfile.TarInfo(f"bin/{applet}")
            link.type, link.linkname, link.mtime = tarfile.SYMTYPE, "busybox", EPOCH_S
            tar.addfile(link)
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o755, EPOCH_S
            tar.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def _compress(tar: bytes, out: BinaryIO) -> Blob:
    writer = BlobWriter(out, fast=True)
    writer.write(tar)
    return writer.finish()
