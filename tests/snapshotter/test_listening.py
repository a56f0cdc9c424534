"""Sockets that others connect to: whose they are, and when a name leads to them."""

import socket
import stat
from pathlib import Path

import pytest

from snapshotter.errors import UserError
from snapshotter.listening import bind, is_at

pytestmark = pytest.mark.timeout(30)


def test_only_root_may_connect(tmp_path: Path) -> None:
    with bind(tmp_path / "run" / "s"):
        assert stat.S_IMODE((tmp_path / "run" / "s").stat().st_mode) == 0o600
        assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["s"]


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    bind(tmp_path / "s").close()
    with bind(tmp_path / "s") as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(tmp_path / "s"))
        listener.accept()[0].close()


def test_a_socket_in_use_is_left_alone(tmp_path: Path) -> None:
    with bind(tmp_path / "s") as listener:
        with pytest.raises(UserError, match="another process serves there"):
            bind(tmp_path / "s")
        assert is_at(tmp_path / "s", listener.fileno())


def test_one_that_nobody_serves_at_the_moment_is_in_use(tmp_path: Path) -> None:
    """Its backlog is full."""
    with bind(tmp_path / "s") as listener:
        listener.listen(0)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "s"))
            with pytest.raises(UserError, match="another process serves there"):
                bind(tmp_path / "s")


def test_paths_that_cannot_be_sockets(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(UserError, match="not a socket"):
        bind(file)
    assert file.read_text() == "precious"
    with pytest.raises(UserError, match="107 bytes"):
        bind(tmp_path / ("x" * 120))
    with pytest.raises(UserError, match="absolute"):
        bind(Path("relative.sock"))


def test_whether_a_name_leads_to_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bind(path) as listener:
        assert is_at(path, listener.fileno())
        path.rename(tmp_path / "moved")
        assert not is_at(path, listener.fileno()) and is_at(tmp_path / "moved", listener.fileno())
        with bind(path) as other:
            assert not is_at(path, listener.fileno()) and is_at(path, other.fileno())
    with open("/dev/null") as no_socket:
        assert not is_at(path, no_socket.fileno())
