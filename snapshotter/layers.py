"""The service's way to its lazy layers: asks the fetch process to bring a layer in, then mounts it.

Runs in the service process. A fetch process that dies under a call is respawned by the supervisor within moments, so
the call is simply made again. A watcher thread per incomplete layer waits for its completion (which also starts its
background and its image's prefetch again after such a restart) and then lets the kernel read further ahead.

Removing a layer from the store, so that no process goes on with files that are not in the store any more:
1. The caller keeps snapshots off the layer (`containerd.lazy.LazyLayers.kept_out`): none stands on it, none comes.
2. Service: unmount it, privately too; wait until no loop device stands on one of its FUSE files. One that stays belongs
   to a container that outlived its snapshot: refused.
3. Fetch process: let no arrival of the layer begin; refuse if readers wait; rename its directory and drop it from the
   table of open layers in one step. Threads that still hold it (a flight that is landing) write into files that are
   closed with the last reference.
4. Fetch process: FUSE_NOTIFY_INVAL_ENTRY for the name, and for that of each private file (`<name>.<slot>`) that there
   can be. The kernel drops the dentries, and the inodes unless someone has the file open; the FORGETs that follow make
   the block server close its files. Once it has none open below the renamed directory the layer is deleted. If it still
   has after some seconds, the name is put back, and the removal refused.
The next pull finds neither directory nor inode, and begins anew under the same node id. A fetch process that is killed
before it is sure that the layer can go leaves the renamed directory, and its successor puts it back: somebody may have
it open. The call is made again then. One that is killed later leaves the directory under a name that says so, and its
successor deletes it. A look-up that overtakes the FORGET is harmless: at each the block server compares what it has
open with what is in the store.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from blockindex.hotset import DEFAULT_WORKLOAD

from .admission import Admission
from .attach import Attacher
from .blockstore import BlockStore, LayerRecord, node_name
from .errors import Damaged, NotFound, Precondition, SnapshotterError
from .eviction import Expected
from .integrity import restore_seal
from .judgement import Judgements
from .killpoints import reach
from .model import Digest, LayerRef, MountedLayer
from .rpc import Unanswered, call

__all__ = ["Layers", "NoLayers"]

_log = logging.getLogger(__name__)

_ANSWER_S = 60.0
_WATCH_S = 30.0
_HOT_S = 0.2  # a container's start waits for this answer; the search has begun with the pull, mostly
_HOT_POLL_S = 0.01
_LET_GO_S = 2.0


class Layers:
    """The LayerProvider of the daemon. Thread-safe."""

    def __init__(
        self, store: BlockStore, fetch_socket: Path, attacher: Attacher, admission: Admission | None = None
    ) -> None:
        """`admission` bounds how many callers may wait for layers that come in (default: any number)."""
        self._store = store
        self._admission = admission or Admission(1 << 30, 1 << 30)
        self._fetch = fetch_socket
        self._attacher = attacher
        self._expected = Expected()
        self._lock = threading.Lock()
        self._judgements = Judgements(store.layers.parent)
        self._watched: set[str] = set()
        self._mount_times: dict[Digest, tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"<Layers {len(self._watched)} still incomplete>"

    def ensure(self, ref: LayerRef) -> MountedLayer:
        """See `LayerProvider.ensure`. A layer that has come through the same image is mounted without asking anyone;
        another image's registry is made known, since the one before may have lost the layer."""
        with self._expected.pull(ref.siblings):
            return self._ensure(ref)

    def _ensure(self, ref: LayerRef) -> MountedLayer:
        started = time.monotonic()
        directory = self._sound(ref.digest)
        if directory is None or ref.image not in LayerRecord.load(directory).images:
            request = {
                "image": ref.image,
                "digest": ref.digest,
                "siblings": list(ref.siblings),
                "layers": list(ref.layers),
            }
            with self._admission.place(ref.image):
                directory = self._store.layers / self._ask("ensure", None, **request)["name"]
        ready = time.monotonic()
        try:
            record = LayerRecord.load(directory)
            target = self._attacher.attach(record)
        except OSError as error:
            raise SnapshotterError(f"{ref.digest}: cannot be mounted: {error}") from error
        self._store.touch(target.name)
        self._watch(ref)
        mounted = time.monotonic()
        with self._lock:
            self._mount_times[ref.digest] = (ready - started, mounted - ready)
        _log.info("layer.mounted layer=%s ready_s=%.3f mount_s=%.3f", ref.digest, ready - started, mounted - ready)
        return MountedLayer(target, record.implied_dirs)

    def promote(self, image: str, layers: Sequence[str], workload: str) -> str:
        """Have the hot set that the image with these layers, bottom up, has for a workload brought before its others.
        Answers at once whether there is one: "found", "none", or "unknown" while it is looked for. "none" also where
        the fetch process does not answer."""
        try:
            request = {"image": image, "layers": list(layers), "workload": workload}
            return str(call(self._fetch, "workload", _HOT_S, **request)["state"])
        except SnapshotterError as error:
            _log.info("layer.hot_state_unknown image=%s error=%r", image, str(error))
            return "none"

    def _sound(self, digest: Digest) -> Path | None:
        """The layer's directory; None where there is none, or where it was damaged beyond repair and has been dropped
        from the store. A layer that is mounted is not: what is there of it is served on."""
        directory = self._store.layers / node_name(digest)
        is_mounted = directory.name in self._attacher.mounted()
        try:
            if self._store.find(digest) is None:
                return None
            if unsound := self._judgements.unsound(directory.name):
                raise Damaged(f"its metadata are not sound: {unsound}")
            if restore_seal(directory):
                _log.warning("layer.repaired layer=%s the metadata were damaged and are written again", digest)
        except Precondition:  # another layer with a digest that begins alike
            raise
        except Damaged as error:
            if not is_mounted:
                self._drop(digest, error)
                return None
            _log.error(
                "layer.damaged layer=%s reason=%r it is in use, and served as far as it is there", digest, str(error)
            )
        except SnapshotterError as error:
            if is_mounted:
                raise
            self._drop(digest, error)
            return None
        return directory

    def _drop(self, digest: Digest, error: SnapshotterError) -> None:
        name = node_name(digest)
        _log.warning("layer.dropped name=%s reason=%r it will be fetched again", name, str(error))
        self._ask("remove", _ANSWER_S, name=name, digest=digest)

    def doubt(self, name: str, runs: Sequence[tuple[int, int]]) -> None:
        """Have the blocks of these runs checked before they are read again, and fetched anew if they are wrong."""
        self._ask("doubt", _ANSWER_S, name=name, runs=list(runs))

    def hot_state(self, image: str, layers: Sequence[str], workload: str = DEFAULT_WORKLOAD) -> str:
        """As `promote`; "unknown" when the search is not over within `_HOT_S`."""
        give_up = time.monotonic() + _HOT_S
        while (state := self.promote(image, layers, workload)) == "unknown" and time.monotonic() < give_up:
            time.sleep(_HOT_POLL_S)
        return state

    def release(self, digest: Digest) -> None:
        """See `LayerProvider.release`."""
        self._store.touch(node_name(digest))
        try:
            self._attacher.detach(digest)
        finally:  # mounted or not, fetch no more of it
            reach("service.detached")
            self._ask("release", _ANSWER_S, name=node_name(digest))

    def mounted(self) -> dict[str, str]:
        """Node name -> mount point of what is mounted now."""
        return self._attacher.mounted()

    def attached(self) -> list[Digest]:
        """The layers that are mounted now, also those that an earlier process mounted."""
        records = []
        for name in self._attacher.mounted():
            with contextlib.suppress(SnapshotterError):  # it is not in the store any more: nobody can say what it is
                records.append(LayerRecord.load(self._store.layers / name))
        return [record.digest for record in records]

    def remove(self, digest: Digest) -> None:
        """Delete the layer from the store. The caller holds off all its users meanwhile. Raises Precondition, and
        leaves it in the store, when somebody uses it all the same; NotFound when there is no such layer."""
        name = node_name(digest)
        if not (self._store.layers / name).exists():
            raise NotFound(f"there is no layer {name}")
        self._attacher.detach(digest)
        self._attacher.detach_private(f"{name}.*")  # of a snapshot that is gone: none stands on the layer
        give_up = time.monotonic() + _LET_GO_S
        while holders := self._attacher.holders(f"{name}*"):
            if time.monotonic() > give_up:
                raise Precondition(
                    f"{name} is in use: {', '.join(holders)} stands on it, a container still runs with it"
                )
            time.sleep(0.02)
        reach("service.removing")
        self._ask("remove", _ANSWER_S, name=name, digest=digest)
        reach("service.removed")

    def status(self) -> dict[str, Any]:
        """The fetch process's view of the layers, each with its mount point."""
        status: dict[str, Any] = self._ask("status", _ANSWER_S)
        mounted = self._attacher.mounted()
        for layer in status["layers"]:
            layer["mount"] = mounted.get(layer["name"], "")
        return status

    def expected(self) -> Set[Digest]:
        """Layers that a pull under way will ask for, or has just asked for."""
        return self._expected.current()

    def is_refused(self) -> bool:
        """Whether the disk refuses bytes of layers now; False where the fetch process does not say."""
        try:
            return bool(call(self._fetch, "refusing", _ANSWER_S))
        except SnapshotterError:
            return False

    def mount_times(self) -> dict[Digest, tuple[float, float]]:
        """For each layer that this process has mounted: seconds that it took to come in, and to be mounted."""
        with self._lock:
            return dict(self._mount_times)

    def history(self, names: Sequence[str], since: float, until: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """What happened to these layers between two times (seconds since 1970), as the fetch process's journal has it;
        and its prefetches."""
        journal = self._ask("journal", _ANSWER_S, names=list(names), since=since, until=until)
        return journal, self._ask("status", _ANSWER_S)["prefetches"]

    def _ask(self, op: str, timeout_s: float | None, **fields: Any) -> Any:
        """A call that outlives restarts of the fetch process (tried again for up to `_ANSWER_S` seconds)."""
        give_up = time.monotonic() + _ANSWER_S
        while True:
            try:
                return call(self._fetch, op, timeout_s, **fields)
            except Unanswered:
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)

    def _watch(self, ref: LayerRef) -> None:
        with self._lock:
            if ref.digest in self._watched:
                return
            self._watched.add(ref.digest)
        try:
            threading.Thread(target=self._until_complete, args=(ref,), name="watch", daemon=True).start()
        except RuntimeError as error:  # out of threads: the layer is served all the same
            _log.error("layer.not_watched layer=%s error=%r", ref.digest, str(error))
            with self._lock:
                self._watched.discard(ref.digest)

    def _until_complete(self, ref: LayerRef) -> None:
        name = node_name(ref.digest)
        lost: dict[str, Any] = {}  # what a fetch process that was killed has to be told again
        try:
            while self._attacher.path(ref.digest).name in self._attacher.mounted():
                try:
                    if call(self._fetch, "complete", _WATCH_S + _ANSWER_S, name=name, wait_s=_WATCH_S, **lost):
                        self._attacher.warm(ref.digest)
                        return
                    lost = {}
                except Unanswered:
                    lost = {"image": ref.image, "layers": list(ref.layers)}
                    time.sleep(0.2)
        except (SnapshotterError, OSError) as error:
            _log.warning("layer.watch_failed layer=%s error=%r", ref.digest, str(error))
        finally:
            with self._lock:
                self._watched.discard(ref.digest)


