"""The manifest of an artifact: an OCI image manifest 1.1, written and read. docs/format.md has the table.

Sans-IO: an `Artifact` in, bytes out, and back. The bytes follow from the artifact alone, so equal artifacts have equal
digests. Whatever a registry sends is read by the same rules by which ours is written: `encode` refuses what `decode`
would. Signatures are carried, not judged: that is `snapshotter.trust`'s.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256

from blockindex.errors import Corrupt
from blockindex.hotset import MAX_LAYERS, check_workload
from snapshotter.artifacts.model import Artifact, Blob, Kind, Signature, Subject
from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest
from snapshotter.registry.reference import parse_digest

__all__ = [
    "CONFIG",
    "HEAD_TYPE",
    "IMAGE_KEY",
    "INDEX_TYPE",
    "INLINE_ALL_BYTES",
    "INLINE_BYTES",
    "MANIFEST_BYTES",
    "MANIFEST_TYPE",
    "PACK_TYPE",
    "WORKLOAD",
    "config_blob",
    "decode",
    "digest_of",
    "encode",
    "place_tags",
    "tag_prefix",
    "tags",
]

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.bootseer.layerindex.v1.bsi"
HEAD_TYPE = "application/vnd.bootseer.hotset.v1.head"
PACK_TYPE = "application/vnd.bootseer.hotset.v1.pack"

CONFIG = b"{}"
"""The configuration of every artifact: OCI's empty one."""

INLINE_BYTES = 64 << 10
"""Heads up to this size are in the manifest itself: `import numpy` has 3.4 KB, and saves a round trip."""

INLINE_ALL_BYTES = 8 << 10
"""The smallest indexes are in the manifest itself, as far as they fit into this together: in base64 that is less than
the 14.6 kB that a new connection brings in its first round trip, and each saves a request."""

MANIFEST_BYTES = 4 << 20
"""Most bytes of a manifest: what registries accept."""

IMAGE_KEY = "dev.bootseer.image-key"
WORKLOAD = "dev.bootseer.workload"
_LAYER = "dev.bootseer.layer"
_SIGNATURES = "dev.bootseer.signatures"
_CREATED = "org.opencontainers.image.created"

_NAMES = {Kind.LAYER_INDEX: "layerindex", Kind.HOT_SET: "hotset"}
_TAG_CHARACTERS = 128
_MAX_SIZE = 1 << 40  # of a blob
_MAX_SIGNATURES = 16
_MAX_SECONDS = 253402300799  # the end of the year 9999
_MAX_NAME = 200  # characters of a key's name or a media type
_SIGNATURE_BYTES = 64  # ed25519

_Object = Mapping[str, object]


def digest_of(data: bytes) -> Digest:
    """The digest that a registry knows `data` by."""
    return Digest(f"sha256:{sha256(data).hexdigest()}")


def config_blob(kind: Kind) -> Blob:
    """The configuration as a blob, which has to be in the repository like the others."""
    return Blob(digest_of(CONFIG), len(CONFIG), kind.value)


def tag_prefix(hex_digits: str) -> str:
    """How all tags of the artifacts of an image begin; `hex_digits` are the key's or the subject's."""
    return f"sha256-{hex_digits}.bootseer-"


def tags(kind: Kind, hex_digits: str, workload: str = "") -> str:
    """The tag of the artifact of this kind and workload of the image with this key or digest."""
    prefix = tag_prefix(hex_digits) + _NAMES[kind]
    whole = f"{prefix}-{workload}" if workload else prefix
    return whole if len(whole) <= _TAG_CHARACTERS else f"{prefix}-{sha256(workload.encode()).hexdigest()[:16]}"


def place_tags(artifact: Artifact) -> tuple[str, ...]:
    """All tags of the artifact: by its image key, where a node looks first, then by its subject if it has one."""
    digests = [artifact.image_key, *([artifact.subject.digest] if artifact.subject else [])]
    return tuple(tags(artifact.kind, digest.removeprefix("sha256:"), artifact.workload) for digest in digests)


