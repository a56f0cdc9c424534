"""The measurement of outages runs, and has a line for each kind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("containerd") is None, reason="needs containerd: run scripts/setup"),
]


def test_the_table_of_outages() -> None:
    argv = [sys.executable, "-m", "tests.systemd.outage", "--turns", "1"]
    checkout = Path(__file__).resolve().parents[2]
    done = subprocess.run(argv, cwd=checkout, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [line[28:].split() for line in done.stdout.splitlines()[1:]]
    assert len(rows) == 5 and all(len(row) == 6 for row in rows), done.stdout
    assert rows[0][:4] == ["0"] * 4, "nothing happened, and calls failed"
    assert all(float(row[5]) > 0 for row in rows), "calls were answered"
