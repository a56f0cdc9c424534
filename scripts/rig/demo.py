"""The demo: cold starts of one real image with overlayfs and with bootseer over an emulated link, side by side.

It needs root, and leaves nothing behind but the built image in its cache: everything else belongs to one workspace,
which ends with it, also on Ctrl-C, SIGTERM, SIGHUP or an error. The first such signal starts the clean-up, further ones
are ignored until it is done (each step of it is bounded in time).
"""

import argparse
import os
import platform
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from scripts.rig.arguments import count, positive
from scripts.rig.artifacts import publish_hot_set, publish_indexes
from scripts.rig.coldstart import Bench, ColdStart, System, cold_start
from scripts.rig.errors import RigError
from scripts.rig.fileserver import FileServer
from scripts.rig.image import CACHE, RECIPES, build
from scripts.rig.interrupt import Interrupted, arm, disarm, leave
from scripts.rig.link import Link
from scripts.rig.oci import Layout
from scripts.rig.progress import Progress
from scripts.rig.registry import Registry
from scripts.rig.report import document, table
from scripts.rig.workspace import Workspace

__all__ = ["main"]

SYSTEMS = (System.OVERLAYFS, System.BOOTSEER_FIRST, System.BOOTSEER, System.BOOTSEER_HOT)
"""What the demo compares, in the order of its table."""


@dataclass(frozen=True, slots=True)
class _Options:
    """`systems` in the order of the table; `rounds` cold starts of each."""

    image: str
    systems: tuple[System, ...]
    rounds: int
    mbit: float
    rtt_ms: float
    json: Path | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if every start was ready with the right output, 1 if not, 128 + signal if interrupted."""
    options = _parse(argv)
    if os.geteuid() != 0:
        print("demo: namespaces and mounts need root; run: sudo ./scripts/demo", file=sys.stderr)
        return 2
    progress = Progress()
    arm()
    try:
        with ExitStack() as stack:
            stack.callback(progress, "all stopped, unmounted and removed")
            try:
                layout, runs = _run(options, stack, progress)
            finally:
                disarm()
    except Interrupted as interrupted:
        print(f"demo: interrupted by {signal.Signals(interrupted.number).name}, all cleaned up", file=sys.stderr)
        return 128 + interrupted.number
    except RigError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    _show(options, layout, runs)
    return 0 if all(run.output_ok for run in runs) else 1


def _run(options: _Options, stack: ExitStack, progress: Progress) -> tuple[Layout, list[ColdStart]]:
    """Build everything, make all cold starts. What it opens is closed by `stack`."""
    workspace = stack.enter_context(Workspace())
    recipe = RECIPES[options.image]
    layout = build(recipe, workspace.env, progress, CACHE)
    progress(f"link of {options.mbit:g} Mbit/s and {options.rtt_ms:g} ms: testing it")
    link = Link(workspace, options.mbit, options.rtt_ms)
    stack.callback(link.close)
    progress(f"link: {link.self_test()}")
    registry = Registry(workspace, link)
    stack.callback(registry.close)
    files = FileServer(workspace, link)
    stack.callback(files.close)
    reference = registry.push(layout, f"bench/{recipe.name}")
    progress(f"registry: {reference}, {len(layout.layers)} layers, {layout.size / 1e6:.1f} MB")
    references = {}
    if {System.BOOTSEER, System.BOOTSEER_HOT} & set(options.systems):
        references[System.BOOTSEER.value] = publish_indexes(workspace, link, reference, progress)
        if System.BOOTSEER_HOT in options.systems:
            references[System.BOOTSEER_HOT.value] = publish_hot_set(workspace, link, recipe, reference, progress)
    bench = Bench(workspace, link, registry, files, recipe, reference, references)
    return layout, _all_rounds(options, bench, progress)


def _all_rounds(options: _Options, bench: Bench, progress: Progress) -> list[ColdStart]:
    runs = []
    for number in range(1, options.rounds + 1):
        for system in random.sample(options.systems, len(options.systems)):
            result = cold_start(bench, system, f"{number}-{system.value}")
            runs.append(result)
            verdict = "" if result.output_ok else ", WRONG OUTPUT"
            progress(
                f"round {number}/{options.rounds}: {system.value}: ready after {result.ready_s:.2f} s "
                f"(pull {result.pull_s:.2f} s), {result.size / 1e6:.1f} MB, {result.requests} requests{verdict}"
            )
    return runs


def _show(options: _Options, layout: Layout, runs: Sequence[ColdStart]) -> None:
    machine = f"Linux {platform.release()}, {os.cpu_count()} CPUs"
    print(
        f"\n{options.image} image ({len(layout.layers)} layers, {layout.size / 1e6:.1f} MB), cold node, "
        f"{options.mbit:g} Mbit/s, {options.rtt_ms:g} ms; {machine}; median [lowest-highest]\n\n{table(runs)}"
    )
    if options.json is not None:
        options.json.write_text(document(layout, options.mbit, options.rtt_ms, runs))
        print(f"\nwritten: {options.json}")


def _parse(argv: Sequence[str] | None) -> _Options:
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").splitlines()[0])
    systems = [system.value for system in SYSTEMS]
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument("--rounds", type=count, default=3, metavar="N", help="cold starts of each (3)")
    parser.add_argument("--mbit", type=positive, default=100.0, help="rate of the link (100)")
    parser.add_argument("--rtt-ms", type=positive, default=20.0, help="round-trip time of the link (20)")
    parser.add_argument("--image", choices=sorted(RECIPES), default="numpy", help="image to start (numpy)")
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems, help="what to compare (all)")
    options = parser.parse_args(argv)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: no directory {options.json.absolute().parent}")
    chosen = tuple(system for system in SYSTEMS if system.value in options.systems)
    return _Options(options.image, chosen, options.rounds, options.mbit, options.rtt_ms, options.json)


if __name__ == "__main__":
    leave(main())
