"""`bootseer alarm`: hot packs that brought wrong bytes, until somebody says that he has seen to it. Needs no daemon."""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotter.cli.table import table
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import load_config

if TYPE_CHECKING:
    from snapshotter.alarms import Alarm

__all__ = ["ALARM_COLUMNS", "add", "alarm_rows"]

ALARM_COLUMNS = ("ALARM", "SINCE", "LAYER", "BLOCKS", "SERVED", "KEY", "PACK FROM", "IMAGES", "FILES")
"""Of `alarm_rows`."""

_SHOWN = 3


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "alarm",
        help="hot packs that brought wrong bytes",
        description=(
            "A hot pack's bytes are compared with the layer as that comes in. If they differ, there is an alarm until"
            " somebody clears it."
        ),
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "List the alarms: which images' containers may have read wrong bytes, of which files, and who signed them."
    ls = verbs.add_parser("ls", help="list the alarms", description=text)
    ls.set_defaults(run=_ls)
    text = (
        "Say that you have seen to an alarm, that is: stopped the containers of its images, and removed the key that"
        " signed the pack where it is not to be trusted. The kernel's cached pages of the files are dropped; the"
        " layer's own bytes are in the store already. Start the containers again after this. The pack stays in"
        " quarantine."
    )
    clear = verbs.add_parser("clear", help="acknowledge alarms", description=text)
    clear.add_argument("alarms", metavar="ALARM", nargs="*", help="as `ls` names it (default: all)")
    clear.set_defaults(run=_clear)
    for verb in (ls, clear):
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        add_config(verb)


def _ls(args: argparse.Namespace) -> int:
    from snapshotter.alarms import Alarms

    alarms = [asdict(alarm) for alarm in Alarms(load_config(args.config).root_path).entries()]
    if args.json:
        print(json.dumps({"alarms": alarms}, indent=2))
    else:
        print(table(ALARM_COLUMNS, alarm_rows(alarms)) if alarms else "no alarms")
    return 0


def _clear(args: argparse.Namespace) -> int:
    from snapshotter.alarms import Alarms

    config = load_config(args.config)
    alarms = Alarms(config.root_path)
    known = {alarm.id: alarm for alarm in alarms.entries()}
    cleared, dropped = [], 0
    for id_ in args.alarms or list(known):
        if id_ in known:
            dropped += sum(map(_drop_pages, _mounted(config.mounts_path, known[id_])))
        alarms.clear(id_)
        cleared.append(id_)
    if args.json:
        print(json.dumps({"cleared": cleared, "files_dropped": dropped}, indent=2))
    else:
        print(f"{len(cleared)} alarms cleared; the cached pages of {dropped} files were dropped")
    return 0


def alarm_rows(alarms: Sequence[dict[str, object]]) -> list[tuple[str, ...]]:
    """A table's rows for alarms as JSON values."""
    return [_row(alarm) for alarm in alarms]


def _row(alarm: dict[str, object]) -> tuple[str, ...]:
    pack, runs = alarm["pack"], alarm["runs"]
    assert isinstance(pack, dict) and isinstance(runs, (list, tuple))
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(str(alarm["at"]))))
    return (
        str(alarm["id"]),
        at,
        str(alarm["layer"]).removeprefix("sha256:")[:12],
        str(sum(end - start for start, end in runs)),
        "yes" if alarm["served"] else "no",
        str(pack["key"] or "-"),
        str(pack["where"]),
        _few(alarm["images"]),
        _few(alarm["files"]),
    )


def _few(names: object) -> str:
    assert isinstance(names, (list, tuple))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(str, names[:_SHOWN])) + more if names else "-"


def _mounted(mounts: Path, alarm: "Alarm") -> Iterator[str]:
    """The alarm's files in all mounts of its layer, private ones too."""
    for target in sorted(mounts.glob(f"{alarm.name}*")):
        yield from (f"{target}{name}" for name in alarm.files)


def _drop_pages(path: str) -> bool:
    """Have the kernel forget the file's pages; whether it was there. Pages that a program has mapped stay."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True
