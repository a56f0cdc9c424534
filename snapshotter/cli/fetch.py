"""`bootseer fetch`: the layers of a lazily pulled image, into containerd's content store."""

import argparse
import json
import time

from snapshotter.cli.progress import Progress
from snapshotter.cli.tree import Commands, add_config, add_containerd_address
from snapshotter.config import load_config

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Fetch the layers of a lazily pulled image into containerd's content store, for whoever needs the compressed "
        "layers themselves: push, save, export, commit, another snapshotter. What is there already is not fetched "
        "again. Running containers are not touched. Needs no daemon."
    )
    command = commands.add_parser("fetch", help="complete a lazily pulled image", description=text)
    command.add_argument("image", metavar="REF", help="image reference, as it was pulled")
    command.add_argument("--namespace", metavar="NAME", default="default", help="containerd's (default: default)")
    command.add_argument("--platform", metavar="OS/ARCH", help="platform of the image (default: this machine's)")
    add_containerd_address(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)
    command.set_defaults(run=_fetch)


def _fetch(args: argparse.Namespace) -> int:
    from snapshotter.containerd.client import Containerd
    from snapshotter.containerd.completion import Completion
    from snapshotter.registry import Registry, parse_platform

    started = time.monotonic()
    config = load_config(args.config)
    platform = parse_platform(args.platform) if args.platform else None
    registry, shown = Registry(config.registry), _Shown()
    try:
        done = Completion(registry, Containerd(args.containerd_address), args.namespace, shown).run(
            args.image, platform
        )
    finally:
        shown.end()
        registry.close()
    seconds = round(time.monotonic() - started, 3)
    if args.json:
        result = {"image": done.image, "manifest": done.manifest, "layers": done.layers, "fetched": done.fetched}
        print(json.dumps({**result, "bytes": done.size, "seconds": seconds}, indent=2))
    else:
        print(
            f"{done.image}: {len(done.fetched)} of {len(done.layers)} layers fetched, {done.size / 1e6:.1f} MB in "
            f"{seconds} s; containerd has all of them"
        )
    return 0


class _Shown:
    """Progress that begins with the first bytes."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __call__(self, done: int, total: int, left: int) -> None:
        if self._progress is None:
            self._progress = Progress(total)
        self._progress.show(done, f"{left} layers to fetch")

    def end(self) -> None:
        """Clear the bar."""
        if self._progress is not None:
            self._progress.end()
