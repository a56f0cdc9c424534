"""The leak rules of `conftest` see what they are for."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = {
    "descriptor": "import os\ndef test(): os.open('/dev/null', os.O_RDONLY)",
    "thread": (
        "import threading, time\n"
        "def test(): threading.Thread(target=time.sleep, args=(3,), daemon=True, name='stray').start()"
    ),
    "process": (
        "import subprocess\n"
        "def test(): subprocess.run(['sh', '-c', 'setsid sleep 3 </dev/null >/dev/null 2>&1 &'], check=True)"
    ),
    "loop device": (
        "import subprocess, pytest\n"
        "@pytest.mark.system\n"
        "def test(tmp_path):\n"
        "    (tmp_path / 'disk').write_bytes(bytes(1 << 16))\n"
        "    subprocess.run(['losetup', '-f', tmp_path / 'disk'], check=True)"
    ),
    "mount": (
        "import subprocess, pytest\n"
        "@pytest.mark.system\n"
        "def test(tmp_path): subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', tmp_path], check=True)"
    ),
}


def _pytest(directory: Path, source: str) -> subprocess.CompletedProcess[str]:
    conftest = Path(__file__).with_name("conftest.py").read_text().replace("GRACE_S = 3.0", "GRACE_S = 0.2")
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_case.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = system\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(directory / "tmp"), "."]
    alone = ["unshare", "--mount", "--propagation", "private"] if "system" in source else []
    done = subprocess.run([*alone, *argv], cwd=directory, capture_output=True, text=True)
    for disk in directory.rglob("disk"):
        subprocess.run(f"losetup -n -O NAME -j {disk} | xargs -r losetup -d", shell=True, check=True)
    return done


def _check(directory: Path, kinds: list[str]) -> None:
    """Each leak fails its test, and the test beside them that leaks nothing passes."""
    clean = "def test_clean(tmp_path): open(tmp_path / 'x', 'w').close()\n"
    sources = [CASES[kind].replace("def test(", f"def test_{number}(") for number, kind in enumerate(kinds)]
    done = _pytest(directory, "\n".join([clean, *sources]))
    assert done.returncode == 1, done.stdout
    assert f"{len(kinds) + 1} passed, {len(kinds)} errors" in done.stdout, done.stdout
    for kind in kinds:
        assert f"left behind: {kind}" in done.stdout, done.stdout


def test_a_leak_fails_the_test_that_leaks(tmp_path: Path) -> None:
    _check(tmp_path, [kind for kind in CASES if "system" not in CASES[kind]])


@pytest.mark.system
def test_a_leak_of_the_system_fails_the_test_that_leaks(tmp_path: Path) -> None:
    _check(tmp_path, [kind for kind in CASES if "system" in CASES[kind]])
