"""`scripts/setup` on a machine that has everything is quick and changes nothing."""

import subprocess
import time

from scripts.rig.link import CHECKOUT


def test_nothing_to_do_takes_no_time() -> None:
    subprocess.run([CHECKOUT / "scripts" / "setup"], capture_output=True, check=True)  # may have something to do
    started = time.monotonic()
    done = subprocess.run([CHECKOUT / "scripts" / "setup"], capture_output=True, text=True, check=True)
    assert time.monotonic() - started < 2
    assert [line for line in done.stderr.splitlines() if "ready" in line]
    assert "install" not in done.stderr
