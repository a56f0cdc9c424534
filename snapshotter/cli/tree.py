"""What the command files share: the type of a group of commands, and the options that several have."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotter.config import DEFAULT_PATH

__all__ = ["Commands", "add_config", "add_containerd_address"]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction  # not generic when the program runs


def add_config(command: argparse.ArgumentParser) -> None:
    """Declare `--config`; read it with `load_config(args.config)`."""
    command.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration (default: {DEFAULT_PATH} if it exists)"
    )


def add_containerd_address(command: argparse.ArgumentParser) -> None:
    """Declare `--containerd-address`, a path, with containerd's own default."""
    command.add_argument(
        "--containerd-address",
        metavar="SOCK",
        type=Path,
        default=Path("/run/containerd/containerd.sock"),
        help="containerd's socket (default: /run/containerd/containerd.sock)",
    )
