"""gRPC on a socket that it has not made. How servers follow one another is in containerd/test_service.py."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from snapshotter.errors import UserError
from snapshotter.grpcsocket import check, listen
from snapshotter.listening import bind

pytestmark = pytest.mark.timeout(60)


def test_this_grpc_can_be_treated_so() -> None:
    check()


def test_with_another_poller_the_check_fails() -> None:
    """As with a version of gRPC that goes about it in another way: said so, and not found out by containerd."""
    program = (
        "import os; from snapshotter import grpcsocket, listening\n"
        "os.environ.update(listening.POLLER); grpcsocket._ANSWER_S = 0.5\n"
        "grpcsocket.check()"
    )
    environment = {name: text for name, text in os.environ.items() if name != "GRPC_POLL_STRATEGY"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{UserError.__name__}: gRPC does not serve on a socket" in done.stderr, done.stderr


def test_connections_stay_with_the_socket(tmp_path: Path) -> None:
    """Who connects after the server has stopped is not refused, and not cut off when it is gone altogether."""
    path = tmp_path / "s"
    with bind(path) as kept, socket.socket(socket.AF_UNIX) as client:
        serving = listen(kept.dup(), lambda server: None, "first", 1)
        assert "on descriptor" in repr(serving)
        serving.stop(None).wait(10)
        serving.stop(None).wait(10)  # again: nothing happens
        assert "no more" in repr(serving)
        client.connect(str(path))
        client.settimeout(10)
        second = listen(kept.dup(), lambda server: None, "second", 1)
        assert client.recv(1), "the settings of HTTP/2"
        second.stop(None).wait(10)
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
