"""`bootseer hotset publish`: one artifact for each hot set of an image, with its bytes where they can be had.

Sets come from the node's own directory, or from where --from says. A set without bytes out of the node's directory is
packed first, from the block store; where its blocks are not here, the extents alone are published: a node then fetches
them from the layers. So are those of a workload whose blocks the pack of `default` holds anyway: what comes by that is
asked for first, and nothing is stored and fetched twice.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from blockindex.hotpack import Codec, HotPack
from blockindex.hotset import DEFAULT_GAP, DEFAULT_WORKLOAD, includes
from snapshotter.artifacts.displacement import Displacement
from snapshotter.artifacts.made import hot_artifact, read_chunks
from snapshotter.artifacts.model import Blob
from snapshotter.artifacts.place import OpenBlob, Place, Placed
from snapshotter.cli.hotsetbuild import exported
from snapshotter.cli.hotsetfind import Found, one_line, read_file
from snapshotter.cli.places import client_config, explained, open_place, open_source, platform_of, readable, signing_key
from snapshotter.cli.progress import Progress
from snapshotter.cli.publishing import ADVICE, Sending, image_name
from snapshotter.cli.table import megabytes, table
from snapshotter.config import Config, load_config
from snapshotter.errors import NotFound, UserError
from snapshotter.hotpacking import check_frames
from snapshotter.hotstore import HotStore
from snapshotter.imagesource import ImageSource, PlatformImage, Refused, platform_images
from snapshotter.registry import Registry
from snapshotter.trust.keys import SecretKey, sign

__all__ = ["publish"]


@dataclass(frozen=True, slots=True)
class SetRow:
    """What became of a hot set. `status`: published, there (it was already), refused (what is there is signed, see
    `note`). `file_bytes`: of the file; `hot_bytes`: of the blocks it names, which are in it if `packed`; `note` says
    why not. `artifact`: the manifest's digest, "" where plain files are kept; `names`: its tags, or the file."""

    platform: str
    image_key: str
    workload: str
    status: str
    packed: bool
    hot_bytes: int
    file_bytes: int
    artifact: str
    names: tuple[str, ...]
    signed_by: str
    note: str


def publish(args: argparse.Namespace) -> int:
    """Run the command."""
    config = load_config(args.config)
    to = args.to or config.publish.to
    client = client_config(args, config, args.image, to)
    rows: list[SetRow] = []
    with closing(Registry(client)) as registry, tempfile.TemporaryDirectory(prefix="bootseer-") as spool:
        with readable(client):
            source = open_source(args.image, registry)
            place = open_place(to, registry, source)
            key = signing_key(args.key, config, place)
            images = [it for it in platform_images(source, platform_of(args)) if not isinstance(it, Refused)]
        chosen = list(_chosen(args, config, source, images))
        with explained(place.name, client, ADVICE):
            place.prepare()
            defaults: dict[str, HotPack] = {}
            for image, found in sorted(chosen, key=lambda pair: pair[1].pack.hotset.workload != DEFAULT_WORKLOAD):
                hotset, note, item = found.pack.hotset, "", found
                default = defaults.get(hotset.image_key)
                if default is not None and not found.pack.frames and includes(default.hotset, hotset):
                    note = f"its bytes are in the pack of {DEFAULT_WORKLOAD}"
                elif not args.sources:
                    item, note = _packed(config, found, Path(spool))
                if hotset.workload == DEFAULT_WORKLOAD and item.pack.frames:
                    defaults[hotset.image_key] = item.pack
                rows.append(_put(image, item, note, place, key, args.replace))
    if args.json:
        document = {"image": source.name, "to": place.name, "sets": [asdict(row) for row in rows]}
        print(json.dumps(document, indent=2))
    else:
        print(_text(rows))
    for row in rows:
        if row.note:
            print(f"bootseer: {row.platform} {row.workload}: {row.note}", file=sys.stderr)
    return 1 if any(row.status == "refused" for row in rows) else 0


