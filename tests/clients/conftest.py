"""The programs and images of the client tests, and the matrix of what was seen, printed at the end of the session."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts.rig.image import CACHE, RECIPES, Recipe, Step, build
from scripts.rig.link import CHECKOUT
from scripts.rig.oci import Layout
from tests.clients.cases import CONTAINERDS, render
from tests.clients.node import BOOTSEER, Containerd

Cells = list[tuple[str, str, str]]
_CELLS = pytest.StashKey[Cells]()

# Of a pod's pause container nothing is asked but that it stays.
_PAUSE = """
mkdir -p "$1/bin"
busybox=$(command -v busybox)
cp "$busybox" "$1/bin/busybox"
for library in $(ldd "$busybox" 2>/dev/null | grep -o '/[^ )]*'); do
    mkdir -p "$1$(dirname "$library")"
    cp -L "$library" "$1$library"
done
echo pause >"$1/name"
"""


@dataclass(frozen=True, slots=True)
class Images:
    """The image that is pulled, the pause image, and the directory with their indexes."""

    app: Layout
    pause: Layout
    indexes: Path


def pytest_configure(config: pytest.Config) -> None:
    """Begin with an empty matrix."""
    none_yet: Cells = []
    config.stash[_CELLS] = none_yet


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix, as far as it was run."""
    if config.stash[_CELLS]:
        terminalreporter.section("clients")
        cells = config.stash[_CELLS]
        terminalreporter.write_line(render(cells))


@pytest.fixture
def cells(pytestconfig: pytest.Config) -> Cells:
    """Where a test notes what it saw: row, containerd, outcome."""
    return pytestconfig.stash[_CELLS]


@pytest.fixture(scope="session")
def programs() -> Path:
    """The directory of what `scripts/tools clients` builds."""
    built = subprocess.run([CHECKOUT / "scripts" / "tools", "clients"], capture_output=True, text=True)
    assert built.returncode == 0, f"the clients cannot be built:\n{built.stderr}"
    return Path(built.stdout.strip())


@pytest.fixture(scope="session")
def nerdctl(programs: Path) -> Path:
    """The built nerdctl. Skips where a module server refuses it, as `scripts/tools` has noted, and only there."""
    refused = programs / "nerdctl.refused"
    if refused.exists():
        pytest.skip(f"no nerdctl: {refused.read_text().strip()}")
    assert (programs / "nerdctl").exists()
    return programs / "nerdctl"


@pytest.fixture(scope="session")
def containerds(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Containerd]:
    """Debian's containerd, with crictl and nerdctl beside it, and the one that was built."""
    clients = tmp_path_factory.mktemp("bin")
    for name in ("crictl", "nerdctl"):
        if (programs / name).exists():
            (clients / name).symlink_to(programs / name)
    found = {"1.6": Containerd("1.6", 2, clients), "2.4": Containerd("2.4", 3, programs)}
    assert tuple(found) == CONTAINERDS
    for containerd in found.values():
        program = shutil.which("containerd", path=containerd.path)
        assert program, "containerd is missing (run: sudo ./scripts/setup)"
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()[2]
        assert version.removeprefix("v").startswith(f"{containerd.name}."), f"{program} is {version}"
    return found


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    """Both images, built or from the cache, with indexes."""
    app = build(RECIPES["tiny"], os.environ, print, CACHE)
    recipe = Recipe("pause", (Step("pause", _PAUSE),), ("/bin/busybox", "sleep", "86400"), "")
    pause = build(recipe, os.environ, print, tmp_path_factory.mktemp("images"))
    indexes = tmp_path_factory.mktemp("indexes")
    for image in (app, pause):
        argv = [str(BOOTSEER), "index", "build", str(image.path), "--out", str(indexes)]
        subprocess.run(argv, check=True, capture_output=True)
    return Images(app, pause, indexes)