def encode(artifact: Artifact) -> bytes:
    """The manifest's bytes. InvalidArgument for an artifact that cannot be one."""
    _check(artifact)
    notes = {IMAGE_KEY: artifact.image_key}
    if artifact.workload:
        notes[WORKLOAD] = artifact.workload
    if artifact.created:
        notes[_CREATED] = datetime.fromtimestamp(artifact.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if artifact.signatures:
        pairs = [{"key": one.key, "value": base64.b64encode(one.value).decode()} for one in artifact.signatures]
        notes[_SIGNATURES] = json.dumps(pairs, separators=(",", ":"))
    document: dict[str, object] = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": artifact.kind.value,
        "config": _descriptor(config_blob(artifact.kind)),
        "layers": [_descriptor(blob) for blob in artifact.blobs],
    }
    if artifact.subject is not None:
        subject = artifact.subject
        document["subject"] = {"mediaType": subject.media_type, "digest": subject.digest, "size": subject.size}
    document["annotations"] = notes
    body = json.dumps(document, separators=(",", ":")).encode()
    if len(body) > MANIFEST_BYTES:
        raise InvalidArgument(f"artifact manifest: has {len(body)} bytes, registries take {MANIFEST_BYTES}")
    return body


def decode(body: bytes) -> Artifact:
    """The artifact that a manifest describes. InvalidArgument says in one line which part is none of ours."""
    if len(body) > MANIFEST_BYTES:
        raise InvalidArgument(f"artifact manifest: has more than {MANIFEST_BYTES} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("artifact manifest: is not JSON") from exc
    top = _object(document, "the whole")
    config = _object(top.get("config"), "config")
    kind = _kind(top.get("artifactType", config.get("mediaType")))
    if config.get("mediaType") != kind.value:
        raise InvalidArgument("artifact manifest: config: its mediaType is not the artifactType")
    if parse_digest(_text(config, "digest", "config")) != digest_of(CONFIG):
        raise InvalidArgument("artifact manifest: config: is not the empty one")
    notes = _object(top.get("annotations"), "annotations")
    subject = top.get("subject")
    artifact = Artifact(
        kind=kind,
        image_key=_text(notes, IMAGE_KEY, "annotations"),
        workload=_text(notes, WORKLOAD, "annotations", ""),
        subject=None if subject is None else _subject(_object(subject, "subject")),
        blobs=tuple(_blob(_object(one, "layers")) for one in _list(top.get("layers"), "layers", MAX_LAYERS)),
        signatures=_signatures(_text(notes, _SIGNATURES, "annotations", "[]")),
        created=_seconds(_text(notes, _CREATED, "annotations", "")),
    )
    _check(artifact)
    return artifact


def _check(artifact: Artifact) -> None:
    """Raises InvalidArgument unless this is what an artifact of its kind consists of."""
    parse_digest(artifact.image_key)
    _bounded(artifact.created, 0, _MAX_SECONDS, "created")
    if artifact.subject is not None:
        parse_digest(artifact.subject.digest)
        _bounded(artifact.subject.size, 1, _MAX_SIZE, "subject: size")
        _word(artifact.subject.media_type, "subject: mediaType")
    for blob in artifact.blobs:
        parse_digest(blob.digest)
        _bounded(blob.size, 1, _MAX_SIZE, "layers: size")
        if blob.data and (len(blob.data) != blob.size or digest_of(blob.data) != blob.digest):
            raise InvalidArgument("artifact manifest: layers: data is not what its digest says")
        if len(blob.data) > INLINE_BYTES:
            raise InvalidArgument(f"artifact manifest: layers: data is longer than {INLINE_BYTES} bytes")
    if len(artifact.signatures) > _MAX_SIGNATURES:
        raise InvalidArgument(f"artifact manifest: has more than {_MAX_SIGNATURES} signatures")
    for signature in artifact.signatures:
        _word(signature.key, "signatures: key")
        if len(signature.value) != _SIGNATURE_BYTES:
            raise InvalidArgument(f"artifact manifest: signatures: value has not {_SIGNATURE_BYTES} bytes")
    if artifact.kind is Kind.LAYER_INDEX:
        _check_index(artifact)
    else:
        _check_hotset(artifact)


def _check_index(artifact: Artifact) -> None:
    if artifact.workload:
        raise InvalidArgument("artifact manifest: a layer index is of no workload")
    layers = [parse_digest(blob.layer) for blob in artifact.blobs]
    if not 1 <= len(set(layers)) == len(layers) <= MAX_LAYERS:
        raise InvalidArgument("artifact manifest: layers: not one index for each layer")
    _check_types(artifact.blobs, [INDEX_TYPE] * len(layers))


def _check_hotset(artifact: Artifact) -> None:
    try:
        check_workload(artifact.workload)
    except Corrupt as exc:
        raise InvalidArgument(f"artifact manifest: {exc}") from exc
    _check_types(artifact.blobs, [HEAD_TYPE, PACK_TYPE][: max(1, len(artifact.blobs))])
    if any(blob.layer for blob in artifact.blobs):
        raise InvalidArgument("artifact manifest: layers: a hot set is of no single layer")
    if artifact.blobs[-1].size < artifact.blobs[0].size:
        raise InvalidArgument("artifact manifest: layers: the pack is shorter than its head")


def _check_types(blobs: Sequence[Blob], wanted: list[str]) -> None:
    if [blob.media_type for blob in blobs] != wanted:
        raise InvalidArgument(f"artifact manifest: layers: expected the media types {', '.join(wanted)}"[:300])


def _descriptor(blob: Blob) -> dict[str, object]:
    found: dict[str, object] = {"mediaType": blob.media_type, "digest": blob.digest, "size": blob.size}
    if blob.data:
        found["data"] = base64.b64encode(blob.data).decode()
    if blob.layer:
        found["annotations"] = {_LAYER: blob.layer}
    return found


def _blob(entry: _Object) -> Blob:
    notes = _object(entry.get("annotations", {}), "layers: annotations")
    return Blob(
        digest=parse_digest(_text(entry, "digest", "layers")),
        size=_size(entry, "layers"),
        media_type=_text(entry, "mediaType", "layers"),
        layer=_text(notes, _LAYER, "layers: annotations", ""),
        data=_base64(_text(entry, "data", "layers", ""), "layers: data"),
    )


def _subject(entry: _Object) -> Subject:
    digest = parse_digest(_text(entry, "digest", "subject"))
    return Subject(digest, _text(entry, "mediaType", "subject"), _size(entry, "subject"))


def _signatures(text: str) -> tuple[Signature, ...]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("artifact manifest: signatures: is not JSON") from exc
    found = []
    for entry in _list(entries, "signatures", _MAX_SIGNATURES):
        one = _object(entry, "signatures")
        value = _base64(_text(one, "value", "signatures"), "signatures: value")
        found.append(Signature(_text(one, "key", "signatures"), value))
    return tuple(found)


def _kind(value: object) -> Kind:
    for kind in Kind:
        if kind.value == value:
            return kind
    raise InvalidArgument(f"artifact manifest: artifactType: {str(value)[:100]!r} is none of ours")


def _seconds(text: str) -> int:
    if not text:
        return 0
    try:
        moment = datetime.fromisoformat(text)
        return max(0, int(moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()))
    except (ValueError, OverflowError) as exc:
        raise InvalidArgument(f"artifact manifest: {_CREATED}: {text[:100]!r} is no time") from exc


def _base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise InvalidArgument(f"artifact manifest: {where}: is not base64") from exc


def _object(value: object, where: str) -> _Object:
    if not isinstance(value, dict):
        raise InvalidArgument(f"artifact manifest: {where}: is not an object")
    return value


def _list(value: object, where: str, most: int) -> list[object]:
    if not isinstance(value, list) or len(value) > most:
        raise InvalidArgument(f"artifact manifest: {where}: is not a list of at most {most}")
    return value


def _text(entry: _Object, key: str, where: str, default: str | None = None) -> str:
    value = entry.get(key, default)
    if not isinstance(value, str):
        raise InvalidArgument(f"artifact manifest: {where}: {key} is missing or no text")
    return value


def _size(entry: _Object, where: str) -> int:
    value = entry.get("size")
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidArgument(f"artifact manifest: {where}: size is missing or no number")
    return value


def _bounded(value: int, low: int, high: int, where: str) -> None:
    if not low <= value <= high:
        raise InvalidArgument(f"artifact manifest: {where}: is not between {low} and {high}")


def _word(text: str, where: str) -> None:
    """Names that get into logs and headers: short, printable, without blanks."""
    if not 0 < len(text) <= _MAX_NAME or not text.isprintable() or " " in text:
        raise InvalidArgument(f"artifact manifest: {where}: is no name")
