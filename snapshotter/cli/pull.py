"""`bootseer pull`: a lazy pull into containerd, for nodes whose own client sends no labels."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from snapshotter.cli.tree import Commands, add_config, add_containerd_address
from snapshotter.config import Config, load_config
from snapshotter.errors import UserError

if TYPE_CHECKING:
    from snapshotter.containerd.client import Containerd
    from snapshotter.containerd.pull import Pulled

__all__ = ["add", "pulled_image"]

_POLL_S = 0.5
_POLL_HOT_S = 0.05


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Pull an image lazily into containerd: its manifest and configuration, and for each layer a snapshot whose"
        " contents come when they are read. Then containerd's clients can run it with the same snapshotter. Fails, and"
        " downloads nothing, where a layer cannot be lazy. Needs the daemon, and a containerd that has it as a plugin."
    )
    command = commands.add_parser("pull", help="pull an image lazily", description=text)
    command.add_argument("image", metavar="REF", help="image reference")
    command.add_argument(
        "--wait", choices=("mounted", "hot", "complete"), default="mounted", help="until (default: mounted)"
    )
    command.add_argument("--namespace", metavar="NAME", default="default", help="containerd's (default: default)")
    command.add_argument("--snapshotter", metavar="NAME", help="plugin's name (default: the one with our socket)")
    command.add_argument("--platform", metavar="OS/ARCH", help="platform of the image (default: this machine's)")
    add_containerd_address(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)
    command.set_defaults(run=_pull)


def pulled_image(args: argparse.Namespace, config: Config, platform: str = "") -> tuple["Pulled", str]:
    """The image of the command line, pulled lazily as it says, and the snapshotter that has it."""
    from snapshotter.containerd.client import Containerd
    from snapshotter.containerd.pull import Pull
    from snapshotter.registry import Registry, parse_platform

    containerd = Containerd(args.containerd_address)
    snapshotter: str = args.snapshotter or _snapshotter(containerd, config)
    registry = Registry(config.registry)
    try:
        pull = Pull(registry, containerd, args.namespace, snapshotter, _progress)
        return pull.run(args.image, parse_platform(platform) if platform else None), snapshotter
    finally:
        registry.close()


def _pull(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    started = time.monotonic()
    pulled, snapshotter = pulled_image(args, config, args.platform or "")
    if args.wait == "complete":
        _wait(config, set(pulled.layers))
    elif args.wait == "hot":
        _wait_hot(config, pulled.layers)
    seconds = round(time.monotonic() - started, 3)
    if args.json:
        result = {"image": pulled.image, "manifest": pulled.manifest, "layers": pulled.layers}
        print(json.dumps({**result, "snapshotter": snapshotter, "seconds": seconds}, indent=2))
    else:
        print(f"{pulled.image}: {len(pulled.layers)} layers by {snapshotter} in {seconds} s")
    return 0


def _snapshotter(containerd: "Containerd", config: Config) -> str:
    """The name under which containerd knows our socket."""
    ours = os.path.realpath(config.socket_path)
    for plugin in containerd.snapshotters():
        address = plugin.exports.get("address", "").removeprefix("unix://")
        if address and os.path.realpath(address) == ours:
            return plugin.name
    raise UserError(
        f"containerd has no snapshotter at {ours}: see `bootseer doctor`, or give --snapshotter", exit_code=1
    )


def _progress(done: int, layers: int) -> None:
    print(f"{done} of {layers} layers mounted", file=sys.stderr)


def _wait(config: Config, layers: set[str]) -> None:
    """Until the daemon says that each of the layers is complete; it streams what is missing, if it is set to."""
    from snapshotter.rpc import call

    if not config.fetch.background:
        raise UserError("--wait complete needs background = true in [fetch]: nothing would fetch the rest", exit_code=1)
    while True:
        states = {row.get("digest"): row for row in call(config.control_path, "status", 30)["layers"]}
        missing = [digest for digest in layers if states.get(digest, {}).get("state") != "complete"]
        if not missing:
            return
        left = sum(row["size_bytes"] - row["present_bytes"] for it, row in states.items() if it in missing)
        print(f"{len(missing)} layers to complete, {left / 1e6:.1f} MB", file=sys.stderr)
        time.sleep(_POLL_S)


def _wait_hot(config: Config, layers: Sequence[str]) -> None:
    """Until the image's hot blocks are on the node, or the daemon knows that it has no hot set."""
    from blockindex.hotset import image_key
    from snapshotter.rpc import call

    if not config.hotset.prefetch:
        raise UserError("--wait hot needs prefetch = true in [hotset]: nothing would fetch the blocks", exit_code=1)
    key = image_key(layers)
    while True:
        prefetches = call(config.control_path, "status", 30)["prefetches"]
        found = next((row for row in prefetches if row["image_key"] == key), None)
        if found is None or found["state"] in ("none", "over"):
            if found is None or found["state"] == "none":
                print("no hot set was found: the image's blocks come when they are read", file=sys.stderr)
            return
        print(f"hot blocks: {found['blocks']} of {found['hot_blocks']}", file=sys.stderr)
        time.sleep(_POLL_HOT_S)
