"""`bootseer serve`: the daemon."""

import argparse

from snapshotter import log
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    text = "Run the daemon in the foreground until SIGTERM or SIGINT. Needs root. Layers stay mounted when it ends."
    command = commands.add_parser("serve", help="run the daemon", description=text)
    add_config(command)
    command.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    log.configure(config.log.level, config.log.format)
    from snapshotter.supervisor import run

    return run(config)