class NoLayers:
    """The LayerProvider of a node that cannot mount layers: every image is an ordinary one there."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __repr__(self) -> str:
        return f"<NoLayers {self._reason}>"

    def ensure(self, ref: LayerRef) -> MountedLayer:
        """Raises Precondition: containerd is to unpack the layer."""
        raise Precondition(self._reason)

    def release(self, digest: Digest) -> None:
        """Nothing was mounted."""

    def mounted(self) -> dict[str, str]:
        """Nothing is."""
        return {}

    def attached(self) -> list[Digest]:
        """None are."""
        return []

    def mount_times(self) -> dict[Digest, tuple[float, float]]:
        """None were."""
        return {}

    def history(self, names: Sequence[str], since: float, until: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Raises Precondition: there is nothing to tell but the reason."""
        raise Precondition(self._reason)

    def doubt(self, name: str, runs: Sequence[tuple[int, int]]) -> None:
        """Raises Precondition: stop the daemon to repair layers here."""
        raise Precondition(f"{self._reason}; stop the daemon, then try again")

    def remove(self, digest: Digest) -> None:
        """Raises Precondition: stop the daemon to remove layers here."""
        raise Precondition(f"{self._reason}; stop the daemon, then try again")

    def status(self) -> dict[str, Any]:
        """Raises Precondition: there is nothing to tell but the reason."""
        raise Precondition(self._reason)
