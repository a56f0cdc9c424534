"""The service process: containerd's socket, the mounts, and the socket that `bootseer status` asks.

It holds the FUSE mount but not the connection, so it may wait for reads through it and still be killed. Killed, it
loses nothing: snapshots are in SQLite, mounts stay, a successor takes up both.
"""

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from snapshotter.admission import Admission
from snapshotter.attach import Attacher, Capabilities
from snapshotter.blockstore import BlockStore
from snapshotter.cache import CachedLayer, inventory, refuse_if_used
from snapshotter.config import Config
from snapshotter.errors import NotFound, Precondition, SnapshotterError
from snapshotter.eviction import Evictor
from snapshotter.hotpages import HotPages
from snapshotter.hotstore import HotStore
from snapshotter.layers import Layers, NoLayers
from snapshotter.lazyswitch import LazySwitch
from snapshotter.model import Digest
from snapshotter.record.log import directory
from snapshotter.record.recorder import Recorder
from snapshotter.record.records import Records
from snapshotter.rpc import Handler, Server
from snapshotter.supervise.memory import PassedMemory
from snapshotter.supervise.sockets import taken
from snapshotter.version import VERSION
from snapshotter.workload.starts import Starts

from .containers import ContainerdContainers
from .explainer import explain_container
from .ordinary import LazyRules
from .pullaccess import PullAccess
from .service import serve
from .snapshots import Snapshots
from .tasks import ContainerdTasks, NoTasks

__all__ = ["main"]

_log = logging.getLogger(__name__)


