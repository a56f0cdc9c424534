"""`bootseer index build`: make layer indexes ahead of time. Needs no root, no daemon, no containerd."""

import argparse
import json
import sys
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotter.cli.progress import Progress
from snapshotter.cli.table import megabytes, table
from snapshotter.cli.tree import Commands
from snapshotter.config import RegistryConfig
from snapshotter.errors import InvalidArgument, UserError

if TYPE_CHECKING:
    from snapshotter.cli.building import Built, Job
    from snapshotter.registry import Registry

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser("index", help="layer indexes", description="Layer indexes, made ahead of time.")
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = (
        "Read each layer of an image once and write its index to DIR/sha256/<hex>.bsi, for `url` in [index] of the"
        " daemon's configuration. An index that is there and valid is kept. Exit code 1 if any layer failed."
    )
    build = verbs.add_parser("build", help="index the layers of an image", description=text)
    build.add_argument("image", metavar="REF|FILE", help="image reference, OCI layout directory, or one layer blob")
    build.add_argument("--out", metavar="DIR", type=Path, required=True, help="directory of the indexes")
    build.add_argument("--platform", metavar="OS/ARCH", help="platform of the image (default: this machine's)")
    build.add_argument("--plain-http", action="store_true", help="speak to the registry without TLS")
    build.add_argument("--json", action="store_true", help="print the result as JSON")
    build.set_defaults(run=_build)


def _build(args: argparse.Namespace) -> int:
    from snapshotter.cli.building import build_all
    from snapshotter.registry import Registry, parse_reference

    _prepare(args.out)
    plain_http = (parse_reference(args.image).api_host,) if args.plain_http and not Path(args.image).exists() else ()
    with closing(Registry(RegistryConfig(plain_http=plain_http))) as registry:
        jobs = _jobs(args, registry)
        progress = Progress(sum(job.size for job in jobs))
        try:
            results = build_all(
                jobs,
                args.out,
                lambda layers, done: progress.show(done, f"{layers} of {len(jobs)} layers"),
                progress.interval_s,
            )
        finally:
            progress.end()
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
