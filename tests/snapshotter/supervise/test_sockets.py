"""Which of the sockets that were kept are still of use, and what becomes of them at the end."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from snapshotter.config import Config, CriConfig
from snapshotter.listening import bind, is_at
from snapshotter.supervise import sockets

pytestmark = pytest.mark.timeout(30)

NAME = "socket-containerd"


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_which_are_wanted() -> None:
    control = {"socket-control": Path("/r/control.sock")}
    assert sockets.wanted(Config(run="/r")) == {NAME: Path("/r/bootseer.sock"), **control}
    config = Config(run="/r", socket="/x/b.sock", cri=CriConfig(enabled=True))
    assert sockets.wanted(config) == {NAME: Path("/x/b.sock"), "socket-cri": Path("/r/cri.sock"), **control}


def test_one_that_is_kept_goes_on_where_its_name_leads_to_it(tmp_path: Path, closing: ExitStack) -> None:
    paths = {NAME: tmp_path / "s"}
    held: dict[str, int] = {}
    sockets.complete(paths, held)
    closing.callback(os.close, held[NAME])
    assert sockets.kept_of(paths, {**held, "run": 0}) == held
    before = dict(held)
    sockets.complete(paths, held)
    assert held == before, "there was nothing to do"
    assert sockets.kept_of({NAME: tmp_path / "elsewhere"}, held) == {}
    paths[NAME].unlink()
    assert sockets.kept_of(paths, held) == {}, "nobody would reach it"


def test_one_that_cannot_be_made_stays_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "s").write_text("precious")
    held: dict[str, int] = {}
    sockets.complete({NAME: tmp_path / "s"}, held)
    assert held == {} and "socket.not_held" in caplog.text and (tmp_path / "s").read_text() == "precious"


@pytest.mark.parametrize("manager", [False, True])
@pytest.mark.parametrize("name", [NAME, "socket-control"])
def test_the_name_stays_where_a_manager_keeps_the_socket(
    tmp_path: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch, name: str, manager: bool
) -> None:
    """The command line is to learn that no daemon runs."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    paths = {name: tmp_path / "s"}
    held: dict[str, int] = {}
    sockets.complete(paths, held)
    closing.callback(os.close, held[name])
    if manager:
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    sockets.let_go(paths, held)
    assert paths[name].exists() is (manager and name == NAME)


def test_a_name_that_leads_to_another_socket_is_left_alone(tmp_path: Path, closing: ExitStack) -> None:
    paths = {NAME: tmp_path / "s"}
    held: dict[str, int] = {}
    sockets.complete(paths, held)
    closing.callback(os.close, held[NAME])
    paths[NAME].unlink()
    other = closing.enter_context(bind(paths[NAME]))
    sockets.let_go(paths, held)
    assert is_at(paths[NAME], other.fileno())


def test_the_service_takes_what_is_held_or_one_of_its_own(tmp_path: Path) -> None:
    held: dict[str, int] = {}
    sockets.complete({NAME: tmp_path / "s"}, held)
    with sockets.taken(held, NAME, tmp_path / "s") as listener:
        assert listener.fileno() == held[NAME]
    with sockets.taken({}, NAME, tmp_path / "s") as listener:
        assert is_at(tmp_path / "s", listener.fileno())
