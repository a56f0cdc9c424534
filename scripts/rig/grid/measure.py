"""`scripts/bench run`: cold starts of images over emulated networks with several systems, one JSON line a run.

Within a round all combinations of image, network and system take their turns in random order. A start that fails is a
line with `ok` false and its reason, and no sample. Lines are appended, each as soon as it is known.
"""

import argparse
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.rig.arguments import count, positive
from scripts.rig.coldstart import ColdStart, Extras, System, cold_start
from scripts.rig.errors import RigError
from scripts.rig.grid import machine
from scripts.rig.grid.floor import floor_s
from scripts.rig.grid.network import GROUPS, NETWORKS, Network, choose
from scripts.rig.grid.run import Run, read_runs
from scripts.rig.grid.session import Session
from scripts.rig.image import RECIPES, Recipe
from scripts.rig.interrupt import Interrupted, arm, disarm
from scripts.rig.peer import found
from scripts.rig.progress import Progress

__all__ = ["Plan", "main", "missing", "run_of"]

_MAX_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run. `rounds` of all combinations; `seed` decides their order."""

    recipes: tuple[Recipe, ...]
    networks: tuple[Network, ...]
    systems: tuple[System, ...]
    rounds: int
    seed: int
    together: int = 1
    warm: int = 1
    timeline: Path | None = None
    floor_again: bool = False
    max_load: float | None = None
    any_link: bool = False
    background: bool = True

    def round(self, number: int) -> list[tuple[Recipe, Network, System]]:
        """The runs of one round, the first is number 1, in their order."""
        order = [(recipe, network, system) for recipe in self.recipes for network in self.networks
                 for system in self.systems]  # fmt: skip
        random.Random(self.seed * 1000 + number).shuffle(order)
        return order


def main(argv: Sequence[str] | None = None) -> int:
    """Run the plan; 0 if every run was ok, 1 if one was not, 2 if nothing was run, 128 + signal if interrupted."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        plan = _plan(args)
        done = read_runs([args.out]) if args.resume and args.out.exists() else []
    except RigError as error:
        parser.error(str(error))
    if not args.out.absolute().parent.is_dir():
        parser.error(f"--out: no directory {args.out.absolute().parent}")
    if os.geteuid() != 0:
        print("scripts/bench run: namespaces and mounts need root", file=sys.stderr)
        return 2
    progress = Progress()
    failed = 0
    arm()
    try:
        with Session(plan.networks, progress, any_link=plan.any_link, background=plan.background) as session:
            try:
                with args.out.open("a") as out:
                    for run in _runs(plan, session, done, progress):
                        out.write(run.line())
                        out.flush()
                        failed += not run.ok
            finally:
                disarm()
    except Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        print(f"scripts/bench run: interrupted by {name}, all cleaned up; what was measured is in {args.out}")
        return 128 + interrupted.number
    except RigError as error:
        print(f"scripts/bench run: {error}", file=sys.stderr)
        return 2
    progress(f"written: {args.out}" + (f", {failed} runs failed" if failed else ""))
    return 1 if failed else 0


def missing(plan: Plan, done: Sequence[Run], commit: str) -> Callable[[Recipe, Network, System], bool]:
    """Whether one more run of a combination is wanted: called once a round. Runs of this commit in `done` are not
    repeated; with changed files (a `+`) nobody knows what they were runs of."""
    counts: dict[tuple[str, str, str, int], int] = {}
    for run in done:
        if run.ok and run.more.get("commit") == commit and not commit.endswith("+"):
            key = (run.image, run.network, run.system, run.together)
            counts[key] = counts.get(key, 0) + 1

    def wanted(recipe: Recipe, network: Network, system: System) -> bool:
        key = (recipe.name, network.name, system.value, plan.together)
        counts[key] = counts.get(key, 0) - 1
        return counts[key] < 0

    return wanted


def run_of(result: ColdStart, recipe: Recipe, network: Network, limit_s: float | None, more: dict[str, object]) -> Run:
    """The line of one cold start. Wrong output is a failure."""
    system = result.system
    details = {
        **more,
        "output": result.line,
        "t_warm_all_s": [round(value, 4) for value in result.warm_s],
        "t_ready_each_s": [round(value, 4) for value in result.ready_each_s],
        "status": dict(result.layers),
    }
    if not result.output_ok:
        details["reason"] = f"wrong output: {result.line!r}"
    return Run(
        image=recipe.name,
        network=network.name,
        system=system.value,
        t_ready_s=round(result.ready_s, 4),
        t_pull_s=round(result.pull_s, 4),
        t_warm_s=round(result.warm_s[0], 4) if result.warm_s else None,
        bytes=result.size,
        requests=result.requests,
        demand_fetches=result.layers.get("demand_fetches") if system.ours else None,
        floor_s=None if limit_s is None else round(limit_s, 4),
        ok=result.output_ok,
        more=details,
    )


