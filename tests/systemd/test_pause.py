"""The measurement of pauses runs, and has a line for each kind."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system


def test_the_table_of_pauses() -> None:
    argv = [sys.executable, "-m", "tests.systemd.pause", "--turns", "1"]
    checkout = Path(__file__).resolve().parents[2]
    done = subprocess.run(argv, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    pauses = [float(line.split()[-1]) for line in done.stdout.splitlines()[1:]]
    assert len(pauses) == 6 and all(0 < pause < 60_000 for pause in pauses)
