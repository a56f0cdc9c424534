"""Threads and traffic of registry hosts."""

import threading
import time
from collections.abc import Iterator

import pytest

from snapshotter.fetch import host as host_module
from snapshotter.fetch.host import Host, Lane
from tests.snapshotter.fetch.blobs import PATIENCE_S


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host("registry.test", demand_threads=1, hot_threads=2, background_threads=1)
    yield host
    host.close()


class Job:
    """A job that says when it runs and goes on when it may."""

    def __init__(self, host: Host, lane: Lane = Lane.DEMAND, delay_s: float = 0.0, free: bool = True) -> None:
        self.began, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        if free:
            self.go.set()
        host.submit(lane, self._run, delay_s)

    def _run(self) -> None:
        self.began.set()
        assert self.go.wait(PATIENCE_S)
        self.ended.set()

    def await_begin(self) -> None:
        assert self.began.wait(PATIENCE_S)

    def await_end(self) -> None:
        assert self.ended.wait(PATIENCE_S)


def test_a_lane_has_as_many_threads_as_it_may_and_queues_the_rest() -> None:
    host = Host("registry.test", demand_threads=2, hot_threads=2, background_threads=1)
    first, second, third = (Job(host, free=False) for _ in range(3))
    first.await_begin()
    second.await_begin()
    assert "2 running, 1 queued" in repr(host) and not third.began.is_set()
    first.go.set()
    third.await_begin()
    for job in (second, third):
        job.go.set()
        job.await_end()
    host.close()


def test_jobs_of_a_lane_run_in_the_order_they_came(host: Host) -> None:
    blocker = Job(host, free=False)
    blocker.await_begin()
    order: list[int] = []
    for number in range(5):
        host.submit(Lane.DEMAND, lambda number=number: order.append(number))
    last = Job(host)
    blocker.go.set()
    last.await_end()
    assert order == [0, 1, 2, 3, 4]


def test_a_full_background_does_not_hold_up_demand(host: Host) -> None:
    background = Job(host, Lane.BACKGROUND, free=False)
    background.await_begin()
    Job(host, Lane.DEMAND).await_end()
    background.go.set()
    background.await_end()


def test_a_dead_host_holds_up_no_other(host: Host) -> None:
    dead = Host("dead.test", demand_threads=2, hot_threads=2, background_threads=1)
    stuck = [Job(dead, lane, free=False) for lane in (Lane.DEMAND, Lane.DEMAND, Lane.BACKGROUND)]
    waiting = [Job(dead) for _ in range(100)]
    for job in stuck:
        job.await_begin()
    for lane in Lane:
        Job(host, lane).await_end()
    assert not any(job.began.is_set() for job in waiting)
    for job in stuck:
        job.go.set()
    for job in waiting:
        job.await_end()
    dead.close()


def test_a_delayed_job_waits_and_lets_others_pass(host: Host) -> None:
    started = time.monotonic()
    delayed = Job(host, delay_s=0.1)
    never = Job(host, delay_s=3600)
    Job(host).await_end()
    assert not delayed.began.is_set() or time.monotonic() - started >= 0.1
    delayed.await_end()
    assert time.monotonic() - started >= 0.1
    assert not never.began.is_set()


