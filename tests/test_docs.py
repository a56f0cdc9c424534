"""README and docs say what is so: commands are run, byte tables compared with the code, names and links looked up.

A command in the documents is a line of a block fenced as `sh`, or an indented line that begins like one. Each must be
run: by the session test here (`SITE`), by a function here (`HERE`), or by another test (`ELSEWHERE`).
"""

import contextlib
import dataclasses
import json
import os
import re
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from google.protobuf.message import Message

from blockindex.codec import PROLOGUE_SIZE
from blockindex.erofs import ondisk
from proto import hotset_pb2, layerindex_pb2
from scripts.rig.image import RECIPES, build
from scripts.rig.workspace import Workspace
from snapshotter.config import Config
from snapshotter.containerd.ordinary import OrdinaryLayers
from tests.clients.cases import CASES, FETCH
from tests.snapshotter.daemon import Daemon, make_layer, origin, write_index
from tests.snapshotter.images import gzip_layer, write_layout

CHECKOUT = Path(__file__).resolve().parents[1]
DOCS = {path.name: path.read_text() for path in (CHECKOUT / "README.md", *sorted((CHECKOUT / "docs").glob("*.md")))}
BOOTSEER = str(Path(sys.executable).parent / "bootseer")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    ((?:sudo |bootseer |containerd |ctr|\./|\.venv/).*)$", re.MULTILINE)


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [body for found, body in _FENCE.findall(text) if found == language]


def commands(text: str) -> list[str]:
    """Every command of a document."""
    lines = [line for block in blocks(text, "sh") for line in block.splitlines()]
    lines += _INDENTED.findall(_FENCE.sub("", text))
    return [line for line in lines if line and not line.startswith("#")]


