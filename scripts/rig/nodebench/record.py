"""What a recording costs the container that is recorded: the same cold start with and without one.

Each start has a cold node of its own: pull, then one container, until its first line. With no distance nothing that a
recording adds is hidden behind the network; but then the layers are complete at once, and a container that is not
recorded has a larger read-ahead from then on, which a real link does not allow so early. Taken are the whole start, and
the container's part of it, which has all of the cost (private mounts at Prepare, a note a read) and so shows it larger.
That the one start was recorded, and the record kept, and the other was not, is looked at each time.
"""

import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from scripts.rig.containers import Containers, run_words
from scripts.rig.errors import RigError
from scripts.rig.node import SNAPSHOTTER
from scripts.rig.nodebench.site import Site
from scripts.rig.nodebench.statistics import PairedRatio, paired_ratio
from scripts.rig.nodebench.table import Row

__all__ = ["GOAL", "Record", "measure"]

GOAL = 1.03
_DEADLINE_S = 120.0
_KEPT_S = 15.0
_LOOK_S = 0.1
_KEPT = re.compile(r"record\.kept .*blocks=(\d+)")


@dataclass(frozen=True, slots=True)
class Record:
    """Ratios recorded / not recorded; medians of those that were not, in seconds; the least and most blocks that one of
    the records has."""

    start: PairedRatio
    container: PairedRatio
    start_s: float
    container_s: float
    least_blocks: int
    most_blocks: int

    def rows(self) -> list[Row]:
        """For the table. The goal is for the upper end of the interval."""
        parts = (
            ("pull to ready", self.start, self.start_s),
            ("the container's part", self.container, self.container_s),
        )
        return [
            Row(
                f"cold start, recorded / not recorded: {words}",
                f"{ratio} (not recorded {seconds:.3f} s)",
                ratio.n,
                f"< {GOAL} with 95 %",
                None if ratio.high is None else ratio.high < GOAL,
            )
            for words, ratio, seconds in parts
        ]


def measure(site: Site, rounds: int) -> Record:
    """`rounds` pairs in random order, after a start of each that is thrown away."""
    samples: list[dict[bool, tuple[float, float]]] = []
    blocks: list[int] = []
    for number in range(rounds + 1):
        pair = {recorded: _start(site, recorded, blocks) for recorded in random.sample((False, True), 2)}
        if number:
            samples.append(pair)
            ratios = (with_it / without for with_it, without in zip(pair[True], pair[False], strict=True))
            site.progress(f"record: pair {number}/{rounds}: {', '.join(f'{ratio:.3f}' for ratio in ratios)}")
    return _result(samples, blocks)


def _start(site: Site, recorded: bool, blocks: list[int]) -> tuple[float, float]:
    """Seconds from the order to pull until ready, and from the order to run."""
    recipe = site.image.recipe
    with site.node(f"[record]\nauto = {str(recorded).lower()}\n") as node:
        words = ["--plain-http", "--snapshotter", SNAPSHOTTER, site.image.reference]
        pull = node.ctr("images", "rpull", *words, tool="ctr-remote")
        started = time.monotonic()
        site.run(pull, "pulling the image")
        run = run_words(recipe, SNAPSHOTTER, site.image.reference)
        with Containers(site.workspace, node, "recorded" if recorded else "plain", run, 1) as containers:
            (line,) = containers.first_lines(time.monotonic() + _DEADLINE_S)
            containers.wait()
        if not recipe.is_ready(line.text):
            raise RigError(f"the container printed {line.text!r}")
        give_up = time.monotonic() + (_KEPT_S if recorded else 0)
        while not (kept := _KEPT.findall(node.daemon_log.read_text())) and time.monotonic() < give_up:
            time.sleep(_LOOK_S)
        if len(kept) != recorded:
            raise RigError(f"{len(kept)} records were kept of a start that was {'' if recorded else 'not '}recorded")
        blocks += map(int, kept)
        return line.at - started, line.after_s


def _result(samples: Sequence[dict[bool, tuple[float, float]]], blocks: Sequence[int]) -> Record:
    starts = [(pair[True][0], pair[False][0]) for pair in samples]
    containers = [(pair[True][1], pair[False][1]) for pair in samples]
    return Record(
        paired_ratio(starts),
        paired_ratio(containers),
        median(without for _, without in starts),
        median(without for _, without in containers),
        min(blocks),
        max(blocks),
    )
