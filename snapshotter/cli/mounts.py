"""`bootseer unmount`: take down what a stopped daemon left mounted."""

import argparse
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config
from snapshotter.errors import UserError

__all__ = ["add", "no_daemon"]


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Unmount every layer below <root>/m. The daemon leaves them mounted when it ends, so that a new one can go on"
        " serving running containers; use this before removing bootseer or its root. The daemon must be stopped."
    )
    command = commands.add_parser("unmount", help="unmount the layers of a stopped daemon", description=text)
    add_config(command)
    command.set_defaults(run=_unmount)


def _unmount(args: argparse.Namespace) -> int:
    from snapshotter.attach import unmount_all

    config = load_config(args.config)
    with no_daemon(config.lock_path):
        try:
            targets = unmount_all(config.root_path)
        except PermissionError as error:
            raise UserError("unmount needs root", exit_code=1) from error
        except OSError as error:
            raise UserError(f"cannot unmount below {config.mounts_path}: {error.strerror}", exit_code=1) from error
    for target in targets:
        print(target)
    return 0


@contextmanager
def no_daemon(lock_path: Path) -> Iterator[None]:
    """Hold the daemon's lock, so that none runs or starts meanwhile; without a lock file none ever ran here."""
    try:
        lock = lock_path.open("r+")
    except FileNotFoundError:
        yield
        return
    except PermissionError as error:
        raise UserError(f"{lock_path}: this needs root", exit_code=1) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"the daemon still runs (it holds {lock_path}): stop it first", exit_code=1) from error
        yield
