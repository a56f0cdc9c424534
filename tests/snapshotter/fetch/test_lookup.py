"""Looking in several registries: who is asked, whose answer is taken, who is waited for."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from snapshotter.artifacts.finder import Found
from snapshotter.artifacts.model import Artifact, Kind
from snapshotter.config import LookupConfig
from snapshotter.errors import InvalidArgument
from snapshotter.fetch import lookup as lookup_module
from snapshotter.fetch.lookup import Judged, Lookup, places_of
from snapshotter.model import Digest
from snapshotter.registry.reference import ImageRef, parse_repository
from snapshotter.trust.policy import Verdict
from tests.snapshotter.artifacts.making import KEY, SUBJECT, digest, hot_set
from tests.snapshotter.fetch.blobs import PATIENCE_S

IMAGE = "registry.test/team/app:1"
OWN, FIRST, SECOND = "registry.test/team/app", "one.test/artifacts", "two.test/artifacts"
GOOD, BAD = Verdict(True, "is signed by the trusted key k", "k"), Verdict(False, "is not signed")


class Finder:
    """Has artifacts by repository, and may be held."""

    def __init__(self) -> None:
        self.has: dict[str, Artifact] = {}
        self.asked: list[tuple[str, str, Kind, str, Digest | None]] = []
        self.hold: dict[str, threading.Event] = {}
        self.all_asked = threading.Barrier(3)
        self.together = False

    def find(
        self, repository: ImageRef, image_key: str, kind: Kind, workload: str = "", subject: Digest | None = None
    ) -> Found | None:
        name = f"{repository.host}/{repository.repository}"
        self.asked.append((name, image_key, kind, workload, subject))
        if self.together:
            self.all_asked.wait(PATIENCE_S)
        if name in self.hold:
            assert self.hold[name].wait(PATIENCE_S)
        artifact = self.has.get(name)
        return Found(artifact, parse_repository(name), digest(name)) if artifact else None


class Bench:
    def __init__(self, config: LookupConfig) -> None:
        self.finder = Finder()
        self.verdicts: dict[str, Verdict] = {}
        self.lookup = Lookup(self.finder, lambda artifact: self.verdicts.get(artifact.workload, GOOD), config)

    def ask(self, image: str = IMAGE) -> Iterator[Judged]:
        return self.lookup.ask(image, KEY, Kind.HOT_SET, "default", SUBJECT.digest)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(LookupConfig(places=(FIRST, SECOND), timeout_s=PATIENCE_S))
    yield bench
    for hold in bench.finder.hold.values():
        hold.set()
    bench.lookup.close()


SET = hot_set()[0]


def test_the_image_s_own_repository_then_the_places_in_order() -> None:
    def names(config: LookupConfig, image: str = IMAGE) -> list[str]:
        return [f"{it.host}/{it.repository}" for it in places_of(config, image) if it.tag is it.digest is None]

    assert names(LookupConfig(places=(SECOND, FIRST))) == [OWN, SECOND, FIRST]
    assert names(LookupConfig(registry=False, places=(FIRST,))) == [FIRST]
    assert names(LookupConfig(registry=False)) == []
    assert names(LookupConfig(places=(OWN,))) == [OWN]
    assert names(LookupConfig(), "alpine") == ["docker.io/library/alpine"]


@pytest.mark.parametrize("text", ["artifacts", "team/artifacts", "h.test/a:1", f"h.test/a@{KEY}", "h.test/UP", ""])
def test_what_is_no_repository(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_repository(text)


def test_all_are_asked_at_once_for_the_same_thing(bench: Bench) -> None:
    bench.finder.together = True  # none answers before all have been asked
    assert list(bench.ask()) == []
    assert sorted(bench.finder.asked) == [
        (name, KEY, Kind.HOT_SET, "default", SUBJECT.digest) for name in sorted([OWN, FIRST, SECOND])
    ]


def test_answers_come_in_the_order_of_preference(bench: Bench) -> None:
    bench.finder.has = {FIRST: SET, SECOND: SET, OWN: SET}
    bench.finder.hold[OWN] = threading.Event()
    answers = bench.ask()
    while len(bench.finder.asked) < 3:
        threading.Event().wait(0.001)
    bench.finder.hold[OWN].set()
    assert [judged.where.partition("@")[0] for judged in answers] == [OWN, FIRST, SECOND]


def test_no_place_is_waited_for_once_one_before_it_was_taken(bench: Bench) -> None:
    bench.finder.has = {OWN: SET}
    bench.finder.hold = {FIRST: threading.Event(), SECOND: threading.Event()}
    assert next(bench.ask()).verdict is GOOD


def test_a_place_that_takes_too_long_is_passed_over() -> None:
    bench = Bench(LookupConfig(places=(FIRST,), timeout_s=0.1))
    bench.finder.has = {OWN: SET, FIRST: SET}
    bench.finder.hold[OWN] = threading.Event()
    answers = bench.ask()
    while len(bench.finder.asked) < 2:
        threading.Event().wait(0.001)
    assert [judged.found.repository.host for judged in answers] == ["one.test"]
    bench.finder.hold[OWN].set()
    bench.lookup.close()


def test_an_image_that_no_registry_can_have(bench: Bench) -> None:
    assert list(bench.ask("not an image")) == [] and bench.finder.asked == []


def test_what_is_not_trusted_is_said_once_and_listed(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.finder.has = {OWN: SET, FIRST: replace(SET, workload="train")}
    bench.verdicts["default"] = BAD
    for _ in range(2):
        assert [judged.verdict.trusted for judged in bench.ask()] == [False, True]
    where = f"{OWN}@{digest(OWN)}"
    assert bench.lookup.refusals.rows() == [
        {
            "artifact": "hot-set", "workload": "default", "image_key": KEY, "from": where, "reason": "is not signed",
            "times": 2,
        }
    ]  # fmt: skip
    [record] = caplog.records
    assert record.levelname == "WARNING" and where in record.getMessage() and "is not signed" in record.getMessage()
    caplog.clear()


def test_the_list_of_refusals_is_bounded(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    judged = Judged(Found(SET, parse_repository(OWN), digest("x")), BAD)
    for number in range(lookup_module._REFUSALS + 5):
        bench.lookup.refusals.add(judged, f"reason {number}")
    rows = bench.lookup.refusals.rows()
    assert len(rows) == lookup_module._REFUSALS and rows[-1]["reason"] == f"reason {number}"
    caplog.clear()