def table(text: str, *head: str) -> list[list[str]]:
    """The rows of the table with these first columns."""
    lines = text.split(f"\n| {' | '.join(head)}", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# --- commands


def _config_show(command: str, tmp_path: Path) -> None:
    shown = subprocess.run(_argv(command), capture_output=True, text=True, check=True).stdout
    (tmp_path / "c.toml").write_text(shown)
    Config.from_toml(tmp_path / "c.toml")


def _index_build(command: str, tmp_path: Path) -> None:
    write_layout(tmp_path / "image", [gzip_layer({"a": b"a" * 9000})])
    argv = _argv(
        re.sub(r"registry\.example/\S+", str(tmp_path / "image"), command).replace("/srv/indexes", f"{tmp_path}")
    )
    subprocess.run(argv, capture_output=True, check=True)
    assert len(list(tmp_path.glob("sha256/*.bsi"))) == 1


def _config_dump(command: str, tmp_path: Path) -> None:
    """containerd drops what it does not understand, so each line of each snippet must come out again."""
    snippets = [toml for text in DOCS.values() for toml in blocks(text, "toml") if "plugins" in toml]
    theirs = ("version = 3", "io.containerd.cri.v1")  # containerd 2's: tests/clients has one
    snippets = [toml for toml in snippets if not any(it in toml for it in theirs)]
    assert len(snippets) == 4
    for snippet in snippets:
        path = tmp_path / "config.toml"
        path.write_text(snippet if "version" in snippet else f"version = 2\n{snippet}")
        argv = shlex.split(command.replace("/etc/containerd/config.toml", str(path)))
        dumped = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        lines = {line.strip() for line in dumped.splitlines()}
        assert {line.strip() for line in snippet.splitlines() if line} <= lines


def _demo_options(command: str, tmp_path: Path) -> None:
    """The options only: `--help` at the end is reached when they have been accepted."""
    options = shlex.split(command.removeprefix("sudo ./scripts/demo"))
    argv = [sys.executable, "-m", "scripts.rig.demo", *options, "--help"]
    assert "usage: demo" in subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout


def _bench_options(command: str, tmp_path: Path) -> None:
    """The options only, as above."""
    words = shlex.split(command.removeprefix("sudo ").removeprefix("./scripts/bench"))
    argv = [sys.executable, "-m", "scripts.rig.bench", *words, "--help"]
    shown = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    assert f"usage: scripts/bench {words[0]}" in shown


HERE: dict[str, Callable[[str, Path], None]] = {
    "sudo ./scripts/bench images": _bench_options,
    "sudo ./scripts/bench run --images numpy --networks metro --rounds 5 --out results.jsonl": _bench_options,
    "sudo ./scripts/bench run --images numpy --networks metro --systems bootseer --together 50 --out results.jsonl": (
        _bench_options
    ),
    "sudo ./scripts/bench run --images numpy --systems bootseer-hot --rounds 1 --out one.jsonl --timeline kept": (
        _bench_options
    ),
    "./scripts/bench report --timeline kept/numpy-metro-bootseer-hot-1": _bench_options,
    "./scripts/bench report results.jsonl --markdown --plots plots": _bench_options,
    "bootseer config show": _config_show,
    "bootseer index build registry.example/team/app:1.2 --out /srv/indexes": _index_build,
    "containerd --config /etc/containerd/config.toml config dump": _config_dump,
    "sudo ./scripts/demo --rounds 5 --json results.json": _demo_options,
    "sudo ./scripts/demo --mbit 50 --rtt-ms 100": _demo_options,
}
ELSEWHERE = {
    "sudo bootseer alarm ls": ("tests/snapshotter/test_cli_trust.py", '["alarm", "ls", '),
    "sudo bootseer alarm clear": ("tests/snapshotter/test_daemon_latecheck.py", '"alarm", "clear"'),
    "sudo ./scripts/demo": ("tests/scripts/test_demo.py", '"-m", "scripts.rig.demo"'),
    "sudo ./scripts/chaos --seconds 120 --seed 1 --json chaos.json": (
        "tests/scripts/chaos/test_command.py",
        '"-m", "scripts.rig.chaos.command"',
    ),
    "sudo ./scripts/chaos --load --json load.json": ("tests/scripts/chaos/test_command.py", '_run("--load"'),
    "sudo ./scripts/test": (".ci/run", "\nif ./scripts/test; then exit 0; fi\n"),
    "sudo ./scripts/bench node --json node.json": (
        "tests/scripts/nodebench/test_command.py",
        '"-m", "scripts.rig.bench", "node"',
    ),
    "sudo ./scripts/bench check": ("tests/scripts/grid/test_check.py", '"-m", "scripts.rig.bench", "check"'),
    "sudo systemctl reload bootseer": ("tests/systemd/test_systemd.py", '"reload", "bootseer"'),
    "sudo systemctl restart bootseer": ("tests/systemd/test_systemd.py", '"restart", "bootseer"'),
    'sudo ln -sfn "$(readlink /opt/bootseer/previous)" /opt/bootseer/current': (
        "tests/systemd/test_install.py",
        'ln -sfn "$(readlink {prefix}/previous)" {prefix}/current',
    ),
    "sudo .venv/bin/python -m tests.systemd.pause": ("tests/systemd/test_pause.py", '"-m", "tests.systemd.pause"'),
    "sudo .venv/bin/python -m tests.systemd.outage": ("tests/systemd/test_outage.py", '"-m", "tests.systemd.outage"'),
    "sudo ./scripts/setup": ("tests/scripts/test_setup.py", '[CHECKOUT / "scripts" / "setup"]'),
}
CLIENTS = {FETCH, *(case.command for case in CASES)}
"""Run by tests/clients."""
GUIDES = {it for name in ("node-setup.md", "nerdctl.md", "publish.md") for it in commands(DOCS[name])}
"""Run by tests/clients/test_guides.py and tests/test_publishing_guide.py, which take care that they leave none out."""
SESSION = commands(DOCS["README.md"].split("## A session")[1].split("\n## ")[0])
SITE = {
    *SESSION,
    "sudo bootseer serve --config /etc/bootseer/config.toml",
    "sudo bootseer status --json",
    "sudo bootseer doctor --image registry.example/app:1",
    "sudo bootseer cache ls",
    "sudo bootseer gc --dry-run",
    "sudo bootseer gc",
    "sudo bootseer verify",
    "sudo bootseer verify --repair",
    "sudo bootseer cache gc --max-size 20G --dry-run",
    "sudo bootseer cache gc --max-size 20G",
    "sudo bootseer pull registry.example/app:1",
    "sudo bootseer record registry.example/app:1 --ready-exit",
    "sudo bootseer lazy off",
    "sudo bootseer lazy on",
    "sudo bootseer unmount",
}
KNOWN = SITE | CLIENTS | GUIDES | HERE.keys() | ELSEWHERE.keys()


def unrun(documents: Sequence[str]) -> list[str]:
    """The commands that no test runs."""
    return [it for text in documents for it in commands(text) if it not in KNOWN]


def test_every_command_is_run_by_a_test() -> None:
    assert unrun(list(DOCS.values())) == []
    shown = {it for text in DOCS.values() for it in commands(text)}
    assert shown >= KNOWN, "a command that no document shows any more"


def test_a_command_that_nobody_runs_is_found() -> None:
    text = "```sh\n# a comment\nbootseer fly\n```\nor\n\n    bootseer fly --far\n\n```toml\nbootseer = 1\n```\n"
    assert unrun([text]) == ["bootseer fly", "bootseer fly --far"]


@pytest.mark.parametrize("name", DOCS)
def test_no_command_hides_in_a_block_of_no_language(name: str) -> None:
    found = _FENCE.findall(DOCS[name])
    assert DOCS[name].count("```") == 2 * len(found)
    assert {language for language, _ in found} <= {"sh", "toml", "text"}
    for block in blocks(DOCS[name], "text"):
        assert not re.search(r"^\s*(\$|#|sudo) ", block, re.MULTILINE)


@pytest.mark.parametrize(
    "command", [pytest.param(it, marks=pytest.mark.system if it.startswith("containerd") else ()) for it in HERE]
)
def test_commands_run_here(command: str, tmp_path: Path) -> None:
    HERE[command](command, tmp_path)


@pytest.mark.parametrize("command", ELSEWHERE)
def test_commands_run_elsewhere(command: str) -> None:
    path, text = ELSEWHERE[command]
    assert text in (CHECKOUT / path).read_text()


def _argv(command: str) -> list[str]:
    """The command as we run it: already root, and the program of this environment."""
    words = shlex.split(command.removeprefix("sudo "))
    return [BOOTSEER if words[0] in ("bootseer", ".venv/bin/bootseer") else words[0], *words[1:]]


class Site:
    """A node with its own registry, containerd and daemon, below a short root; runs the documents' commands on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.image = f"127.0.0.1:{_free_port()}/app:1"
        self._processes: list[subprocess.Popen[bytes]] = []
        index = next(toml for toml in blocks(DOCS["README.md"], "toml") if "[index]" in toml)
        index = index.replace("/srv/indexes", f"{root}/indexes")
        (root / "b.toml").write_text(f'root = "{root}/b"\nrun = "{root}/r"\n{index}')

    def registry(self) -> None:
        """Run a registry and push an image of three layers whose command prints a line."""
        host = self.image.split("/")[0]
        config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": f"{self.root}/store"}}}
        (self.root / "registry.yml").write_text(json.dumps({**config, "http": {"addr": host}}))
        self._start("registry", ["docker-registry", "serve", f"{self.root}/registry.yml"])
        _until(lambda: _accepts(int(host.split(":")[1])))
        with Workspace() as workspace:
            layout = build(RECIPES["tiny"], workspace.env, lambda text: None, self.root / "images")
        source, target = f"oci:{layout.path}", f"docker://{self.image}"
        copy = ["skopeo", "copy", "-q", "--insecure-policy", "--dest-tls-verify=false", source, target]
        subprocess.run(copy, check=True, capture_output=True)

    def containerd(self) -> None:
        """Run containerd with the documents' lines in its configuration."""
        snippet = next(toml for toml in blocks(DOCS["README.md"], "toml") if "proxy_plugins" in toml)
        snippet = snippet.replace("/run/bootseer/", f"{self.root}/r/")
        own = (
            f'version = 2\nroot = "{self.root}/c"\nstate = "{self.root}/s"\ndisabled_plugins = {json.dumps(_UNUSED)}\n'
        )
        (self.root / "c.toml").write_text(f'{own}[grpc]\naddress = "{self.root}/c.sock"\n{snippet}')
        self._start("containerd", ["containerd", "--config", f"{self.root}/c.toml"])
        _until(lambda: subprocess.run(["ctr", "version"], env=self._env, capture_output=True).returncode == 0)

    def run(self, command: str) -> str:
        """Run a command of the documents here, and return what it prints. The daemon stays in the background."""
        for there, here in (("registry.example/app:1", self.image), ("/srv/indexes", f"{self.root}/indexes")):
            command = command.replace(there, here)
        argv = _argv(command.removesuffix(" &").removesuffix(" --config /etc/bootseer/config.toml"))
        if argv[0] == BOOTSEER and argv[1] != "index":
            argv += ["--config", f"{self.root}/b.toml"]
        if argv[1:2] == ["doctor"]:
            argv += ["--containerd-config", f"{self.root}/c.toml"]
        if argv[1:2] in (["doctor"], ["pull"], ["record"]):
            argv += ["--containerd-address", f"{self.root}/c.sock"]
        if argv[:2] == ["ctr", "run"]:
            argv[2:2] = ["--cgroup", ""]  # a parent group named after the namespace would stay on the machine
        if argv[1:2] == ["serve"]:
            self._start("daemon", argv)
            _until(lambda: " service.ready " in self.log("daemon"))
            return ""
        done = subprocess.run(argv, env=self._env, cwd=CHECKOUT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.log('daemon')}"
        return done.stdout

    def log(self, name: str) -> str:
        """What a process has written."""
        return (self.root / f"{name}.log").read_text()

    def stop(self) -> None:
        """End the last process that was started."""
        process = self._processes.pop()
        process.terminate()
        process.wait(30)

    def close(self) -> None:
        """End everything that still runs, and unmount what it left."""
        while self._processes:
            self.stop()
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if line.split()[1].startswith(f"{self.root}/"):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)

    @property
    def _env(self) -> dict[str, str]:
        return {**os.environ, "CONTAINERD_ADDRESS": f"{self.root}/c.sock"}

    def _start(self, name: str, argv: list[str]) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            self._processes.append(subprocess.Popen(argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL))


