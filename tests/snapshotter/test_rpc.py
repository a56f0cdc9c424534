"""Calls between our processes: values and errors come over, a dead process is told from one that refuses."""

import errno
import os
import socket
import stat
import threading
from pathlib import Path

import pytest

from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.rpc import Server, Unanswered, call


def _refuse(request: object) -> None:
    raise NotFound("no such layer")


def _break(request: object) -> None:
    raise ZeroDivisionError("bug")


def test_values_and_errors_come_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "socket"
    server = Server(path, {"add": lambda request: request["a"] + request["b"], "refuse": _refuse, "break": _break})
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert call(path, "add", a=2, b=40) == 42
    with pytest.raises(NotFound, match="no such layer"):
        call(path, "refuse")
    with pytest.raises(SnapshotterError, match="ZeroDivisionError"):
        call(path, "break")
    with pytest.raises(InvalidArgument, match="'unheard of' is no call of socket"):
        call(path, "unheard of")
    server.close()
    assert not path.exists()
    caplog.clear()


def test_nobody_there_is_unanswered(tmp_path: Path) -> None:
    with pytest.raises(Unanswered):
        call(tmp_path / "nothing", "ping")


def test_a_process_that_ends_before_it_answers_is_unanswered(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def hang_up() -> None:
            connection, _ = listener.accept()
            connection.recv(100)
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(Unanswered, match="ended before"):
            call(path, "ping")
        thread.join()


def test_a_caller_that_only_looks_whether_somebody_is_there_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(tmp_path / "socket", {"ping": lambda request: "pong"})
    with socket.socket(socket.AF_UNIX) as probe:
        probe.connect(str(tmp_path / "socket"))
    assert call(tmp_path / "socket", "ping") == "pong"
    for thread in threading.enumerate():
        if thread.name == "rpc-call":
            thread.join()
    server.close()
    assert caplog.text == ""


def test_a_slow_call_does_not_hold_up_another(tmp_path: Path) -> None:
    gate = threading.Event()
    server = Server(tmp_path / "socket", {"slow": lambda request: gate.wait(10), "fast": lambda request: 1})
    slow = threading.Thread(target=call, args=(tmp_path / "socket", "slow"))
    slow.start()
    assert call(tmp_path / "socket", "fast") == 1
    gate.set()
    slow.join()
    server.close()


def test_a_node_out_of_descriptors_or_threads_for_a_moment_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever connects to a server that takes no calls would wait as long as it lives."""
    path = tmp_path / "socket"
    server = Server(path, {"ping": lambda request: "pong"})
    accept, start = socket.socket.accept, threading.Thread.start
    refusals = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.ENFILE, "Too many open files in system")]

    def flaky_accept(listener: socket.socket) -> tuple[socket.socket, object]:
        if refusals:
            raise refusals.pop()
        return accept(listener)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(socket.socket, "accept", flaky_accept)
    assert call(path, "ping") == "pong"  # by the accept that had begun
    assert call(path, "ping") == "pong"
    assert not refusals
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(Unanswered):
        call(path, "ping")
    monkeypatch.setattr(threading.Thread, "start", start)
    assert call(path, "ping") == "pong"
    server.close()
    assert caplog.text.count("rpc.refused") == 3
    caplog.clear()


def test_a_socket_left_by_a_killed_process_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    server = Server(path, {"ping": lambda request: "pong"})
    assert call(path, "ping") == "pong"
    server.close()
