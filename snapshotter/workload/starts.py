"""The starts of containers: each one's workload, whose own hot set comes first, who is recorded, who missed too much.

Stands between the snapshots and the recorder. The life of a start:
    prepared   its snapshot is there, its container is not known: `default` is on its way since the pull
    known      the container is known, by the event of its creation or when its mounts are asked for: its workload is
               chosen, and the fetch process told to bring that workload's own set first
    judged     it has ended: the snapshot is removed, `window_s` is over, or another container of the image starts.
               What was fetched on demand although a set served it is compared with what was read. From `stale_share`
               on the workload is *stale*, and its next container is recorded again.

A container is recorded when its image has no hot set at all (from its Prepare on, by the recorder's rule), when its
workload is stale, or when its workload has no set anywhere and the image's `default` was made here, of other workloads.
Where `default` came from elsewhere it is given a chance: whoever made it may have known this workload. A node that
publishes records a workload until its newest recordings agree (`publish.agreement`), `records` times at most; what a
person has recorded or imported stays as it is.

What was read is counted by the layers' devices, what was missed by the fetch process's journal (`judging`). Both count
all containers on the layers, since the kernel does not say who reads: therefore a start ends with the next one. A
judgement that is wrong costs one recording.

Locking: `_lock` guards the table. containerd and the fetch process are asked without it. Nothing here may keep a
container from starting: what fails is logged.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from blockindex.hotset import DEFAULT_WORKLOAD, HotSet, image_key
from snapshotter.blockstore import node_name
from snapshotter.config import Config
from snapshotter.errors import SnapshotterError
from snapshotter.model import Digest, LayerRef
from snapshotter.publish.agreement import agree
from snapshotter.record.recorder import Recorder, namespace_and_name
from snapshotter.record.records import Records

from .choice import Choice, WorkloadChoice
from .container import Container
from .judging import blocks_read, unforeseen
from .rules import parse_rules

__all__ = ["Containers", "HotBlocks", "Starts"]

_log = logging.getLogger(__name__)

_LEAST_MISSED = 64
"""Blocks: 256 KiB. A start that missed less is not worth a recording, whatever the share."""

_REMEMBERED = 256
_TICK_S = 1.0


class Containers(Protocol):
    """What containerd knows of containers."""

    def find(self, namespace: str, name: str) -> Container | None:
        """The container; None when there is none (yet), or nobody answers in time. Never raises."""


class HotBlocks(Protocol):
    """The fetch process, as `layers.Layers` knows it."""

    def promote(self, image: str, layers: Sequence[str], workload: str) -> str:
        """Have the image's hot set of this workload brought, before what else is hot. Answers at once whether there is
        one: "found", "none", or "unknown" while it is looked for. Never raises."""

    def hot_state(self, image: str, layers: Sequence[str], workload: str = DEFAULT_WORKLOAD) -> str:
        """As `promote`, and waits for the search as long as a container may wait."""

    def history(self, names: Sequence[str], since: float, until: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The journal of these layers between two times, and the prefetches. SnapshotterError."""

    def mounted(self) -> dict[str, str]:
        """Node name -> mount point."""


@dataclass(slots=True, eq=False)
class _Start:
    """`began`, `ended`: seconds since 1970, 0 for not yet; `read`, `read_then`: `blocks_read` of each layer at these
    times, by node name; `share` of the blocks that nobody had foreseen, once it is judged."""

    key: str
    image: str
    layers: tuple[Digest, ...]
    choice: Choice | None = None
    began: float = 0.0
    ended: float = 0.0
    read: Mapping[str, int] = field(default_factory=dict)
    read_then: Mapping[str, int] = field(default_factory=dict)
    is_recorded: bool = False
    is_removed: bool = False
    is_judged: bool = False
    share: float | None = None
    learning: threading.Lock = field(default_factory=threading.Lock)

    @property
    def image_key(self) -> str:
        return image_key(self.layers)

    @property
    def names(self) -> list[str]:
        return [node_name(digest) for digest in dict.fromkeys(self.layers)]


