"""The snapshotter: containerd's rules for snapshots, over the store, the directories and the lazy layers.

It knows nothing of gRPC. State of a snapshot (all transitions are in this file):
    prepare            -> active      view -> view
    commit             active -> committed
    prepare of a layer -> committed at once, lazy, when the provider serves the layer
    remove             any without children -> gone
Only committed snapshots may be parents, and they never change but for their labels.

Order of things: what takes time (provider, directory walks) comes before the write transaction, which checks again what
it relies on; directories are renamed into place inside it; garbage is deleted, and layers are given back, after it. So
a crash at any point leaves a directory or a mounted layer too many, never a row without its files.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from snapshotter.containerd import labels as labelling
from snapshotter.containerd.dirs import SnapshotDirs, disk_usage
from snapshotter.containerd.filters import compile_filters
from snapshotter.containerd.layerchoice import LayerChoice, cannot_find
from snapshotter.containerd.lazy import LazyLayers
from snapshotter.containerd.metadata import Metadata, View
from snapshotter.containerd.model import Counters, Kind, LazyLayer, Mount, Snapshot, Usage
from snapshotter.containerd.ordinary import OrdinaryLayers, OrdinaryPulls, Reason, Refusal
from snapshotter.containerd.overlay import check_path, mounts
from snapshotter.containerd.recordings import NoRecordings, Recordings
from snapshotter.containerd.skeleton import build_skeleton
from snapshotter.errors import AlreadyExists, InvalidArgument, NotFound, Precondition, SnapshotterError
from snapshotter.killpoints import reach
from snapshotter.model import Digest, LayerProvider, LayerRef, MountedLayer

__all__ = ["Snapshots"]

_log = logging.getLogger(__name__)

_Outcome = Literal["lazy", "reused", "ordinary", "refused", "fallback", "containers"]


class Snapshots:
    """All snapshots of one snapshotter, kept below `root` (`metadata.db` and `s/`). Thread-safe.

    Raises NotFound, AlreadyExists, InvalidArgument and Precondition as containerd expects them; and whatever the
    provider raises, where a mounted layer is needed to go on.
    """

    def __init__(
        self,
        root: Path,
        provider: LayerProvider,
        refusal: Callable[[str], Refusal | None] = lambda image: None,
        find_layer: Callable[[str, str], LayerRef] = cannot_find,
        recordings: Recordings | None = None,
        on_damage: Callable[[], None] = lambda: None,
    ) -> None:
        """`refusal` and `find_layer`: see `LayerChoice`. Without `recordings` nothing is recorded. `on_damage`:
        called when the store turns out to be damaged; a new start will repair what can be repaired."""
        check_path(root)
        root.mkdir(mode=0o711, parents=True, exist_ok=True)
        self._dirs = SnapshotDirs(root)
        self._metadata = Metadata(root / "metadata.db", on_damage, self._dirs.ids(), self._dirs.keep_unknown)
        self._layers = LazyLayers(provider, self._uses_layer)
        self._recordings = recordings or NoRecordings()
        self._ordinary = OrdinaryPulls()
        self._choice = LayerChoice(refusal, find_layer, self._ordinary)
        self._counters = Counters()
        self._counting = threading.Lock()

    def prepare(self, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A new active snapshot on `parent` (empty: none), and how to mount it.

        For an image layer the provider can serve: its committed snapshot instead, and AlreadyExists to tell so. Blocks
        until the layer is mounted then.
        """
        outcome: _Outcome = "containers"
        if labelling.is_layer_unpack(key, labels):
            outcome = self._prepare_layer(key, parent, labels)
        if outcome in ("lazy", "reused"):
            self._count(outcome)
            raise AlreadyExists(f'target snapshot "{labelling.target_name(labels)}": already exists')
        created = self._create(key, parent, Kind.ACTIVE, labels)
        self._count(outcome)
        return created

    def view(self, key: str, parent: str, labels: Mapping[str, str]) -> list[Mount]:
        """A new read-only view of `parent` (empty: of nothing), and how to mount it."""
        return self._create(key, parent, Kind.VIEW, labels)

    def mounts(self, key: str) -> list[Mount]:
        """How to mount an active snapshot or a view. Brings lazy layers back that are not mounted any more."""
        with self._metadata.read() as view:
            snapshot = view.get(key)
            chain = view.parents(snapshot)
        if snapshot.kind is Kind.COMMITTED:
            raise Precondition(f'snapshot "{key}" is committed: it cannot be mounted, prepare or view one on it')
        with ExitStack() as pins:
            lowers = self._lowers(chain, pins)
            private = self._recordings.private(key, _lazy_refs(chain)) if snapshot.kind is Kind.ACTIVE else {}
            return self._mounts(snapshot.id, snapshot.kind, self._lowers(chain, pins, private) if private else lowers)

    def commit(self, name: str, key: str, labels: Mapping[str, str], parent: str = "") -> None:
        """Make the active snapshot `key` the committed one `name`, with these labels instead of its own.

        `parent` may only be given when it was prepared without one.
        """
        _require("name", name)
        with self._metadata.read() as view:
            snapshot = _active(view, key)
        usage = disk_usage(self._dirs.upper(snapshot.id))
        with self._metadata.write() as change:
            snapshot = _active(change, key)
            if parent and snapshot.parent:
                raise InvalidArgument(f'snapshot "{key}" has a parent already, commit cannot give it another')
            below = _parent(change, parent or snapshot.parent, Precondition)
            change.commit(snapshot, name, below, labels, usage)
        self._recordings.release(key)
        _log.info("snapshot.committed name=%s key=%s bytes=%d", name, key, usage.size)

    def remove(self, key: str) -> None:
        """Forget a snapshot without children. Its files go at the next `cleanup`, its lazy layer with its last user."""
        with self._metadata.write() as change:
            snapshot = change.get(key)
            if change.has_children(snapshot):
                raise Precondition(f'cannot remove snapshot "{key}": it has children')
            change.delete(snapshot)
        self._recordings.release(key)
        self._dirs.discard(snapshot.id)
        reach("service.discarded")
        if snapshot.lazy is not None:
            self._layers.release_if_unused(snapshot.lazy.ref.digest)
        _log.info("snapshot.removed key=%s", key)

    def stat(self, key: str) -> Snapshot:
        """The snapshot of this key or name."""
        with self._metadata.read() as view:
            return view.get(key)

    def update(self, key: str, labels: Mapping[str, str], paths: Sequence[str] = ()) -> Snapshot:
        """Replace labels: all of them, or with `paths` (`labels`, `labels.<key>`) only those named.

        A label that is named but not in `labels` is deleted. Nothing else of a snapshot can be changed.
        """
        for path in paths:
            if path != "labels" and not path.startswith("labels."):
                raise InvalidArgument(f'snapshot "{key}": field "{path}" cannot be updated, only labels can')
        with self._metadata.write() as change:
            snapshot = change.get(key)
            change.relabel(snapshot, _relabelled(snapshot.labels, labels, paths))
            return change.get(key)

    def select(self, filters: Iterable[str] = ()) -> list[Snapshot]:
        """The snapshots that match any of the filters (none: all), as of one moment; parents before children."""
        matches = compile_filters(filters)
        with self._metadata.read() as view:
            snapshots = view.all()
        return [snapshot for snapshot in snapshots if matches(snapshot)]

    def usage(self, key: str) -> Usage:
        """What the snapshot itself takes on disk: measured now when active, at its commit when committed.

        Zero for views, and for lazy snapshots: their blocks are shared by all images, the block store counts them.
        """
        snapshot = self.stat(key)
        return disk_usage(self._dirs.upper(snapshot.id)) if snapshot.kind is Kind.ACTIVE else snapshot.usage

    def cleanup(self) -> None:
        """Delete the files of removed snapshots, and directories that a crash left without a snapshot."""
        with self._metadata.write() as change:
            self._dirs.discard_orphans(change.ids())
        reach("service.cleaning")
        self._dirs.delete_discarded()

    def lazy_layers(self) -> list[LazyLayer]:
        """The layers that snapshots stand on, each once."""
        with self._metadata.read() as view:
            return [snapshot.lazy for snapshot in view.lazy() if snapshot.lazy is not None]

    def layer_users(self) -> dict[Digest, list[str]]:
        """The layers that snapshots stand on, each with the images that it was asked for under."""
        users: dict[Digest, list[str]] = {}
        for snapshot in self.select():
            if snapshot.lazy is not None:
                images = users.setdefault(snapshot.lazy.ref.digest, [])
                if snapshot.lazy.ref.image not in images:
                    images.append(snapshot.lazy.ref.image)
        return users

    def without_layer(self, digest: Digest) -> AbstractContextManager[None]:
        """For the length of the block no snapshot stands on the layer, and none begins to. Raises Precondition when one
        does."""
        return self._layers.kept_out(digest)

    def restore(self, workers: int = 8) -> list[Digest]:
        """Have the provider mount all lazy layers again, after a restart. Returns those that failed.

        A failure is logged and no more: that layer is tried again when a container needs it.
        """
        layers = [layer.ref for layer in self.lazy_layers()]
        with ThreadPoolExecutor(workers, thread_name_prefix="restore") as pool:
            restored = list(pool.map(self._restore, layers))
        return [ref.digest for ref, done in zip(layers, restored, strict=True) if not done]

    def release_unused(self, digests: Iterable[Digest]) -> None:
        """Give back those of the layers that no snapshot stands on: a process that is killed between the removal of a
        snapshot and the release of its layer, or between mount and commit, leaves one mounted."""
        for digest in digests:
            self._layers.release_if_unused(digest)

    def counters(self) -> Counters:
        """What became of the Prepares so far."""
        with self._counting:
            return self._counters

    def ordinary(self) -> list[OrdinaryLayers]:
        """The image layers that were left to containerd, by reason."""
        return self._ordinary.rows()

    def keep_copy(self) -> None:
        """To be called now and then: see `Metadata.copy`."""
        self._metadata.copy()

    def close(self) -> None:
        """Close the store. Mounted layers stay as they are."""
        self._metadata.close()

    def _prepare_layer(self, key: str, parent: str, labels: Mapping[str, str]) -> _Outcome:
        """Commit the layer's snapshot if it can be lazy; "ordinary", "refused" and "fallback" say that it is not."""
        target = labelling.target_name(labels)
        ref = self._choice.layer(key, labels)
        if isinstance(ref, str):
            return ref
        with self._metadata.read() as view:
            below = _parent(view, parent, InvalidArgument)
            if view.find(key) is not None:
                raise AlreadyExists(f'snapshot "{key}" already exists')
            if view.committed_as(labelling.TARGET_LABEL, target, below) is not None:
                return "reused"
            chain = [] if below is None else [below, *view.parents(below)]
        ref = replace(ref, layers=_image_layers(ref, chain))
        with ExitStack() as pins:
            try:
                layer = pins.enter_context(self._layers.mounted(ref))
                skeleton = self._skeleton(layer, chain, pins)
            except SnapshotterError as error:
                _log.warning("layer.fallback layer=%s image=%s reason=%s", ref.digest, ref.image, error)
                self._ordinary.count(Reason.FAILED, ref.image, str(error))
                return "fallback"
            except Exception:  # border to the provider: the image can still be unpacked by containerd
                _log.exception("layer.fallback layer=%s image=%s reason=unexpected error", ref.digest, ref.image)
                self._ordinary.count(Reason.FAILED, ref.image, "unexpected error, see the log")
                return "fallback"
            reach("service.layer-mounted")
            lazy = LazyLayer(ref, layer.path, skeleton is not None)
            try:
                return self._commit_layer(target, parent, labels, lazy, skeleton)
            finally:
                if skeleton is not None:
                    self._dirs.drop(skeleton)

    def _skeleton(self, layer: MountedLayer, chain: Sequence[Snapshot], pins: ExitStack) -> Path | None:
        """The directories, not adopted yet, that have to lie over the layer on these parents; None where none have."""
        if not chain or not layer.implied_dirs:
            return None
        lowers = self._lowers(chain, pins)
        try:
            new = self._dirs.make(os.stat(layer.path), work=False)
            try:
                needed = build_skeleton(new / "fs", layer.path, layer.implied_dirs, lowers)
            except BaseException:
                self._dirs.drop(new)
                raise
        except OSError as error:
            raise SnapshotterError(f"{layer.path}: its directories cannot be copied: {error}") from error
        if not needed:
            self._dirs.drop(new)
            return None
        return new

    def _commit_layer(
        self, target: str, parent: str, labels: Mapping[str, str], lazy: LazyLayer, skeleton: Path | None
    ) -> _Outcome:
        """Insert the committed snapshot of a layer that is mounted and pinned."""
        with self._metadata.write() as change:
            below = _parent(change, parent, InvalidArgument)
            if change.committed_as(labelling.TARGET_LABEL, target, below) is not None:
                return "reused"  # another Prepare was faster
            # One chain can stand on different parents: another namespace unpacked the lower layers under its own names.
            name = target if change.find(target) is None else f"{target}@{parent}"
            snapshot = change.insert(name, below, Kind.COMMITTED, labels, lazy)
            if skeleton is not None:
                self._dirs.adopt(skeleton, snapshot.id)
        _log.info("layer.lazy name=%s layer=%s image=%s", name, lazy.ref.digest, lazy.ref.image)
        return "lazy"

    def _create(self, key: str, parent: str, kind: Kind, labels: Mapping[str, str]) -> list[Mount]:
        """Insert an active snapshot or a view; its directories exist when its row does."""
        _require("key", key)
        with self._metadata.read() as view:
            below = _parent(view, parent, InvalidArgument)
            chain = [] if below is None else [below, *view.parents(below)]
        with ExitStack() as pins:
            lowers = self._lowers(chain, pins)
            # A view of something needs no directories of its own.
            new = None if kind is Kind.VIEW and lowers else self._dirs.make(os.stat(lowers[0]) if lowers else None)
            private: Mapping[Digest, Path] = {}
            try:
                if kind is Kind.ACTIVE and not labelling.is_layer_unpack(key, labels):
                    private = self._recorded(key, chain)
                with self._metadata.write() as change:
                    snapshot = change.insert(key, _parent(change, parent, InvalidArgument), kind, labels)
                    if new is not None:
                        self._dirs.adopt(new, snapshot.id)
            except BaseException:
                if new is not None:
                    self._dirs.drop(new)
                if private:
                    self._recordings.release(key)
                raise
            return self._mounts(snapshot.id, kind, self._lowers(chain, pins, private) if private else lowers)

    def _recorded(self, key: str, chain: Sequence[Snapshot]) -> Mapping[Digest, Path]:
        """The private mounts of a container that is to be recorded: its image is lazy in all of its layers."""
        refs = _lazy_refs(chain)
        return self._recordings.begin(key, refs) if refs else {}

    def _mounts(self, snapshot_id: int, kind: Kind, lowers: Sequence[Path]) -> list[Mount]:
        return mounts(kind, self._dirs.upper(snapshot_id), self._dirs.work(snapshot_id), lowers)

    def _lowers(
        self, chain: Iterable[Snapshot], pins: ExitStack, private: Mapping[Digest, Path] = MappingProxyType({})
    ) -> list[Path]:
        """The directories of committed snapshots; lazy ones are mounted again if need be, and pinned by `pins`. Where
        there is a `private` mount of a layer, that one instead of the mount for all."""
        lowers: list[Path] = []
        for snapshot in chain:
            if snapshot.lazy is None or snapshot.lazy.skeleton:
                lowers.append(self._dirs.upper(snapshot.id))
            if snapshot.lazy is not None:
                shared = pins.enter_context(self._layers.mounted(snapshot.lazy.ref)).path
                lowers.append(private.get(snapshot.lazy.ref.digest, shared))
        return lowers

    def _restore(self, ref: LayerRef) -> bool:
        try:
            with self._layers.mounted(ref):
                return True
        except SnapshotterError as error:
            _log.warning("layer.restore.failed layer=%s image=%s reason=%s", ref.digest, ref.image, error)
        except Exception:  # border to the provider: one layer must not keep the daemon from starting
            _log.exception("layer.restore.failed layer=%s image=%s", ref.digest, ref.image)
        return False

    def _uses_layer(self, digest: Digest) -> bool:
        with self._metadata.read() as view:
            return view.uses_layer(digest)

    def _count(self, outcome: _Outcome) -> None:
        with self._counting:
            number: int = getattr(self._counters, outcome)
            self._counters = replace(self._counters, **{outcome: number + 1})

    def __repr__(self) -> str:
        return f"<Snapshots {self._dirs!r} {self._layers!r} {self.counters()}>"


