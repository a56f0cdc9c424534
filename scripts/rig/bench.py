"""`scripts/bench`: which measurement to make. Each is a module of its own, with a `main` of the remaining arguments."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence

from scripts.rig import indexbench

__all__ = ["VERBS", "main"]

VERBS: Mapping[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "index": (indexbench.main, "building layer indexes, and decoding through them"),
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
    sys.exit(main())
