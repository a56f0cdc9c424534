"""`bootseer status`: what the running daemon says of itself, for people or as JSON.

Fields that this version does not know are shown as they come, so that an older command line never hides what a newer
daemon tells.
"""

import argparse
import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from snapshotter.cli.alarm import ALARM_COLUMNS, alarm_rows
from snapshotter.cli.table import megabytes, table
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config
from snapshotter.errors import UserError

__all__ = ["add", "ask", "render"]

_LAYER_COLUMNS = (
    "digest", "state", "image", "size_bytes", "present_bytes", "blocks", "blocks_present", "mount",
    "demand_fetches", "demand_bytes", "background_fetches", "background_bytes", "waiting_readers", "name",
)  # fmt: skip
_STARTS = 20  # containers that are printed, the newest; --json has all
_TOP = (
    "version",
    "pid",
    "processes",
    "alarms",
    "prepares",
    "lazy_off_since",
    "cache",
    "unstored_bytes",
    "ordinary",
    "prefetches",
    "artifacts_refused",
    "workloads",
    "publishing",
    "layers",
)


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Show the running daemon's processes and layers: what is on the node, what readers wait for, what was fetched."
    )
    command = commands.add_parser("status", help="what the running daemon does", description=text)
    command.add_argument("--json", action="store_true", help="print the daemon's answer as JSON")
    add_config(command)
    command.set_defaults(run=_status)


def _status(args: argparse.Namespace) -> int:
    answer = ask(load_config(args.config).control_path, "status")
    print(json.dumps(answer, indent=2) if args.json else render(answer))
    return 0


def ask(path: Path, op: str, **fields: Any) -> Mapping[str, Any]:
    """The running daemon's answer; UserError where none answers."""
    from snapshotter.rpc import Unanswered, call

    try:
        answer: Mapping[str, Any] = call(path, op, **fields)
        return answer
    except Unanswered as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM):
            raise UserError(f"{path}: only root may ask the daemon", exit_code=1) from error
        if isinstance(cause, TimeoutError):
            raise UserError(f"{path}: the daemon runs but does not answer", exit_code=1) from error
        raise UserError(
            f"no daemon answers at {path}: is `bootseer serve` running, with the same --config?", exit_code=1
        ) from error


def render(answer: Mapping[str, Any]) -> str:
    """The daemon's answer as text."""
    parts = [f"bootseer {answer.get('version', '?')}, pid {answer.get('pid', '?')}"]
    if alarms := answer.get("alarms"):
        parts.append("ALARM: hot packs brought wrong bytes; restart what is named, then `bootseer alarm clear`")
        parts.append(table(ALARM_COLUMNS, alarm_rows(alarms)))
    if processes := answer.get("processes"):
        rows = [
            [str(p.get("name")), str(p.get("pid")), str(p.get("restarts")), megabytes(p.get("rss_bytes", 0))]
            for p in processes
        ]
        parts.append(table(("PROCESS", "PID", "RESTARTS", "MEMORY"), rows))
    if prepares := answer.get("prepares"):
        parts.append("prepares: " + ", ".join(f"{count} {kind}" for kind, count in prepares.items()))
    if since := answer.get("lazy_off_since"):
        parts.append(f"lazy: off since {since}; new pulls are ordinary (`bootseer lazy on` ends this)")
    if cache := answer.get("cache"):
        parts.append(_store(cache))
    if unstored := answer.get("unstored_bytes"):
        parts.append(f"THE DISK IS FULL: {megabytes(unstored)} wait in memory; readers are served from the network")
    if ordinary := answer.get("ordinary"):
        rows = [[str(row.get(key, "")) for key in ("layers", "reason", "image", "detail")] for row in ordinary]
        parts.append(table(("LAYERS", "LEFT TO CONTAINERD", "LAST OF", "WHY"), rows))
    if prefetches := answer.get("prefetches"):
        rows = [_prefetch_row(row) for row in prefetches]
        parts.append(table(("HOT BLOCKS OF", "WORKLOAD", "STATE", "CAME", "SIZE", "REQUESTS", "FROM"), rows))
    if refused := answer.get("artifacts_refused"):
        rows = [[str(row.get(key, "")) for key in ("artifact", "workload", "from", "reason")] for row in refused]
        parts.append(table(("REFUSED", "WORKLOAD", "FROM", "WHY"), rows))
    if workloads := answer.get("workloads"):
        rows = [_start_row(row) for row in workloads[-_STARTS:]]
        parts.append(table(("CONTAINER", "WORKLOAD", "BY", "IMAGE", "RECORDED", "MISSED", "STALE"), rows))
    if publishing := answer.get("publishing"):
        parts += _publishing(publishing)
    parts += [f"{key}: {_plain(value)}" for key, value in answer.items() if key not in _TOP]
    layers = answer.get("layers", [])
    parts.append(_layers(layers) if layers else "no layers")
    return "\n\n".join(parts)


