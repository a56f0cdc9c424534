"""Answers to look-ups: what fails is no answer, and what is kept is bounded."""

import logging
import time

import pytest

from snapshotter.artifacts.answers import Answers


def test_what_fails_unforeseen_is_said_and_is_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    answers: Answers[int] = Answers(60.0, 60.0)
    assert answers.ask("host", ("question",), lambda: 1 // 0) is None
    assert answers.ask("host", ("question",), lambda: 1) is None, "nor is it asked again"
    assert answers.ask("host", ("another",), lambda: 1) == 1
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and "lookup.failed" in record.getMessage() and record.exc_info


def test_the_oldest_go_first() -> None:
    answers: Answers[int] = Answers(60.0, 3600.0, time.monotonic)
    for number in range(1100):
        assert answers.ask("host", (number,), lambda number=number: number) == number  # type: ignore[misc]
    assert "1024 kept, 0 under way" in repr(answers)
    assert answers.ask("host", (1099,), lambda: -1) == 1099
    assert answers.ask("host", (0,), lambda: -1) == -1