_UNUSED = [
    "io.containerd.grpc.v1.cri",
    "io.containerd.internal.v1.opt",
    *(f"io.containerd.snapshotter.v1.{name}" for name in ("aufs", "btrfs", "devmapper", "zfs")),
]


@pytest.fixture
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="bs", dir="/tmp") as root, contextlib.ExitStack() as closing:
        made = Site(Path(root))
        closing.callback(made.close)
        yield made


@pytest.mark.system
def test_the_session_of_the_readme(site: Site) -> None:
    for program in ("containerd", "ctr", "ctr-remote", "runc", "docker-registry", "skopeo"):
        assert shutil.which(program), f"{program} is missing (run: sudo ./scripts/setup)"
    site.registry()
    printed = {}
    for command in SESSION:
        printed[command] = site.run(command)
        if " serve " in command:
            site.containerd()
    assert any(RECIPES["tiny"].ready in text for command, text in printed.items() if " run " in command)
    assert "3 lazy" in printed["sudo .venv/bin/bootseer status"]
    assert "layer.streamed" not in site.log("daemon"), "the indexes were not used"
    _fields_are_documented(json.loads(site.run("sudo bootseer status --json")))
    checks = site.run("sudo bootseer doctor --image registry.example/app:1")
    assert "containerd runs it as bootseer" in checks and checks.count("-index ") == 3
    assert "3 layers by bootseer" in site.run("sudo bootseer pull registry.example/app:1")
    assert "(the container exited with 0)" in site.run("sudo bootseer record registry.example/app:1 --ready-exit")
    assert "3 layers take" in site.run("sudo bootseer cache ls")
    for command in ("sudo bootseer gc --dry-run", "sudo bootseer gc"):
        assert site.run(command) == "nothing to remove\n"
    for command in ("sudo bootseer verify", "sudo bootseer verify --repair"):
        assert "nothing is damaged" in site.run(command)
    assert site.run("sudo bootseer cache gc --max-size 20G --dry-run") == "nothing to remove\n"
    assert site.run("sudo bootseer cache gc --max-size 20G") == "nothing to remove\n"
    assert site.run("sudo bootseer lazy off").startswith("off since")
    assert "new pulls are ordinary" in site.run("sudo .venv/bin/bootseer status")
    assert site.run("sudo bootseer lazy on").startswith("on")
    site.stop()  # containerd
    site.stop()  # the daemon
    site.run("sudo bootseer serve --config /etc/bootseer/config.toml")
    site.stop()
    assert len(site.run("sudo bootseer unmount").splitlines()) == 3