def _chosen(
    args: argparse.Namespace, config: Config, source: ImageSource, images: list[PlatformImage]
) -> Iterator[tuple[PlatformImage, Found]]:
    """The sets to publish, each with its image. NotFound where there is none, UserError for a file of another image."""
    by_key = {image.image_key: image for image in images}
    found = [(by_key[item.pack.hotset.image_key], item) for item in _sets(args.sources, config, source, by_key)]
    workloads = ", ".join(sorted({item.pack.hotset.workload for _, item in found}))
    chosen = [pair for pair in found if args.workload in (None, pair[1].pack.hotset.workload)]
    if not chosen:
        where = " or ".join(map(str, args.sources)) or f"this node's store ({config.root})"
        what = f" of workload {args.workload!r} (there is: {workloads})" if workloads else ""
        raise NotFound(
            f"{source.name}: no hot set{what}: looked in {where}; record one with `bootseer record`, or name files with"
            " --from"
        )
    return iter(chosen)


def _sets(
    sources: list[Path], config: Config, source: ImageSource, by_key: dict[str, PlatformImage]
) -> Iterator[Found]:
    for place in sources or [config.root_path]:
        if place.is_dir() or not sources:
            for key in by_key:
                yield from map(read_file, HotStore(place).find(key).values())
            continue
        found = read_file(place)
        if found.pack.hotset.image_key not in by_key:
            raise UserError(
                f"{place}: is a hot set of another image (key {found.pack.hotset.image_key[7:19]}) than {source.name}"
            )
        yield found


def _packed(config: Config, found: Found, spool: Path) -> tuple[Found, str]:
    """The set with its bytes if they can be had here, and why not."""
    if found.pack.frames:
        return found, ""
    written = exported(config, found, spool, Codec.ZSTD, DEFAULT_GAP)
    note = (
        f"published without bytes: {written.problem.removeprefix('written without bytes: ')}" if written.problem else ""
    )
    return read_file(Path(written.path)), note


def _put(image: PlatformImage, found: Found, note: str, place: Place, key: SecretKey | None, replace: bool) -> SetRow:
    hotset = found.pack.hotset
    _check(found)
    artifact = hot_artifact(found.path, found.pack, image_name(image).subject)
    if key is not None:
        artifact = sign(artifact, key)
    sending = Sending(artifact, f"sending {hotset.workload}")
    try:
        placed = place.put(artifact, sending.through(_reader(found.path)), replace=replace)
        status = "there" if placed.existed else "published"
    except Displacement as error:
        placed, status, note = Placed(False, "", ()), "refused", str(error)
    finally:
        sending.end()
    return SetRow(
        platform=str(image.platform),
        image_key=hotset.image_key,
        workload=hotset.workload,
        status=status,
        packed=bool(found.pack.frames),
        hot_bytes=hotset.hot_bytes,
        file_bytes=found.pack.size,
        artifact=placed.digest,
        names=placed.names,
        signed_by=key.public.name if key is not None and status != "refused" else "",
        note=note,
    )


def _check(found: Found) -> None:
    """Every frame decodes: what is published is fetched by many."""
    progress = Progress(found.pack.size)
    try:
        with one_line(found.path), found.path.open("rb") as file:
            check_frames(found.pack, file, lambda done: progress.show(done, f"checking {found.pack.hotset.workload}"))
    finally:
        progress.end()


def _reader(path: Path) -> OpenBlob:
    """A blob of a hot set is the file's beginning: its head, or all of it."""

    def read(blob: Blob) -> Iterator[bytes]:
        return read_chunks(path, blob.size)

    return read


def _text(rows: list[SetRow]) -> str:
    cells = [
        [
            row.platform,
            row.workload,
            row.status,
            megabytes(row.hot_bytes),
            megabytes(row.file_bytes) if row.packed else "no bytes",
            row.artifact.removeprefix("sha256:")[:12] or ("1 file" if row.names else "-"),
        ]
        for row in rows
    ]
    return table(("PLATFORM", "WORKLOAD", "RESULT", "HOT", "PACK", "ARTIFACT"), cells)
