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
    conftest = Path(__file__).with_name("conftest.py").read_text().replace("GRACE_S = 3.0", "GRACE_S = 0.3")
    (directory / "conftest.py").write_text(conftest)
    (directory / "test_case.py").write_text(source)
    (directory / "pytest.ini").write_text("[pytest]\nmarkers = system\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(directory / "tmp"), "."]
    alone = ["unshare", "--mount", "--propagation", "private"] if "system" in source else []
    done = subprocess.run([*alone, *argv], cwd=directory, capture_output=True, text=True)
    for disk in directory.rglob("disk"):
        subprocess.run(f"losetup -n -O NAME -j {disk} | xargs -r losetup -d", shell=True, check=True)
    return done


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.system if "system" in CASES[k] else ()) for k in CASES]
)
def test_a_leak_fails_the_test(kind: str, tmp_path: Path) -> None:
    done = _pytest(tmp_path, CASES[kind])
    assert done.returncode == 1, done.stdout
    assert f"left behind: {kind}" in done.stdout


def test_a_clean_test_passes(tmp_path: Path) -> None:
    assert _pytest(tmp_path, "def test(tmp_path): open(tmp_path / 'x', 'w').close()").returncode == 0
