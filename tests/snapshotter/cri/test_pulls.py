"""Handing credentials to the fetch process: while it is down, when it comes back, and what is kept of which pull."""

import threading
import time
from pathlib import Path

import pytest

from snapshotter.cri.pulls import Pulls
from snapshotter.cri.requests import PullRequest
from snapshotter.errors import SnapshotterError, Transient
from snapshotter.registry.credentials import Credential
from snapshotter.registry.passed import Passed, PassedCredentials
from snapshotter.registry.reference import parse_reference
from snapshotter.rpc import Server
from snapshotter.supervise.memory import PassedMemory
from tests.snapshotter.cri.conftest import Fetch

SECRET = "s3cr:t"


def _request(image: str = "r.io/app:1", password: str = SECRET) -> PullRequest:
    return PullRequest(image, parse_reference(image), Passed(Credential("me", password)) if password else None)


@pytest.fixture
def passed() -> PassedCredentials:
    return PassedCredentials()


@pytest.fixture
def pulls(fetch: Fetch, passed: PassedCredentials, memory: PassedMemory) -> Pulls:
    return Pulls(passed, memory, fetch.path, list)


def test_a_fetch_process_that_is_being_started_is_waited_for(pulls: Pulls, fetch: Fetch) -> None:
    fetch.stop()
    back = threading.Timer(0.3, fetch.start)
    back.start()
    with pulls.pulling(_request()):
        assert len(fetch.passed.rows()) == 1
    back.join()


def test_one_that_stays_away_holds_up_no_pull(
    pulls: Pulls, fetch: Fetch, memory: PassedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    fetch.stop()
    began = time.monotonic()
    with pulls.pulling(_request()):
        assert time.monotonic() - began < 6
    assert "credentials.not_handed_over" in caplog.text and SECRET not in caplog.text
    assert len(memory.read()) == 1, "it finds them when it starts"


def test_one_that_is_of_another_opinion_holds_up_no_pull(
    short: Path, passed: PassedCredentials, memory: PassedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(short / "other.sock", {})
    with Pulls(passed, memory, short / "other.sock", list).pulling(_request()):
        pass
    server.close()
    assert "credentials.not_handed_over" in caplog.text and SECRET not in caplog.text
    caplog.clear()


def test_without_credentials_nothing_is_handed_over(pulls: Pulls, fetch: Fetch) -> None:
    with pulls.pulling(_request(password="")):
        assert pulls.under_way() == ["r.io/app:1"]
    assert fetch.handed == 0 and pulls.under_way() == []


def test_a_failure_leaves_what_was_there_before(pulls: Pulls, passed: PassedCredentials) -> None:
    with pulls.pulling(_request()):
        pass
    for request in (_request(), _request("r.io/app:2"), _request(password="wrong")):
        with pytest.raises(Transient), pulls.pulling(request):
            raise Transient("no such tag")
    assert [row["password"] for row in passed.rows()] == [SECRET]


def test_a_failure_leaves_what_another_pull_needs(pulls: Pulls, passed: PassedCredentials) -> None:
    with pytest.raises(Transient), pulls.pulling(_request("r.io/app:2")), pulls.pulling(_request()):
        assert len(pulls.under_way()) == 2
        raise Transient("both fail: the inner one leaves it to the outer one")
    assert passed.rows() == []
    first = pulls.pulling(_request("r.io/app:2"))
    with first:
        with pytest.raises(Transient), pulls.pulling(_request()):
            raise Transient("no such tag")
        assert len(passed.rows()) == 1
    assert len(passed.rows()) == 1


def test_what_cannot_be_counted_is_kept(
    fetch: Fetch, passed: PassedCredentials, memory: PassedMemory, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[str]:
        raise SnapshotterError("the database is gone")

    pulls = Pulls(passed, memory, fetch.path, broken)
    with pulls.pulling(_request()):
        pass
    pulls.forget_unused()
    assert len(passed.rows()) == 1 and "credentials.kept" in caplog.text


def test_those_of_a_pull_under_way_are_kept(pulls: Pulls, fetch: Fetch, memory: PassedMemory) -> None:
    with pulls.pulling(_request()):
        pulls.forget_unused()
        assert len(fetch.passed.rows()) == 1 and memory.read() == fetch.passed.rows()
    pulls.forget_unused()
    assert fetch.passed.rows() == [] and memory.read() == []
