"""`bootseer index`: make layer indexes ahead of time, look into them. Needs no root, no daemon, no containerd."""

import argparse
import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotter.cli.table import megabytes, table
from snapshotter.cli.tree import Commands, add_config, add_plain_http, add_publishing, registry_config, written_path
from snapshotter.config import RegistryConfig
from snapshotter.errors import InvalidArgument, UserError

if TYPE_CHECKING:
    from snapshotter.cli.building import Built, Job
    from snapshotter.registry import Registry

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "index", help="layer indexes", description="Make layer indexes ahead of time, and look into them."
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = (
        "Read each layer of an image once and write its index to DIR/sha256/<hex>.bsi, for `url` in [index] of the"
        " daemon's configuration. An index that is there and valid is kept. Exit code 1 if any layer failed."
    )
    build = verbs.add_parser("build", help="index the layers of an image", description=text)
    build.add_argument("image", metavar="REF|FILE", help="image reference, OCI layout directory, or one layer blob")
    build.add_argument("--out", metavar="DIR", type=written_path, required=True, help="directory of the indexes")
    build.add_argument("--platform", metavar="OS/ARCH", help="platform of the image (default: this machine's)")
    add_plain_http(build)
    build.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(build)
    build.set_defaults(run=_build)
    _add_publish(verbs)
    _add_show(verbs)
    _add_verify(verbs)


def _add_publish(verbs: Commands) -> None:
    text = (
        "Index the layers of an image, of all its platforms, and publish the indexes: one artifact for each platform,"
        " beside the image or where --to says. Only what is not indexed there yet is read. With docker-archive:FILE,"
        " whose layers are plain tars, the same image is looked for in its registry. Exit codes: 0 published, or there"
        " already; 1 something failed; 2 a mistake in the call. Images for other systems than Linux are passed over."
    )
    publish = verbs.add_parser("publish", help="index an image and publish the indexes", description=text)
    what = "image reference, oci-layout:DIR[:TAG], or docker-archive:FILE"
    publish.add_argument("image", metavar="IMAGE", help=what)
    publish.add_argument(
        "--image", dest="name", metavar="REF", default="", help="the image in docker-archive:FILE (default: as in it)"
    )
    publish.add_argument(
        "--reuse",
        metavar="IMAGE",
        action="append",
        default=[],
        help="take over what is indexed of this image, as of the last release; may be given more than once",
    )
    add_publishing(publish)
    publish.set_defaults(run=_publish)


def _add_show(verbs: Commands) -> None:
    text = (
        "Show what an index file, or the index of each layer of an image, holds: counts, sizes, and how much a missing"
        " block makes the daemon fetch and decode. With --path, what reading that file would cost on a node that has"
        " nothing of the layer yet."
    )
    show = verbs.add_parser("show", help="what indexes hold, what a read costs", description=text)
    show.add_argument("image", metavar="FILE|REF", help="index file, image reference, or OCI layout directory")
    show.add_argument("--indexes", metavar="DIR|URL", help="where the image's indexes are (default: as configured)")
    show.add_argument("--path", metavar="PATH", help="a file in the image")
    show.add_argument("--bytes", metavar="START-END", type=_byte_range, help="of it these bytes only, END not included")
    show.add_argument("--platform", metavar="OS/ARCH", help="platform of the image (default: this machine's)")
    add_plain_http(show)
    show.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(show)
    show.set_defaults(run=_show)


def _add_verify(verbs: Commands) -> None:
    text = (
        "Check an index file: digests, tables, metadata, windows. With --blob also that every span decodes to the bytes"
        " it promises, and that the index says of files and metadata what the layer says. Exit code 1 if not."
    )
    verify = verbs.add_parser("verify", help="check an index", description=text)
    verify.add_argument("index", metavar="FILE", type=Path, help="index file")
    verify.add_argument("--blob", metavar="BLOB", type=Path, help="the layer it is of, as a file")
    verify.add_argument("--json", action="store_true", help="print the result as JSON")
    verify.set_defaults(run=_verify)


def _byte_range(text: str) -> tuple[int, int]:
    start, dash, end = text.partition("-")
    if not (dash and start.isascii() and start.isdigit() and end.isascii() and end.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not START-END")
    return int(start), int(end)


def _publish(args: argparse.Namespace) -> int:
    from snapshotter.cli.indexpublish import publish

    return publish(args)


def _show(args: argparse.Namespace) -> int:
    from snapshotter.cli.showing import show

    return show(args)


def _verify(args: argparse.Namespace) -> int:
    from snapshotter.cli.showing import verify

    return verify(args)


def _build(args: argparse.Namespace) -> int:
    from snapshotter.cli.building import build_all
    from snapshotter.registry import Registry

    _prepare(args.out)
    config = RegistryConfig() if Path(args.image).exists() else registry_config(args)
    with closing(Registry(config)) as registry:
        results = build_all(_jobs(args, registry), args.out)
    print(json.dumps(_document(args.image, results), indent=2) if args.json else _text(results))
    failed = [result for result in results if result.status == "failed"]
    for result in failed:
        print(f"bootseer: layer {result.digest} has no index: {result.reason}", file=sys.stderr)
    return 1 if failed else 0


def _prepare(out: Path) -> None:
    """Meet a wrong --out before the first byte is read."""
    try:
        (out / "sha256").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from error


def _jobs(args: argparse.Namespace, registry: "Registry") -> "list[Job]":
    """What the argument means: something on disk if it exists there, else an image reference."""
    from snapshotter.cli.building import Job
    from snapshotter.registry import FileBlob, OciLayout, parse_platform

    path = Path(args.image)
    try:
        platform = parse_platform(args.platform) if args.platform else None
        if path.is_dir():
            layout = OciLayout(path)
            return [
                Job(d.digest, d.size, layout.blob(d.digest)) for d in dict.fromkeys(layout.resolve(platform).layers)
            ]
        if path.exists():
            blob = FileBlob(path)
            return [Job(blob.digest(), blob.size(), blob)]
        layers = registry.resolve(args.image, platform).layers
        return [Job(d.digest, d.size, registry.blob(args.image, d.digest)) for d in dict.fromkeys(layers)]
    except InvalidArgument as error:
        raise UserError(str(error)) from error


def _document(image: str, results: "list[Built]") -> dict[str, object]:
    return {"image": image, "layers": [asdict(result) for result in results]}


def _text(results: "list[Built]") -> str:
    rows = [
        [
            result.digest.removeprefix("sha256:")[:12],
            result.status,
            megabytes(result.blob_bytes),
            megabytes(result.index_bytes) if result.index_bytes else "-",
            f"{result.seconds:.1f} s",
        ]
        for result in results
    ]
    return table(("LAYER", "RESULT", "BLOB", "INDEX", "TIME"), rows)