def _require(what: str, value: str) -> None:
    if not value:
        raise InvalidArgument(f"a snapshot needs a {what}")


def _active(view: View, key: str) -> Snapshot:
    snapshot = view.get(key)
    if snapshot.kind is not Kind.ACTIVE:
        raise Precondition(f'snapshot "{key}" is {snapshot.kind.name.lower()}, only an active one can be committed')
    return snapshot


def _parent(view: View, name: str, not_committed: type[SnapshotterError]) -> Snapshot | None:
    """The committed snapshot `name`, None for no name; raises NotFound, or `not_committed` when it is not committed."""
    if not name:
        return None
    parent = view.find(name)
    if parent is None:
        raise NotFound(f'parent snapshot "{name}" does not exist')
    if parent.kind is not Kind.COMMITTED:
        raise not_committed(f'parent snapshot "{name}" is not committed')
    return parent


def _lazy_refs(chain: Sequence[Snapshot]) -> list[LayerRef]:
    """The layers below a container, from the bottom up (`chain`: the nearest first); none unless all are lazy."""
    refs = [snapshot.lazy.ref for snapshot in reversed(chain) if snapshot.lazy is not None]
    return refs if len(refs) == len(chain) else []


def _image_layers(ref: LayerRef, chain: Sequence[Snapshot]) -> tuple[Digest, ...]:
    """All layers of the image, each once; `chain` are the snapshots below the layer, the nearest first."""
    below = [snapshot.lazy.ref.digest for snapshot in reversed(chain) if snapshot.lazy is not None]
    if ref.cut or len(below) < len(chain):
        return ()
    return tuple(dict.fromkeys((*below, *ref.siblings)))


def _relabelled(old: Mapping[str, str], given: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    if not paths or "labels" in paths:
        return dict(given)
    labels = dict(old)
    for path in paths:
        label = path.removeprefix("labels.")
        if label in given:
            labels[label] = given[label]
        else:
            labels.pop(label, None)
    return labels
