"""`deploy/install`: versions beside each other, and two links. A stand-in for Python makes empty environments; that the
real one gives a daemon that runs is in tests/clients/test_guides.py."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).resolve().parents[2]
_PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 9
mkdir -p "$3/bin"
printf '#!/bin/sh\\n[ ! -e /%s ]\\n' "${PIP_FAILS:-none}" >"$3/bin/pip"
printf '#!/bin/sh\\necho "$0"\\n' >"$3/bin/bootseer"
chmod +x "$3/bin/pip" "$3/bin/bootseer"
"""


class Installer:
    """A checkout, and a prefix to install it to."""

    def __init__(self, home: Path) -> None:
        self.checkout, self.prefix = home / "checkout", home / "opt"
        (self.checkout / "deploy").mkdir(parents=True)
        shutil.copy2(_CHECKOUT / "deploy" / "install", self.checkout / "deploy")
        for package in ("blockindex", "proto", "snapshotter"):
            (self.checkout / package).mkdir()
            (self.checkout / package / "__init__.py").write_text("")
        (self.checkout / "README.md").write_text("")
        (self.checkout / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
        (home / "bin").mkdir()
        (home / "bin" / "python3").write_text(_PYTHON)
        (home / "bin" / "python3").chmod(0o755)
        self._env = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}

    def run(self, **env: str) -> subprocess.CompletedProcess[str]:
        words = [self.checkout / "deploy" / "install", self.prefix]
        return subprocess.run(words, env={**self._env, **env}, capture_output=True, text=True, check=False)

    def change(self, text: str) -> None:
        """Another version of the sources."""
        (self.checkout / "snapshotter" / "__init__.py").write_text(text)

    def link(self, name: str) -> str:
        return os.readlink(self.prefix / name)

    def versions(self) -> set[str]:
        return {path.name for path in self.prefix.iterdir() if path.is_dir() and not path.is_symlink()}


@pytest.fixture
def installer(tmp_path: Path) -> Installer:
    return Installer(tmp_path)


def test_versions_stand_beside_each_other(installer: Installer) -> None:
    names = []
    for text in ("", "1", "2"):
        installer.change(text)
        done = installer.run()
        assert done.returncode == 0, done.stderr
        names.append(installer.link("current"))
        program = subprocess.run(
            [installer.prefix / "current/bin/bootseer"], capture_output=True, text=True, check=True
        )
        assert program.stdout.strip().endswith("current/bin/bootseer")
    assert len(set(names)) == 3 and all(name.startswith("1.2.3-") for name in names)
    assert installer.link("previous") == names[1]
    assert installer.versions() == set(names[1:]), "those before are removed"
    prefix = installer.prefix
    subprocess.run(["sh", "-c", f'ln -sfn "$(readlink {prefix}/previous)" {prefix}/current'], check=True)
    assert installer.link("current") == names[1]


def test_what_is_there_is_not_made_again(installer: Installer) -> None:
    installer.run()
    name = installer.link("current")
    (installer.prefix / name / "mark").touch()
    assert installer.run().returncode == 0
    assert (installer.prefix / name / "mark").exists() and installer.link("current") == name
    assert not (installer.prefix / "previous").exists()


def test_a_version_that_was_not_finished_is_made_anew_and_never_current(installer: Installer, tmp_path: Path) -> None:
    installer.run()
    before = installer.link("current")
    installer.change("broken")
    done = installer.run(PIP_FAILS="proc")
    assert done.returncode == 1 and "pip install failed" in done.stderr
    assert installer.link("current") == before
    assert installer.run().returncode == 0
    assert installer.link("previous") == before


def test_a_version_that_a_daemon_runs_from_is_left(installer: Installer) -> None:
    installer.run()
    oldest = installer.link("current")
    program = shutil.copy2("/bin/sleep", installer.prefix / oldest / "bin" / "sleep")
    running = subprocess.Popen([program, "600"])
    try:
        for text in ("1", "2"):
            installer.change(text)
            installer.run()
        assert oldest in installer.versions()
    finally:
        running.kill()
        running.wait()
    installer.change("3")
    installer.run()
    assert oldest not in installer.versions()


def test_a_relative_prefix_is_refused(installer: Installer) -> None:
    installer.prefix = Path("opt")
    done = installer.run()
    assert done.returncode == 1 and done.stderr.splitlines() == ["install: opt is not an absolute path"]
