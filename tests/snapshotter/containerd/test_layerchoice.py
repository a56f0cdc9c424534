"""Layers whose image no label names: looked for once there is a target, then treated as any other."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotter.containerd.layerchoice import LayerChoice
from snapshotter.containerd.model import Counters
from snapshotter.containerd.ordinary import OrdinaryPulls, Reason, Refusal
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import AlreadyExists, NotFound, SnapshotterError
from snapshotter.model import LayerRef
from tests.snapshotter.containerd.fake_provider import TARGET, FakeProvider, digest, layer_labels

A, B = digest("a"), digest("b")
FOUND = LayerRef(f"r.io/app@{B}", A, (A,))
KEY = "ns/1/extract-1-x c"


def _never(key: str, target: str) -> LayerRef:
    raise AssertionError(f"{key} was looked for")


def _choice(find: Callable[[str, str], LayerRef], counts: OrdinaryPulls, refusal: Refusal | None = None) -> LayerChoice:
    return LayerChoice(lambda image: refusal, find, counts)


def test_what_is_found_is_served(tmp_path: Path, provider: FakeProvider, caplog: pytest.LogCaptureFixture) -> None:
    provider.add(A, {"f": b"1"})
    asked: list[tuple[str, str]] = []

    def find(key: str, target: str) -> LayerRef:
        asked.append((key, target))
        return FOUND

    snapshots = Snapshots(tmp_path / "root", provider, find_layer=find)
    with caplog.at_level(logging.INFO), pytest.raises(AlreadyExists):
        snapshots.prepare(KEY, "", {TARGET: "c"})
    assert asked == [(KEY, "c")]
    assert f"layer.found key={KEY} layer={A} image={FOUND.image}" in caplog.text
    assert snapshots.counters() == Counters(lazy=1) and snapshots.ordinary() == []
    assert snapshots.stat("c").labels == {TARGET: "c"}, "by which containerd looks for it"
    snapshots.close()


def test_labels_and_clients_without_target_need_no_look() -> None:
    counts = OrdinaryPulls()
    choice = _choice(_never, counts)
    assert choice.layer(KEY, layer_labels("c", A)) == LayerRef("registry.test/app:1", A, (A,))
    assert choice.layer(KEY, {}) == "ordinary"
    assert [row.reason for row in counts.rows()] == ["no-target"]


def test_what_is_found_may_be_refused() -> None:
    counts = OrdinaryPulls()
    refusal = Refusal(Reason.EXCLUDED, "by the operator")
    assert _choice(lambda key, target: FOUND, counts, refusal).layer(KEY, {TARGET: "c"}) == "refused"
    assert [(row.reason, row.image) for row in counts.rows()] == [("excluded", FOUND.image)]


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (NotFound("none of 3 manifests"), "not found in containerd: none of 3 manifests"),
        (SnapshotterError("UNKNOWN: boom"), "not found in containerd: UNKNOWN: boom"),
        (ZeroDivisionError("bug"), "unexpected error, see the log"),
    ],
)
def test_what_is_not_found_is_unpacked(error: Exception, detail: str) -> None:
    def find(key: str, target: str) -> LayerRef:
        raise error

    counts = OrdinaryPulls()
    assert _choice(find, counts).layer(KEY, {TARGET: "c"}) == "ordinary"
    assert [(row.reason, row.layers) for row in counts.rows()] == [("no-labels", 1)]
    assert detail in counts.rows()[0].detail
