"""What docs/clients.md and README.md tell an operator to configure and to type, taken from there word by word."""

import re
from collections.abc import Sequence

from scripts.rig.link import CHECKOUT

__all__ = ["DOCUMENT", "commands", "configuration", "table"]

DOCUMENT = (CHECKOUT / "docs" / "clients.md").read_text()

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """All commands of the document."""
    return [line for kind, text in _FENCE.findall(DOCUMENT) if kind == "sh" for line in text.splitlines() if line]


def configuration(containerd: str, cri: bool) -> str:
    """The lines that the document adds to the configuration of a containerd, with those for CRI or without."""
    found = [text for kind, text in _FENCE.findall(_section(containerd)) if kind == "toml"]
    base, for_cri = found
    return "\n".join(re.sub(r"^version = \d\n", "", text) for text in ([base, for_cri] if cri else [base]))


def table(head: str) -> str:
    """The table that begins with this line's start."""
    begin = DOCUMENT.index(f"\n| {head} ") + 1
    return DOCUMENT[begin : DOCUMENT.index("\n\n", begin)]


def _section(containerd: str) -> str:
    major = containerd.split(".")[0]
    sections: Sequence[str] = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)
    return next(section for section in sections if section.startswith(f"containerd {major}"))