def _store(cache: Mapping[str, Any]) -> str:
    bound = f" of {megabytes(cache['max_bytes'])}" if cache.get("max_bytes") else ""
    free = f"{megabytes(cache.get('free_bytes', 0))} of {megabytes(cache.get('disk_bytes', 0))}"
    return f"store: {megabytes(cache.get('taken_bytes', 0))}{bound}; free on its disk: {free}"


def _publishing(document: Mapping[str, Any]) -> list[str]:
    """Tables of what this node has published, and of what it leaves alone for a while."""
    parts = []
    if done := document.get("done"):
        rows = [[str(row.get(key) or "-") for key in ("what", "workload", "image", "to", "status")] for row in done]
        parts.append(table(("PUBLISHED", "WORKLOAD", "IMAGE", "TO", "RESULT"), rows))
    if pauses := document.get("pauses"):
        rows = [[str(row.get("to")), str(row.get("failures")), str(row.get("error"))] for row in pauses]
        parts.append(table(("NOT PUBLISHED TO", "FAILED", "WHY"), rows))
    return parts or ["publishing: nothing yet"]


def _prefetch_row(row: Mapping[str, Any]) -> list[str]:
    return [
        str(row.get("image_key", "?")).removeprefix("sha256:")[:12],
        str(row.get("workload") or "-"),
        str(row.get("state", "?")),
        f"{row.get('blocks', 0)} of {row.get('hot_blocks', 0)}",
        megabytes(row.get("bytes", 0)),
        str(row.get("requests", 0)),
        str(row.get("from") or "-") + (f" (only which blocks: {why})" if (why := row.get("bytes_refused")) else ""),
    ]


def _start_row(row: Mapping[str, Any]) -> list[str]:
    missed = row.get("missed_share")
    return [
        str(row.get("key", "?")).rpartition("/")[2][:20],
        str(row.get("workload", "?")),
        str(row.get("why", "?")),
        str(row.get("image", "-")),
        "yes" if row.get("recorded") else "no",
        "-" if missed is None else f"{100 * missed:.0f} %",
        "no" if row.get("stale_share") is None else "yes: recorded next time",
    ]


def _layers(layers: list[Mapping[str, Any]]) -> str:
    head = ("LAYER", "STATE", "PRESENT", "SIZE", "DEMAND", "BACKGROUND", "WAITING", "IMAGE", "ALSO")
    return table(head, [_layer_row(layer) for layer in layers])


def _layer_row(layer: Mapping[str, Any]) -> list[str]:
    size, present = int(layer.get("size_bytes", 0)), int(layer.get("present_bytes", 0))
    share = f"{100 * present // size} %" if size else "100 %" if layer.get("state") == "complete" else "0 %"
    also = [f"{key}={_plain(value)}" for key, value in layer.items() if key not in _LAYER_COLUMNS and value]
    return [
        str(layer.get("digest", layer.get("name", "?"))).removeprefix("sha256:")[:12],
        str(layer.get("state", "?")),
        share,
        megabytes(size),
        f"{layer.get('demand_fetches', 0)}, {megabytes(layer.get('demand_bytes', 0))}",
        megabytes(layer.get("background_bytes", 0)),
        str(layer.get("waiting_readers", 0)),
        str(layer.get("image", "-")),
        " ".join(also) if layer.get("mount") else " ".join(["not-mounted", *also]),
    ]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
