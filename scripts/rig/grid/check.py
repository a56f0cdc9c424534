"""`scripts/bench check`: whether a few cold starts still need as few requests and bytes as they did.

Images hello and numpy at metro, one round, overlayfs and ours: about a minute. Gates: every container's output is
right; requests and bytes until ready are at most 5 % above `baseline.json`, which `--update` writes anew; and as a wide
guard that a busy machine does not trip, ours are ready in at most twice overlayfs' time. Whether a connection becomes
a straggler is a matter of chance: requests that relieved one are not counted, nor what that may have cost. Layers are
not streamed in the background meanwhile: how much of that comes until ready is a matter of time.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.grid import measure
from scripts.rig.grid.run import Run, read_runs

__all__ = ["BASELINE", "SLACK", "TIME_GUARD", "judge", "main"]

BASELINE = Path(__file__).with_name("baseline.json")
"""`{image: {system: {"requests": n, "bytes": n}}}`."""
SLACK = 1.05
TIME_GUARD = 2.0
_RELIEF_BYTES = 256 << 10  # a connection has hardly more in flight when it is broken off

Baseline = Mapping[str, Mapping[str, Mapping[str, int]]]
Measure = Callable[[Sequence[str]], int]


def main(argv: Sequence[str] | None = None, run: Measure = measure.main) -> int:
    """Run and judge; 0 if nothing got worse, 1 if something did, 2 if it could not be run."""
    parser = argparse.ArgumentParser(prog="scripts/bench check", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true", help="take what was measured as the new baseline")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("scripts/bench check: namespaces and mounts need root", file=sys.stderr)
        return 2
    try:
        baseline: Baseline = json.loads(BASELINE.read_text())
        with tempfile.TemporaryDirectory(prefix="bootseer-check-") as directory:
            out = Path(directory) / "runs.jsonl"
            systems = ["overlayfs", *dict.fromkeys(system for image in baseline.values() for system in image)]
            options = ["--images", ",".join(baseline), "--networks", "metro", "--systems", ",".join(systems)]
            code = run(
                [
                    *options,
                    "--rounds",
                    "1",
                    "--no-warm",
                    "--any-link",
                    "--no-background",
                    "--seed",
                    "0",
                    "--out",
                    str(out),
                ]
            )
            if code > 1:
                return code
            runs = read_runs([out])
    except (RigError, OSError, ValueError) as error:
        print(f"scripts/bench check: {error}", file=sys.stderr)
        return 2
    if args.update:
        BASELINE.write_text(json.dumps(_updated(baseline, runs), indent=1) + "\n")
        print(f"written: {BASELINE}")
        return 0 if all(each.ok for each in runs) else 1
    complaints = judge(baseline, runs)
    print("\n".join(complaints or ["check: as few requests and bytes as before, and every output right"]))
    return 1 if complaints else 0


def judge(baseline: Baseline, runs: Sequence[Run]) -> list[str]:
    """What is worse than the baseline allows, one line each; also a run that is missing or failed."""
    complaints = [f"{run.image}, {run.system}: {run.more.get('reason', 'failed')}" for run in runs if not run.ok]
    good = {(run.image, run.system): run for run in runs if run.ok}
    failed = {(run.image, run.system) for run in runs if not run.ok}
    for image, systems in baseline.items():
        overlayfs = good.get((image, "overlayfs"))
        for system, limits in systems.items():
            run = good.get((image, system))
            if run is None:
                if (image, system) not in failed:
                    complaints.append(f"{image}, {system}: was not run")
                continue
            for name, value in _counts(run).items():
                if value > limits[name] * SLACK:
                    complaints.append(f"{image}, {system}: {value} {name}, the baseline is {limits[name]}")
            if overlayfs is not None and run.ready_s > TIME_GUARD * overlayfs.ready_s:
                complaints.append(
                    f"{image}, {system}: ready after {run.ready_s:.2f} s, overlayfs after {overlayfs.ready_s:.2f} s"
                )
    return complaints


def _counts(run: Run) -> dict[str, int]:
    """What the gates count of a run that is ok."""
    relieved = int((run.more.get("status") or {}).get("relieved", 0))
    return {"requests": (run.requests or 0) - relieved, "bytes": (run.bytes or 0) - relieved * _RELIEF_BYTES}


def _updated(baseline: Baseline, runs: Sequence[Run]) -> dict[str, dict[str, dict[str, int]]]:
    """The baseline with what was measured in place of what was there."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    measured = {(run.image, run.system): run for run in runs if run.ok}
    for image, systems in baseline.items():
        for system, before in systems.items():
            run = measured.get((image, system))
            found.setdefault(image, {})[system] = dict(before) if run is None else _counts(run)
    return found
