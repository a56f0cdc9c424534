"""Layers that are left to containerd (kill switch, patterns, no labels, failures): each counted with its reason."""

from pathlib import Path

import pytest

from snapshotter.containerd.labels import TARGET_LABEL
from snapshotter.containerd.model import Counters
from snapshotter.containerd.ordinary import LazyRules, OrdinaryPulls, Reason
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import AlreadyExists
from snapshotter.lazyswitch import LazySwitch
from tests.snapshotter.containerd.fake_provider import FakeProvider, digest, layer_labels

A, B = digest("a"), digest("b")


def _reasons(snapshots: Snapshots) -> dict[str, int]:
    return {row.reason: row.layers for row in snapshots.ordinary()}


def _rules(root: Path, include: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> LazyRules:
    return LazyRules(LazySwitch(root), include, exclude)


@pytest.mark.parametrize(
    ("image", "include", "exclude", "reason"),
    [
        ("r.io/a/b:1", (), (), None),
        ("r.io/a/b:1", ("r.io/*",), (), None),
        ("r.io/a/b:1", ("other/*", "*/b:1"), (), None),
        ("r.io/a/b:1", ("other/*",), (), Reason.NOT_INCLUDED),
        ("r.io/a/b:1", (), ("r.io/a/*",), Reason.EXCLUDED),
        ("r.io/a/b:1", ("r.io/*",), ("*:1",), Reason.EXCLUDED),
        ("r.io/a/b:1", (), ("R.io/*", "r.io/a"), None),
        ("debian:12", ("docker.io/library/*",), (), None),
        ("docker.io/library/debian:12", (), ("debian*",), None),
        ("not a reference", (), ("not*",), Reason.EXCLUDED),
        (f"r.io/a/b@{A}", (), ("r.io/a/b:1",), Reason.EXCLUDED),  # it may be that tag
        (f"r.io:5000/a/b@{A}", (), ("*/b:1*",), Reason.EXCLUDED),
        (f"r.io:5000/a/b@{A}", (), ("r.io:5000/a/c", "r.io:*/c", "r.io/a/b:1"), None),
        (f"r.io/a/b:2@{A}", (), ("r.io/a/b:1",), None),
        (f"r.io/a/b@{A}", ("r.io/a/b:1",), (), Reason.NOT_INCLUDED),
        (f"r.io/a/b@{A}", ("r.io/a/*",), (), None),
    ],
)
def test_patterns(
    tmp_path: Path, image: str, include: tuple[str, ...], exclude: tuple[str, ...], reason: Reason | None
) -> None:
    refusal = _rules(tmp_path, include, exclude).refusal(image)
    assert (None if refusal is None else refusal.reason) is reason


def test_the_switch_turns_the_next_pull_and_leaves_the_last(tmp_path: Path, provider: FakeProvider) -> None:
    provider.add(A, {"a": b"1"})
    provider.add(B, {"b": b"2"})
    root = tmp_path / "root"
    switch = LazySwitch(root)
    snapshots = Snapshots(root, provider, _rules(root).refusal)
    with pytest.raises(AlreadyExists):
        snapshots.prepare("ns/1/extract-1-x one", "", layer_labels("one", A))
    switch.turn_off()
    since = switch.off_since()
    switch.turn_off()
    assert switch.off_since() == since is not None
    assert snapshots.prepare("ns/2/extract-1-x two", "one", layer_labels("two", B))
    assert snapshots.prepare("ns/3/extract-1-x one", "", layer_labels("one", A, "r.io/x:1")), "not even reused"
    assert snapshots.prepare("container", "one", {})[0].options, "containers of lazy images still start"
    assert provider.released == [] and provider.ensured[B] == 0
    assert _reasons(snapshots) == {"switched-off": 2}
    assert snapshots.ordinary()[0].image == "r.io/x:1" and "lazy off" in snapshots.ordinary()[0].detail
    snapshots.remove("ns/2/extract-1-x two")
    switch.turn_on()
    switch.turn_on()
    with pytest.raises(AlreadyExists):
        snapshots.prepare("ns/4/extract-1-x two", "one", layer_labels("two", B))
    assert snapshots.counters() == Counters(lazy=2, refused=2, containers=1)
    snapshots.close()


def test_every_other_reason_is_counted(snapshots: Snapshots, provider: FakeProvider) -> None:
    snapshots.prepare("ns/1/extract-1-x one", "", {})
    snapshots.prepare("ns/2/extract-1-x two", "", {**layer_labels("two", A), "containerd.io/snapshot.ref": ""})
    bad = layer_labels("three", A)
    snapshots.prepare("three", "", {key: value.replace("sha256:", "md5:") for key, value in bad.items()})
    snapshots.prepare("four", "", layer_labels("four", A))
    provider.failure = ZeroDivisionError("bug")
    snapshots.prepare("five", "", layer_labels("five", A))
    snapshots.prepare("ns/6/extract-1-x six", "", {TARGET_LABEL: "six"})
    assert _reasons(snapshots) == {"no-target": 2, "bad-labels": 1, "failed": 2, "no-labels": 1}
    assert "no address of containerd is configured" in snapshots.ordinary()[-1].detail
    snapshots.prepare("five again", "", layer_labels("five", A))
    assert snapshots.ordinary()[-1].image == "registry.test/app:1"


def test_the_latest_of_a_reason_is_kept() -> None:
    pulls = OrdinaryPulls()
    pulls.count(Reason.FAILED, "a", "first")
    pulls.count(Reason.EXCLUDED, "b", "pattern")
    pulls.count(Reason.FAILED, "c", "second")
    assert [(row.reason, row.layers, row.image, row.detail) for row in pulls.rows()] == [
        ("excluded", 1, "b", "pattern"),
        ("failed", 2, "c", "second"),
    ]
