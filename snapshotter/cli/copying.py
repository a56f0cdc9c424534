"""What `bootseer copy` does: the image first, then what refers to it, which so never stands there without one."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass

from snapshotter.artifacts.directory import DirectoryPlace
from snapshotter.artifacts.displacement import Displacement
from snapshotter.artifacts.made import index_artifact
from snapshotter.artifacts.model import Kind
from snapshotter.artifacts.ocilayout import LayoutPlace
from snapshotter.artifacts.place import Held, ImageName, Place
from snapshotter.artifacts.registryplace import RegistryPlace
from snapshotter.cli.places import (
    client_config,
    explained,
    open_held,
    open_place,
    open_source,
    platform_of,
    readable,
    taken_from,
)
from snapshotter.cli.progress import Progress
from snapshotter.cli.publishing import Sending, image_name
from snapshotter.config import RegistryConfig, load_config
from snapshotter.errors import InvalidArgument, UserError
from snapshotter.imagesource import ImageSource, Layout, PlatformImage, parse_layout, platform_images
from snapshotter.imagesource.imagecopy import Copied, ImageCopy, parts_of
from snapshotter.imagesource.sources import LAYOUT_PREFIX
from snapshotter.imagesource.targets import ImageTarget, LayoutTarget, RegistryTarget
from snapshotter.model import Digest
from snapshotter.registry import Document, Platform, Registry, parse_reference
from snapshotter.registry.push import Pusher

__all__ = ["copy"]

_NAMES = {Kind.LAYER_INDEX: "layer index", Kind.HOT_SET: "hot set"}


@dataclass(frozen=True, slots=True)
class ArtifactRow:
    """An artifact that was taken along, out of the place `source`. `status`: copied, there (it was already), refused
    (the target has a signed one, and `digest` is that of the source, "" if that keeps plain files)."""

    platform: str
    type: str
    workload: str
    digest: str
    status: str
    source: str


def copy(args: argparse.Namespace) -> int:
    """Run the command."""
    started = time.monotonic()
    config = load_config(args.config)
    client = client_config(args, config, args.source, args.target, *args.places)
    with closing(Registry(client)) as registry:
        source = open_source(args.source, registry)
        target, place = _target(args.target, registry, source)
        others = [open_held(text, registry) for text in args.places]
        with readable(client):
            images = _images(source, platform_of(args))
            root = images[0].document if args.platform else source.document()
        with explained(place.name, client, "log in with `docker login`"):
            copied, elsewhere = _copy_image(source, target, root)
            rows = _copy_artifacts([open_place("", registry, source), *others], place, images, client)
    seconds = round(time.monotonic() - started, 3)
    if args.json:
        document = {
            "source": source.name,
            "target": target.name,
            "manifest": root.digest,
            "platforms": [str(image.platform) for image in images],
            "blobs": asdict(copied),
            "elsewhere": elsewhere,
            "artifacts": [asdict(row) for row in rows],
            "seconds": seconds,
        }
        print(json.dumps(document, indent=2))
    else:
        print(_text(target.name, copied, elsewhere, rows, seconds))
    return 1 if any(row.status == "refused" for row in rows) else 0


def _target(text: str, registry: Registry, source: ImageSource) -> tuple[ImageTarget, Place]:
    """Where the image goes, and its artifacts. A layout gives the image the source's tag, if none is named."""
    try:
        if text.startswith(LAYOUT_PREFIX):
            directory, tag = parse_layout(text)
            layout = Layout.create(directory)
            return LayoutTarget(layout, tag or (source.home and source.home.tag) or ""), LayoutPlace(layout)
        ref = parse_reference(text)
    except InvalidArgument as error:
        raise UserError(str(error)) from error
    if ref.digest:
        raise UserError(f"{text}: an image is copied to a tag; its digest stays what it is")
    return RegistryTarget(Pusher(registry), ref), RegistryPlace(registry, ref)


def _images(source: ImageSource, wanted: Platform | None) -> list[PlatformImage]:
    """The images that may have artifacts. What has none, as an image for Windows, is copied all the same."""
    try:
        found = platform_images(source, wanted)
    except InvalidArgument:  # no container image at all
        return []
    images = [image for image in found if isinstance(image, PlatformImage)]
    if wanted and not images:
        raise UserError(f"{source.name}: {wanted} alone cannot be copied: leave --platform out")
    return images


def _copy_image(source: ImageSource, target: ImageTarget, root: Document) -> tuple[Copied, list[str]]:
    parts = parts_of(source, root)
    progress = Progress(sum(parts.blobs.values()))
    try:
        copied = ImageCopy(source, target, parts).run(
            lambda done, size: progress.show(size, f"{done} of {len(parts.blobs)} blobs"), progress.interval_s
        )
    finally:
        progress.end()
    return copied, sorted(parts.elsewhere)


def _copy_artifacts(
    sources: list[Place], target: Place, images: list[PlatformImage], client: RegistryConfig
) -> list[ArtifactRow]:
    """Of each kind and workload the first. A place that is named and has nothing of the image is said: it may be one
    that was misspelt."""
    rows: list[ArtifactRow] = []
    taken: set[tuple[str, Kind, str]] = set()
    for number, source in enumerate(sources):
        has_some = False
        for image in images:
            for held in _held(source, image_name(image), client):
                has_some = True
                what = (str(image.platform), held.artifact.kind, held.artifact.workload)
                if what not in taken:
                    taken.add(what)
                    rows.append(_artifact(str(image.platform), held, source, target))
        if number and images and not has_some:
            print(f"bootseer: {source.name} has no artifacts of this image", file=sys.stderr)
    return rows


def _held(source: Place, name: ImageName, client: RegistryConfig) -> Iterator[Held]:
    """What a place has, as the target is to have it: plain files become artifacts of the image."""
    with taken_from(source.name, client):
        found = source.held(name)
    if not isinstance(source, DirectoryPlace):
        yield from found
        return
    for held in found:
        blobs = {Digest(blob.layer): blob for blob in held.artifact.blobs}
        missing = [layer for layer in name.layers if layer not in blobs]
        if missing:
            print(
                f"bootseer: {source.name} has no index of layer {missing[0]}: no layer index is taken from there",
                file=sys.stderr,
            )
        else:
            yield Held(index_artifact(name, blobs), "", held.open)
    yield from source.hot_sets(name)


def _artifact(platform: str, held: Held, source: Place, target: Place) -> ArtifactRow:
    artifact = held.artifact
    sending = Sending(artifact, f"{_NAMES[artifact.kind]} {artifact.workload}".strip())
    status, digest = "refused", held.digest
    try:
        placed = target.put(artifact, sending.through(held.open))
        status, digest = "there" if placed.existed else "copied", placed.digest
    except Displacement as error:  # the image is whole without it
        print(f"bootseer: {error}", file=sys.stderr)
    finally:
        sending.end()
    return ArtifactRow(platform, artifact.kind.value, artifact.workload, digest, status, source.name)


def _text(target: str, copied: Copied, elsewhere: list[str], rows: list[ArtifactRow], seconds: float) -> str:
    lines = [
        f"{target}: {copied.sent} blobs sent ({copied.bytes / 1e6:.1f} MB), {copied.mounted} mounted, {copied.there} "
        f"there before, in {seconds} s"
    ]
    lines += [f"layer {digest} is not in a registry, but at a URL of its own: not copied" for digest in elsewhere]
    names = {kind.value: name for kind, name in _NAMES.items()}
    lines += [f"{row.platform}: {' '.join(filter(None, (names[row.type], row.workload)))} {row.status}" for row in rows]
    return "\n".join(lines)
