"""Ending a bench in order when a signal asks for it: the first one raises `Interrupted`, further ones are ignored.

From `arm` to `disarm` SIGINT, SIGTERM and SIGHUP raise in the main thread, once. What was opened is closed on
the way up, and each step of that is bounded in time, so an impatient second signal changes nothing. `leave` is the
program's last word.
"""

import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ["SIGNALS", "Interrupted", "arm", "disarm", "leave"]

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked for the end. Not an Exception: nothing on the way may take it for a failure and go on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def arm() -> None:
    """From now on the first signal raises Interrupted."""
    for number in SIGNALS:
        signal.signal(number, _interrupt)


def disarm() -> None:
    """From now on signals are ignored. By a handler, not by SIG_IGN: Python complains of a signal that came just
    before, and children inherit it."""
    for number in SIGNALS:
        signal.signal(number, _nothing)


def leave(code: int) -> NoReturn:
    """End the program with this code, whatever signals come meanwhile: Python's own end puts the default handlers back,
    so they are held back until the process is gone."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    sys.exit(code)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Signal handler: the first signal raises, and none counts after it."""
    disarm()
    raise Interrupted(number)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """Signal handler: the clean-up goes on."""
