"""The block server: the one process that reads the FUSE connection. Hits are answered inline, misses handed on.

It is single-threaded (two reader threads get in each other's way under the GIL: 84 against 240 MB/s at 4 KiB) and does
nothing that can wait: no network, no decoding, no lock. A read whose blocks are not all present stays in its slot of
the ring and the fetch process answers it; so does one whose bytes the disk cannot read back. A reply to READ is exactly
min(size, end - offset) bytes or an error: EROFS turns short replies into zero pages. A request that makes the code fail
is answered with EIO; one that has killed the process `_POISON` times is answered with EIO unread. It must never touch a
path below its own mounts.

A layer has one file that all containers share, and private ones, `<node name>.<slot>`: same bytes, other node ids, so
that the kernel keeps another page cache for each. A read of a private file is noted for the recorder (`record.log`),
then served as any other. Each node id has its own open files, which go with the FORGET of that id.
"""

import errno
import logging
import os
import re
import select
import time
from collections.abc import Callable
from pathlib import Path

from snapshotter.blockstore import LayerFiles, node_id
from snapshotter.errors import SnapshotterError
from snapshotter.killpoints import reach
from snapshotter.record.log import Notes

from . import abi
from .abi import IN_HEADER, OUT_HEADER, Opcode
from .ring import Ring

__all__ = ["BlockServer"]

_log = logging.getLogger(__name__)

_READ = int(Opcode.READ)  # an enum's member takes a look-up more, for each request
_POISON = 5
_MAX_READ = 1 << 20
_IDLE_S = 1.0
_BEAT_EVERY = 1024
_NEAR_S = 0.0004
_SPIN_S = 0.001
_FILE_NAME = re.compile(r"([0-9a-f]{14})(?:\.([0-9a-f]{2}))?")


class _Pace:
    """How fast requests come. A starting program reads thousands of times, one read after the other, each some 100 µs
    after the answer before. Whoever sleeps meanwhile is woken late, most of all in a virtual machine whose idle CPU has
    been given away: looking again for a moment made a cold `import numpy` from complete layers a fifth faster. Requests
    that come further apart than `_NEAR_S` on average are slept for."""

    def __init__(self) -> None:
        self._last = 0.0
        self._gap_s = 1.0

    def came(self) -> None:
        """A request has come."""
        now = time.monotonic()
        self._gap_s += (min(now - self._last, 1.0) - self._gap_s) / 8
        self._last = now

    def next_is_near(self) -> bool:
        """Whether the next request is likely to come before a sleeper would be awake."""
        return self._gap_s < _NEAR_S and time.monotonic() - self._last < _SPIN_S


