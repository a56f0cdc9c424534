"""The end of a bench: signals that come while Python itself ends change nothing."""

import subprocess
import sys

import pytest

from scripts.rig.interrupt import SIGNALS

_PROGRAM = """
import atexit, os, signal, sys
from scripts.rig.interrupt import arm, disarm, leave

def late():  # as Python's own end does; then somebody is impatient
    signal.signal({number}, signal.SIG_DFL)
    os.kill(os.getpid(), {number})

atexit.register(late)
arm()
disarm()
{end}(5)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("end", ["leave", "sys.exit"])
def test_nothing_interrupts_the_end(end: str, number: int) -> None:
    """What it prevents is what happens to a program that ends without it."""
    program = _PROGRAM.format(number=int(number), end=end)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (5 if end == "leave" else -number, "")
