"""The fetch process: reads that the block server handed over come in by the ring, calls of the service by a socket.

It replies to reads on the same connection as the block server. Killed at any moment it loses nothing: requests stay in
the ring, a successor takes them up; layers open again when a read or a call names them; streams under way start over.
"""

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from blockindex.codec import decode_stored
from blockindex.errors import BlockIndexError
from blockindex.model import BLOCK
from snapshotter.alarms import Alarms
from snapshotter.blockstore import BlockStore, LayerFiles, private_name
from snapshotter.config import Config
from snapshotter.errors import NotFound, Precondition, SnapshotterError
from snapshotter.fuse.abi import OUT_HEADER, inval_entry
from snapshotter.fuse.ring import Ring
from snapshotter.killpoints import reach
from snapshotter.model import Digest, RemoteBlob
from snapshotter.registry import parse_reference
from snapshotter.rpc import Server
from snapshotter.supervise.memory import PassedMemory
from snapshotter.unproven import Unproven

from .access import RegistryAccess
from .arrival import Arrivals, IndexSource
from .carrying import Carrying
from .host import Host
from .hotsets import Prefetches
from .journal import Journal
from .landed import Landed
from .latejudge import LateJudge
from .layer import LayerFetch, Tally, Waiter
from .overflow import Overflow
from .prefetch import HotFinder
from .publishing import Publishing
from .sources import Sources
from .workloads import WorkloadCalls

__all__ = ["FetchProcess", "main"]

_log = logging.getLogger(__name__)

_SWEEP_S = 1.0
_PATIENCE_S = 15.0
_LOOK_S = 0.5
_INSIST_S = 2.0  # what a prefetch had promised a reader is fetched for it after that
_FORGET_S = 3.0
_FORGET_POLL_S = 0.02
_SAID_RUNS = 32


