"""The fetch process's ticker: off by default; a round that fails does not end it."""

import threading
from dataclasses import replace

import pytest

from snapshotter.config import Config, PublishConfig
from snapshotter.errors import SnapshotterError
from snapshotter.fetch.publishing import Publishing


def test_a_round_that_fails_does_not_end_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rounds, enough = [], threading.Event()

    def run(self: Publishing) -> None:
        rounds.append(self)
        if len(rounds) < 3:
            raise SnapshotterError("the program did not start")
        enough.set()
        self.end()

    monkeypatch.setattr(Publishing, "round", run)
    Publishing(Config()).start()
    assert not rounds and not any(it.name == "publishing" for it in threading.enumerate()), "it is off by default"
    Publishing(replace(Config(), publish=PublishConfig(enabled=True, every_s=0.01, jitter_s=0.0))).start()
    assert enough.wait(60)
    for thread in threading.enumerate():
        if thread.name == "publishing":
            thread.join(60)
    assert caplog.text.count("the program did not start") == len(rounds) - 1 == 2


@pytest.mark.parametrize(
    ("every_s", "jitter_s", "pauses"), [(300.0, 60.0, [90.0, 360.0, 360.0]), (5.0, 0.0, [5.0, 5.0, 5.0])]
)
def test_when_it_looks(every_s: float, jitter_s: float, pauses: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after the start, then every so often; each time later by a random delay."""
    publishing = Publishing(replace(Config(), publish=PublishConfig(True, every_s=every_s, jitter_s=jitter_s)))
    waited: list[float] = []

    def wait(pause_s: float) -> bool:
        waited.append(pause_s)
        return len(waited) == 3

    monkeypatch.setattr(publishing._ended, "wait", wait)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    monkeypatch.setattr(Publishing, "round", lambda self: None)
    publishing._run()
    assert waited == pauses