def test_a_broken_job_does_not_take_the_lane_down(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ValueError("a bug")

    blocker = Job(host, free=False)
    host.submit(Lane.DEMAND, broken)
    after = Job(host)
    blocker.go.set()
    after.await_end()
    [record] = [record for record in caplog.records if record.levelname == "ERROR"]
    assert record.getMessage() == "fetch.job_failed host=registry.test lane=DEMAND"
    assert record.exc_info is not None and isinstance(record.exc_info[1], ValueError)


def test_a_job_that_found_no_thread_runs_as_soon_as_there_is_one(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The node is out of threads for a moment: no job is lost, and the lane is as wide as before."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        job = Job(host)
    assert "0 running, 1 queued" in repr(host) and "fetch.no_thread" in caplog.text
    caplog.clear()
    host.tend()
    job.await_end()


def test_close_drops_what_is_queued_and_what_comes_later(host: Host) -> None:
    blocker = Job(host, free=False)
    blocker.await_begin()
    queued = Job(host)
    host.close()
    blocker.go.set()
    blocker.await_end()
    late = Job(host)
    for thread in threading.enumerate():
        if thread.name.endswith("registry.test"):
            thread.join(PATIENCE_S)
    assert not queued.began.is_set() and not late.began.is_set()


# -- giving way ------------------------------------------------------------------------------------------------------


class Background:
    """A thread of background work that gives way."""

    def __init__(self, host: Host) -> None:
        self.asks = threading.Event()
        self._host = host
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.asks.wait(PATIENCE_S)

    def _run(self) -> None:
        self.asks.set()
        self._host.give_way(Lane.BACKGROUND)

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def await_pass(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_on_a_quiet_host_the_background_goes_on_at_once(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_PATIENCE_S", 3600.0)
    host.give_way(Lane.BACKGROUND)


def test_the_background_waits_until_the_last_reader_is_served(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_QUIET_S", 0.0)
    host.urge(+1)
    host.urge(+1)
    background = Background(host)
    host.urge(-1)
    assert background.waits
    host.urge(-1)
    background.await_pass()


def test_the_background_waits_for_a_pause(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A starting program that has been served asks again within milliseconds."""
    monkeypatch.setattr(host_module, "_QUIET_S", 0.1)
    host.urge(+1)
    host.urge(-1)
    served = time.monotonic()
    host.give_way(Lane.BACKGROUND)
    assert time.monotonic() - served >= 0.1


def test_readers_that_never_pause_hold_the_background_up_only_so_long(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "_PATIENCE_S", 0.05)
    host.urge(+1)
    started = time.monotonic()
    host.give_way(Lane.BACKGROUND)
    assert time.monotonic() - started >= 0.05


def test_close_lets_the_background_go(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_PATIENCE_S", 3600.0)
    host.urge(+1)
    background = Background(host)
    host.close()
    background.await_pass()


def test_the_background_waits_for_prefetches_and_a_while_longer(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that has its hot blocks is not disturbed; one that has none is helped by the background."""
    monkeypatch.setattr(host_module, "_AFTER_HOT_S", 0.1)
    host.prefetch(+1)
    background = Background(host)
    host.prefetch(-1, served=True)
    served = time.monotonic()
    assert background.waits
    background.await_pass()
    assert time.monotonic() - served >= 0.09
    monkeypatch.setattr(host_module, "_AFTER_HOT_S", 3600.0)
    host.prefetch(+1)
    background = Background(host)
    host.prefetch(-1)
    background.await_pass()


def test_what_goes_on_beside_pulls_waits_for_readers_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_module, "_HOT_PATIENCE_S", 3600.0)
    with host.hurry():
        host.give_way(Lane.HOT, beside_pulls=True)
        others = [threading.Thread(target=host.give_way, args=(Lane.HOT, beside)) for beside in (True, False)]
        host.urge(+1)
        for thread in others:
            thread.start()
        assert all(thread.is_alive() for thread in others)
        host.urge(-1)
        others[0].join(PATIENCE_S)
        assert not others[0].is_alive() and others[1].is_alive(), "the pull still waits"
    others[1].join(PATIENCE_S)
    assert not others[1].is_alive()


def test_a_lane_can_be_widened_and_is_never_narrowed(host: Host) -> None:
    go, running = threading.Event(), threading.Semaphore(0)

    def job() -> None:
        running.release()
        assert go.wait(PATIENCE_S)

    host.widen(Lane.HOT, 5)
    host.widen(Lane.HOT, 1)
    for _ in range(6):
        host.submit(Lane.HOT, job)
    for _ in range(5):
        assert running.acquire(timeout=PATIENCE_S)
    assert "5 running, 1 queued" in repr(host)
    go.set()