class FetchProcess:
    """Everything that the fetch process keeps. `run` serves the ring; the methods named after ops serve calls."""

    def __init__(
        self,
        config: Config,
        ring: Ring,
        device: int,
        doorbell: int,
        indexes: IndexSource,
        open_blob: Callable[[str, Digest], RemoteBlob],
        host_of: Callable[[str], str],
        hot: HotFinder,
        layers_of: Callable[[str], Sequence[Digest]],
        refused: Callable[[], list[dict[str, Any]]] = list,
    ) -> None:
        """`host_of(image)` names the registry host whose threads and traffic an image's layers share;
        `layers_of(image)` asks it which layers these are, and answers none where it does not say. `refused()` tells of
        artifacts that were found and not used."""
        self._config = config
        self._ring = ring
        self._device = device
        self._doorbell = doorbell
        self._open_blob = open_blob
        self._host_of = host_of
        self._refused = refused
        self._store = BlockStore(Path(config.root))
        self._store.sweep()  # what a killed predecessor had staged or set aside: nobody else does that
        min_lazy_bytes = config.lazy.min_layer_kib << 10
        self._arrivals = Arrivals(self._store, indexes, open_blob, min_lazy_bytes, self._hurry)
        # Guards additions to the two tables. Layers are opened under it, which takes up to seconds, so what is open
        # is found without it: one layer's coming must not hold up the others' readers.
        self._lock = threading.Lock()
        self._layers: dict[str, LayerFetch] = {}
        self._journal = Journal()
        self._overflow = Overflow(config.cache.unstored_mib << 20)
        self._landed = Landed()
        self._judge = LateJudge(Path(config.root))
        self._alarms = Alarms(Path(config.root), self._doubt_pack)
        self._hosts: dict[str, Host] = {}
        self._prefetches = Prefetches(
            hot,
            self._host_of_image,
            self._layer_if_there,
            layers_of,
            config.hotset.streams,
            config.hotset.far_streams,
        )
        self._carrying = Carrying(Path(config.root), self._prefetches.lacks, self._prefetches.begin_anew)
        self._publishing = Publishing(config)
        self.ops: dict[str, Callable[[Mapping[str, Any]], Any]] = {
            "ensure": self.ensure,
            "hot": self.hot,
            "workload": WorkloadCalls(config.hotset, self._prefetches).promote,
            "complete": self.complete,
            "release": self.release,
            "remove": self.remove,
            "status": self.status,
            "journal": self.journal,
            "doubt": self.doubt,
            "refusing": lambda request: self._overflow.refusing,
            "landed": lambda request: asdict(self._landed.take(request["wait_s"])),
        }

    # -- reads -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Answer the ring's requests until the process ends."""
        self._ring.inherit()
        reach("fetch.inherited")
        threading.Thread(target=self._sweep, name="sweep", daemon=True).start()
        self._publishing.start()
        while True:
            for slot in self._ring.take():
                reach("fetch.taken")
                self._take(slot)
            with contextlib.suppress(InterruptedError):
                os.eventfd_read(self._doorbell)

    def _take(self, slot: int) -> None:
        fields = self._ring.request(slot)
        unique, node, offset, size = fields[2], fields[3], fields[10], fields[11]
        try:
            layer = self._layer(f"{node >> 8:014x}")
            size = max(min(size, layer.files.record.image_size - offset), 0)
            start, end = layer.files.blocks_of(offset, size)
            since = self._ring.since(slot)
            if since <= time.monotonic() - self._config.fetch.read_timeout_s and not layer.files.has(start, end):
                raise TimeoutError("not answered in time by this process and those before it that were killed")

            def answer(waiter: Waiter, error: int) -> None:
                self._answer(slot, unique, layer, waiter, error)

            layer.wait_for(Waiter(offset, size, start, end, since, answer))
        except Exception:  # a poison request gets EIO, the process goes on
            _log.exception("read.failed node=%x offset=%d size=%d answered=EIO", node, offset, size)
            self._reply(slot, unique, -errno.EIO)

    def _answer(
        self, slot: int, unique: int, layer: LayerFetch, waiter: Waiter, error: int, again: bool = True
    ) -> None:
        """Reply with what the store has. What the disk cannot read back is fetched `again`, once."""
        body, files = b"", layer.files
        if not error:
            buffer = bytearray(waiter.size)
            try:
                files.read_into(memoryview(buffer), waiter.offset)
                waiter.overlay(buffer, files.meta_size)
                body = bytes(buffer)
            except OSError as failed:
                if again and waiter.start < waiter.end:
                    layer.doubt([(waiter.start, waiter.end)])
                    layer.wait_for(
                        replace(
                            waiter,
                            held={},
                            answer=lambda it, error: self._answer(slot, unique, layer, it, error, again=False),
                        )
                    )
                    return
                _log.error("read.failed file=%r offset=%d error=%r answered=EIO", files, waiter.offset, str(failed))
                error = errno.EIO
        self._reply(slot, unique, -error, body)

    def _reply(self, slot: int, unique: int, error: int, body: bytes = b"") -> None:
        try:
            os.writev(self._device, (OUT_HEADER.pack(OUT_HEADER.size + len(body), error, unique), body))
        except OSError as refused:
            if refused.errno not in (errno.ENOENT, errno.ENODEV):  # the reader was killed, or a predecessor answered
                _log.error("read.reply_refused unique=%d error=%r", unique, str(refused))
        finally:
            reach("fetch.answered")
            self._ring.free(slot)

    def _sweep(self) -> None:
        """End the wait of readers for whom nothing has come in the stated time; start threads that were refused."""
        while True:
            time.sleep(_SWEEP_S)
            self._ring.sweeps()
            try:
                self._sweep_once()
            except Exception:  # without this thread readers would wait for ever
                _log.exception("sweep.failed")

    def _sweep_once(self) -> None:
        """A function of its own, so that nothing holds the last layer between two sweeps: it may be removed."""
        for host in tuple(self._hosts.values()):
            host.tend()
        now = time.monotonic()
        for layer in tuple(self._layers.values()):
            layer.tend()
            layer.insist(now - _INSIST_S)
            layer.expire(now - self._config.fetch.read_timeout_s)
        self._overflow.settle()
        self._judge.tend()
        self._prefetches.tend()
        self._carrying.tend()

    def _layer(self, name: str) -> LayerFetch:
        layer = self._layers.get(name)
        if layer is None:
            with self._lock:
                layer = self._layers.get(name)
                if layer is None:
                    layer = self._layers[name] = self._open(self._store.layers / name)
        return layer

    def _open(self, directory: Path) -> LayerFetch:
        files = LayerFiles(directory, writable=True)
        try:
            index = self._arrivals.fresh(directory) or decode_stored((directory / "index").read_bytes())
            image = files.record.images[-1]
            # newest first; images that share a repository share its blob
            blobs = [self._open_blob(image, files.record.digest) for image in reversed(files.record.images)]
        except BaseException:
            files.close()
            raise
        fetch, host = self._config.fetch, self._host(self._host_of(image))
        patience_s = min(_PATIENCE_S, fetch.read_timeout_s / 4)
        sources = list(dict.fromkeys(blobs))
        growth = fetch.span_growth_kib << 10
        shared = (self._journal, self._overflow, self._alarms, self._landed)
        return LayerFetch(files, index, sources, host, growth, patience_s, *shared)

    def _doubt_pack(self, digest: str) -> None:
        """A layer has refuted a pack: none serves anything more of it that it has not proven itself."""
        for name in self._store.names():
            directory = self._store.layers / name
            try:
                if not any(pack.digest == digest for pack in Unproven.packs_of(directory)):
                    continue
                layer = self._layer(name)
                if layer.doubt_pack(digest) and self._config.fetch.background:
                    layer.fill_in_background(0.0)
            except (SnapshotterError, BlockIndexError, OSError) as error:  # it has gone, or cannot be read at all
                _log.warning("layer.not_doubted name=%s pack=%s error=%r", name, digest, str(error))

    def _layer_if_there(self, digest: Digest) -> LayerFetch | None:
        """The layer if it is in the store."""
        directory = self._store.find(digest)
        return None if directory is None else self._layer(directory.name)

    def _host_of_image(self, image: str) -> Host:
        return self._host(self._host_of(image))

    def _hurry(self, image: str) -> contextlib.AbstractContextManager[None]:
        return self._host_of_image(image).hurry()

    def _host(self, name: str) -> Host:
        host = self._hosts.get(name)
        if host is None:
            fetch = self._config.fetch
            hot_threads = self._config.hotset.streams
            host = Host(name, fetch.demand_threads, hot_threads, fetch.background_threads)
        return self._hosts.setdefault(name, host)  # another thread may have been faster

    # -- calls of the service process --------------------------------------------------------------------------------

    def ensure(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Bring a layer in; answers with its node name once it can be mounted."""
        blob = self._open_blob(request["image"], Digest(request["digest"]))  # before all: is the reference one?
        siblings = tuple(Digest(digest) for digest in request["siblings"])
        self._prefetch(request)
        try:
            directory = self._arrivals.ensure(request["image"], Digest(request["digest"]), siblings, _layers(request))
        except BlockIndexError as error:
            raise SnapshotterError(f"{request['digest']}: {error}") from error
        layer = self._layer(directory.name)
        layer.add_source(blob)
        self._prefetches.flush()
        self._carrying.tend()
        if self._config.fetch.background:
            layer.fill_in_background(self._config.fetch.background_delay_s)
        reach("fetch.ensured")
        return {"name": directory.name, "complete": layer.completed.is_set()}

    def hot(self, request: Mapping[str, Any]) -> dict[str, str]:
        """Begin to prefetch the hot blocks of an image, unless that goes on already. Answers at once whether it has a
        hot set: "found", "none", or "unknown" while that is being looked for."""
        return {"state": self._prefetch(request)}

    def _prefetch(self, request: Mapping[str, Any]) -> str:
        if not self._config.hotset.prefetch:
            return "none"
        layers = _layers(request)
        state = self._prefetches.begin(request["image"], layers)
        self._carrying.consider(request["image"], layers)
        return state

    def complete(self, request: Mapping[str, Any]) -> bool:
        """Wait until the layer is complete, at most `wait_s`; whether it is. False soon when it is removed meanwhile.
        Also takes its background fetching up again after a restart of this process, and the prefetch of its image
        where that is named."""
        layer = self._layer(request["name"])
        self._prefetches.flush()  # one that came in as another's sibling is mounted without a call of `ensure`
        if "image" in request:
            self._prefetch(request)
        if self._config.fetch.background:
            layer.fill_in_background(self._config.fetch.background_delay_s)
        give_up = time.monotonic() + request["wait_s"]
        while not layer.completed.wait(max(min(_LOOK_S, give_up - time.monotonic()), 0)):
            if time.monotonic() >= give_up or self._layers.get(layer.files.name) is not layer:
                return False
        return True

    def doubt(self, request: Mapping[str, Any]) -> None:
        """Blocks of a layer were found wrong on disk: see `LayerFetch.doubt`."""
        layer = self._layer(request["name"])
        layer.doubt([(int(start), int(end)) for start, end in request["runs"]])
        _log.warning("layer.doubted layer=%s runs=%s", layer.files.record.digest, request["runs"][:_SAID_RUNS])
        if self._config.fetch.background:
            layer.fill_in_background(0.0)

    def release(self, request: Mapping[str, Any]) -> None:
        """No snapshot uses the layer any more: fetch no more of it unless a container still reads."""
        layer = self._layers.get(request["name"])
        if layer is not None:
            layer.stop_background()

    def remove(self, request: Mapping[str, Any]) -> None:
        """Delete a layer that nothing mounts and no snapshot uses; the service has made sure of both and keeps it so.
        Raises Precondition, and leaves the layer as it was, when somebody turns out to use it all the same.

        The block server closes its files when the kernel forgets the layer's inode, and the kernel does when it is
        told to forget the name, unless the file is open somewhere. So what it has open shows whether that is so.
        """
        name, digest = request["name"], Digest(request["digest"])
        with self._arrivals.kept_out(digest):
            with self._lock:  # nobody opens the layer between these two
                layer = self._layers.get(name)
                if layer is not None and layer.waiting():
                    raise Precondition(f"{name} is in use: readers wait for it")
                aside = self._set_aside(name)
                reach("fetch.set-aside")
                self._layers.pop(name, None)
            if layer is not None:
                layer.stop_background()
            if not self._is_forgotten(name):
                if aside is not None:
                    self._store.put_back(aside)
                raise Precondition(f"{name} is in use: the kernel still has its file open")
            reach("fetch.forgotten")
            if aside is not None:
                self._store.delete(aside)
        reach("fetch.deleted")
        _log.info("layer.removed layer=%s", digest)

    def _set_aside(self, name: str) -> Path | None:
        """None when it is gone: the call is made again after a process that was killed in the middle of it."""
        try:
            return self._store.set_aside(name)
        except NotFound:
            return None

    def _is_forgotten(self, name: str) -> bool:
        """Have the kernel forget the layer's file, and see whether the block server lets go of it."""
        asides = f"{os.path.realpath(self._store.layers)}/.aside-{name}-"
        give_up = time.monotonic() + _FORGET_S
        while True:
            self._forget(name)
            if not _is_open_elsewhere(asides, Path(self._config.run) / "processes.json"):
                return True
            if time.monotonic() > give_up:
                return False
            time.sleep(_FORGET_POLL_S)

    def _forget(self, name: str) -> None:
        """Have the kernel forget the names of a layer's files, those of private ones too."""
        for slot in range(256):
            try:
                os.write(self._device, inval_entry(private_name(name, slot).encode()))
            except OSError as error:
                if error.errno != errno.ENOENT:  # it did not know it
                    raise SnapshotterError(f"{name}: the kernel refuses to forget it: {error}") from error

    def status(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What `bootseer status` shows of the layers."""
        layers = []
        for name in self._store.names():
            try:
                layers.append(self._status_of(name))
            except (SnapshotterError, BlockIndexError, OSError) as error:
                layers.append({"name": name, "state": "broken", "reason": str(error)})
        return {
            "layers": layers,
            "prefetches": self._prefetches.status(),
            "artifacts_refused": self._refused(),
            "arriving": self._arrivals.under_way(),
            "requests_in_flight": self._ring.in_flight(),
            "unstored_bytes": self._overflow.size,
            "alarms": [asdict(alarm) for alarm in self._alarms.entries()],
            "publishing": self._publishing.status(),
        }

    def journal(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """What happened to the layers `names` between `since` and `until` (seconds since 1970)."""
        return self._journal.excerpt(request["names"], request["since"], request["until"])

    def _status_of(self, name: str) -> dict[str, Any]:
        """One layer; one that nobody has read from yet is looked at without opening it for fetching."""
        layer = self._layers.get(name)
        with contextlib.ExitStack() as closing:
            files = layer.files if layer else closing.enter_context(_looked_at(self._store.layers / name))
            present, record = files.blocks_present(), files.record
        fetching = layer is not None and layer.background
        return {
            "digest": record.digest,
            "name": name,
            "state": "complete" if present == record.blocks else "fetching" if fetching else "partial",
            "image": record.images[-1],
            "index_from": record.index_from,
            "size_bytes": record.data_size,
            "present_bytes": present * BLOCK,
            "blocks": record.blocks,
            "blocks_present": present,
            "waiting_readers": layer.waiting() if layer else 0,
            **asdict(layer.tally if layer else Tally()),
        }


def _layers(request: Mapping[str, Any]) -> list[Digest]:
    """All layers of the image, from the bottom up, as far as a call names them."""
    return [Digest(digest) for digest in request.get("layers", ())]


def _is_open_elsewhere(beginning: str, processes: Path) -> bool:
    """Whether another process of this daemon has a file open whose path begins like this."""
    pids = {int(row["pid"]) for row in json.loads(processes.read_text())} - {os.getpid(), 0}
    for pid in pids:
        with contextlib.suppress(FileNotFoundError):  # it has ended, or closed one while we looked
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    if os.readlink(f"/proc/{pid}/fd/{number}").startswith(beginning):
                        return True
    return False


def _looked_at(directory: Path) -> contextlib.closing[LayerFiles]:
    """The layer's files for a look."""
    return contextlib.closing(LayerFiles(directory))


def main(config: Config, ring: Ring, device: int, doorbell: int, passed: int) -> None:
    """Be the fetch process of the daemon until it is killed. `passed`: of `PassedMemory`."""
    access = RegistryAccess(config, PassedMemory(passed))
    registry = access.registry
    sources = Sources(config, registry)
    process = FetchProcess(
        config,
        ring,
        device,
        doorbell,
        sources.indexes,
        registry.blob,
        lambda image: parse_reference(image).api_host,
        sources.hot,
        sources.images.layers,
        sources.refused,
    )
    Server(Path(config.run) / "fetch.sock", {**process.ops, **access.ops})
    process.run()
