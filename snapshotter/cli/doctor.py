"""`bootseer doctor`: one line a check."""

import argparse
import json
import sys
from pathlib import Path

from snapshotter.cli.tree import Commands, add_config, add_containerd_address
from snapshotter.config import load_config

__all__ = ["add"]

_NAME_WIDTH = 18


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Check whether this node can pull lazily: kernel, root directory, daemon, directories of indexes and hot sets,"
        " containerd and its configuration, labels; and why pulls were full ones. One line a check: state, name, what"
        " was found, why it matters, the fix. With --image also the registry, the layers' types and their indexes."
        " Changes nothing. Exit code 1 if any check failed."
    )
    command = commands.add_parser("doctor", help="what is wrong, and how to mend it", description=text)
    command.add_argument("--json", action="store_true", help="print the checks as JSON")
    command.add_argument(
        "--containerd-config",
        metavar="FILE",
        type=Path,
        default=Path("/etc/containerd/config.toml"),
        help="containerd's configuration (default: /etc/containerd/config.toml)",
    )
    add_containerd_address(command)
    command.add_argument("--image", metavar="REF", default="", help="an image that is to be lazy")
    add_config(command)
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from snapshotter.doctor import State, Subject, examine

    subject = Subject(load_config(args.config), args.containerd_config, args.containerd_address, args.image)
    checks = []
    for check in examine(subject):
        checks.append(check)
        if not args.json:
            print(f"{check.state.value:4}  {check.name:{_NAME_WIDTH}}  {check.line}")
            sys.stdout.flush()
    if args.json:
        rows = [
            {"name": it.name, "state": it.state.value, "what": it.what, "why": it.why, "fix": it.fix} for it in checks
        ]
        print(json.dumps({"checks": rows}, indent=2))
    return 1 if any(check.state is State.FAIL for check in checks) else 0
