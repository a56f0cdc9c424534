"""The block store: what of each layer is on this node, shared by every image and container.

A layer is a directory `<root>/layers/<node name>`, which appears whole by one rename and then holds
  layer.json  what it is (see `LayerRecord`)
  meta        the EROFS metadata: the layer image's first part, complete from the start
  data        the data region, a sparse file of its full size
  present     one byte a block of the data region: ABSENT, PRESENT or UNVERIFIED
  index       the layer index, as `blockindex.codec` encodes it
  used        empty; its time of modification is when the layer was mounted or given back last
  unproven, packs  which blocks came from hot packs, and are to be compared yet; see `unproven`
While it is not sure that a layer can go it is a directory `.aside-…`, which is put back after a killed process; once
that is sure it is `.dead-…`, which is deleted. See `layers`.
The node name is the first 14 hex digits of the layer's digest; shifted left by 8 bits it is also the FUSE node id, so
ids are the same after any restart with no table to lose. The low 8 bits are 0 for the file that all containers share,
and a slot (1..255) for a private file of the same layer, `<node name>.<slot>`, whose reads are recorded. Two layers
with one node name are told apart by layer.json: the second is refused and served by the ordinary path.

Invariant: bytes are in `data` before their block says PRESENT, and only verified bytes are written. One process (the
fetch process) writes; any process may map `present` and read. Nobody stores through a mapping: where the disk is full
that would be SIGBUS, on btrfs also in what is allocated, and not an error. `present` is allocated in full when it is
made, so that elsewhere a mark needs no room. After the machine's boot id has changed nothing says which writes reached
the disk: PRESENT becomes UNVERIFIED, and each piece is checked against its digest on first use; a layer whose files
have not the sizes that they had is dropped. Whether metadata and index are what was sealed in layer.json is looked at
before each mount (`integrity`). This module does not know where bytes come from, nor FUSE.
"""

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from blockindex.model import BLOCK

from .errors import NotFound, Precondition, SnapshotterError
from .killpoints import reach
from .model import Digest

__all__ = [
    "ABSENT",
    "PRESENT",
    "UNVERIFIED",
    "BlockStore",
    "LayerFiles",
    "LayerRecord",
    "Staging",
    "node_id",
    "node_name",
    "private_name",
    "seal_of",
    "write_all",
]

_log = logging.getLogger(__name__)

ABSENT, PRESENT, UNVERIFIED = 0, 1, 2
_DISTRUST = bytes([ABSENT, UNVERIFIED]) + bytes(range(2, 256))
_VERSION = 3
_NAME_DIGITS = 14
_ALL_PRESENT = bytes([PRESENT]) * 4096


def node_name(digest: Digest) -> str:
    """Directory and FUSE file name of a layer: the first 14 hex digits of its digest."""
    return digest.partition(":")[2][:_NAME_DIGITS]


def private_name(name: str, slot: int) -> str:
    """FUSE file name of a layer's private file; slot 0 is the shared one."""
    return f"{name}.{slot:02x}" if slot else name


def node_id(name: str, slot: int = 0) -> int:
    """FUSE node id of a node name; the inverse is `f"{node_id >> 8:014x}"`, and the slot `node_id & 0xFF`."""
    return int(name, 16) << 8 | slot


