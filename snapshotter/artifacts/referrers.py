"""What refers to a manifest, as registries list it: the answer of the referrers API, and the fallback tag; and tags.

Both are an OCI image index. Sans-IO: bytes in, values out. Entries that are not ours are kept as they are when an index
is written again; entries that make no sense are passed over when it is read.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from snapshotter.artifacts.manifest import IMAGE_KEY, MANIFEST_BYTES, MANIFEST_TYPE, WORKLOAD
from snapshotter.artifacts.model import Artifact, Kind
from snapshotter.errors import InvalidArgument
from snapshotter.model import Digest
from snapshotter.registry.reference import parse_digest

__all__ = [
    "REFERRERS_TYPE",
    "Referrer",
    "digests",
    "fallback_tag",
    "parse_referrers",
    "parse_tags",
    "referrer_of",
    "rewritten",
    "without",
]

REFERRERS_TYPE = "application/vnd.oci.image.index.v1+json"
_CREATED = "org.opencontainers.image.created"
_MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Referrer:
    """One entry that may be an artifact of ours. `workload` and `image_key` are None where the entry does not tell;
    `created`: as the entry has it, for ordering only."""

    digest: Digest
    kind: Kind
    image_key: str | None
    workload: str | None
    created: str = ""

    def may_be(self, kind: Kind, image_key: str, workload: str) -> bool:
        """Whether this can be the artifact that is looked for; the manifest itself decides."""
        told = [(self.image_key, image_key), (self.workload, workload if kind is Kind.HOT_SET else None)]
        return self.kind is kind and all(own is None or own == wanted for own, wanted in told)


def fallback_tag(digest: Digest) -> str:
    """The tag under which registries without the referrers API list what refers to `digest`."""
    return digest.replace(":", "-", 1)


def parse_referrers(body: bytes) -> list[Referrer]:
    """The entries that may be ours, in their order. InvalidArgument when it is no image index (a web page, for one)."""
    found = []
    for entry in _entries(body):
        notes = entry.get("annotations")
        notes = notes if isinstance(notes, dict) else {}
        kinds = [kind for kind in Kind if kind.value == entry.get("artifactType")]
        try:
            digest = parse_digest(str(entry.get("digest")))
        except InvalidArgument:
            continue
        if kinds and entry.get("mediaType") == MANIFEST_TYPE:
            texts = [notes.get(key) for key in (IMAGE_KEY, WORKLOAD, _CREATED)]
            key, workload, created = (text if isinstance(text, str) else None for text in texts)
            found.append(Referrer(digest, kinds[0], key, workload, created or ""))
    return found


def referrer_of(artifact: Artifact, manifest: bytes, digest: Digest) -> dict[str, object]:
    """The entry of an artifact: a descriptor with the annotations of its manifest, but for long ones."""
    notes = json.loads(manifest)["annotations"]
    return {
        "mediaType": MANIFEST_TYPE,
        "digest": digest,
        "size": len(manifest),
        "artifactType": artifact.kind.value,
        "annotations": {key: notes[key] for key in (IMAGE_KEY, WORKLOAD, _CREATED) if key in notes},
    }


def rewritten(body: bytes | None, added: dict[str, object], dropped: Collection[str]) -> bytes | None:
    """The index with `added` in it and without the digests `dropped`; `body` None: there is none yet. None when it says
    that already. InvalidArgument when what is there is no image index."""
    entries = _entries(body) if body is not None else []
    kept = [entry for entry in entries if entry.get("digest") not in {*dropped, added["digest"]}]
    wanted = [*kept, added]
    if body is not None and len(wanted) == len(entries) and all(one in entries for one in wanted):
        return None
    return _index(wanted)


def without(body: bytes, missing: Iterable[str]) -> bytes:
    """The index without entries of these digests."""
    gone = set(missing)
    return _index([entry for entry in _entries(body) if entry.get("digest") not in gone])


def digests(body: bytes) -> list[str]:
    """The digests of all entries, ours or not."""
    return [str(entry.get("digest")) for entry in _entries(body)]


def parse_tags(body: bytes) -> list[str]:
    """The tags of one page of a repository's list of tags. InvalidArgument when it is none."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("list of tags: is not JSON") from exc
    names = document.get("tags") if isinstance(document, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _index(entries: list[dict[str, object]]) -> bytes:
    document = {"schemaVersion": 2, "mediaType": REFERRERS_TYPE, "manifests": entries}
    return json.dumps(document, separators=(",", ":")).encode()


def _entries(body: bytes) -> list[dict[str, object]]:
    if len(body) > MANIFEST_BYTES:
        raise InvalidArgument(f"list of referrers: is longer than {MANIFEST_BYTES} bytes")
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument("list of referrers: is not JSON") from exc
    manifests = document.get("manifests") if isinstance(document, dict) else None
    if not isinstance(manifests, list) or len(manifests) > _MAX_ENTRIES:
        raise InvalidArgument("list of referrers: is no image index")
    return [entry for entry in manifests if isinstance(entry, dict) and isinstance(entry.get("digest"), str)]
