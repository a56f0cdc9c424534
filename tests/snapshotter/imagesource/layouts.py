"""Images of several platforms as OCI layouts, and as archives of `docker save`; small, and the same at each call."""

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image"


class LayoutWriter:
    """Writes blobs and documents into a layout; `index` keeps what `index.json` lists."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.blobs = directory / "blobs" / "sha256"
        self.blobs.mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.index([])

    def blob(self, data: bytes, media_type: str, **more: Any) -> dict[str, Any]:
        """A blob's descriptor."""
        digest = hashlib.sha256(data).hexdigest()
        (self.blobs / digest).write_bytes(data)
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data), **more}

    def document(self, content: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """The descriptor of a manifest or an image index."""
        return self.blob(json.dumps({"schemaVersion": 2, **content}).encode(), content["mediaType"], **more)

    def image(self, blobs: Sequence[bytes], arch: str = "amd64", os: str = "linux", **more: Any) -> dict[str, Any]:
        """The descriptor of a platform's manifest; `more` goes into the manifest."""
        diff_ids = [_digest(gzip.decompress(it)) if it[:2] == b"\x1f\x8b" else _digest(it) for it in blobs]
        config = {"os": os, "architecture": arch, "rootfs": {"type": "layers", "diff_ids": diff_ids}}
        manifest = {
            "mediaType": f"{OCI}.manifest.v1+json",
            "config": self.blob(json.dumps(config).encode(), f"{OCI}.config.v1+json"),
            "layers": [self.blob(layer, f"{OCI}.layer.v1.tar+gzip") for layer in blobs],
        }
        return self.document(manifest | more)

    def several(self, *images: tuple[dict[str, Any], str]) -> dict[str, Any]:
        """The descriptor of an image index over images, each with its `os/arch`."""
        entries = []
        for image, platform in images:
            os, _, arch = platform.partition("/")
            entries.append({**image, "platform": {"os": os, "architecture": arch}})
        return self.document({"mediaType": f"{OCI}.index.v1+json", "manifests": entries})

    def index(self, entries: Sequence[dict[str, Any]]) -> None:
        """Write `index.json`."""
        (self.directory / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": list(entries)}))


def tagged(entry: dict[str, Any], tag: str) -> dict[str, Any]:
    """The entry under a tag."""
    return {**entry, "annotations": {"org.opencontainers.image.ref.name": tag}}


def write_archive(path: Path, layers: Sequence[bytes], names: Sequence[str], arch: str = "amd64") -> None:
    """An archive of plain tars, as `docker save` writes it; an equal layer is there once, and else a link."""
    tars = [gzip.decompress(layer) for layer in layers]
    config = {
        "os": "linux",
        "architecture": arch,
        "rootfs": {"type": "layers", "diff_ids": [_digest(tar) for tar in tars]},
        "history": [{"created_by": "save"}],
    }
    body = json.dumps(config).encode()
    name = f"{hashlib.sha256(body).hexdigest()}.json"
    with tarfile.open(path, "w") as archive:
        places: dict[bytes, str] = {}
        listed = []
        for number, tar in enumerate(tars):
            place = f"layer{number}/layer.tar"
            if tar in places:
                link = tarfile.TarInfo(place)
                link.type, link.linkname = tarfile.SYMTYPE, f"../{places[tar]}"
                archive.addfile(link)
            else:
                places[tar] = place
                _add(archive, place, tar)
            listed.append(place)
        _add(archive, name, body)
        document = [{"Config": name, "RepoTags": list(names) or None, "Layers": listed}]
        _add(archive, "manifest.json", json.dumps(document).encode())


def archive_of(layout: Path, path: Path) -> None:
    """A layout as one tar file, as newer versions of `docker save` write it."""
    with tarfile.open(path, "w") as archive:
        for file in sorted(layout.rglob("*")):
            if file.is_file():
                _add(archive, str(file.relative_to(layout)), file.read_bytes())


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"
