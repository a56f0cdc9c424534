"""`bootseer lazy`: the kill switch. Works with and without a running daemon."""

import argparse
import json

from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config
from snapshotter.lazyswitch import LazySwitch

__all__ = ["add"]

_VERBS = {
    "off": (
        "have new pulls be ordinary ones",
        "Have containerd download and unpack what it pulls from now on, as without bootseer. Takes effect at once and"
        " lasts until `bootseer lazy on`, also over restarts. Running containers, and images that are on the node"
        " already, stay as they are.",
    ),
    "on": ("have new pulls be lazy again", "Undo `bootseer lazy off`."),
    "status": ("say which", "Say whether new pulls are lazy. Exit code 0 either way."),
}


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "lazy", help="the kill switch", description="Whether new pulls are lazy: the kill switch."
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, (help_text, text) in _VERBS.items():
        verb = verbs.add_parser(name, help=help_text, description=text)
        verb.add_argument("--json", action="store_true", help="print the state as JSON")
        add_config(verb)
        verb.set_defaults(run=_lazy, verb=name)


def _lazy(args: argparse.Namespace) -> int:
    switch = LazySwitch(load_config(args.config).root_path)
    if args.verb == "off":
        switch.turn_off()
    elif args.verb == "on":
        switch.turn_on()
    since = switch.off_since()
    if args.json:
        print(json.dumps({"lazy": since is None, "off_since": since or ""}))
    else:
        print("on: new pulls are lazy" if since is None else f"off since {since}: new pulls are ordinary")
    return 0