def main(config: Config, mount_fd: int, ready: Callable[[], None], held: Mapping[str, int], passed: int) -> None:
    """Serve until SIGTERM, on the sockets `held` by the supervisor; `ready` is called when containerd is answered.
    `passed`: of `PassedMemory`."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    root, run = Path(config.root), Path(config.run)
    mount = config.mount
    store = BlockStore(root)
    layers: Layers | NoLayers
    recorder: Recorder | None = None
    starts: Starts | None = None
    containers = ContainerdContainers(Path(config.containerd.address)) if config.containerd.address else None
    try:
        attacher = Attacher(
            root, mount_fd, mount.attach, mount.readahead_cold_kib, mount.readahead_warm_kib, Capabilities.probe()
        )
        admission = Admission(config.fetch.waiting_pulls, _WORKERS - _SPARE_WORKERS)
        layers = Layers(store, run / "fetch.sock", attacher, admission)
        if config.hotset.prefetch:
            HotPages(store.layers, run / "fetch.sock", attacher).start()
        records = Records(root, HotStore(root), config.workload)
        recorder = _recorder(config, store, attacher, layers, records)
        starts = Starts(config, recorder, records, layers, containers)
    except Precondition as error:  # no EROFS, no loop devices: images are ordinary ones, which is no failure
        _log.error("service.ordinary_only reason=%r", str(error))
        layers = NoLayers(str(error))
    rules = LazyRules(LazySwitch(root), config.lazy.include, config.lazy.exclude)
    access = PullAccess(config, PassedMemory(passed), lambda: [layer.ref.image for layer in snapshots.lazy_layers()])
    snapshots = Snapshots(root, layers, rules.refusal, access.find_layer, starts, on_damage=stop.set)
    cache = _Cache(store, layers, snapshots)
    evictor: Evictor | None = None
    if isinstance(layers, Layers):
        evictor = Evictor(config.cache, root, cache.layers, cache.remove, layers.expected, layers.is_refused)
    ops: dict[str, Handler] = {
        "status": lambda request: {
            **_status(config, layers, snapshots, recorder, evictor),
            "workloads": starts.status() if starts else [],
        },
        "cache": lambda request: cache.rows(),
        "cache-remove": lambda request: cache.remove(request["name"]),
        "cache-doubt": lambda request: layers.doubt(request["name"], request["runs"]),
        "explain": lambda request: explain_container(snapshots, layers, starts, request),
    }
    if recorder is not None:
        recorder.load({snapshot.key for snapshot in snapshots.select()})
        ops |= _record_ops(recorder)
    control = Server(config.control_path, ops, taken(held, "socket-control", config.control_path))
    # containers that still run get their layers back before containerd is served; a slow layer holds up no other
    restored = threading.Thread(target=_restore, args=(snapshots, layers, recorder), name="restore", daemon=True)
    restored.start()
    restored.join(timeout=_RESTORE_S)
    server = serve(snapshots, taken(held, "socket-containerd", config.socket_path), _WORKERS)
    access.serve(held)
    if containers is not None and starts is not None:
        containers.listen(starts.created)
    _log.info("service.ready socket=%s pid=%d", config.socket_path, os.getpid())
    ready()
    if evictor is not None:
        evictor.start()
    while not stop.wait(_COPY_S):
        snapshots.keep_copy()
    if evictor is not None:
        evictor.close()
    access.close()
    server.stop(grace=1.0).wait()
    control.close()
    if containers is not None:
        containers.close()
    if starts is not None:
        starts.close()
    if recorder is not None:
        recorder.close()
    snapshots.close()


_RESTORE_S = 2.0
_WORKERS = 256  # threads for containerd's calls; made as they are needed
_SPARE_WORKERS = 64  # of them, those that never wait for a layer to come in
_COPY_S = 2.0  # what a damaged snapshot store may lack of the latest


def _recorder(config: Config, store: BlockStore, attacher: Attacher, layers: Layers, records: Records) -> Recorder:
    root, address = Path(config.root), config.containerd.address
    return Recorder(
        directory(root),
        store,
        attacher,
        layers.hot_state,
        records,
        ContainerdTasks(Path(address)) if address else NoTasks(),
        config.record,
        Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    )


def _record_ops(recorder: Recorder) -> dict[str, Handler]:
    """What `bootseer record` asks for, by the name of the snapshot in its namespace."""
    return {
        "record-arm": lambda it: recorder.arm(
            it["namespace"], it["name"], it["workload"], it["manifest"], float(it["window_s"])
        ),
        "record-progress": lambda it: recorder.progress(it["namespace"], it["name"]),
        "record-end": lambda it: recorder.end(it["namespace"], it["name"], bool(it["keep"]), it["why"]),
    }


def _restore(snapshots: Snapshots, layers: Layers | NoLayers, recorder: Recorder | None) -> None:
    """Mount what snapshots need and is not mounted; unmount what is and nobody needs."""
    if recorder is not None:
        recorder.heal()
    snapshots.restore()
    snapshots.release_unused(layers.attached())


class _Cache:
    """`bootseer cache` on the running daemon."""

    def __init__(self, store: BlockStore, layers: Layers | NoLayers, snapshots: Snapshots) -> None:
        self._store = store
        self._layers = layers
        self._snapshots = snapshots

    def rows(self) -> list[dict[str, Any]]:
        """The layers of the store."""
        return [asdict(layer) for layer in self.layers()]

    def remove(self, name: str) -> None:
        """Remove one layer that nothing uses."""
        layer = next((layer for layer in self.layers() if layer.name == name), None)
        if layer is None:
            raise NotFound(f"there is no layer {name}")
        refuse_if_used(layer)
        # a broken layer has no known digest: its name is all that matters then, since none can come with that name
        digest = Digest(layer.digest or f"sha256:{name}")
        with self._snapshots.without_layer(digest):
            self._layers.remove(digest)

    def layers(self) -> list[CachedLayer]:
        """The same, as values."""
        return inventory(self._store, self._snapshots.layer_users(), self._layers.mounted())


def _status(
    config: Config,
    layers: Layers | NoLayers,
    snapshots: Snapshots,
    recorder: Recorder | None,
    evictor: Evictor | None,
) -> Mapping[str, Any]:
    processes = json.loads((Path(config.run) / "processes.json").read_text())
    for process in processes:
        process["rss_bytes"] = _rss(process["pid"])
    try:
        fetch = layers.status()
    except SnapshotterError as error:
        fetch = {"layers": [], "problem": str(error)}
    return {
        "version": VERSION,
        "pid": processes[0]["pid"],
        "processes": processes,
        "prepares": asdict(snapshots.counters()),
        "lazy_off_since": LazySwitch(Path(config.root)).off_since() or "",
        "ordinary": [asdict(row) for row in snapshots.ordinary()],
        "recordings": recorder.status() if recorder else {},
        "cache": evictor.status() if evictor else {},
        **fetch,
    }


def _rss(pid: int) -> int:
    """Resident bytes of a process, 0 when it has just ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (FileNotFoundError, ProcessLookupError):
        return 0