class BlockServer:
    """Serves `<layers>/<node name>` as files of the connection `device` until the connection ends."""

    def __init__(self, ring: Ring, device: int, doorbell: int, layers: Path, notes: Notes, resend: bool = True) -> None:
        """`doorbell` is the eventfd that wakes the fetch process. `resend` false leaves the kernel's own second
        delivery unused, as on kernels that lack it."""
        self._ring = ring
        self._device = device
        self._doorbell = doorbell
        self._layers_dir = layers
        self._notes = notes
        self._use_resend = resend
        self._layers: dict[int, LayerFiles] = {}
        self._buffer = memoryview(bytearray(_MAX_READ))
        self._header = bytearray(OUT_HEADER.size)
        self._answers: dict[int, Callable[[int, int], bytes]] = {
            Opcode.LOOKUP: self._lookup,
            Opcode.GETATTR: self._getattr,
            Opcode.OPEN: self._open,
            Opcode.OPENDIR: lambda node, slot: abi.open_reply(),
            Opcode.READDIR: self._readdir,
            Opcode.STATFS: self._statfs,
            Opcode.RELEASE: lambda node, slot: b"",
            Opcode.RELEASEDIR: lambda node, slot: b"",
            Opcode.INIT: self._init,
            Opcode.DESTROY: lambda node, slot: b"",
        }

    def run(self) -> None:
        """Serve until the kernel ends the connection. Raises OSError when the connection fails otherwise."""
        self._recover()
        poll = select.poll()
        poll.register(self._device, select.POLLIN)
        slot, buffers = self._claim()
        served = 0
        pace = _Pace()
        while True:
            served += 1
            if not served % _BEAT_EVERY:
                self._ring.beat()
            try:
                os.readv(self._device, buffers)
            except BlockingIOError:
                if pace.next_is_near():
                    continue
                self._ring.beat()
                poll.poll(_IDLE_S * 1000)
                continue
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted or aborted: the end
                    return
                if error.errno in (errno.ENOENT, errno.EINTR):  # the request was withdrawn while we read it
                    continue
                raise
            pace.came()
            reach("block.came")
            if self._serve(slot):
                reach("block.answered")
                buffers[0][:4] = b"\0\0\0\0"
            else:
                slot, buffers = self._claim()

    def _claim(self) -> tuple[int, tuple[memoryview, memoryview]]:
        while True:
            try:
                slot = self._ring.claim()
                reach("block.claimed")
                return slot, self._ring.buffers(slot)
            except BlockingIOError:  # more requests in flight than the kernel promised: wait for the fetch process
                self._ring.beat()
                time.sleep(0.01)

    def _recover(self) -> None:
        """Finish what a killed block server left, and have the kernel send again what else is unanswered."""
        slot = self._ring.owned()
        if slot is not None:
            if self._ring.attempts(slot) >= _POISON:
                unique = self._ring.request(slot)[2]
                _log.error("fuse.poison unique=%d attempts=%d answered=EIO", unique, self._ring.attempts(slot))
                self._reply(unique, -errno.EIO)
                self._ring.free(slot)
            elif self._serve(slot):
                self._ring.free(slot)
        reach("block.recovered")
        os.eventfd_write(self._doorbell, 1)  # a request may have been handed over without it
        if self._use_resend and self._ring.resend:
            os.write(self._device, abi.NOTIFY_RESEND)

    def _serve(self, slot: int) -> bool:
        """Handle the slot's request; False when the slot was handed on and is not ours any more."""
        fields = self._ring.request(slot)
        opcode, unique, node = fields[1], fields[2], fields[3]
        try:
            if opcode == _READ:
                return self._read(slot, unique, node, fields[10], fields[11])
            if opcode in (Opcode.FORGET, Opcode.BATCH_FORGET, Opcode.INTERRUPT):
                self._forget(opcode, node, slot)
                return True
            answer = self._answers.get(opcode)
            if answer is None:
                self._reply(unique, -errno.ENOSYS)
            else:
                self._reply(unique, 0, answer(node, slot))
        except OSError as error:
            self._reply(unique, -(error.errno or errno.EIO))
        except Exception:
            _log.exception("fuse.failed opcode=%d node=%x answered=EIO", opcode, node)
            self._reply(unique, -errno.EIO)
        return True

    def _read(self, slot: int, unique: int, node: int, offset: int, size: int) -> bool:
        layer = self._layers.get(node) or self._layer(node)
        if offset + size > layer.image_size:
            size = max(layer.image_size - offset, 0)
        start, end = layer.blocks_of(offset, size)
        if node & 0xFF and start < end:
            self._notes.note(node, start, end)
            reach("block.noted")
        data = self._buffer[:size]
        if not layer.has(start, end) or not self._is_read(layer, data, offset):
            self._ring.hand(slot, time.monotonic())
            reach("block.handed")
            os.eventfd_write(self._doorbell, 1)
            reach("block.rung")
            return False
        self._reply(unique, 0, data)
        return True

    @staticmethod
    def _is_read(layer: LayerFiles, data: memoryview, offset: int) -> bool:
        """Fill `data`; False when the disk cannot read it back: the fetch process has it fetched again then."""
        try:
            layer.read_into(data, offset)
        except OSError as error:
            _log.error("layer.unreadable name=%s offset=%d error=%r", layer.name, offset, str(error))
            return False
        return True

    def _reply(self, unique: int, error: int, body: bytes | memoryview = b"") -> None:
        OUT_HEADER.pack_into(self._header, 0, OUT_HEADER.size + len(body), error, unique)
        try:
            os.writev(self._device, (self._header, body) if body else (self._header,))
        except OSError as refused:
            if refused.errno not in (errno.ENOENT, errno.ENODEV):  # withdrawn, or already answered by a predecessor
                raise

    def _layer(self, node: int) -> LayerFiles:
        layer = self._layers.get(node)
        if layer is None:
            try:
                layer = self._layers[node] = LayerFiles(self._layers_dir / f"{node >> 8:014x}")
            except (SnapshotterError, FileNotFoundError) as error:
                raise OSError(errno.ENOENT, str(error)) from error
        return layer

    def _forget(self, opcode: int, node: int, slot: int) -> None:
        """The kernel has dropped inodes: close their files (opened again on demand should one come back). Removing a
        layer relies on it: see `layers.Layers.remove`."""
        if opcode == Opcode.INTERRUPT:
            return
        nodes = [node]
        if opcode == Opcode.BATCH_FORGET:
            nodes = abi.forgotten(self._ring.body(slot, IN_HEADER.size, self._ring.request(slot)[0]))
        reach("block.forgetting")
        for gone in nodes:
            if gone in self._layers:
                self._layers.pop(gone).close()
            self._notes.forget(gone)

    # -- replies to rare requests: (node, slot) -> body --------------------------------------------------------------

    def _init(self, node: int, slot: int) -> bytes:
        reply = abi.init_reply(self._ring.body(slot, IN_HEADER.size, IN_HEADER.size + 64))
        self._ring.agreed(reply.resend, reply.async_dio)
        reach("block.agreed")
        return reply.body

    def _lookup(self, node: int, slot: int) -> bytes:
        length = self._ring.request(slot)[0]
        name = self._ring.body(slot, IN_HEADER.size, length).rstrip(b"\0").decode("ascii", "replace")
        parts = _FILE_NAME.fullmatch(name)
        if parts is None or parts[2] == "00":
            raise OSError(errno.ENOENT, "not a layer")
        found = node_id(parts[1], int(parts[2] or "0", 16))
        known = self._layers.get(found)
        if known is not None and not known.is_current(self._layers_dir / parts[1]):  # removed, its FORGET is to come
            self._layers.pop(found).close()
        return abi.entry_reply(found, self._layer(found).record.image_size)

    def _getattr(self, node: int, slot: int) -> bytes:
        if node == abi.ROOT_ID:
            return abi.attr_reply(node, 0, directory=True)
        return abi.attr_reply(node, self._layer(node).record.image_size)

    def _open(self, node: int, slot: int) -> bytes:
        self._layer(node)
        return abi.open_reply()

    def _readdir(self, node: int, slot: int) -> bytes:
        fields = self._ring.request(slot)
        offset, size = fields[10], fields[11]
        names = [(abi.ROOT_ID, b".", True), (abi.ROOT_ID, b"..", True)]
        for entry in sorted(os.listdir(self._layers_dir)):
            if len(entry) == 14:
                names.append((node_id(entry), entry.encode(), False))
        reply = b""
        for position, (child, name, directory) in enumerate(names[offset:], offset + 1):
            record = abi.dirent(child, position, name, directory)
            if len(reply) + len(record) > size:
                break
            reply += record
        return reply

    def _statfs(self, node: int, slot: int) -> bytes:
        disk = os.statvfs(self._layers_dir)
        return abi.statfs_reply(disk.f_blocks * disk.f_frsize // 4096, disk.f_bavail * disk.f_frsize // 4096)
