"""`bootseer cache` and `bootseer gc`: what the block store holds, and making room in it. Through the daemon if one
runs, else itself."""

import argparse
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from snapshotter.cache import CachedLayer, pick, plan
from snapshotter.cli.table import megabytes, table
from snapshotter.cli.tree import Commands, add_config
from snapshotter.config import Config, load_config
from snapshotter.errors import SnapshotterError, UserError
from snapshotter.model import Digest

__all__ = ["Access", "add", "short_name", "size", "store"]

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30}
_UNITS["TI"] = 1 << 40


@dataclass(frozen=True, slots=True)
class Access:
    """The store; how to remove one layer from it by name, and to have runs of its blocks checked before they are read
    again."""

    layers: list[CachedLayer]
    remove: Callable[[str], None]
    doubt: Callable[[str, Sequence[tuple[int, int]]], None]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "cache", help="the layers on this node", description="What the block store holds, and making room in it."
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = "List the layers of the block store, the one that was used last at the end."
    ls = verbs.add_parser("ls", help="list the layers", description=text)
    ls.set_defaults(run=_ls)
    text = (
        "Remove layers that no image on this node uses. The next pull fetches them again. Refuses layers in use. Exit"
        " code 1 if one could not be removed."
    )
    rm = verbs.add_parser("rm", help="remove layers", description=text)
    rm.add_argument("layers", metavar="DIGEST", nargs="+", help="a layer's digest, or its first 6 digits or more")
    rm.set_defaults(run=_rm)
    text = (
        "Remove layers that no image on this node uses, those unused for longest first, until the store takes no more"
        " than SIZE. Layers in use stay even if that is too much. `bootseer gc` and `bootseer cache gc` are the same."
    )
    gcs = [it.add_parser("gc", help="remove unused layers", description=text) for it in (verbs, commands)]
    for gc in gcs:
        help_ = "bytes, or as in 500M, 20G, 20Gi (default: all unused layers go)"
        gc.add_argument("--max-size", metavar="SIZE", type=size, help=help_)
        gc.set_defaults(run=_gc)
    for verb in (ls, rm, *gcs):
        if verb is not ls:
            verb.add_argument("--dry-run", action="store_true", help="only say what would be removed")
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        add_config(verb)


