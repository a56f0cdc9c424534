"""`bootseer explain`: why a container's start took what it took."""

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from snapshotter.cli.table import megabytes, table
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config

__all__ = ["add", "render"]

_CLASSES = ("demand", "hot", "background")


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Tell why a container's start took what it took: its reads that waited for blocks, for which layers, what "
        "ended the waits, how many bytes came meanwhile, and whether the image has a hot set. Needs the daemon; the "
        "container must still be there. Reads of other containers on the same layers are counted too."
    )
    command = commands.add_parser("explain", help="why a start took what it took", description=text)
    command.add_argument("container", metavar="CONTAINER", help="its id, or the beginning of it")
    command.add_argument(
        "--seconds", type=float, default=120.0, metavar="N", help="from its creation on (default: 120)"
    )
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)
    command.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    from snapshotter.cli.status import ask

    answer = ask(load_config(args.config).control_path, "explain", container=args.container, seconds=args.seconds)
    print(json.dumps(answer, indent=2) if args.json else render(answer))
    return 0


def render(answer: Mapping[str, Any]) -> str:
    """The daemon's answer as text."""
    created = datetime.fromtimestamp(answer["since"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    workload = f", workload {answer['workload']}" if answer.get("workload") else ""
    parts = [f"container {answer['container']} of {answer['image']}{workload}, created {created}"]
    parts.append("\n".join(f"- {finding}" for finding in answer["findings"]))
    if hot := answer["hot"]:
        parts.append(
            f"hot set {hot.get('workload') or '-'}: {hot.get('state')}, {hot.get('blocks')} of {hot.get('hot_blocks')} "
            f"blocks came in {hot.get('requests')} requests, {megabytes(hot.get('bytes', 0))}"
        )
    head = (
        "LAYER",
        "READY",
        "MOUNT",
        "WAITS",
        "WAITED",
        "LONGEST",
        "MISSED",
        *(it.upper() for it in _CLASSES),
        "ENDED BY",
    )
    parts.append(table(head, [_row(layer) for layer in answer["layers"]]))
    return "\n\n".join(parts)


def _row(layer: Mapping[str, Any]) -> list[str]:
    ended = ", ".join(f"{count} {name}" for name, count in sorted(layer["brought_by"].items()))
    return [
        str(layer["digest"]).removeprefix("sha256:")[:12],
        _seconds(layer["ready_s"]),
        _seconds(layer["mount_s"]),
        str(layer["waits"]),
        _seconds(layer["waited_s"]),
        _seconds(layer["longest_s"]),
        f"{layer['missed_blocks']} blocks",
        *(megabytes(layer["bytes"].get(name, 0)) for name in _CLASSES),
        ended or "-",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