class Starts:
    """See the module. What the snapshots see is `containerd.recordings.Recordings`. Thread-safe."""

    def __init__(
        self, config: Config, recorder: Recorder, records: Records, hot: HotBlocks, containers: Containers | None
    ) -> None:
        """`containers` is None where no containerd can be asked: every container is `default` then."""
        self._config = config
        self._recorder = recorder
        self._records = records
        self._hot = hot
        self._containers = containers
        self._hotsets = records.hotsets
        self._choice = WorkloadChoice(parse_rules(config.workload.rules), records.hotsets)
        self._lock = threading.Lock()
        self._starts: dict[str, _Start] = {}  # by the snapshot's key
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="starts", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<Starts {len(self._starts)} known>"

    def close(self) -> None:
        """Judge no more."""
        self._stopping = True
        self._wake.set()
        self._thread.join(5)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def begin(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """See `Recordings`."""
        self._known(key, refs)
        return self._recorder.begin(key, refs)

    def private(self, key: str, refs: Sequence[LayerRef]) -> Mapping[Digest, Path]:
        """See `Recordings`."""
        if refs:
            start = self._known(key, refs)
            try:
                choice = self._learn(start)
                if choice is not None and self._is_to_be_recorded(start, choice):
                    self._recorder.record(key, refs, choice.workload, choice.argv)
            except Exception:  # border: a container starts whatever is wrong here
                _log.exception("workload.failed key=%s", key)
            private = self._recorder.private(key)
            start.is_recorded = start.is_recorded or bool(private)
            return private
        return self._recorder.private(key)

    def release(self, key: str) -> None:
        """See `Recordings`."""
        with self._lock:
            start = self._starts.get(key)
        if start is not None:
            start.is_removed = True
            self._end(start)
        self._recorder.release(key)

    # -- containers --------------------------------------------------------------------------------------------------

    def created(self, namespace: str, name: str) -> None:
        """containerd says that this container has been created. Never raises."""
        with self._lock:
            start = next((it for key, it in self._starts.items() if namespace_and_name(key) == (namespace, name)), None)
        try:
            if start is not None:
                self._learn(start)
        except Exception:  # border of the stream of events
            _log.exception("workload.failed key=%s", start.key if start is not None else name)

    def workload(self, key: str) -> str:
        """The workload of the container on this snapshot; empty where it is not known."""
        with self._lock:
            start = self._starts.get(key)
        return "" if start is None or start.choice is None else start.choice.workload

    def status(self) -> list[dict[str, Any]]:
        """What `bootseer status` shows, the newest last."""
        with self._lock:
            starts = [start for start in self._starts.values() if start.choice is not None]
        return [self._shown(start, start.choice) for start in starts if start.choice is not None]

    def _shown(self, start: _Start, choice: Choice) -> dict[str, Any]:
        return {
            "key": start.key,
            "image": start.image,
            "image_key": start.image_key,
            "workload": choice.workload,
            "why": choice.why,
            "recorded": start.is_recorded,
            "missed_share": start.share,
            "stale_share": self._records.stale(start.image_key, choice.workload),
        }

    def _known(self, key: str, refs: Sequence[LayerRef]) -> _Start:
        with self._lock:
            start = self._starts.get(key)
            if start is None or start.is_removed:
                self._starts.pop(key, None)
                start = self._starts[key] = _Start(key, refs[-1].image, tuple(ref.digest for ref in refs))
                for old in list(self._starts)[:-_REMEMBERED]:
                    del self._starts[old]
            return start

    def _learn(self, start: _Start) -> Choice | None:
        """The start's workload, found out if need be; None when containerd does not know the container yet."""
        with start.learning:
            if start.choice is not None or self._containers is None:
                return start.choice
            container = self._containers.find(*namespace_and_name(start.key))
            if container is None:
                return None
            choice = self._choice.choose(container, start.image_key)
            with self._lock:
                before = [it for it in self._starts.values() if it.began and it.image_key == start.image_key]
            for other in before:
                self._end(other)
            start.began, start.read = time.time(), self._read(start)
            start.choice = choice
            _log.info(
                "workload.chosen key=%s image=%s workload=%s why=%r",
                start.key, start.image, choice.workload, choice.why,
            )  # fmt: skip
            self._recorder.name(start.key, choice.workload, choice.argv)
            self._hot.promote(start.image, start.layers, choice.workload)
        self._wake.set()
        return choice

    def _own_set(self, key: str, workload: str) -> HotSet | None:
        pack = self._hotsets.load(key, workload)
        return None if pack is None else pack.hotset

    def _is_to_be_recorded(self, start: _Start, choice: Choice) -> bool:
        """By the rule in the module's docstring, but for images without any hot set."""
        key, workload = start.image_key, choice.workload
        if not self._config.record.auto:
            return False
        if self._records.stale(key, workload) is not None:
            return True
        own = self._own_set(key, workload)
        if own is not None and not own.carried_from:  # one that was carried is a guess
            return self._lacks_evidence(key, workload)
        if not self._records.mixes_default(key):
            return False
        return self._hot.hot_state(start.image, start.layers, workload) == "none"

    def _lacks_evidence(self, key: str, workload: str) -> bool:
        """Whether the workload's set, which is here, would be published, were there more recordings that agree."""
        if not self._config.publish.enabled:
            return False
        records = self._records.of_workload(key, workload)
        if not records or any(record.manifest for record in records):  # a person's: only commands name the manifest
            return False
        return len(records) < self._config.workload.records and not agree(records, self._config.publish.min_records)

    # -- judging -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                starts = [start for start in self._starts.values() if start.began and not start.is_judged]
            for start in starts:
                if start.began and time.time() > start.began + self._config.record.window_s:
                    self._end(start)
                if start.ended:
                    self._judge(start)
                    start.is_judged = True
            self._wake.wait(_TICK_S if starts else None)
            self._wake.clear()

    def _end(self, start: _Start) -> None:
        """The start is over, if it is not yet: to be judged."""
        if not start.ended:
            start.read_then = self._read(start)
            start.ended = time.time()
            self._wake.set()

    def _judge(self, start: _Start) -> None:
        if start.choice is None or start.is_recorded or not self._config.hotset.prefetch:
            return
        try:
            names, read = start.names, start.read_then
            journal, _ = self._hot.history(names, start.began, start.ended)
            key, workload = start.image_key, start.choice.workload
            hotset = self._own_set(key, workload) or self._own_set(key, DEFAULT_WORKLOAD)
            missed = unforeseen(journal["waits"], names, hotset)
            if journal["whole_since"] > start.began:
                return
            blocks = sum(read[name] - start.read[name] for name in names if name in read and name in start.read)
            if not blocks and hotset is not None:  # no devices to ask: what is hot has been read
                blocks = hotset.block_count
            start.share = round(missed / max(blocks, missed, 1), 3)
            if missed >= _LEAST_MISSED and start.share >= self._config.workload.stale_share:
                self._records.mark_stale(key, workload, start.share)
                _log.info(
                    "workload.stale key=%s image=%s workload=%s missed=%d share=%.3f",
                    start.key, start.image, workload, missed, start.share,
                )  # fmt: skip
        except (SnapshotterError, OSError) as error:
            _log.warning("workload.not_judged key=%s error=%r", start.key, str(error))
        except Exception:  # border of the thread
            _log.exception("workload.not_judged key=%s", start.key)

    def _read(self, start: _Start) -> dict[str, int]:
        """`blocks_read` of the start's layers, by node name."""
        mounts = self._hot.mounted()
        counts = {name: blocks_read(Path(mounts[name])) for name in start.names if name in mounts}
        return {name: count for name, count in counts.items() if count is not None}
