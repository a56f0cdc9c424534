"""The fuzzer: mutates inputs, keeps those that end in a new way, and raises what must not happen.

    scripts/fuzz TARGET --seconds 3600 [--seed N]

Targets are in `tests.blockindex.fuzz` and `tests.snapshotter.fuzz`: everything that reads bytes of strangers. For
each, whatever the input, within `LIMIT_S` and `LIMIT_BYTES`: an error of the stated kind, or a result that agrees with
itself.
Inputs that end in a way not seen before (the lines of the traceback, or the rough shape of the result) are mutated
further, and kept in `corpus/TARGET` beside the targets when run by hand; tests replay them all. A finding is written to
`findings/` there, and raised.
"""

import argparse
import hashlib
import logging
import random
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["NUMBERS", "Fuzzer", "Target", "blind"]

LIMIT_S = 10.0
LIMIT_BYTES = 600 << 20
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 511, 512, 4095, 4096, 4097, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62, (1 << 64) - 1)
_MAX_INPUT = 1 << 18


@dataclass(frozen=True)
class Target:
    """`seeds` makes inputs to begin with, `mutate` repairs or restructures what the blind mutations made, `run` reads
    an input and returns the shape of the result. `error`: what a bad input may raise; `home`: where its corpus is."""

    home: Path
    error: type[Exception]
    seeds: Callable[[], Iterator[bytes]]
    mutate: Callable[[bytearray, random.Random], bytes]
    run: Callable[[bytes], object]


class Fuzzer:
    """One run over one target; `seen` counts how inputs ended, `corpus` holds an input for each such end."""

    def __init__(self, name: str, target: Target, seed: int) -> None:
        self.name = name
        self.target = target
        self.rng = random.Random(seed)
        self.seen: dict[object, int] = {}
        self.corpus: list[bytes] = []
        self.runs = 0

    def kept(self) -> list[Path]:
        """The corpus of the target."""
        return sorted((self.target.home / "corpus" / self.name).glob("*"))

    def replay(self) -> None:
        """Run the seeds and the kept corpus, all of which are mutated later."""
        inputs = [*self.target.seeds(), *(path.read_bytes() for path in self.kept())]
        for data in inputs:
            self.try_one(data)
        self.corpus = inputs

    def run(self, seconds: float) -> None:
        """Mutate for so long what has been replayed or has ended in a new way."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            data = blind(self.rng.choice(self.corpus), self.rng)
            self.try_one(self.target.mutate(bytearray(data), self.rng)[:_MAX_INPUT])

    def try_one(self, data: bytes) -> bool:
        """Whether the input ended in a new way; a finding is written down and raised as AssertionError."""
        self.runs += 1
        started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            shape = self.target.run(data)
        except self.target.error as error:
            shape = tuple((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)[1:])
        except Exception as error:
            raise AssertionError(f"{self._finding(data)} raises {type(error).__name__}: {error}") from error
        seconds = time.monotonic() - started
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        if seconds > LIMIT_S or grown > LIMIT_BYTES:
            raise AssertionError(f"{self._finding(data)} takes {seconds:.1f} s and {grown} bytes")
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if self.seen[shape] == 1:
            self.corpus.append(data)
        return self.seen[shape] == 1

    def _finding(self, data: bytes) -> Path:
        path = self.target.home / "findings" / f"{self.name}-{hashlib.sha256(data).hexdigest()[:12]}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return path


def blind(data: bytes, rng: random.Random) -> bytes:
    """A few mutations that know nothing of the format."""
    out = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        if not out:
            return b"\0"
        place, other = rng.randrange(len(out)), rng.randrange(len(out))
        size = rng.choice((1, 2, 4, 8, 12, 32, 512, 4096))
        match rng.randrange(8):
            case 0 | 1:
                out[place] ^= 1 << rng.randrange(8)
            case 2:
                out[place] = rng.randrange(256)
            case 3:
                out[place : place + size] = rng.choice(NUMBERS).to_bytes(8, rng.choice(("little", "big")))[:size]
            case 4:
                out[place : place + size] = out[other : other + size]
            case 5:
                del out[place : place + size]
            case 6:
                out[place:place] = out[other : other + size]
            case _:
                del out[place:]
    return bytes(out)


def _targets() -> Mapping[str, Target]:
    from tests.blockindex import fuzz as blockindex  # they import this module
    from tests.snapshotter import fuzz as snapshotter

    return {**blockindex.TARGETS, **snapshotter.TARGETS}


def main() -> int:
    """Run by hand: prints what was found, keeps what ended in new ways."""
    targets = _targets()
    parser = argparse.ArgumentParser(description="Fuzz one target, or `all`, each for so long.")
    parser.add_argument("target", choices=(*targets, "all"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    logging.getLogger().addHandler(logging.NullHandler())  # what targets log of bad inputs is no news
    for name in targets if args.target == "all" else (args.target,):
        fuzzer = Fuzzer(name, targets[name], args.seed)
        fuzzer.replay()
        known, ends = len(fuzzer.corpus), len(fuzzer.seen)
        fuzzer.run(args.seconds)
        directory = fuzzer.target.home / "corpus" / name
        directory.mkdir(parents=True, exist_ok=True)
        for data in fuzzer.corpus[known:]:
            if len(data) <= 1 << 13:  # a repository is no place for large ones
                (directory / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)
        print(f"{name}: {fuzzer.runs} inputs, {len(fuzzer.seen)} ends ({ends} known), seed {args.seed}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
