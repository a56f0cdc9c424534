"""What the command files share: the type of a group of commands, and the option that names the configuration."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotter.config import DEFAULT_PATH

__all__ = ["Commands", "add_config"]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction  # not generic when the program runs


def add_config(command: argparse.ArgumentParser) -> None:
    """Declare `--config`; read it with `load_config(args.config)`."""
    command.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration (default: {DEFAULT_PATH} if it exists)"
    )
