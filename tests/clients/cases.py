"""What each client does with each containerd, as docs/clients.md says it and the tests see it.

A command stands here as in the document, where anybody may copy it. Outcomes: "lazy", every layer is served by us and
containerd downloads none; "unpacked", containerd downloads and unpacks all; "fails", the pull ends with an error.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = [
    "AFTER",
    "CASES",
    "CONTAINERDS",
    "FETCH",
    "INCOMPLETE",
    "After",
    "Case",
    "render",
    "render_after",
    "render_incomplete",
]

CONTAINERDS = ("1.6", "2.4")

_IMAGE = "registry.example/app:1"
_UNPACK_CONFIG = """\
[[plugins."io.containerd.transfer.v1.local".unpack_config]]
platform = "linux/amd64"
snapshotter = "bootseer"
"""
_ANNOTATIONS = 'enable_remote_snapshot_annotations = "true"\n'
_CRI_ANNOTATIONS = "disable_snapshot_annotations = false\n"


@dataclass(frozen=True, slots=True)
class Case:
    """One cell: the command that pulls, containerd's version, and the outcome when `without` is left out of the
    document's configuration. `says` is in the error of a pull that fails."""

    command: str
    containerd: str
    outcome: str
    without: str = ""
    says: str = ""

    @property
    def client(self) -> str:
        """The client's program."""
        return self.command.split()[1]

    @property
    def plugin(self) -> str:
        """The name under which containerd knows our daemon."""
        return "stargz" if "--snapshotter stargz" in self.command else "bootseer"

    @property
    def row(self) -> str:
        """The command as the document's table shows it."""
        words = self.command.removeprefix("sudo ").removesuffix(f" {_IMAGE}")
        return f"`{words.replace(' --snapshotter bootseer', '')}`"

    def __str__(self) -> str:
        omitted = self.without.strip().splitlines()
        return f"{self.containerd} {self.row.strip('`')}" + (f" without {omitted[0]}" if omitted else "")


_COMMANDS: Mapping[str, Mapping[str, str]] = {
    f"sudo ctr-remote images rpull --snapshotter bootseer {_IMAGE}": {"1.6": "lazy", "2.4": "lazy"},
    f"sudo ctr images pull --snapshotter bootseer {_IMAGE}": {"1.6": "unpacked", "2.4": "lazy"},
    f"sudo ctr images pull --local --snapshotter bootseer {_IMAGE}": {"2.4": "unpacked"},
    f"sudo nerdctl --snapshotter bootseer pull {_IMAGE}": {"1.6": "lazy", "2.4": "lazy"},
    f"sudo nerdctl --snapshotter bootseer run --rm --network none {_IMAGE}": {"1.6": "lazy", "2.4": "lazy"},
    f"sudo nerdctl --snapshotter stargz pull {_IMAGE}": {"1.6": "lazy"},
    f"sudo crictl pull {_IMAGE}": {"1.6": "lazy", "2.4": "lazy"},
}

CASES = tuple(
    Case(command, containerd, outcome)
    for command, outcomes in _COMMANDS.items()
    for containerd, outcome in outcomes.items()
)

INCOMPLETE = (
    Case(
        f"sudo ctr images pull --snapshotter bootseer {_IMAGE}",
        "2.4",
        "fails",
        _UNPACK_CONFIG,
        "no unpack platforms defined",
    ),
    Case(f"sudo ctr images pull --snapshotter bootseer {_IMAGE}", "2.4", "lazy", _ANNOTATIONS),
    Case(f"sudo crictl pull {_IMAGE}", "2.4", "lazy", _ANNOTATIONS),
    Case(f"sudo crictl pull {_IMAGE}", "2.4", "lazy", _CRI_ANNOTATIONS),
    Case(f"sudo crictl pull {_IMAGE}", "1.6", "lazy", _CRI_ANNOTATIONS),
)
"""Configurations with one thing missing."""


FETCH = f"sudo bootseer fetch {_IMAGE}"
"""Brings the layers of an image into containerd's content store."""


@dataclass(frozen=True, slots=True)
class After:
    """What a command does after a lazy pull, as `row` of the document names it. `says` is in its error, by containerd;
    where there is none it works. With `fetch` it works once the layers are fetched, else never, lazy pull or not."""

    row: str
    command: str
    says: Mapping[str, str]
    fetch: bool = True

    def cell(self, containerd: str) -> str:
        """The table's entry."""
        if containerd not in self.says:
            return "works"
        return f"{'needs the layers' if self.fetch else 'fails'}: `{self.says[containerd]}`"


_ALL = ("1.6", "2.4")
_NO_BLOB = "content digest sha256:…: not found"
_NO_SERVICE = "unknown service containerd.services"
_NEW = "registry.example/new:1"
_OTHER = "registry.example/other:1"

AFTER = (
    After("`nerdctl commit`", f"nerdctl commit app {_NEW}", {}),
    After("`nerdctl push`", f"nerdctl push {_IMAGE}", {}),
    After("`nerdctl save`", f"nerdctl save -o app.tar {_IMAGE}", {"1.6": f"{_NO_SERVICE}.streaming"}, fetch=False),
    After("`nerdctl tag`", f"nerdctl tag {_IMAGE} {_NEW}", {"1.6": f"{_NO_SERVICE}.transfer"}, fetch=False),
    After(
        "`nerdctl push`, of a name that `ctr images tag` gave",
        f"nerdctl push {_OTHER}",
        dict.fromkeys(_ALL, "failed to resolve reference …: not found"),
    ),
    After("`ctr images export`", f"ctr images export app.tar {_IMAGE}", dict.fromkeys(_ALL, _NO_BLOB)),
    After("`ctr images push`, to where the layers are", f"ctr images push {_IMAGE}", {"1.6": _NO_BLOB}),
)


def render_after() -> str:
    """The table of `AFTER`."""
    lines = ["| after a lazy pull | " + " | ".join(f"containerd {name}" for name in CONTAINERDS) + " |"]
    lines.append("| --- " * (1 + len(CONTAINERDS)) + "|")
    lines += [f"| {it.row} | " + " | ".join(it.cell(name) for name in CONTAINERDS) + " |" for it in AFTER]
    return "\n".join(lines)


def render(cells: Iterable[tuple[str, str, str]]) -> str:
    """The matrix of (row, containerd, outcome) as a table; a dash where a client was not tried."""
    rows: dict[str, dict[str, str]] = {}
    for row, containerd, outcome in cells:
        rows.setdefault(row, {})[containerd] = outcome
    lines = ["| pull | " + " | ".join(f"containerd {name}" for name in CONTAINERDS) + " |"]
    lines.append("| --- " * (1 + len(CONTAINERDS)) + "|")
    for row, outcomes in rows.items():
        lines.append(f"| {row} | " + " | ".join(outcomes.get(name, "-") for name in CONTAINERDS) + " |")
    return "\n".join(lines)


def render_incomplete(cases: Iterable[Case]) -> str:
    """The table of what happens when something is missing."""
    lines = ["| containerd | pull | without | then |", "| --- | --- | --- | --- |"]
    for case in cases:
        then = f"{case.outcome}: `{case.says}`" if case.says else case.outcome
        line = case.without.splitlines()[0]
        lines.append(f"| {case.containerd} | {case.row} | `{line}` | {then} |")
    return "\n".join(lines)