def _runs(plan: Plan, session: Session, done: Sequence[Run], progress: Progress) -> Iterator[Run]:
    session_id = uuid.uuid4().hex[:12]
    commit = machine.commit()
    common: dict[str, object] = {
        "session": session_id, "seed": plan.seed, "commit": commit, "machine": machine.describe(),
    }  # fmt: skip
    wanted = missing(plan, done, commit)
    if plan.floor_again:
        for recipe in plan.recipes:
            session.working_set(recipe, again=True)
    serial = 0
    for number in range(1, plan.rounds + 1):
        for recipe, network, system in plan.round(number):
            if not wanted(recipe, network, system):
                continue
            _settle(plan.max_load, progress)
            serial += 1
            more = {
                **common,
                "round": number,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "load": machine.load(),
                "link": session.stages[network.name].tested,
                "together": plan.together,
                "background": plan.background,
            }
            label = f"{number}/{plan.rounds} {recipe.name} {network.name} {system.value}"
            run = _one(plan, session, (recipe, network, system), f"r{serial}", more)
            progress(f"{label}: {_words(run)}")
            yield run


def _one(plan: Plan, session: Session, what: tuple[Recipe, Network, System], name: str, more: dict[str, object]) -> Run:
    recipe, network, system = what
    limit_s = None
    try:
        limit_s = floor_s(session.working_set(recipe), network)
        bench = session.bench(recipe, network, system)
        layout = session.layout(recipe)
        more |= {
            "layers": len(layout.layers),
            "image_bytes": layout.size,
            "mbit": network.mbit,
            "rtt_ms": network.rtt_ms,
        }
        directory = None
        if plan.timeline is not None:
            directory = plan.timeline / f"{recipe.name}-{network.name}-{system.value}-{more['round']}"
            more["timeline"] = str(directory)
        result = cold_start(bench, system, name, Extras(plan.warm, plan.together, directory))
    except RigError as error:
        reason = str(error)
        return Run(
            recipe.name, network.name, system.value, None, None, None, None, None, None, limit_s, False,
            {**more, "reason": reason},
        )  # fmt: skip
    return run_of(result, recipe, network, limit_s, more)


def _words(run: Run) -> str:
    if not run.ok:
        return f"FAILED: {run.more.get('reason')}"
    share = f", floor {run.floor_s:.2f} s" if run.floor_s is not None else ""
    warm = f", warm {run.t_warm_s:.2f} s" if run.t_warm_s is not None else ""
    demand = f", {run.demand_fetches} on demand" if run.demand_fetches is not None else ""
    megabytes = (run.bytes or 0) / 1e6
    return (
        f"ready after {run.ready_s:.2f} s (pull {run.t_pull_s:.2f} s{warm}{share}), {megabytes:.1f} MB, "
        f"{run.requests} requests{demand}"
    )


def _settle(max_load: float | None, progress: Progress) -> None:
    """Wait until the machine is quiet enough, ten minutes at most: the load is in the line anyway."""
    if max_load is None or machine.load() <= max_load:
        return
    progress(f"waiting for a load of {max_load:g}, it is {machine.load():g}")
    deadline = time.monotonic() + _MAX_WAIT_S
    while machine.load() > max_load and time.monotonic() < deadline:
        time.sleep(1)


def _plan(args: argparse.Namespace) -> Plan:
    recipes = []
    for name in _names(args.images):
        if name not in RECIPES:
            raise RigError(f"no image {name}; there are {', '.join(RECIPES)}")
        recipes.append(RECIPES[name])
    systems = [_system(name) for name in _names(args.systems)]
    seed = args.seed if args.seed is not None else random.SystemRandom().randrange(1 << 20)
    return Plan(
        tuple(recipes), tuple(choose(_names(args.networks))), tuple(systems), args.rounds, seed, args.together,
        0 if args.no_warm else 1, args.timeline, args.measure_floor, args.max_load, args.any_link,
        not args.no_background,
    )  # fmt: skip


def _system(name: str) -> System:
    known = [system.value for system in System if system.peer is None or found(system.peer)]
    if name not in known:
        peers = [f"{system.value} ({system.peer.program})" for system in System if system.peer is not None]
        raise RigError(f"no system {name}; there are {', '.join(known)}; and on PATH could be {', '.join(peers)}")
    return System(name)


def _names(text: str) -> list[str]:
    """The words between commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench run", description=(__doc__ or "").splitlines()[0])
    systems = "overlayfs,bootseer-first,bootseer,bootseer-hot"
    networks = ", ".join([*NETWORKS, *GROUPS])
    parser.add_argument("--images", default="numpy", metavar="A,B", help=f"of {', '.join(RECIPES)} (numpy)")
    parser.add_argument("--networks", default="metro", metavar="N,M", help=f"of {networks} (metro)")
    every = ", ".join(system.value for system in System)
    parser.add_argument("--systems", default=systems, metavar="S,T", help=f"of {every} ({systems})")
    parser.add_argument("--rounds", type=count, default=5, metavar="K", help="runs of each combination (5)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON lines are appended to FILE")
    parser.add_argument("--seed", type=int, metavar="N", help="decides the order (drawn, and written into each line)")
    parser.add_argument("--together", type=count, default=1, metavar="N", help="containers started at once (1)")
    parser.add_argument("--resume", action="store_true", help="do not repeat what FILE has of this commit")
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="keep logs of each run in DIR; daemon logs all")
    parser.add_argument("--no-warm", action="store_true", help="no second start on each node")
    parser.add_argument("--measure-floor", action="store_true", help="measure working sets again")
    parser.add_argument("--no-background", action="store_true", help="ours bring in only what is read or hot")
    parser.add_argument("--any-link", action="store_true", help="use a link that failed its test; times mean nothing")
    parser.add_argument("--max-load", type=positive, metavar="L", help="before each run wait for a load of at most L")
    return parser