def write_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """pwrite until all is written (near a full disk the kernel writes a part and only then fails)."""
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def seal_of(metadata: bytes, index: bytes) -> str:
    """What says that both are what was written."""
    return hashlib.sha256(metadata + index).hexdigest()


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """layer.json: sizes in bytes; `images` are the references it was pulled through, the newest last; `implied_dirs`
    those of the layer index, in layer.json as text with undecodable bytes as surrogates; `layout` the index's name of
    how the data region is laid out; `seal` the sha256 of metadata and index, one after the other (set by
    `Staging.publish`); `index_from` where the index was found, empty where it was made here."""

    digest: Digest
    blob_size: int
    meta_size: int
    data_size: int
    images: tuple[str, ...]
    implied_dirs: tuple[bytes, ...]
    layout: str
    seal: str = ""
    index_from: str = ""

    @property
    def image_size(self) -> int:
        """Bytes of the layer image, which the kernel sees as one file."""
        return self.meta_size + self.data_size

    @property
    def blocks(self) -> int:
        """Blocks of the data region."""
        return self.data_size // BLOCK

    @staticmethod
    def load(directory: Path) -> "LayerRecord":
        """Read layer.json; NotFound when there is no such layer, SnapshotterError when it is unreadable."""
        try:
            fields = json.loads((directory / "layer.json").read_bytes())
            if fields.pop("version") != _VERSION:
                raise ValueError("another version's record")
            fields["images"] = tuple(fields["images"])
            fields["implied_dirs"] = tuple(path.encode("utf-8", "surrogateescape") for path in fields["implied_dirs"])
            return LayerRecord(**fields)
        except FileNotFoundError:
            raise NotFound(f"no layer in {directory}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SnapshotterError(f"{directory}/layer.json: {error}; remove the directory to refetch") from error

    def save(self, directory: Path) -> None:
        """Write layer.json, whole or not at all."""
        temporary = directory / f"layer.json.{os.urandom(4).hex()}"
        implied_dirs = [path.decode("utf-8", "surrogateescape") for path in self.implied_dirs]
        temporary.write_text(json.dumps({"version": _VERSION, **asdict(self), "implied_dirs": implied_dirs}))
        reach("fetch.record-written")
        temporary.rename(directory / "layer.json")


class LayerFiles:
    """A layer's open files. The attributes are public for the block server's hot path; nobody else touches them."""

    __slots__ = (
        "_open",
        "_present_fd",
        "data_fd",
        "directory",
        "image_size",
        "meta_fd",
        "meta_size",
        "name",
        "present",
        "record",
    )

    def __init__(self, directory: Path, writable: bool = False) -> None:
        """Open the layer. NotFound when there is none, SnapshotterError when a part of it is missing."""
        self._open = False
        self.directory = directory
        self.name = directory.name
        self.record = LayerRecord.load(directory)
        self.meta_size = self.record.meta_size
        self.image_size = self.record.image_size
        mode = os.O_RDWR if writable else os.O_RDONLY
        with contextlib.ExitStack() as on_failure:
            try:
                self.meta_fd = os.open(directory / "meta", os.O_RDONLY | os.O_CLOEXEC)
                on_failure.callback(os.close, self.meta_fd)
                self.data_fd = os.open(directory / "data", mode | os.O_CLOEXEC)
                on_failure.callback(os.close, self.data_fd)
                self._present_fd = os.open(directory / "present", mode | os.O_CLOEXEC)
                on_failure.callback(os.close, self._present_fd)
                self.present = mmap.mmap(self._present_fd, max(self.record.blocks, 1), access=mmap.ACCESS_READ)
            except (FileNotFoundError, ValueError) as error:  # ValueError: the presence map is too short
                raise SnapshotterError(f"{directory}: {error}; remove the directory to refetch") from error
            on_failure.pop_all()
        self._open = True

    def __repr__(self) -> str:
        return f"<LayerFiles {self.record.digest[:19]} {self.blocks_present()}/{self.record.blocks} blocks present>"

    def __del__(self) -> None:
        # A thread may still hold the files of a layer that is removed: they are closed with the last reference.
        self.close()

    def close(self) -> None:
        """Close the files and the mapping; for whoever knows that nobody else uses them. More than once is harmless."""
        if self._open:
            self._open = False
            self.present.close()
            for descriptor in (self._present_fd, self.meta_fd, self.data_fd):
                os.close(descriptor)

    def is_current(self, directory: Path) -> bool:
        """Whether these are the files that are in `directory` now."""
        try:
            return os.path.samestat(os.fstat(self.data_fd), os.stat(directory / "data"))
        except FileNotFoundError:
            return False

    def blocks_of(self, offset: int, size: int) -> tuple[int, int]:
        """The blocks of the data region that image bytes `[offset, offset + size)` touch; empty inside the metadata."""
        start = offset - self.meta_size  # no `max`, here and below: each read comes by, and calls are what it costs
        end = start + size
        return start // BLOCK if start > 0 else 0, -(-end // BLOCK) if end > 0 else 0

    def has(self, start: int, end: int) -> bool:
        """Whether the blocks `[start, end)` may be read."""
        count = end - start
        wanted = _ALL_PRESENT[:count] if count <= len(_ALL_PRESENT) else _ALL_PRESENT[:1] * count
        return self.present[start:end] == wanted

    def blocks_present(self) -> int:
        """Number of blocks that may be read (copies the map: not for a hot path)."""
        return self.present[: self.record.blocks].count(PRESENT)

    def complete(self) -> bool:
        """Whether every block may be read."""
        return self.has(0, self.record.blocks)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` with image bytes from `offset`; the caller has made sure that they are there."""
        from_meta = min(self.meta_size - offset, len(buffer)) if offset < self.meta_size else 0
        if from_meta and os.preadv(self.meta_fd, [buffer[:from_meta]], offset) != from_meta:
            raise OSError(f"{self.name}/meta is shorter than its {self.meta_size} bytes")
        rest = buffer[from_meta:] if from_meta else buffer
        if rest and os.preadv(self.data_fd, [rest], offset + from_meta - self.meta_size) != len(rest):
            raise OSError(f"{self.name}/data is shorter than its {self.record.data_size} bytes")

    def fill(self, start: int, end: int, data: bytes | memoryview) -> None:
        """Write verified bytes of the blocks `[start, end)` and say that they are present. Here and in the next two:
        OSError when the disk refuses that."""
        write_all(self.data_fd, data, start * BLOCK)
        reach("fetch.written")
        self.trust(start, end)

    def trust(self, start: int, end: int) -> None:
        """Say that the blocks `[start, end)`, whose bytes are in the file and verified, are present."""
        write_all(self._present_fd, bytes([PRESENT]) * (end - start), start)

    def distrust(self, start: int, end: int) -> None:
        """Have those of the blocks `[start, end)` that are present checked before they are read again."""
        write_all(self._present_fd, self.present[start:end].translate(_DISTRUST), start)


class Staging:
    """A layer on its way into the store: a private directory that `publish` renames into place, or `discard` removes.

    For a layer without an index its data is written while the blob streams by, and published at the end.
    """

    def __init__(self, layers: Path, digest: Digest) -> None:
        self._layers = layers
        self._name = node_name(digest)
        self._digest = digest
        serial = os.urandom(4).hex()
        self.directory = layers / f".new-{self._name}-{serial}"
        self.directory.mkdir(mode=0o700)
        self._data_fd = os.open(self.directory / "data", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        reach("fetch.staged")

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Put bytes at a data offset."""
        write_all(self._data_fd, data, offset)

    def publish(self, record: LayerRecord, metadata: bytes, index: bytes, absent: Iterable[tuple[int, int]]) -> Path:
        """Make the layer visible with all blocks PRESENT but the ranges `absent`; returns its directory. If another
        one was published meanwhile, that one is kept. Raises Precondition if another layer has the node name."""
        os.ftruncate(self._data_fd, record.data_size)
        present = bytearray([PRESENT]) * max(record.blocks, 1)
        for start, end in absent:
            present[start:end] = bytes(end - start)
        for name, content in (("meta", metadata), ("index", index), ("present", present)):
            fd = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, max(len(content), 1))
                write_all(fd, content, 0)
            finally:
                os.close(fd)
        reach("fetch.layer-written")
        replace(record, seal=seal_of(metadata, index)).save(self.directory)
        reach("fetch.layer-described")
        target = self._layers / self._name
        try:
            self.directory.rename(target)
        except OSError:
            if not (target / "layer.json").exists():
                raise
            if LayerRecord.load(target).digest != self._digest:
                raise Precondition(f"{target} holds another layer whose digest begins like {self._digest}") from None
        reach("fetch.layer-published")
        self.discard()
        return target

    def discard(self) -> None:
        """Remove what was staged; safe after `publish` and more than once."""
        if self._data_fd >= 0:
            os.close(self._data_fd)
            self._data_fd = -1
        shutil.rmtree(self.directory, ignore_errors=True)


class BlockStore:
    """All layers of the node, below `<root>/layers`."""

    def __init__(self, root: Path) -> None:
        self.layers = root / "layers"
        self._boot_marker = root / "boot_id"
        self._adding = threading.Lock()  # held while a record is changed
        self.layers.mkdir(mode=0o700, parents=True, exist_ok=True)

    def recover(self, boot_id: str) -> None:
        """At the start of the daemon, before any other process has the store open: sweep what a killed run had
        staged, and stop trusting presence if the machine has booted since (or nothing says that it has not)."""
        self.sweep()
        if self._boot_marker.exists() and self._boot_marker.read_text() == boot_id:
            return
        for name in list(self.names()):
            try:
                self._distrust(self.layers / name)
            except (SnapshotterError, OSError) as error:
                _log.warning("layer.dropped name=%s reason=%r it will be fetched again", name, str(error))
                shutil.rmtree(self.layers / name)
        try:
            self._boot_marker.write_text(boot_id)
        except OSError as error:  # a full disk: the next start trusts nothing either
            _log.warning("store.boot_not_noted error=%r", str(error))

    def sweep(self) -> None:
        """Remove what a killed process had staged or was deleting, and put back what it had set aside; to be called
        while nobody does any of these."""
        for aside in list(self.layers.glob(".aside-*")):
            try:
                self.put_back(aside)
            except OSError as error:  # another one has come in its place
                _log.warning("layer.not_put_back directory=%s error=%r", aside, str(error))
                self.delete(aside)
        for unfinished in self.layers.glob("[!.]*/layer.json.*"):
            unfinished.unlink()
        for leftover in list(self.layers.glob(".new-*")):
            # renamed first: a thread of the killed one may just be publishing it, then it is whole or not at all
            with contextlib.suppress(FileNotFoundError):
                leftover.rename(leftover.with_name(f".dead-{leftover.name}"))
        for dead in self.layers.glob(".dead-*"):
            shutil.rmtree(dead, ignore_errors=True)

    @staticmethod
    def _distrust(directory: Path) -> None:
        """Have every block of the layer checked again. SnapshotterError or OSError when what cannot be checked block
        by block did not survive whole."""
        record = LayerRecord.load(directory)
        if (directory / "data").stat().st_size != record.data_size:
            raise SnapshotterError("the data file is not as long as it was")
        with (directory / "present").open("r+b") as file:
            states = file.read()
            if len(states) != max(record.blocks, 1):
                raise SnapshotterError("the presence map is not as long as it was")
            file.seek(0)
            file.write(states.translate(_DISTRUST))

    def names(self) -> Iterator[str]:
        """Node names of the layers in the store."""
        for entry in sorted(os.scandir(self.layers), key=lambda entry: entry.name):
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                yield entry.name

    def find(self, digest: Digest) -> Path | None:
        """The layer's directory, or None. Raises Precondition if another layer has its node name."""
        directory = self.layers / node_name(digest)
        try:
            record = LayerRecord.load(directory)
        except NotFound:
            return None
        if record.digest != digest:
            raise Precondition(f"{directory} holds {record.digest}, whose digest begins like {digest}")
        return directory

    def touch(self, name: str) -> None:
        """Note that the layer is used now. A failure only makes the layer look older than it is."""
        try:
            (self.layers / name / "used").touch(mode=0o600)
        except OSError as error:
            _log.warning("layer.use_not_noted name=%s error=%r", name, str(error))

    def set_aside(self, name: str) -> Path:
        """Take the layer out of the store: the directory, not to be found any more, that `put_back` or `delete` takes.
        NotFound when there is no such layer."""
        aside = self.layers / f".aside-{name}-{os.urandom(4).hex()}"
        try:
            (self.layers / name).rename(aside)
        except FileNotFoundError:
            raise NotFound(f"there is no layer {name} in {self.layers}") from None
        return aside

    def put_back(self, aside: Path) -> None:
        """Undo `set_aside`."""
        aside.rename(self.layers / aside.name.removeprefix(".aside-").partition("-")[0])

    def delete(self, aside: Path) -> None:
        """Delete what was set aside; there is no way back. What cannot be deleted now is at the next start."""
        dead = aside.with_name(f".dead-{aside.name.removeprefix('.aside-')}")
        aside.rename(dead)
        reach("fetch.doomed")
        shutil.rmtree(dead, ignore_errors=True)

    def stage(self, digest: Digest) -> Staging:
        """Begin to put a layer into the store."""
        return Staging(self.layers, digest)

    def add_image(self, directory: Path, image: str) -> LayerRecord:
        """Remember one more reference through which the layer can be fetched (the newest 8 are kept)."""
        with self._adding:
            record = LayerRecord.load(directory)
            if record.images[-1:] == (image,):
                return record
            images = (*[known for known in record.images if known != image], image)[-8:]
            record = replace(record, images=images)
            record.save(directory)
            return record