def size(text: str) -> int:
    """A size in bytes; K, M, G, T are powers of 1000, Ki, Mi, Gi, Ti of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]I?)?B?", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected as in 500M, 20G or 20Gi")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def _ls(args: argparse.Namespace) -> int:
    with store(load_config(args.config)) as access:
        layers = access.layers
    if args.json:
        print(json.dumps({"layers": [{**asdict(layer), "used": layer.used} for layer in layers]}, indent=2))
        return 0
    head = ("LAYER", "STATE", "DISK", "PRESENT", "LAST USED", "USED BY")
    rows = [
        (
            _short(layer),
            layer.state,
            megabytes(layer.disk_bytes),
            f"{100 * layer.present_bytes // layer.size_bytes if layer.size_bytes else 100} %",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(layer.last_used_s)),
            ", ".join(layer.images) or "-",
        )
        for layer in layers
    ]
    print(table(head, rows) if rows else "no layers")
    total, unused = sum(it.disk_bytes for it in layers), sum(it.disk_bytes for it in layers if not it.used)
    print(f"\n{len(layers)} layers take {megabytes(total)}; unused are {megabytes(unused)}")
    return 0


def _rm(args: argparse.Namespace) -> int:
    with store(load_config(args.config)) as access:
        chosen, problems = [], []
        for text in args.layers:
            try:
                chosen.append(pick(access.layers, text))
            except SnapshotterError as error:
                problems.append(str(error))
        return _remove(access, list(dict.fromkeys(chosen)), problems, args, None)


def _gc(args: argparse.Namespace) -> int:
    with store(load_config(args.config)) as access:
        chosen, left = plan(access.layers, args.max_size or 0)
        code = _remove(access, chosen, [], args, left)
    if args.max_size is not None and left > args.max_size:
        print(f"bootseer: the layers in use take {megabytes(left)}, more than --max-size", file=sys.stderr)
    return code


def _remove(
    access: Access, chosen: Sequence[CachedLayer], problems: list[str], args: argparse.Namespace, left: int | None
) -> int:
    """Remove what was chosen, one after the other; a refusal stops no other."""
    removed = []
    for layer in chosen:
        try:
            if layer.used:
                raise SnapshotterError(
                    f"{_short(layer)} is in use by {', '.join(layer.images)}: remove that image first"
                )
            if not args.dry_run:
                access.remove(layer.name)
            removed.append(layer)
        except SnapshotterError as error:
            problems.append(str(error))
    if args.json:
        rows = [{"digest": it.digest, "name": it.name, "disk_bytes": it.disk_bytes} for it in removed]
        result = {"removed": rows, "dry_run": args.dry_run, "problems": problems}
        print(json.dumps(result if left is None else {**result, "left_bytes": left}, indent=2))
    else:
        verb = "would remove" if args.dry_run else "removed"
        for layer in removed:
            print(f"{verb} {_short(layer)}, {megabytes(layer.disk_bytes)}")
        if not removed and not problems:
            print("nothing to remove")
    for problem in problems:
        print(f"bootseer: {' '.join(problem.split())}", file=sys.stderr)
    return 1 if problems else 0


def short_name(digest: str, name: str) -> str:
    """A layer for people: the beginning of its digest, or its node name where that is not known."""
    return digest.removeprefix("sha256:")[:12] or name


def _short(layer: CachedLayer) -> str:
    return short_name(layer.digest, layer.name)


@contextmanager
def store(config: Config) -> Iterator[Access]:
    """The store of the running daemon; without one, of the disk, with no daemon starting meanwhile."""
    from snapshotter.rpc import Unanswered, call

    control = config.control_path
    try:
        rows = call(control, "cache", 60.0)
    except Unanswered as error:
        if isinstance(error.__cause__, PermissionError):
            raise UserError(f"{control}: only root may ask the daemon", exit_code=1) from error
        if isinstance(error.__cause__, TimeoutError):
            raise UserError(f"{control}: the daemon runs but does not answer", exit_code=1) from error
    else:
        layers = [CachedLayer(**{**row, "images": tuple(row["images"])}) for row in rows]
        yield Access(
            layers,
            lambda name: call(control, "cache-remove", 120.0, name=name),
            lambda name, runs: call(control, "cache-doubt", 120.0, name=name, runs=list(runs)),
        )
        return
    from snapshotter.cli.mounts import no_daemon

    with no_daemon(config.lock_path), no_daemon(config.root_path / "store.lock"):
        yield _offline(config.root_path)


def _users(root: Path) -> dict[Digest, list[str]]:
    """The images that stand on layers; where the database of snapshots is damaged, which the daemon sees to at its
    start, one of them may stand on any."""
    from snapshotter.blockstore import BlockStore, LayerRecord
    from snapshotter.containerd.metadata import Metadata
    from snapshotter.containerd.salvage import damage

    path = root / "metadata.db"
    users: dict[Digest, list[str]] = {}
    if damage(path):
        store = BlockStore(root)
        for name in store.names():
            with suppress(SnapshotterError):
                users[LayerRecord.load(store.layers / name).digest] = [f"an image, perhaps ({path} is damaged)"]
        return users
    if path.exists():
        with closing(Metadata(path)) as metadata, metadata.read() as view:
            for snapshot in view.all():
                if snapshot.lazy is not None:
                    users.setdefault(snapshot.lazy.ref.digest, []).append(snapshot.lazy.ref.image)
    return users


def _offline(root: Path) -> Access:
    """The store on disk while no daemon runs."""
    from snapshotter.blockstore import BlockStore, LayerFiles
    from snapshotter.cache import inventory
    from snapshotter.kernel.mountapi import mounts

    if not (root / "layers").is_dir():
        return Access([], lambda name: None, lambda name, runs: None)
    users = _users(root)
    below = (root / "m").resolve()
    targets = [Path(it.target) for it in mounts() if Path(it.target).parent == below]
    mounted = {path.name.partition(".")[0]: str(path) for path in targets}  # private mounts too
    store = BlockStore(root)

    def remove(name: str) -> None:
        if name in mounted:
            raise SnapshotterError(f"{name} is still mounted at {mounted[name]}: run `bootseer unmount` first")
        store.delete(store.set_aside(name))

    def doubt(name: str, runs: Sequence[tuple[int, int]]) -> None:
        with closing(LayerFiles(store.layers / name, writable=True)) as files:
            for start, end in runs:
                files.distrust(start, end)

    return Access(inventory(store, users, mounted), remove, doubt)
