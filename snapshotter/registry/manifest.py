"""Image manifests and indexes (OCI and Docker media types), parsed into values; the choice of a platform.

Sans-IO: bytes in, values out. An index and a manifest are told apart by their content, since media types are often
missing or wrong. Everything used later (digests, sizes) is checked here. Entries of an index that describe other
entries (attestations) are left out; an image with a layer that its registry need not have is refused.
"""

import json
import platform as host
from dataclasses import dataclass
from typing import cast

from snapshotter.errors import InvalidArgument, NotFound
from snapshotter.model import Digest
from snapshotter.registry.reference import parse_digest

__all__ = [
    "ACCEPT",
    "Descriptor",
    "Document",
    "Manifest",
    "Platform",
    "choose",
    "document_type",
    "host_platform",
    "parse_manifest",
    "parse_platform",
]

ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)

_MACHINES = {
    "x86_64": ("amd64", ""),
    "amd64": ("amd64", ""),
    "aarch64": ("arm64", ""),
    "arm64": ("arm64", ""),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "i686": ("386", ""),
    "i386": ("386", ""),
    "ppc64le": ("ppc64le", ""),
    "s390x": ("s390x", ""),
    "riscv64": ("riscv64", ""),
    "loongarch64": ("loong64", ""),
}
_BASE_VARIANT = {"arm64": "v8", "amd64": "v1", "arm": "v7"}  # what an empty variant means
_ARM = ("v8", "v7", "v6", "v5")  # each runs what those after it run

_FOREIGN = ("application/vnd.docker.image.rootfs.foreign.", "application/vnd.oci.image.layer.nondistributable.")


@dataclass(frozen=True, slots=True)
class Platform:
    """`os/arch[/variant]`; an empty variant means the architecture's base variant."""

    os: str
    arch: str
    variant: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, (self.os, self.arch, self.variant)))


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob that a manifest names; `size` in bytes, `platform` only in an index."""

    media_type: str
    digest: Digest
    size: int
    platform: Platform | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """One platform's image: `digest` is the platform manifest's own, `layers` from the bottom up."""

    digest: Digest
    media_type: str
    config: Descriptor
    layers: tuple[Descriptor, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest or an image index as it came."""

    media_type: str
    digest: Digest
    body: bytes


def document_type(body: bytes) -> str:
    """The media type of a document that `parse_manifest` has accepted: its own word, else OCI's for what it is."""
    document = json.loads(body)
    kind = "index" if isinstance(document.get("manifests"), list) else "manifest"
    return str(document.get("mediaType") or f"application/vnd.oci.image.{kind}.v1+json")


def host_platform() -> Platform:
    """The platform whose containers this machine runs."""
    machine = host.machine()
    arch, variant = _MACHINES.get(machine, (machine, ""))
    return Platform("linux", arch, variant)


def parse_platform(text: str) -> Platform:
    """`os/arch[/variant]` as a Platform; InvalidArgument for anything else."""
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(part.isalnum() for part in parts):
        raise InvalidArgument(f"{text!r} is not a platform: expected os/arch or os/arch/variant, as in linux/amd64")
    return Platform(*parts)


def parse_manifest(body: bytes, digest: Digest, what: str) -> Manifest | tuple[Descriptor, ...]:
    """`body` as a Manifest, or as an index's descriptors. InvalidArgument names the part that is wrong."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as exc:
        raise InvalidArgument(f"{what}: the manifest is not JSON") from exc
    if not isinstance(document, dict):
        raise InvalidArgument(f"{what}: the manifest is not a JSON object")
    media_type = str(document.get("mediaType", ""))
    if isinstance(document.get("manifests"), list):
        images = [entry for entry in document["manifests"] if not _is_about_another(entry)]
        return tuple(_descriptor(entry, f"{what}: manifests") for entry in images)
    if document.get("schemaVersion") == 1 or "fsLayers" in document:
        raise InvalidArgument(f"{what}: manifest schema 1 is obsolete and not supported; push the image anew")
    layers = document.get("layers")
    if not isinstance(layers, list):
        raise InvalidArgument(f"{what}: neither an image manifest nor an image index")
    return Manifest(
        digest,
        media_type,
        _descriptor(document.get("config"), f"{what}: config"),
        tuple(_layer(entry, f"{what}: layers") for entry in layers),
    )


def choose(entries: tuple[Descriptor, ...], wanted: Platform, what: str) -> Descriptor:
    """The entry of an index for `wanted`: its variant first, then one that runs there too, else NotFound with what
    there is."""
    same = [e for e in entries if e.platform and (e.platform.os, e.platform.arch) == (wanted.os, wanted.arch)]
    base = _BASE_VARIANT.get(wanted.arch, "")
    variant = wanted.variant or base
    older = _ARM[_ARM.index(variant) + 1 :] if wanted.arch == "arm" and variant in _ARM else (base,)
    for acceptable in (variant, *older):
        for entry in same:
            if entry.platform is not None and (entry.platform.variant or base) == acceptable:
                return entry
    unnamed = [e for e in entries if e.platform is None]
    if not same and len(entries) == 1 and unnamed:
        return unnamed[0]  # an index around one image need not name its platform
    offered = ", ".join(sorted({str(e.platform) for e in entries if e.platform and e.platform.os != "unknown"}))
    raise NotFound(f"{what}: no image for {wanted}; there is {offered or 'none that names a platform'}")


def _is_about_another(entry: object) -> bool:
    """Whether an entry of an index is no image but says something about one (provenance, a list of contents, as an
    attestation; in an OCI layout also artifacts of ours)."""
    if not isinstance(entry, dict):
        return False
    if str(entry.get("artifactType", "")).startswith("application/vnd.bootseer."):
        return True
    notes = entry.get("annotations")
    return isinstance(notes, dict) and notes.get("vnd.docker.reference.type") == "attestation-manifest"


def _layer(entry: object, where: str) -> Descriptor:
    """A layer's descriptor; InvalidArgument for a foreign one, whose bytes come from elsewhere than the registry."""
    layer = _descriptor(entry, where)
    urls = entry.get("urls") if isinstance(entry, dict) else None
    if urls or layer.media_type.startswith(_FOREIGN):
        raise InvalidArgument(
            f"{where}: {layer.digest} is a foreign layer ({layer.media_type}), which is not supported"
        )
    return layer


def _descriptor(entry: object, where: str) -> Descriptor:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where}: a descriptor is missing")
    size = entry.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise InvalidArgument(f"{where}: descriptor without a valid size")
    digest = parse_digest(str(entry.get("digest", "")))
    return Descriptor(str(entry.get("mediaType", "")), digest, size, _platform(entry.get("platform")))


def _platform(entry: object) -> Platform | None:
    if not isinstance(entry, dict):
        return None
    fields = cast(dict[str, object], entry)
    return Platform(*(str(fields.get(key) or "") for key in ("os", "architecture", "variant")))
