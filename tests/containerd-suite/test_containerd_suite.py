"""containerd's own snapshotter suite passes against our service, whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / "scripts" / "tools"
CASES = 21


@pytest.mark.system
@pytest.mark.timeout(1800)  # the first time it is built
def test_containerds_own_suite_passes_whole() -> None:
    built = subprocess.run([TOOLS, "suite"], capture_output=True, text=True)
    assert built.returncode == 0, f"the suite cannot be built:\n{built.stderr}"
    argv = [f"{built.stdout.strip()}/suite", "-test.v", "-test.root"]
    done = subprocess.run(
        argv, cwd=HERE, env={**os.environ, "BOOTSEER_PYTHON": sys.executable}, capture_output=True, text=True
    )
    results = re.findall(r"^ +--- (\w+): TestSnapshotter/(\S+)", done.stdout, re.MULTILINE)
    failed = [f"{name}: {result}" for result, name in results if result != "PASS"]
    assert done.returncode == 0 and not failed, f"{failed}\n{done.stdout[-6000:]}{done.stderr[-3000:]}"
    assert len(results) == CASES, "containerd's suite has other cases than those known here"
