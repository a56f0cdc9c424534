"""`bootseer index publish`: one artifact of layer indexes for each platform of an image.

Only what nobody has indexed is read: an image whose artifact is there is left alone, and single indexes are taken over
from what the place has of this image, or of the images named by --reuse. With a key an index is taken over only from an
artifact that this key has signed: otherwise we would sign what somebody else has made.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from blockindex.codec import index_name
from snapshotter.artifacts.displacement import Displacement, refusal
from snapshotter.artifacts.made import index_artifact, index_blob, read_chunks
from snapshotter.artifacts.model import Blob, Kind
from snapshotter.artifacts.place import Held, OpenBlob, Place
from snapshotter.cli.building import Built, Job, build_all
from snapshotter.cli.places import client_config, explained, open_place, open_source, platform_of, readable, signing_key
from snapshotter.cli.publishing import ADVICE, Sending, image_name, is_signed_by
from snapshotter.cli.table import megabytes, table
from snapshotter.config import load_config
from snapshotter.errors import Denied, NotFound
from snapshotter.imagesource import ImageSource, PlatformImage, Refused, platform_images
from snapshotter.model import Digest
from snapshotter.registry import Registry
from snapshotter.trust.keys import SecretKey, sign

__all__ = ["publish"]


@dataclass(frozen=True, slots=True)
class LayerRow:
    """What became of a layer. `status`: built, reused (its index was taken over), failed (with `reason`)."""

    digest: str
    status: str
    reason: str
    blob_bytes: int
    index_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlatformRow:
    """What became of a platform's image. `status`: published, there (it was already), failed, refused (what is there is
    signed), passed over; the last three with `reason`. `artifact`: the manifest's digest, "" where plain files are
    kept; `names`: its tags, or the files."""

    platform: str
    manifest: str
    image_key: str
    status: str
    reason: str
    artifact: str = ""
    names: tuple[str, ...] = ()
    signed_by: str = ""
    layers: list[LayerRow] = field(default_factory=list)


def publish(args: argparse.Namespace) -> int:
    """Run the command."""
    config = load_config(args.config)
    to = args.to or config.publish.to
    client = client_config(args, config, args.image, args.name, to, *args.reuse)
    with closing(Registry(client)) as registry, tempfile.TemporaryDirectory(prefix="bootseer-") as spool:
        with readable(client):
            source = open_source(args.image, registry, args.name)
            place = open_place(to, registry, source)
            key = signing_key(args.key, config, place)
            images = platform_images(source, platform_of(args))
        indexes = _Indexes(source, Path(spool), key)
        for text in args.reuse:
            indexes.take(_held_of(text, to, registry))
        with explained(place.name, client, ADVICE):
            rows = _publish(images, place, indexes, key, args.replace)
    if args.json:
        document = {"image": source.name, "to": place.name, "platforms": [asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
    else:
        print(_text(rows))
    for row in rows:
        if row.reason:
            print(f"bootseer: {row.platform or row.manifest}: {row.status}: {row.reason}", file=sys.stderr)
    done = [row for row in rows if row.status in ("published", "there")]
    return 0 if done and not any(row.status in ("failed", "refused") for row in rows) else 1


def _held_of(text: str, to: str, registry: Registry) -> list[Held]:
    """What there is of an image named by --reuse. The first release has none before it: that is said, no failure."""
    other = open_source(text, registry)
    try:
        where = open_place(to, registry, other)
        images = [image for image in platform_images(other) if isinstance(image, PlatformImage)]
        return [held for image in images for held in where.held(image_name(image))]
    except (NotFound, Denied) as error:
        print(f"bootseer: nothing is taken over from {text}: {error}", file=sys.stderr)
        return []


class _Indexes:
    """The indexes that there are, by layer: those that were taken over, and those that were built here."""

    def __init__(self, source: ImageSource, spool: Path, key: SecretKey | None) -> None:
        self._source = source
        self._spool = spool
        self._key = key
        self._found: dict[Digest, tuple[Blob, OpenBlob]] = {}
        self.built: dict[Digest, Built] = {}

    def take(self, held: Iterable[Held]) -> None:
        """Take over what may be taken over."""
        for one in held:
            if one.artifact.kind is Kind.LAYER_INDEX and self.trusts(one):
                for blob in one.artifact.blobs:
                    self._found.setdefault(Digest(blob.layer), (blob, one.open))

    def trusts(self, held: Held) -> bool:
        """Whether an artifact of ours may hold the same."""
        return self._key is None or is_signed_by(held.artifact, self._key)

    def build(self, images: Iterable[PlatformImage]) -> None:
        """Index all layers of the images that have no index yet, several at once."""
        layers = {layer.digest: layer.size for image in images for layer in image.manifest.layers}
        jobs = [
            Job(digest, size, self._source.blob(digest)) for digest, size in layers.items() if digest not in self._found
        ]
        for result in build_all(jobs, self._spool):
            self.built[result.digest] = result
            if result.status != "failed":
                path = self._spool / index_name(result.digest)
                self._found[result.digest] = index_blob(result.digest, path), _reader(path)

    def blobs(self, layers: Iterable[Digest]) -> dict[Digest, Blob]:
        """The blobs of those layers that have an index."""
        return {layer: self._found[layer][0] for layer in layers if layer in self._found}

    def open(self, blob: Blob) -> Iterator[bytes]:
        """The bytes of one of them."""
        found, open_ = self._found[Digest(blob.layer)]
        return open_(found)

    def rows(self, image: PlatformImage) -> list[LayerRow]:
        """What became of each layer."""
        sizes = {layer.digest: layer.size for layer in image.manifest.layers}
        return [self._row(layer, sizes[layer]) for layer in image.layers]

    def _row(self, layer: Digest, size: int) -> LayerRow:
        result = self.built.get(layer)
        if result is None:
            return LayerRow(layer, "reused", "", size, self._found[layer][0].size, 0.0)
        return LayerRow(layer, result.status, result.reason, size, result.index_bytes, result.seconds)


def _publish(
    images: list[PlatformImage | Refused], place: Place, indexes: _Indexes, key: SecretKey | None, replace: bool
) -> list[PlatformRow]:
    """All platforms: what is there already, then what is missing."""
    rows: dict[Digest, PlatformRow] = {}
    todo: list[PlatformImage] = []
    for image in images:
        if isinstance(image, Refused):
            status = "failed" if image.meant else "passed over"
            rows[image.digest] = PlatformRow(image.platform, image.digest, "", status, image.reason)
            continue
        held = place.held(image_name(image))
        whole = next((one for one in held if _is_whole(one, image) and indexes.trusts(one)), None)
        if whole is not None and place.signs:  # with whatever signatures it has; its tags may lead elsewhere by now
            placed = place.put(whole.artifact, whole.open)
            status = "there" if placed.existed else "published"
            rows[image.manifest.digest] = _row(image, status, artifact=placed.digest, names=placed.names)
            continue
        refused = _refusal(held, place, key, replace)  # before any layer is read for it
        if refused:
            rows[image.manifest.digest] = _row(image, "refused", refused)
            continue
        indexes.take(held)
        todo.append(image)
    if todo:
        place.prepare()
    indexes.build(todo)
    for image in todo:
        rows[image.manifest.digest] = _put(image, place, indexes, key, replace)
    return [rows[it.digest if isinstance(it, Refused) else it.manifest.digest] for it in images]


def _is_whole(held: Held, image: PlatformImage) -> bool:
    """Whether this is all that we would publish of the image."""
    artifact = held.artifact
    if artifact.kind is not Kind.LAYER_INDEX or {blob.layer for blob in artifact.blobs} != set(image.layers):
        return False
    return artifact.subject is not None and artifact.subject.digest == image.manifest.digest


def _refusal(held: Iterable[Held], place: Place, key: SecretKey | None, replace: bool) -> str:
    """Why what we would publish must not take the place of what there is; "" if it may."""
    signers = [key.public.name] if key is not None else []
    there = [one.artifact for one in held if one.artifact.kind is Kind.LAYER_INDEX]
    return next(filter(None, (refusal(signers, it, place.name, replace=replace) for it in there)), "")


def _put(image: PlatformImage, place: Place, indexes: _Indexes, key: SecretKey | None, replace: bool) -> PlatformRow:
    layers = indexes.rows(image)
    bad = [layer for layer in layers if layer.status == "failed"]
    if bad:
        reason = "; ".join(f"layer {layer.digest} has no index: {layer.reason}" for layer in bad)
        return _row(image, "failed", reason, layers=layers)
    name = image_name(image)
    artifact = index_artifact(name, indexes.blobs(image.layers))
    if key is not None:
        artifact = sign(artifact, key)
    sending = Sending(artifact, f"sending indexes of {image.platform}")
    try:
        placed = place.put(artifact, sending.through(indexes.open), replace=replace)
    except Displacement as error:  # it came in while we read the layers
        return _row(image, "refused", str(error), layers=layers)
    finally:
        sending.end()
    return _row(
        image,
        "there" if placed.existed else "published",
        artifact=placed.digest,
        names=placed.names,
        signed_by=key.public.name if key is not None else "",
        layers=layers,
    )


def _row(
    image: PlatformImage,
    status: str,
    reason: str = "",
    *,
    artifact: str = "",
    names: tuple[str, ...] = (),
    signed_by: str = "",
    layers: list[LayerRow] | None = None,
) -> PlatformRow:
    return PlatformRow(
        str(image.platform),
        image.manifest.digest,
        image.image_key,
        status,
        reason,
        artifact,
        names,
        signed_by,
        layers or [],
    )


def _reader(path: Path) -> OpenBlob:
    return lambda blob: read_chunks(path)


def _text(rows: list[PlatformRow]) -> str:
    cells = []
    for row in rows:
        counts = [f"{n} {it}" for it in ("built", "reused", "failed") if (n := sum(x.status == it for x in row.layers))]
        size = sum(layer.index_bytes for layer in row.layers)
        cells.append(
            [
                row.platform or "-",
                row.status,
                ", ".join(counts) or "-",
                megabytes(size) if size else "-",
                row.artifact.removeprefix("sha256:")[:12] or (f"{len(row.names)} files" if row.names else "-"),
            ]
        )
    return table(("PLATFORM", "RESULT", "LAYERS", "INDEXES", "ARTIFACT"), cells)
