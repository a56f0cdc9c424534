"""The fetch process's ticker: off by default; a round that fails does not end it."""

import threading
from dataclasses import replace

import pytest

from snapshotter.config import Config, PublishConfig
from snapshotter.errors import SnapshotterError
from snapshotter.fetch import publishing
from snapshotter.fetch.publishing import Publishing


def test_a_round_that_fails_does_not_end_it(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(publishing, "_FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(publishing, "_PAUSE_S", 0.0)
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
    Publishing(replace(Config(), publish=PublishConfig(enabled=True, jitter_s=0.0))).start()
    assert enough.wait(60)
    for thread in threading.enumerate():
        if thread.name == "publishing":
            thread.join(60)
    assert caplog.text.count("the program did not start") == len(rounds) - 1 == 2
