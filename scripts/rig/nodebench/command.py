"""The command `scripts/bench node`: options, the measurements in turn, the table, the JSON document.

Progress goes to standard error, the table to standard output. Nothing is left behind, also after Ctrl-C or an error,
but the caches of images and of made-up layers' indexes.
"""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scripts.rig.arguments import count
from scripts.rig.errors import RigError
from scripts.rig.grid.network import NETWORKS, Network
from scripts.rig.image import RECIPES
from scripts.rig.interrupt import Interrupted, arm, disarm
from scripts.rig.nodebench import hit, memory, prepare, record, tar, together, warm
from scripts.rig.nodebench.site import Site
from scripts.rig.nodebench.table import Row, table

__all__ = ["MEASUREMENTS", "main"]

Result = warm.Warm | tar.Tar | hit.Hit | prepare.Prepare | memory.Memory | together.Together | record.Record
Measure = Callable[[Site, int], Result]

MEASUREMENTS: Mapping[str, Measure] = {
    "warm": warm.measure,
    "tar": tar.measure,
    "hit": hit.measure,
    "prepare": prepare.measure,
    "memory": memory.measure,
    "together": together.measure,
    "record": record.measure,
}
"""By name, in the order of the table."""

_SMALL: Mapping[str, Measure] = {
    **MEASUREMENTS,
    "hit": partial(hit.measure, cold_bytes=32 << 20, seconds=0.2),
    "prepare": partial(prepare.measure, files=(1, 300)),
    "memory": partial(memory.measure, many=3, large_bytes=20_000_000),
    "together": partial(together.measure, containers=3),
}
"""The same with little to do, for tests."""


@dataclass(frozen=True, slots=True)
class _Options:
    names: tuple[str, ...]
    rounds: int
    json: Path | None
    small: bool
    network: Network | None

    @property
    def where(self) -> str:
        """The machine, and the link if there is one."""
        return f"{_machine()}, {self.network.name if self.network else 'no distance'}"


class _Progress:
    """Says what is being done, with the seconds since the beginning."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """0 if everything could be measured, whether goals are met or not; 1 if not, 128 + signal if interrupted."""
    options = _parse(argv)
    if os.geteuid() != 0:
        print("scripts/bench node: namespaces and mounts need root; run it with sudo", file=sys.stderr)
        return 2
    progress = _Progress()
    results: dict[str, Result] = {}
    arm()
    try:
        try:
            _measure(options, progress, results)
        finally:
            disarm()
            progress("all stopped, unmounted and removed")
    except Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        print(f"scripts/bench node: interrupted by {name}, all cleaned up", file=sys.stderr)
        return 128 + interrupted.number
    except RigError as error:
        print(f"scripts/bench node: {error}", file=sys.stderr)
        return 1
    finally:
        _show(options, results)
    return 0


def _measure(options: _Options, progress: _Progress, results: dict[str, Result]) -> None:
    """Fill `results`, so that what was measured before an error or a signal is shown all the same."""
    measurements = _SMALL if options.small else MEASUREMENTS
    recipe = RECIPES["tiny" if options.small else "numpy"]
    with Site(recipe, progress, options.network, any_link=options.small) as site:
        try:
            for name in options.names:
                progress(f"{name}: begins")
                results[name] = measurements[name](site, options.rounds)
        finally:
            disarm()


def _show(options: _Options, results: Mapping[str, Result]) -> None:
    rows = [row for result in results.values() for row in result.rows()]
    print(f"{options.where}\n\n{table(rows)}")
    if options.json is not None:
        options.json.write_text(document(results, options.where) + "\n")


def document(results: Mapping[str, Result], machine: str) -> str:
    """The JSON document: the machine and the link, the rows of the table, and each result with its own fields."""
    rows: list[Row] = [row for result in results.values() for row in result.rows()]
    content: dict[str, Any] = {"machine": machine, "rows": [asdict(row) for row in rows]}
    content["results"] = {name: asdict(result) for name, result in results.items()}
    return json.dumps(content, indent=1)


def _machine() -> str:
    load = os.getloadavg()[0]
    return f"Linux {platform.release()}, {os.cpu_count()} CPUs, Python {platform.python_version()}, load {load:.1f}"


def _parse(argv: Sequence[str] | None) -> _Options:
    names = ",".join(MEASUREMENTS)
    parser = argparse.ArgumentParser(prog="scripts/bench node", description="Measure what bootseer costs on a node.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--rounds", type=count, default=20, metavar="N", help="pairs, or repetitions (20)")
    parser.add_argument("--only", type=_names, default=tuple(MEASUREMENTS), metavar="NAME,...", help=f"of {names}")
    parser.add_argument("--small", action="store_true", help="tiny image and layers: to see that it works, no figures")
    parser.add_argument(
        "--network", choices=NETWORKS, metavar="NAME", help="between node and registry, as in `run` (no distance)"
    )
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no directory {options.json.absolute().parent}")
    return _Options(options.only, options.rounds, options.json, options.small, NETWORKS.get(options.network))


def _names(text: str) -> tuple[str, ...]:
    wanted = text.split(",")
    unknown = [name for name in wanted if name not in MEASUREMENTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known: {', '.join(MEASUREMENTS)}")
    return tuple(name for name in MEASUREMENTS if name in wanted)
