"""`scripts/bench`: which measurement to make. Each has a module of its own, with a `main` of what arguments remain."""

import argparse
from collections.abc import Callable, Mapping, Sequence

from scripts.rig import indexbench
from scripts.rig.grid import check, images, measure, report
from scripts.rig.interrupt import leave
from scripts.rig.nodebench import command as nodebench

__all__ = ["VERBS", "main"]


def _record(argv: Sequence[str]) -> int:
    return nodebench.main(["--only", "record", *argv])


VERBS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "images": (images.main, "builds the images that are started, and lists them"),
    "run": (measure.main, "cold starts: images, networks, systems; one JSON line a run"),
    "report": (report.main, "tables and plots of such lines"),
    "check": (check.main, "whether a few cold starts still need as few requests and bytes as they did"),
    "index": (indexbench.main, "building layer indexes, and decoding through them"),
    "node": (nodebench.main, "what bootseer costs on a node, beside overlayfs and ext4"),
    "record": (_record, "what a recording costs: `node --only record`"),
}
"""What can be measured: its `main`, and a few words for the help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Make one measurement; its exit code."""
    lines = "\n".join(f"  {verb:8} {words}" for verb, (_, words) in VERBS.items())
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description="Measure parts of bootseer on this machine. `scripts/bench WHAT --help` says more.",
        epilog=f"what:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=VERBS, metavar="WHAT", help="what to measure: see below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="its options")
    args = parser.parse_args(argv)
    measure, _ = VERBS[args.what]
    return measure(args.rest)


if __name__ == "__main__":
    leave(main())
