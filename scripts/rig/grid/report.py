"""`scripts/bench report`: tables and plots of results, from the JSON lines of `scripts/bench run`.

In the tables: time to ready as median [lowest-highest], its ratio to overlayfs (the median of the ratios within
rounds), its share of the physical limit (1 is as fast as can be), bytes received until ready, requests, ranges fetched
for a waiting reader, the second start on the same node. Plots are SVG; they need matplotlib, which scripts/setup
installs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.rig.coldstart import System
from scripts.rig.errors import RigError
from scripts.rig.grid.network import NETWORKS
from scripts.rig.grid.run import Run, read_runs
from scripts.rig.grid.statistics import Cell, cells, ratio_to
from scripts.rig.grid.table import markdown_table, text_table
from scripts.rig.grid.timeline import read_timeline, render

__all__ = ["ORDER", "main", "report"]

ORDER = tuple(system.value for system in System)
_HEAD = ("system", "n", "ready, s", "x overlayfs", "of the floor", "MB", "requests", "on demand", "warm, s")


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; 1 if a file is no result."""
    parser = argparse.ArgumentParser(prog="scripts/bench report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="JSON lines of `scripts/bench run`")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="also draw SVG files into DIR, which is made")
    parser.add_argument("--timeline", type=Path, metavar="DIR", help="show one run that was kept by `run --timeline`")
    args = parser.parse_args(argv)
    if not args.files and args.timeline is None:
        parser.error("name a FILE, or --timeline DIR")
    try:
        if args.timeline is not None:
            print(render(read_timeline(args.timeline)))
        if args.files:
            runs = read_runs(args.files)
            print(report(runs, args.markdown))
            if args.plots is not None:
                for path in _draw(runs, args.plots):
                    print(f"drawn: {path}", file=sys.stderr)
    except RigError as error:
        print(f"scripts/bench report: {error}", file=sys.stderr)
        return 1
    return 0


def report(runs: Sequence[Run], markdown: bool = False) -> str:
    """All tables, one for each image and network, and a word on each machine and each failure."""
    if not runs:
        return "no runs"
    found = cells(runs, ORDER)
    parts = []
    for key in dict.fromkeys((cell.image, cell.network, cell.together) for cell in found):
        mine = [cell for cell in found if (cell.image, cell.network, cell.together) == key]
        title = _title(mine)
        rows = [_HEAD, *(_row(cell, mine) for cell in mine)]
        parts.append(f"### {title}\n\n{markdown_table(rows)}" if markdown else f"{title}\n{text_table(rows)}")
    parts.append(_machines(runs))
    if refused := {run.network for run in runs if str(run.more.get("link", "")).startswith("REFUSED")}:
        parts.append(f"Links that failed their test, and whose times mean nothing: {', '.join(sorted(refused))}")
    failures = [f"- {run.image}, {run.network}, {run.system}: {_reason(run)}" for run in runs if not run.ok]
    if failures:
        parts.append("\n".join([f"Failed, and no samples: {len(failures)}", *dict.fromkeys(failures)]))
    return "\n\n".join(parts)


def _title(found: Sequence[Cell]) -> str:
    cell = found[0]
    network = NETWORKS.get(cell.network)
    words = [f"{cell.image}, {cell.network}"]
    if network is not None:
        words[0] += f" ({network.mbit:g} Mbit/s, {network.rtt_ms:g} ms)"
    runs = [run for each in found for run in each.runs]
    sizes = {(run.more.get("layers"), run.more.get("image_bytes")) for run in runs} - {(None, None)}
    words += [f"{layers} layers, {size / 1e6:.1f} MB" for layers, size in sorted(sizes) if layers and size]
    floors = sorted({f"{run.floor_s:.2f}" for run in runs if run.floor_s is not None})
    if floors:
        words.append(f"floor {'-'.join(dict.fromkeys((floors[0], floors[-1])))} s")
    if cell.together > 1:
        words.append(f"{cell.together} containers at once")
    return "; ".join(words)


def _row(cell: Cell, beside: Sequence[Cell]) -> tuple[str, ...]:
    n = f"{cell.n} ({cell.failed} failed)" if cell.failed else str(cell.n)
    if not cell.runs:
        return (cell.system, n, *["-"] * (len(_HEAD) - 2))
    reference = next((each for each in beside if each.system == "overlayfs"), None)
    ratio = ratio_to(cell, reference) if reference is not None else None
    share = cell.share_of_floor
    ready, size = cell.spread(lambda run: run.t_ready_s), cell.spread(lambda run: run.bytes)
    requests, warm = cell.spread(lambda run: run.requests), cell.spread(lambda run: run.t_warm_s)
    demand = cell.spread(lambda run: run.demand_fetches)
    return (
        cell.system,
        n,
        ready.text(2) if ready else "-",
        f"{ratio:.2f}" if ratio is not None else "-",
        f"{share:.2f}" if share is not None else "-",
        size.text(1, 1e-6) if size else "-",
        requests.text(0) if requests else "-",
        demand.text(0) if demand else "-",
        warm.text(2) if warm else "-",
    )


def _machines(runs: Sequence[Run]) -> str:
    lines: dict[str, set[str]] = {}
    for run in runs:
        machine = run.more.get("machine") or {}
        key = (machine.get("cpu"), machine.get("cpus"), machine.get("memory_mib"), machine.get("kernel"))
        if any(key):
            text = f"{key[1]} CPUs ({key[0]}), {round((key[2] or 0) / 1024)} GiB, Linux {key[3]}"
            lines.setdefault(text, set()).add(str(run.more.get("commit", "?")))
    loads = [float(run.more["load"]) for run in runs if isinstance(run.more.get("load"), int | float)]
    busy = f"; load before a run {min(loads):.1f}-{max(loads):.1f}" if loads else ""
    described = [f"{text}; commits {', '.join(sorted(commits))}" for text, commits in lines.items()]
    return f"Median [lowest-highest]. Machine: {'; '.join(described) or 'not described'}{busy}."


def _reason(run: Run) -> str:
    return str(run.more.get("reason", "no reason given")).splitlines()[0]


def _draw(runs: Sequence[Run], directory: Path) -> list[Path]:
    try:
        from scripts.rig.grid import plots  # heavy, and needed for nothing else
    except ImportError as error:
        raise RigError(f"plots need matplotlib ({error}); scripts/setup installs it") from None
    return plots.draw(runs, directory)
