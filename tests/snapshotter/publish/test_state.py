"""What a node remembers of its publishing: once for each artifact, and which places it leaves alone, how long."""

from pathlib import Path

import pytest

from snapshotter.errors import Denied, Transient
from snapshotter.publish.state import Done, State


def test_it_is_what_was_saved(tmp_path: Path) -> None:
    assert State.load(tmp_path) == State()
    first = Done("hot-set", "r.example/a:1", "train", "r.example/a", "published", "f1", 1.0, "sha256:1")
    second = Done("hot-set", "r.example/a:1", "train", "r.example/a", "there", "f2", 2.0)
    other = Done("layer-index", "r.example/a:1", "", "r.example/a", "published", "f", 1.0)
    state = State().with_done(first).with_done(other).with_done(second).with_failure("x", Denied("no"), 5.0)
    state.save(tmp_path)
    assert State.load(tmp_path) == state and state.done == (other, second)
    assert state.find("hot-set", "r.example/a:1", "train", "r.example/a") == second
    assert state.find("hot-set", "r.example/a:1", "train", "elsewhere") is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"version": 1, "done": [{}], "pauses": []}', '{"version": 2}'])
def test_what_cannot_be_read_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "publishing.json").write_text(text)
    assert State.load(tmp_path) == State()


def test_pauses_grow_up_to_an_hour() -> None:
    state, pauses = State(), []
    for _ in range(10):
        state = state.with_failure("r.example/a", Transient("down"), 1000.0)
        pauses.append(state.pauses[0].until - 1000)
    assert pauses[:4] == [60, 120, 240, 480] and pauses[-1] == 3600 and len(state.pauses) == 1
    assert state.is_paused("r.example/a", 4599.0) and not state.is_paused("r.example/a", 4600.0)
    assert not state.is_paused("r.example/b", 1001.0)
    done = Done("hot-set", "image", "train", "r.example/a", "published", "f", 1.0)
    assert state.with_done(done).pauses == ()


def test_who_is_refused_waits_an_hour_and_who_is_told_to_wait_waits() -> None:
    assert State().with_failure("a", Denied("403"), 0.0).pauses[0].until == 3600
    assert State().with_failure("a", Transient("429", 7200.0), 0.0).pauses[0].until == 7200
