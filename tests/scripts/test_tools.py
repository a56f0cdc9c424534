"""`scripts/tools` builds once and whole, and says what is wrong with this machine's Go. The Go here is a small fake."""

import os
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
_GO = """\
#!/bin/sh
[ "$1" != -C ] || shift 2
echo "$@" >>"$LOG"
case "$1 $2" in
    "version ") echo "go version go1.19 linux/amd64" ;;
    "env GOARCH") echo amd64 ;;
    "list -m") if [ -n "$OLD" ]; then echo "go.mod requires go >= 9" >&2; exit 1; fi ;;
    "list -deps") if [ -n "$SERVER" ]; then echo "$3: reading m.zip: $SERVER" >&2; exit 1; fi ;;
    build*)
        [ -z "$BROKEN" ] || exit 1
        while [ "$1" != -o ]; do shift; done
        directory=$2
        for program; do case $program in */cmd/*) echo built >"$directory/${program##*/}" ;; esac; done
        [ -d "$directory" ] || echo built >"$directory" ;;
    test*) while [ "$1" != -o ]; do shift; done; echo built >"$2" ;;
esac
"""


class Tools:
    """`scripts/tools` with a private cache and the fake."""

    def __init__(self, directory: Path) -> None:
        self.cache = directory / "cache"
        self._bin = directory / "bin"
        self._log = directory / "log"
        self._log.touch()
        self._bin.mkdir()
        (self._bin / "go").write_text(_GO)
        (self._bin / "go").chmod(0o755)

    def run(self, *arguments: str, go: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it; without `go` there is none in PATH."""
        path = f"{self._bin}:/usr/bin:/bin" if go else "/usr/bin:/bin"
        env = {"PATH": path, "LOG": str(self._log), "BOOTSEER_TOOLS": str(self.cache), **variables}
        return subprocess.run([CHECKOUT / "scripts" / "tools", *arguments], env=env, capture_output=True, text=True)

    def builds(self) -> int:
        """How often something was built."""
        return sum(line.startswith(("build ", "test ")) for line in self._log.read_text().splitlines())


@pytest.fixture
def tools(tmp_path: Path) -> Tools:
    return Tools(tmp_path)


@pytest.mark.parametrize(
    ("name", "program"),
    [("clients", "containerd"), ("clients", "nerdctl"), ("suite", "suite"), ("registry", "registry")],
)
def test_it_builds_once(tools: Tools, name: str, program: str) -> None:
    first, second = tools.run(name), tools.run(name)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout and "building" not in second.stderr
    assert tools.builds() == 1
    directory = Path(first.stdout.strip())
    assert directory.parent == tools.cache and (directory / program).read_text() == "built\n"


def test_a_new_build_replaces_the_old_ones_of_its_kind(tools: Tools) -> None:
    tools.run("suite")
    (tools.cache / "clients-of-yesterday").mkdir()
    (tools.cache / ".build-interrupted").mkdir()
    tools.run("clients")
    names = sorted(path.name.split("-")[0] for path in tools.cache.iterdir())
    assert names == [".lock", "clients", "suite"]
    assert not (tools.cache / "clients-of-yesterday").exists()


def test_a_failed_build_leaves_nothing(tools: Tools) -> None:
    assert tools.run("clients", BROKEN="yes").returncode != 0
    assert [path.name for path in tools.cache.iterdir()] == [".lock"]
    assert tools.run("clients").returncode == 0


def test_it_builds_the_others_where_nerdctl_is_refused_and_asks_again(tools: Tools) -> None:
    refused = tools.run("clients", SERVER="403 Forbidden")
    directory = Path(refused.stdout.strip())
    assert refused.returncode == 0 and "without nerdctl" in refused.stderr
    assert (directory / "crictl").exists() and not (directory / "nerdctl").exists()
    assert (directory / "nerdctl.refused").read_text().endswith("m.zip: 403 Forbidden\n")
    for answer in ("403 Forbidden", "connection refused"):  # what is there stays in use
        assert tools.run("clients", SERVER=answer).stdout == refused.stdout
    assert tools.builds() == 1
    assert tools.run("clients").stdout == refused.stdout
    assert tools.builds() == 2
    assert (directory / "nerdctl").exists() and not (directory / "nerdctl.refused").exists()


def test_a_server_that_does_not_answer_is_no_refusal(tools: Tools) -> None:
    done = tools.run("clients", SERVER="dial tcp: connection refused")
    assert done.returncode == 1 and done.stdout == ""
    assert "nerdctl's modules" in done.stderr and "connection refused" in done.stderr
    assert tools.builds() == 0


@pytest.mark.skipif(os.path.exists("/usr/bin/go"), reason="this machine has a Go where everything else is")
def test_without_go_it_says_so(tools: Tools) -> None:
    done = tools.run("clients", go=False)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("tools: Go is missing: install Go 1.")


def test_an_old_go_is_named_with_what_is_needed(tools: Tools) -> None:
    done = tools.run("suite", OLD="yes")
    assert done.returncode == 1 and done.stdout == ""
    assert "go version go1.19" in done.stderr and "needs Go 1." in done.stderr


def test_an_unknown_name_is_refused(tools: Tools) -> None:
    done = tools.run("everything")
    assert done.returncode == 1 and "usage: scripts/tools clients|suite|registry" in done.stderr
