"""`bootseer config show`: what is in effect."""

import argparse
import sys

from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser("config", help="the configuration", description="The daemon's configuration.")
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "Print the configuration in effect as TOML, each option with its meaning, unit and default or set value."
    show = verbs.add_parser("show", help="print what is in effect", description=text)
    add_config(show)
    show.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> int:
    sys.stdout.write(load_config(args.config).to_toml())
    return 0
