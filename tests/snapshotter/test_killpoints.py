"""Kill points themselves: each name is one place in the code and has a test, and nobody dies who is not armed."""

import importlib
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from snapshotter import killpoints
from snapshotter.errors import UserError
from snapshotter.killpoints import POINTS, VARIABLE, KillPoints, reach, use

CHECKOUT = Path(__file__).resolve().parents[2]
_REACHED = re.compile(r"\breach\(([^)]*)\)")
KILLS = ("hotpacks", "programs", "reading", "recording", "removing", "snapshots", "supervisor")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(killpoints, "_armed", None)
    path = tmp_path / "points"
    path.mkdir(mode=0o700)
    yield path


def _end_of(work: Callable[[], object]) -> int:
    """How a fork ends that does the work: 0 or minus the signal."""
    pid = os.fork()
    if pid == 0:
        with suppress(BaseException):
            work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_each_name_is_one_place_in_the_code() -> None:
    found: Counter[str] = Counter()
    for path in (CHECKOUT / "snapshotter").rglob("*.py"):
        if path.name != "killpoints.py":
            found.update(_REACHED.findall(path.read_text()))
    assert found == Counter(f'"{name}"' for name in POINTS)
    assert len(set(POINTS)) == len(POINTS)
    assert {name.partition(".")[0] for name in POINTS} == {"block", "fetch", "service", "publish", "supervisor"}


def test_each_name_has_a_test_in_which_somebody_dies_there() -> None:
    """By the tables of `tests.snapshotter.kills`, every row of which is one."""
    tested: set[str] = set()
    for name in KILLS:
        module = importlib.import_module(f"tests.snapshotter.kills.test_{name}")
        for value in vars(module).values():
            if isinstance(value, (tuple, dict)):
                rows = [row[0] if isinstance(row, tuple) else row for row in value]
                tested.update(row for row in rows if isinstance(row, str) and row in POINTS)
    assert tested == set(POINTS)


def test_unarmed_nothing_happens(directory: Path) -> None:
    (directory / "fetch.written").write_text("1")
    use({})
    use({VARIABLE: ""})
    reach("fetch.written")
    assert [path.name for path in directory.iterdir()] == ["fetch.written"]


def test_who_comes_there_for_that_many_times_dies_once(directory: Path) -> None:
    use({VARIABLE: str(directory)})
    points = KillPoints(directory)
    points.arm("fetch.written", 3)

    def come(times: int) -> None:
        for _ in range(times):
            reach("fetch.taken")
            reach("fetch.written")

    assert _end_of(lambda: come(2)) == 0 and not points.was_reached("fetch.written")
    assert _end_of(lambda: come(3)) == -signal.SIGKILL and points.was_reached("fetch.written")
    assert _end_of(lambda: come(9)) == 0, "not again"
    points.arm("fetch.written")
    assert not points.was_reached("fetch.written")
    assert _end_of(lambda: come(1)) == -signal.SIGKILL
    points.arm("fetch.written")
    assert not points.disarm("fetch.written")
    assert _end_of(lambda: come(1)) == 0
    assert (directory / "points").read_text().split() == list(POINTS)


def test_a_file_made_by_hand_arms_it(directory: Path) -> None:
    use({VARIABLE: str(directory)})
    (directory / "block.came").touch()
    assert _end_of(lambda: reach("block.came")) == -signal.SIGKILL
    assert (directory / "block.came.reached").exists()
    (directory / "block.came").write_text("nonsense")
    assert _end_of(lambda: reach("block.came")) == 0


def test_what_cannot_be_armed_is_refused_in_one_line(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(where: Path) -> str:
        with pytest.raises(UserError) as caught:
            use({VARIABLE: str(where)})
        text = str(caught.value)
        assert text.startswith(f"{VARIABLE}: ") and "\n" not in text
        return text

    assert "No such file" in refused(directory / "none")
    (directory / "file").touch()
    assert "there is no kill point 'file'" in refused(directory)
    (directory / "file").unlink()
    monkeypatch.chdir(directory.parent)
    assert "must be absolute" in refused(Path("points"))
    directory.chmod(0o770)
    assert "writable by the daemon's user alone" in refused(directory)
    directory.chmod(0o700)
    points = KillPoints(directory)
    with pytest.raises(UserError, match=r"there is no kill point 'fetch\.nothing'"):
        points.arm("fetch.nothing")
    assert list(directory.iterdir()) == [] and repr(points).startswith("<KillPoints ")
