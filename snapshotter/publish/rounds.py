"""One round of publishing: everything the node offers, each to its place, as far as it is not there yet.

Before anything is put, the place is asked what it has of the image: what is as good stays, and a signed artifact is
never displaced by another key's. So two nodes that learn the same publish it once; if both look before either has
written, one of both is left (`artifacts.publisher`). A place that fails, or an image whose manifest
cannot be had, is left alone for a while (`state`), the others go on. What is put is not fetched from anywhere: blocks
that are not here are left out.
"""

import fcntl
import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Set
from pathlib import Path

from blockindex.errors import BlockIndexError
from blockindex.hotpack import Codec, HeadReader, encode_hotset
from blockindex.hotset import DEFAULT_GAP, DEFAULT_WORKLOAD, HotSet, image_key, includes
from snapshotter.artifacts.directory import DirectoryPlace
from snapshotter.artifacts.displacement import Displacement
from snapshotter.artifacts.made import hot_artifact, index_artifact, index_blob, read_chunks
from snapshotter.artifacts.model import Artifact, Blob, Kind, Subject
from snapshotter.artifacts.opening import open_place
from snapshotter.artifacts.place import Held, ImageName, OpenBlob, Place
from snapshotter.artifacts.registryplace import RegistryPlace
from snapshotter.blockstore import LayerRecord, node_name
from snapshotter.config import Config
from snapshotter.errors import InvalidArgument, NotFound, Precondition, SnapshotterError, Transient
from snapshotter.hotpacking import check_frames, write_packed
from snapshotter.hotstore import HotStore, read_head
from snapshotter.killpoints import reach
from snapshotter.model import Digest
from snapshotter.publish.agreement import alike
from snapshotter.publish.offers import HotOffer, IndexOffer, hot_offers, index_offers, layer_records
from snapshotter.publish.state import Done, State
from snapshotter.registry import Registry, parse_reference
from snapshotter.trust.keys import SecretKey, sign

__all__ = ["Round"]

_PUBLISHED = "published"


