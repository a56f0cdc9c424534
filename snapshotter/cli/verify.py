"""`bootseer verify`: whether what is stored on this node is still what was written, and having it fetched again."""

import argparse
import json
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from snapshotter.cache import CachedLayer, pick
from snapshotter.cli.cache import Access, short_name, store
from snapshotter.cli.progress import Progress
from snapshotter.cli.table import table
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import Config, load_config
from snapshotter.errors import SnapshotterError, UserError
from snapshotter.integrity import LayerCheck, check_hotset, check_layer, restore_seal

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Read what the store holds and compare it with its digests: blocks, metadata and index of layers; without LAYER"
        " also the hot sets and the database of snapshots. With --repair the daemon checks damaged blocks before they"
        " are read again, and fetches them anew; damaged metadata are written again out of the index; a layer whose"
        " index is damaged is removed if no image uses it, a damaged hot set always. What running programs have read"
        " already is in their memory: restart their containers. Exit code 1 if damage is left."
    )
    command = commands.add_parser("verify", help="find damage of the store", description=text)
    command.add_argument("layers", metavar="LAYER", nargs="*", help="a layer's digest, or its first 6 digits or more")
    command.add_argument("--all", action="store_true", help="everything (as without LAYER)")
    command.add_argument("--repair", action="store_true", help="have what is damaged fetched again")
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)
    command.set_defaults(run=_verify)


@dataclass(frozen=True, slots=True)
class _Finding:
    """Something that is wrong: `what` it is about, a layer's digest or name or a file; `repaired`: what has been done
    about it, empty where nothing has."""

    what: str
    problem: str
    repaired: str


def _verify(args: argparse.Namespace) -> int:
    if args.all and args.layers:
        raise UserError("--all means everything: give either it or layers")
    config = load_config(args.config)
    with store(config) as access:
        layers = [pick(access.layers, text) for text in args.layers] or access.layers
        checks = list(_checked(config, layers))
        findings = [finding for check in checks for finding in _of_layer(config, access, check, args.repair)]
        if not args.layers:
            findings += [*_of_hotsets(config.root_path, args.repair), *_of_database(config.root_path)]
    if args.json:
        print(json.dumps(_document(checks, findings), indent=2))
    else:
        _print(checks, findings)
    return 1 if any(not finding.repaired for finding in findings) else 0


def _checked(config: Config, layers: Sequence[CachedLayer]) -> Iterator[LayerCheck]:
    progress = Progress(sum(layer.present_bytes for layer in layers))
    with _shown(progress) as count:
        for number, layer in enumerate(layers, 1):
            label = f"layer {number} of {len(layers)}"
            directory = config.root_path / "layers" / layer.name
            check = check_layer(directory, partial(count, label))
            if check.is_sound or directory.exists():  # else it was removed meanwhile
                yield check


@contextmanager
def _shown(progress: Progress) -> Iterator[Callable[[str, int], None]]:
    done = 0

    def count(label: str, size: int) -> None:
        nonlocal done
        done += size
        progress.show(done, label)

    yield count
    progress.end()


def _of_layer(config: Config, access: Access, check: LayerCheck, repair: bool) -> Iterator[_Finding]:
    """What is wrong with a layer, and what is done about it."""
    name = check.digest or check.name
    if check.damaged:
        runs = ", ".join(f"{start}-{end}" for start, end in check.damaged[:8])
        text = f"{check.damaged_blocks} blocks do not match their digest: {runs}{' ...' if check.damaged[8:] else ''}"
        yield _Finding(name, text, _done(repair, "fetched again", lambda: access.doubt(check.name, check.damaged)))
    if check.metadata:
        directory = config.root_path / "layers" / check.name
        done = _done(repair, "written again", lambda: restore_seal(directory))
        yield _Finding(name, "the metadata are not what was written", done)
    for problem in check.problems:
        yield _Finding(name, problem, _done(repair, "removed", lambda: access.remove(check.name)))


def _done(repair: bool, word: str, step: Callable[[], object]) -> str:
    """Take the step if asked to; the word for it once it is done, empty when it is not."""
    if not repair:
        return ""
    try:
        step()
    except SnapshotterError as error:
        print(f"bootseer: not repaired: {' '.join(str(error).split())}", file=sys.stderr)
        return ""
    return word


def _of_hotsets(root: Path, repair: bool) -> Iterator[_Finding]:
    from snapshotter.hotstore import HotStore

    hotsets = HotStore(root)
    for key, workload, path in hotsets.entries():
        problem = check_hotset(path)
        if problem:
            yield _Finding(str(path), problem, _done(repair, "removed", partial(hotsets.remove, key, workload)))


def _of_database(root: Path) -> Iterator[_Finding]:
    """The daemon repairs it, when it starts."""
    from snapshotter.containerd.salvage import damage

    path = root / "metadata.db"
    try:
        problem = damage(path)
    except sqlite3.Error as error:
        problem = f"cannot be read: {error}"
    if problem:
        yield _Finding(str(path), f"{problem}; start the daemon, or bootseer reload: that makes it anew", "")


def _document(checks: Sequence[LayerCheck], findings: Sequence[_Finding]) -> dict[str, object]:
    return {
        "layers": [{**asdict(check), "sound": check.is_sound} for check in checks],
        "findings": [asdict(finding) for finding in findings],
        "sound": not findings,
    }


def _print(checks: Sequence[LayerCheck], findings: Sequence[_Finding]) -> None:
    if checks:
        rows = [
            (
                short_name(check.digest, check.name),
                str(check.checked_blocks),
                str(check.damaged_blocks),
                "sound" if check.is_sound else "damaged",
            )
            for check in checks
        ]
        print(table(("LAYER", "BLOCKS CHECKED", "DAMAGED", "STATE"), rows))
        print()
    for finding in findings:
        print(f"{finding.what}: {finding.problem}{f' ({finding.repaired})' if finding.repaired else ''}")
    if not findings:
        print("nothing is damaged")
    elif any(not finding.repaired for finding in findings):
        print("repair what can be with `bootseer verify --repair`")