def _fields_are_documented(status: dict[str, object]) -> None:
    rows = table(DOCS["operations.md"], "field", "meaning")
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    layers = status["layers"]
    assert isinstance(layers, list)
    prefetches = status["prefetches"]
    assert isinstance(prefetches, list)
    real = {*status, *layers[0], *prefetches[0], *(field.name for field in dataclasses.fields(OrdinaryLayers))}
    assert real <= named, "fields that docs/operations.md does not name"
    assert named - real == {"problem", *ROWS_OF_OTHER_NODES}, "fields that the daemon does not give"


ROWS_OF_OTHER_NODES = {
    *("id", "at", "layer", "images", "files", "runs", "pack", "served", "key"),  # an alarm
    *("why", "recorded", "missed_share", "stale_share"),  # a container whose workload is known
    *("artifact", "times"),  # an artifact that was refused
    *("done", "status", "pauses"),  # what a node has published
}
"""Fields of rows that this daemon has none of; others are those of other rows too."""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _until(holds: Callable[[], bool], limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


# --- bytes


@pytest.mark.parametrize(
    ("name", "heading", "layout"),
    [
        ("format-erofs.md", "## Superblock", ondisk.SUPERBLOCK),
        ("format-erofs.md", "## Inode", ondisk.INODE),
        ("format-erofs.md", "## Directory", ondisk.DIRENT),
        ("format.md", "## Layer index file", struct.Struct("<8sIIQ32s")),
        ("format.md", "## Hot set file", struct.Struct("<8sIIQ32s")),
    ],
)
def test_byte_tables_are_those_of_the_code(name: str, heading: str, layout: struct.Struct) -> None:
    rows = table(DOCS[name].split(heading)[1], "offset", "size")
    places = [(int(row[0]), int(row[1])) for row in rows if row[0].isdigit() and row[1].isdigit()]
    assert [offset for offset, _ in places] == [0, *(offset + size for offset, size in places)][:-1]
    assert sum(places[-1]) == layout.size
    code = layout.format.lstrip("<")
    fields = re.findall(
        r"\d+s|[A-Za-z]", "".join(c * int(n or 1) if c != "s" else n + c for n, c in re.findall(r"(\d*)(\D)", code))
    )
    ends = {struct.calcsize("<" + "".join(fields[:count])) for count in range(len(fields) + 1)}
    assert {offset for offset, _ in places} <= ends, "a row begins inside a field"


@pytest.mark.parametrize(
    ("number", "message"), [("no.", layerindex_pb2.LayerIndexHead), ("number", hotset_pb2.HotSetHead)]
)
def test_the_fields_of_the_head_are_those_of_the_message(number: str, message: type[Message]) -> None:
    rows = table(DOCS["format.md"], number, "field", "type")
    fields = message.DESCRIPTOR.fields
    assert [(int(row[0]), row[1].strip("`")) for row in rows] == [(field.number, field.name) for field in fields]
    assert f"\n| {PROLOGUE_SIZE} | H |" in DOCS["format.md"]


# --- names


@pytest.mark.parametrize("name", DOCS)
def test_links_lead_somewhere(name: str) -> None:
    base = CHECKOUT if name == "README.md" else CHECKOUT / "docs"
    for target in re.findall(r"\]\(([^)]+)\)", _FENCE.sub("", DOCS[name])):
        path, _, anchor = target.partition("#")
        assert (base / (path or name)).is_file(), target
        headings = re.findall(r"^#+ (.+)$", (base / (path or name)).read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert not anchor or anchor in anchors, target


@pytest.mark.parametrize("name", DOCS)
def test_named_files_exist(name: str) -> None:
    for path in re.findall(r"`((?:blockindex|snapshotter|proto|scripts|tests)/[\w./-]*)`", DOCS[name]):
        assert (CHECKOUT / path).exists(), path


def test_named_options_exist() -> None:
    sections = [getattr(Config(), field.name) for field in dataclasses.fields(Config)]
    known = {
        field.name for section in sections if dataclasses.is_dataclass(section) for field in dataclasses.fields(section)
    }
    named = {name for text in DOCS.values() for name in re.findall(r"`([a-z_]+_(?:s|kib|threads))`", text)}
    assert named - known <= {"ready_s", "mount_s", "read_s", "decode_s", "last_s", "last_used_s"}, (
        "fields of documents and logs, not options"
    )
    assert len(named & known) > 3


@pytest.mark.system
def test_the_fields_of_the_status(tmp_path: Path) -> None:
    """Whatever a daemon with a layer tells is in the table, and of a layer nothing else is."""
    layer = make_layer(2, 100_000)
    write_index(tmp_path / "indexes", layer)
    toml = f'[index]\nurl = "{tmp_path}/indexes"\n[publish]\nenabled = true\n'
    with origin(layer) as registry, Daemon(tmp_path, registry, toml) as daemon:
        daemon.prepare(layer)
        status = daemon.status()
    named: dict[str, set[str]] = {"": set()}
    above = ""
    for row in table(DOCS["operations.md"], "field", "meaning"):
        names = set(re.findall(r"`(\w+)`", row[0]))
        if row[0].startswith("…"):
            named[above] |= names
        else:
            named[""] |= names
            above = max(names)
            named[above] = set(re.findall(r"`(\w+)`", row[1])) if len(names) == 1 else set()
    assert set(status) <= named[""] and named[""] - set(status) == {"problem"}
    for field, value in status.items():
        for entry in (value if isinstance(value, list) else [value]) if value else []:
            if isinstance(entry, dict):
                assert set(entry) <= named[field], field
    assert named["layers"] == set(status["layers"][0])


def test_named_events_are_logged() -> None:
    code = "".join(path.read_text() for path in (CHECKOUT / "snapshotter").rglob("*.py"))
    rows = table(DOCS["operations.md"], "event", "meaning")
    for event in re.findall(r"`([a-z]+\.\w+)`", "".join(row[0] for row in rows)):
        assert re.search(rf'"{re.escape(event)}[ "]', code), event