class Round:
    """See the module. For one thread, and one round."""

    def __init__(self, config: Config, registry: Registry, clock: Callable[[], float] = time.time) -> None:
        """SnapshotterError where the key is not sound."""
        self._config = config
        self._root = config.root_path
        self._registry = registry
        self._clock = clock
        self._key = SecretKey.load(Path(config.publish.key)) if config.publish.key else None
        self._last = HotStore(self._root / _PUBLISHED)
        self._state = State()
        self._layers: dict[str, LayerRecord] = {}
        self._rows: list[Done] = []
        self._failed: list[str] = []

    def __repr__(self) -> str:
        return f"<Round {self._root}: {len(self._rows)} done, {len(self._failed)} failed>"

    def run(self) -> tuple[list[Done], list[str]]:
        """What was done, and a line for each place that failed. Nothing while another round goes on. OSError where the
        node's own disk refuses."""
        lock = os.open(self._root / "publishing.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return [], []
            self._state = State.load(self._root)
            self._layers = layer_records(self._root)
            for index in index_offers(self._layers):
                self._try(index.image, lambda place, to, index=index: self._index(index, place, to))  # type: ignore[misc]
            for hot in hot_offers(self._config, self._layers):
                self._try(hot.image, lambda place, to, hot=hot: self._hot(hot, place, to))  # type: ignore[misc]
        finally:
            os.close(lock)
        return self._rows, self._failed

    def _try(self, image: str, work: Callable[[Place, str], Done | None]) -> None:
        """One artifact, unless its place is left alone."""
        to = self._config.publish.to
        try:
            place: Place
            if to:
                place = open_place(to, self._registry)
            else:
                place = RegistryPlace(self._registry, parse_reference(image))
                to = place.name
        except InvalidArgument as error:  # containerd knows images by names that are no references too
            self._failed.append(str(error))
            return
        now = self._clock()
        if self._state.is_paused(to, now) or self._state.is_paused(image, now):
            return
        try:
            row = work(place, to)
        except (SnapshotterError, BlockIndexError, OSError) as error:
            self._failed.append(f"{image}: {error}")
            is_ours = isinstance(error, (_Unnamed, BlockIndexError, OSError))  # the place can do nothing for it
            self._state = self._state.with_failure(image if is_ours else to, _cause(error), now)
        else:
            if row is None:
                return
            self._rows.append(row)
            self._state = self._state.with_done(row)
        reach("publish.put")
        self._state.save(self._root)

    # -- indexes -----------------------------------------------------------------------------------------------------

    def _index(self, offer: IndexOffer, place: Place, to: str) -> Done | None:
        last = self._state.find("layer-index", offer.image, "", to)
        if last is not None and last.fingerprint == offer.fingerprint:
            return None

        def row(status: str, digest: str = "", reason: str = "") -> Done:
            return Done("layer-index", offer.image, "", to, status, offer.fingerprint, self._clock(), digest, reason)

        name = self._named(offer.image)
        if any(layer not in self._layers for layer in name.layers):
            return row("waiting", reason="not all layers are here")
        records = [self._layers[layer] for layer in name.layers]
        if all(record.index_from for record in records):
            return row("waiting", reason="no index of this version of the image was made here")
        if self._key is not None and self._config.trust.policy == "any" and any(it.index_from for it in records):
            return row("refused", reason='indexes that policy "any" let in are not signed')
        for held in place.held(name):
            if held.artifact.kind is Kind.LAYER_INDEX and self._is_as_good(held, name, place):
                return row("there", held.digest)
        blobs = {layer: index_blob(layer, self._index_path(layer)) for layer in name.layers}
        return self._put(
            place, index_artifact(name, blobs), lambda blob: read_chunks(self._index_path(Digest(blob.layer))), row
        )

    def _is_as_good(self, held: Held, name: ImageName, place: Place) -> bool:
        is_whole = {blob.layer for blob in held.artifact.blobs} == set(name.layers)
        return is_whole and self._is_signed_enough(held, place)

    def _is_signed_enough(self, held: Held, place: Place) -> bool:
        return self._key is None or not place.signs or bool(held.artifact.signatures)

    def _index_path(self, layer: Digest) -> Path:
        return self._root / "layers" / node_name(layer) / "index"

    # -- hot sets ----------------------------------------------------------------------------------------------------

    def _hot(self, offer: HotOffer, place: Place, to: str) -> Done | None:
        hotset = offer.hotset
        key, workload = hotset.image_key, hotset.workload
        fingerprint = hashlib.sha256(encode_hotset(hotset)).hexdigest()
        last = self._state.find("hot-set", offer.image, workload, to)
        if last is not None:
            before = self._last.load(key, workload)
            if last.fingerprint == fingerprint or (before is not None and alike(before.hotset, hotset)):
                return None

        def row(status: str, digest: str = "", reason: str = "") -> Done:
            return Done("hot-set", offer.image, workload, to, status, fingerprint, self._clock(), digest, reason)

        name = self._name_of(offer)
        there = _there(place, name, {workload, DEFAULT_WORKLOAD})
        theirs, head = there.get(workload, (None, None))
        done: Done | None = None
        if theirs and head and self._is_signed_enough(theirs, place) and alike(head, hotset):
            done = row("there", theirs.digest)
        else:
            with tempfile.TemporaryDirectory(prefix="bootseer-") as spool:
                reason = self._written(hotset, there.get(DEFAULT_WORKLOAD), Path(spool))
                path = HotStore(Path(spool)).path(key, workload)
                artifact = hot_artifact(path, read_head(path), name.subject)
                done = self._put(place, artifact, lambda blob: read_chunks(path, blob.size), row, reason)
        self._last.save(hotset)
        return done

    def _written(self, hotset: HotSet, default: "_There | None", spool: Path) -> str:
        """Write the set's file, with its bytes unless there is a reason, which is given. `default`: what is there."""
        reason = ""
        theirs, head = default or (None, None)
        has_bytes = hotset.workload != DEFAULT_WORKLOAD and theirs is not None and len(theirs.artifact.blobs) > 1
        if has_bytes and head is not None and includes(head, hotset):
            reason = f"its bytes are in the pack of {DEFAULT_WORKLOAD}"
        if not reason:
            try:
                path, pack = write_packed(
                    self._config, hotset, spool, Codec.ZSTD, DEFAULT_GAP, lambda done: None, fetch=False
                )
                with path.open("rb") as file:
                    check_frames(pack, file, lambda done: None)
            except (NotFound, Precondition) as error:
                reason = str(error)
        if reason:
            HotStore(spool).save(hotset)
        return reason

    def _name_of(self, offer: HotOffer) -> ImageName:
        """With the subject, if the image's manifest can still be had; else the set is found by the image's key."""
        hotset = offer.hotset
        layers = tuple(Digest(layer.digest) for layer in hotset.layers)
        for reference in self._references(offer):
            try:
                name = self._named(reference)
            except _Unnamed as error:
                if isinstance(error.__cause__, Transient):
                    raise
                continue
            if name.key == hotset.image_key:
                return name
        return ImageName(hotset.image_key, layers, None)

    @staticmethod
    def _references(offer: HotOffer) -> Iterator[str]:
        """The image's own reference, and, as a tag may have moved, that of the manifest."""
        yield offer.image
        if offer.hotset.manifest:
            ref = parse_reference(offer.image)
            yield f"{ref.host}/{ref.repository}@{offer.hotset.manifest}"

    # -- both --------------------------------------------------------------------------------------------------------

    def _named(self, image: str) -> ImageName:
        """What its artifacts are found by. _Unnamed where its registry does not tell."""
        try:
            manifest, documents = self._registry.documents(image)
        except SnapshotterError as error:
            raise _Unnamed(str(error)) from error
        layers = tuple(dict.fromkeys(layer.digest for layer in manifest.layers))
        own = documents[-1]
        return ImageName(image_key(layers), layers, Subject(own.digest, own.media_type, len(own.body)))

    def _put(
        self, place: Place, artifact: Artifact, open_blob: OpenBlob, row: Callable[..., Done], reason: str = ""
    ) -> Done:
        if self._key is not None and place.signs:
            artifact = sign(artifact, self._key)
        try:
            place.prepare()
            placed = place.put(artifact, open_blob)
        except Displacement as error:
            return row("refused", reason=str(error))
        return row("there" if placed.existed else "published", placed.digest, reason)


class _Unnamed(SnapshotterError):
    """The image's manifest could not be had; the cause says why."""


def _cause(error: Exception) -> Exception:
    """What decides how long the pause is."""
    return error.__cause__ if isinstance(error, _Unnamed) and isinstance(error.__cause__, Exception) else error


_There = tuple[Held, HotSet | None]
"""A hot set that a place has, and what is in it; None where it is damaged."""


def _there(place: Place, name: ImageName, workloads: Set[str]) -> dict[str, _There]:
    """The hot sets that the place has of the image, by workload."""
    held = place.hot_sets(name, workloads) if isinstance(place, DirectoryPlace) else place.held(name)
    found: dict[str, _There] = {}
    for one in held:
        if one.artifact.kind is Kind.HOT_SET and one.artifact.workload in workloads - found.keys():
            found[one.artifact.workload] = one, _head(one)
    return found


def _head(held: Held) -> HotSet | None:
    """The set that an artifact holds; None where it is damaged."""
    blob: Blob = held.artifact.blobs[0]
    reader = HeadReader()
    try:
        for chunk in (blob.data,) if blob.data else held.open(blob):
            pack = reader.feed(chunk)
            if pack is not None:
                return pack.hotset
    except (BlockIndexError, NotFound):
        pass
    return None
