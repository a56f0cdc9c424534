"""`bootseer serve`: the daemon; `bootseer reload`: the same daemon, with the code and configuration of now."""

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

from snapshotter import log
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config
from snapshotter.errors import SnapshotterError, UserError

__all__ = ["add"]

_PATIENCE_S = 120.0


def add(commands: Commands) -> None:
    """Declare the commands."""
    text = (
        "Run the daemon in the foreground until SIGTERM or SIGINT. Needs root. Layers stay mounted when it ends. On "
        "SIGHUP it takes up the code and configuration of now, as with `bootseer reload`."
    )
    command = commands.add_parser("serve", help="run the daemon", description=text)
    add_config(command)
    command.add_argument(
        "--check", action="store_true", help="only look whether this version could run with this configuration"
    )
    command.set_defaults(run=_serve)
    text = (
        "Have the running daemon take up the version that is installed now, and the configuration as it is now; "
        "whoever reads does not notice. What does not work is refused, and the daemon goes on as it was."
    )
    command = commands.add_parser("reload", help="upgrade the running daemon in place", description=text)
    add_config(command)
    command.set_defaults(run=_reload)


def _serve(args: argparse.Namespace) -> int:
    config = load_config(args.config)
    log.configure(config.log.level, config.log.format)
    from snapshotter.daemon import check, run

    if args.check:
        check(config)
        return 0
    code = run(config)
    logging.shutdown()
    os._exit(code)  # what is loaded is not tidied up: readers may wait for the next daemon, which waits for our end


def _reload(args: argparse.Namespace) -> int:
    run = Path(load_config(args.config).run)
    pid, before = _supervisor(run), _count(run)[0]
    print("the daemon tries the installed version …", file=sys.stderr)
    try:
        os.kill(pid, signal.SIGHUP)
    except PermissionError:
        raise UserError("reload needs root") from None
    give_up = time.monotonic() + _PATIENCE_S
    while (told := _count(run))[0] == before:
        if _supervisor(run) != pid:
            raise SnapshotterError("the daemon was started again meanwhile, with the version that is installed")
        if time.monotonic() > give_up:
            raise SnapshotterError(f"not done within {_PATIENCE_S:.0f} s: look for upgrade.* in the daemon's log")
        time.sleep(0.02)
    if told[1]:
        raise SnapshotterError(f"nothing has changed: {told[1]}")
    return 0


def _supervisor(run: Path) -> int:
    """The daemon's process."""
    try:
        return int(json.loads((run / "processes.json").read_text())[0]["pid"])
    except FileNotFoundError:
        raise SnapshotterError(f"no daemon runs with {run}: see `bootseer serve`") from None


def _count(run: Path) -> tuple[int, str]:
    """How many reloads have come to an end, and what was wrong with the last one."""
    try:
        told = json.loads((run / "reload.json").read_text())
    except FileNotFoundError:
        return 0, ""
    return told["count"], told["problem"]
