"""Recordings of this node: which snapshots are recorded, from their Prepare until they are gone.

While a recording is open its snapshot stands on private mounts of its layers (`attach`): FUSE sees what a page cache
asks for, and only one that is the container's own shows what the container touches, all of it, and nothing of others.
The block server notes the reads in the slot's log (`log`); when and how a recording ends is in `recording`.

The life of a slot:
    free      -> recording   `begin`: the first container of an image without a hot set, or one that a command armed;
                             `record`: one of a workload that is to be recorded (`workload.starts` knows)
    recording -> ended       the rule, or a command: the hot set is saved, or the recording thrown away
    any       -> free        `release`: the snapshot is removed or committed
The snapshot keeps its private mounts when the recording has ended: containers run on them. Nothing here may keep a
container from starting: what fails is logged, and the shared mounts are used.

Order of things, so that a killed service loses no track: the slot's file is written before its log is opened and before
anything is mounted, and deleted after all is unmounted. `load`, at the start, takes up the slots whose snapshots are
there, and clears away the rest, of another boot too. The hot set is saved before the slot's file says that the
recording has ended; one that was killed in between throws it away.

Locking: `_lock` guards the tables; nothing waits under it. Each slot's `reading` is held while its log is read and its
recording ended. `_lock` may be taken under `reading`, not the other way round.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from blockindex.errors import BlockIndexError
from blockindex.hotset import DEFAULT_WORKLOAD, HotLayer, hotset_name, image_key
from snapshotter.attach import Attacher
from snapshotter.blockstore import BlockStore, LayerFiles, LayerRecord, node_name
from snapshotter.config import RecordConfig
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.killpoints import reach
from snapshotter.model import Digest, LayerRef

from .log import SLOTS, LogReader, Logs
from .recording import End, Facts, Recording, Task, TaskState, Touched, ending
from .records import Records

__all__ = ["Recorder", "Tasks", "namespace_and_name"]

_log = logging.getLogger(__name__)

_MOST_OPEN = 8
"""Recordings at once, by themselves: each costs loop devices, and page cache that others cannot share."""
_TICK_S = 0.2
_TWO_DIGITS = "[0-9a-f][0-9a-f]"
_ARMED_S = 60.0
_MOUNTS_AT_ONCE = 4


class Tasks(Protocol):
    """What containerd knows of containers, by the keys of their snapshots."""

    def watch(self) -> None:
        """Containers will be asked about: begin to listen for their ends."""

    def unwatch(self) -> None:
        """They will not be, for a while."""

    def task(self, key: str, seen: bool) -> Task:
        """The first process of the container on this snapshot; `seen`: it is known to have run. Never raises."""


@dataclass(frozen=True, slots=True)
class _Armed:
    """A command will start a container soon that is to be recorded whatever is known of its image."""

    workload: str
    manifest: str
    window_s: float
    until_s: float


@dataclass(slots=True, eq=False)
class _Slot:
    recording: Recording
    touched: Touched
    reader: LogReader | None = None
    busy_s: float = 0.0
    removed_s: float | None = None
    task: Task = field(default=Task(TaskState.UNKNOWN))
    outcome: dict[str, Any] | None = None
    is_freed: bool = False
    reading: threading.Lock = field(default_factory=threading.Lock)


class Recorder:
    """See the module. Thread-safe."""

    def __init__(
        self,
        directory: Path,
        store: BlockStore,
        attacher: Attacher,
        hot_state: Callable[[str, Sequence[str]], str],
        records: Records,
        tasks: Tasks,
        config: RecordConfig,
        boot_id: str,
    ) -> None:
        """`directory`: see `log`. `hot_state(image, layers)` says "none" when there is no hot set of the image, and
        anything else when there is one or nobody knows yet. `records`: where recordings go."""
        self._directory = directory
        self._store = store
        self._attacher = attacher
        self._hot_state = hot_state
        self._records = records
        self._tasks = tasks
        self._config = config
        self._boot_id = boot_id
        self._logs = Logs(directory)
        self._lock = threading.Lock()
        self._slots: dict[int, _Slot] = {}
        self._by_key: dict[str, _Slot] = {}
        self._armed: dict[tuple[str, str], _Armed] = {}
        self._last = 0
        self._used: set[int] = set()  # slots that may be held still: to look costs too much for every Prepare
        self._counts = {"opened": 0, "kept": 0, "discarded": 0}
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __repr__(self) -> str:
        return f"<Recorder {len(self._open())} open, {len(self._slots)} slots taken, {self._counts}>"

    # -- life --------------------------------------------------------------------------------------------------------

    def load(self, keys: Set[str]) -> None:
        """At the start, before containerd is served: take up what an earlier process left; `keys` are those of all
        snapshots. Mounts are looked after by `heal`."""
        for path in sorted(self._directory.glob(f"{_TWO_DIGITS}.json")):
            number = int(path.stem, 16)
            try:
                recording = Recording.load(path)
                if recording.boot_id != self._boot_id or recording.key not in keys:
                    raise NotFound("its snapshot, or the boot it was made in, is gone")
                slot = _Slot(recording, Touched(recording, _name_of), busy_s=time.monotonic())
                if recording.is_open:
                    slot.reader = self._logs.reader(number)
            except (SnapshotterError, OSError) as error:
                _log.info("record.dropped slot=%02x reason=%r", number, str(error))
                self._clear(number)
                continue
            self._slots[number] = self._by_key[recording.key] = slot
            if slot.reader is not None and not self._logs.is_open(number):
                self._end(slot, End(False, "the service was killed while it ended, or its log failed"))
        self._used |= self._attacher.held_slots()
        for log in self._directory.glob(f"{_TWO_DIGITS}.log"):
            if int(log.stem, 16) not in self._slots:
                self._clear(int(log.stem, 16))
        self._thread.start()
        self._wake.set()

    def heal(self) -> None:
        """Have the private mounts of all slots again, on this daemon's connection, and no others."""
        with self._lock:
            slots = list(self._slots.values())
        for slot in slots:
            self._mounted(slot)
        for name in self._attacher.private():
            if int(name.partition(".")[2], 16) not in self._slots:
                try:
                    self._attacher.detach_private(name)
                except OSError as error:
                    _log.warning("record.not_unmounted mount=%s error=%r", name, str(error))

    def close(self) -> None:
        """Stop watching. Recordings stay open, a successor goes on with them."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5)
        self._tasks.unwatch()

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """A container is to get a snapshot on these layers (from the lowest up, all mounted). Where it is to be
        recorded: the private mount of each; else nothing. Whoever gets something calls `release` in the end."""
        with self._lock:
            armed = self._armed.pop(namespace_and_name(key), None)
        if armed is not None and armed.until_s < time.monotonic():
            armed = None
        try:
            if armed is None and not self._is_wanted(refs):
                return {}
            slot = self._reserve(self._recording(key, refs, armed))
            if slot is None:
                return {}
        except (SnapshotterError, OSError) as error:
            _log.warning("record.not_opened key=%s reason=%r", key, str(error))
            return {}
        return self._begun(slot)

    def _begun(self, slot: _Slot) -> Mapping[Digest, Path]:
        mounted = self._opened(slot)
        its = slot.recording
        reach("service.recording")
        if mounted:
            _log.info("record.opened key=%s slot=%02x image=%s workload=%s", its.key, its.slot, its.image, its.workload)
            self._wake.set()
        else:
            self.release(its.key)
        return mounted

    def record(self, key: str, refs: Sequence[LayerRef], workload: str, argv: str) -> None:
        """Record the container on this snapshot, which has been prepared and whose task is not started: `private` says
        where its layers are then. Does nothing when it is recorded, or another one of the image and workload is."""
        try:
            slot = self._reserve(replace(self._recording(key, refs, None), workload=workload, argv=argv))
        except (SnapshotterError, OSError) as error:
            _log.warning("record.not_opened key=%s reason=%r", key, str(error))
            return
        if slot is not None:
            self._begun(slot)

    def name(self, key: str, workload: str, argv: str) -> None:
        """The workload of the container on this snapshot is known now, and the digest of its arguments. (A command has
        named the workload itself.)"""
        with self._lock:
            slot = self._by_key.get(key)
        if slot is None:
            return
        with slot.reading:
            its = slot.recording
            named = replace(its, argv=argv, workload=its.workload if its.commanded else workload)
            if slot.reader is not None and named != its:
                slot.recording = named
                with contextlib.suppress(OSError):
                    named.save(self._file(its.slot))

    def private(self, key: str) -> Mapping[Digest, Path]:
        """The private mounts of a snapshot that has some, mounted again if need be; nothing where they cannot be."""
        with self._lock:
            slot = self._by_key.get(key)
        return {} if slot is None else self._mounted(slot)

    def release(self, key: str) -> None:
        """The snapshot is gone, or is no container's any more. A recording that is open ends by the rule."""
        with self._lock:
            slot = self._by_key.pop(key, None)
        if slot is None:
            return
        slot.removed_s = time.monotonic()
        self._attacher.detach_private(f"*.{slot.recording.slot:02x}")
        with slot.reading:  # one that is just ending writes the slot's file once more
            has_ended = slot.reader is None
        if has_ended:
            self._free(slot)
        self._wake.set()

    # -- commands ----------------------------------------------------------------------------------------------------

    def arm(self, namespace: str, name: str, workload: str, manifest: str, window_s: float) -> None:
        """Record the container that will get the snapshot `name` in the namespace within a minute, until a command ends
        it; `window_s` bounds that. InvalidArgument for a workload that is no name."""
        try:
            hotset_name(image_key(()), workload)
        except BlockIndexError as error:
            raise InvalidArgument(str(error)) from error
        with self._lock:
            now = time.monotonic()
            self._armed = {it: armed for it, armed in self._armed.items() if armed.until_s > now}
            self._armed[(namespace, name)] = _Armed(workload, manifest, window_s, now + _ARMED_S)

    def progress(self, namespace: str, name: str) -> dict[str, Any]:
        """How far the recording of this snapshot is. NotFound when it has none."""
        slot = self._find(namespace, name)
        with slot.reading:
            self._advance(slot)
        if slot.reader is not None and self._is_waiting(slot):
            slot.busy_s = time.monotonic()
        return self._shown(slot)

    def end(self, namespace: str, name: str, keep: bool, why: str) -> dict[str, Any]:
        """End the recording of this snapshot now; says what has become of it, as `progress` does. NotFound when it has
        none."""
        slot = self._find(namespace, name)
        with slot.reading:
            self._advance(slot)
            keep = keep and not self._logs.failed(slot.recording.slot)
        self._end(slot, End(keep and slot.touched.blocks > 0, why))
        return self._shown(slot)

    def status(self) -> dict[str, Any]:
        """What `bootseer status` shows."""
        return {"open": [self._shown(slot) for slot in self._open()], **self._counts}

    # -- opening -----------------------------------------------------------------------------------------------------

    def _is_wanted(self, refs: Sequence[LayerRef]) -> bool:
        if not self._config.auto or not refs:
            return False
        digests = [ref.digest for ref in refs]
        key = image_key(digests)
        with self._lock:
            recorded = {_key_of(slot.recording) for slot in self._slots.values() if slot.recording.is_open}
        if len(recorded) >= _MOST_OPEN or key in recorded:
            return False
        hotsets = self._records.hotsets
        packs = [hotsets.load(key, workload) for workload in hotsets.find(key)]
        if any(pack is not None and not pack.hotset.carried_from for pack in packs):  # one that was carried is a guess
            return False
        return self._hot_state(refs[-1].image, digests) == "none"

    def _recording(self, key: str, refs: Sequence[LayerRef], armed: _Armed | None) -> Recording:
        records = [self._record(ref.digest) for ref in refs]
        layers = [HotLayer(record.digest, record.blocks, record.layout) for record in records]
        return Recording(
            slot=0,
            key=key,
            image=refs[-1].image,
            layers=tuple(dict.fromkeys(layers)),
            workload=armed.workload if armed else DEFAULT_WORKLOAD,
            manifest=armed.manifest if armed else "",
            commanded=armed is not None,
            window_s=armed.window_s if armed else self._config.window_s,
            began_s=time.monotonic(),
            boot_id=self._boot_id,
        )

    def _reserve(self, recording: Recording) -> _Slot | None:
        """Take a free slot, not one that was used just before; None when there is none, or when another recording of
        the image was faster."""
        with self._lock:
            if recording.key in self._by_key:
                return None
            its = [slot.recording for slot in self._slots.values() if slot.recording.is_open]
            if not recording.commanded and (
                len(its) >= _MOST_OPEN or _work_of(recording) in {_work_of(other) for other in its}
            ):
                return None
            for step in range(1, len(SLOTS) + 1):
                number = (self._last + step - 1) % len(SLOTS) + 1
                if number not in self._slots and not self._is_held(number):
                    break
            else:
                return None
            self._last = number
            recording = replace(recording, slot=number)
            slot = _Slot(recording, Touched(recording, _name_of))
            self._slots[number] = self._by_key[recording.key] = slot
            return slot

    def _is_held(self, number: int) -> bool:
        """Whether something of the slot's last container still stands on its files, although they are unmounted: it
        would be recorded with the next one."""
        return number in self._used and bool(self._attacher.holders(f"*.{number:02x}"))

    def _opened(self, slot: _Slot) -> Mapping[Digest, Path]:
        """Open the log, then mount; nothing when one of it fails."""
        try:
            slot.recording.save(self._file(slot.recording.slot))
            reach("service.slot-taken")
            self._logs.open(slot.recording.slot)
            reach("service.log-opened")
            slot.reader = self._logs.reader(slot.recording.slot)
            self._count("opened")
        except OSError as error:
            _log.warning("record.not_opened key=%s reason=%r", slot.recording.key, str(error))
            return {}
        return self._mounted(slot)

    def _mounted(self, slot: _Slot) -> Mapping[Digest, Path]:
        """The private mount of each layer. Where one cannot be mounted: nothing, and what was recorded is worth
        nothing, for the container will use the shared mounts."""
        digests = [Digest(layer.digest) for layer in slot.recording.layers]
        try:
            with ThreadPoolExecutor(_MOUNTS_AT_ONCE, thread_name_prefix="private") as pool:
                paths = list(pool.map(lambda digest: self._mount(digest, slot.recording.slot), digests))
        except (SnapshotterError, OSError) as error:
            _log.warning("record.not_mounted key=%s reason=%r", slot.recording.key, str(error))
            if slot.reader is not None:
                self._end(slot, End(False, "a layer could not be mounted privately"))
            return {}
        if slot.removed_s is not None:  # `release` may have unmounted before we mounted
            self._attacher.detach_private(f"*.{slot.recording.slot:02x}")
            return {}
        return dict(zip(digests, paths, strict=True))

    def _mount(self, digest: Digest, slot: int) -> Path:
        return self._attacher.attach(self._record(digest), slot)

    def _record(self, digest: Digest) -> LayerRecord:
        directory = self._store.find(digest)
        if directory is None:
            raise NotFound(f"{digest} is not in the block store")
        return LayerRecord.load(directory)

    # -- going on, and ending ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            slots = self._open()
            if slots:
                self._tasks.watch()
                for slot in slots:
                    self._tick(slot)
            else:
                self._tasks.unwatch()
            self._wake.wait(_TICK_S if slots else None)
            self._wake.clear()

    def _tick(self, slot: _Slot) -> None:
        its = slot.recording
        try:
            slot.task = self._tasks.task(its.key, its.started_s > 0)
            with slot.reading:
                self._advance(slot)
                if slot.task.state is TaskState.RUNNING and not slot.recording.started_s:
                    slot.recording = replace(slot.recording, started_s=time.monotonic())
                    slot.recording.save(self._file(its.slot))
                failed = self._logs.failed(its.slot)
                facts = Facts(slot.task, slot.removed_s, slot.touched.new_s, slot.busy_s, failed)
            end = ending(slot.recording, facts, self._config.quiet_s, time.monotonic())
            if end is not None and end.is_quiet and self._is_waiting(slot):
                slot.busy_s = time.monotonic()
            elif end is not None:
                self._end(slot, end)
        except Exception as error:  # border of the thread: one recording must not end the others
            _log.exception("record.failed key=%s", its.key)
            self._end(slot, End(False, f"unexpected {type(error).__name__}, see the log"))

    def _is_waiting(self, slot: _Slot) -> bool:
        """Whether a block that was touched is not on the node yet: somebody waits for it, or was killed waiting."""
        with slot.reading:
            touched = slot.touched.extents()
        for digest, runs in touched.items():
            with contextlib.closing(LayerFiles(self._store.layers / _name_of(digest))) as files:
                if not all(files.has(start, end) for start, end in runs):
                    return True
        return False

    def _advance(self, slot: _Slot) -> None:
        if slot.reader is not None:
            for touch in slot.reader.read():
                slot.touched.add(touch)

    def _end(self, slot: _Slot, end: End) -> None:
        """End the recording, if it is open: save what it has seen, or throw it away; free what belongs to it."""
        with slot.reading:
            if slot.reader is None:
                return
            self._logs.stop(slot.recording.slot)
            reach("service.log-closed")
            self._advance(slot)
            slot.reader.close()
            slot.reader = None
            slot.outcome = self._outcome(slot, end)
            reach("service.record-kept")
            slot.recording = replace(slot.recording, is_open=False)
            with contextlib.suppress(OSError):  # a full disk: a successor throws it away once more
                slot.recording.save(self._file(slot.recording.slot))
            reach("service.record-ended")
            with contextlib.suppress(OSError):
                self._logs.delete(slot.recording.slot)
        if slot.removed_s is not None:
            self._free(slot)
        else:
            self._warm(slot)

    def _outcome(self, slot: _Slot, end: End) -> dict[str, Any]:
        its, touched = slot.recording, slot.touched
        seconds = round(time.monotonic() - its.began_s, 3)
        extents, path = 0, ""
        if end.keep:
            try:
                record = replace(touched.hotset(), workload=its.workload, argvs=(its.argv,) if its.argv else ())
                extents = len(record.extents)
                path = str(self._records.keep(record, its.commanded).path)
            except (SnapshotterError, BlockIndexError, OSError) as error:
                end = End(False, f"it could not be saved: {error}")
        self._count("kept" if end.keep else "discarded")
        if end.keep:
            _log.info(
                "record.kept key=%s image=%s workload=%s blocks=%d bytes=%d extents=%d seconds=%.3f why=%r",
                its.key, its.image, its.workload, touched.blocks, touched.blocks * 4096, extents, seconds, end.why,
            )  # fmt: skip
        else:
            _log.info(
                "record.discarded key=%s image=%s workload=%s blocks=%d seconds=%.3f why=%r",
                its.key, its.image, its.workload, touched.blocks, seconds, end.why,
            )  # fmt: skip
        ended = {"kept": end.keep, "why": end.why, "extents": extents, "seconds": seconds}
        return {**ended, "path": path, "quiet_s": None}

    def _warm(self, slot: _Slot) -> None:
        """The container goes on with these mounts: read far ahead where all is there."""
        for layer in slot.recording.layers:
            digest = Digest(layer.digest)
            try:
                with contextlib.closing(LayerFiles(self._store.layers / node_name(digest))) as files:
                    if files.complete():
                        self._attacher.warm(digest, slot.recording.slot)
            except (SnapshotterError, OSError) as error:
                _log.warning("record.not_warmed layer=%s error=%r", digest, str(error))

    def _free(self, slot: _Slot) -> None:
        number = slot.recording.slot
        with self._lock:
            if slot.is_freed:
                return
            slot.is_freed = True
        self._attacher.detach_private(f"*.{number:02x}")
        reach("service.slot-unmounted")
        self._clear(number)
        with self._lock:
            self._used.add(number)
            del self._slots[number]

    def _clear(self, number: int) -> None:
        """Leave nothing of a slot on the disk; its file goes last."""
        self._logs.stop(number)
        with contextlib.suppress(OSError):
            self._logs.delete(number)
        reach("service.slot-cleared")
        self._file(number).unlink(missing_ok=True)

    # -- looking -----------------------------------------------------------------------------------------------------

    def _open(self) -> list[_Slot]:
        with self._lock:
            return [slot for slot in self._slots.values() if slot.reader is not None]

    def _find(self, namespace: str, name: str) -> _Slot:
        with self._lock:
            for key, slot in self._by_key.items():
                if namespace_and_name(key) == (namespace, name):
                    return slot
        raise NotFound(f"no recording of {name} in the namespace {namespace}")

    def _shown(self, slot: _Slot) -> dict[str, Any]:
        its, now = slot.recording, time.monotonic()
        outcome = slot.outcome or {"seconds": round(now - its.began_s, 3)}
        new_s = slot.touched.new_s
        return {
            "key": its.key,
            "image": its.image,
            "image_key": _key_of(its),
            "workload": its.workload,
            "slot": its.slot,
            "task": slot.task.state.value,
            "open": slot.outcome is None,
            "blocks": slot.touched.blocks,
            "bytes": slot.touched.blocks * 4096,
            "quiet_s": None if new_s is None else round(now - max(new_s, slot.busy_s), 3),
            **outcome,
        }

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _file(self, number: int) -> Path:
        return self._directory / f"{number:02x}.json"


def namespace_and_name(key: str) -> tuple[str, str]:
    """Namespace and the client's own key: containerd hands keys on as `<namespace>/<number>/<key>`."""
    namespace, _, rest = key.partition("/")
    number, _, name = rest.partition("/")
    return (namespace, name) if number.isdecimal() and name else ("", key)


def _key_of(recording: Recording) -> str:
    return image_key([layer.digest for layer in recording.layers])


def _work_of(recording: Recording) -> tuple[str, str]:
    return _key_of(recording), recording.workload


def _name_of(digest: str) -> str:
    return node_name(Digest(digest))
