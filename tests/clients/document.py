"""What docs/clients.md and docs/node-setup.md tell an operator to configure and to type, taken word by word.

Run as a program, it writes the output of `bootseer config show` into docs/node-setup.md again.
"""

import re
import subprocess

from scripts.rig.link import CHECKOUT
from tests.clients.guide import Guide
from tests.clients.node import BOOTSEER

__all__ = ["DOCUMENT", "commands", "configuration", "for_cri_here", "table", "with_options"]

DOCUMENT = (CHECKOUT / "docs" / "clients.md").read_text()

_CRI_HERE = {
    "1.6": (
        '[plugins."io.containerd.grpc.v1.cri"]\n',
        '[plugins."io.containerd.grpc.v1.cri".cni]\nconf_dir = "/nonexistent"\n{head}restrict_oom_score_adj = true\n',
    ),
    "2.4": (
        '[plugins."io.containerd.cri.v1.images"]\n',
        '[plugins."io.containerd.cri.v1.runtime".cni]\nconf_dir = "/nonexistent"\n'
        '[plugins."io.containerd.cri.v1.runtime"]\nrestrict_oom_score_adj = true\n{head}',
    ),
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """All commands of the document that pull."""
    return [line for kind, text in _FENCE.findall(DOCUMENT) if kind == "sh" for line in text.splitlines() if line]


def configuration(containerd: str, cri: bool) -> str:
    """The lines that docs/node-setup.md adds to the configuration of a containerd, with those for CRI or without."""
    heading = {"1.6": "containerd 1.6 and 1.7", "2.4": "containerd 2"}[containerd]
    base, for_cri = Guide("node-setup.md").blocks(heading, "toml")
    return "\n".join(re.sub(r"^version = \d\n", "", text) for text in ([base, for_cri] if cri else [base]))


def for_cri_here(containerd: str, text: str) -> str:
    """The same configuration, for a machine that may forbid what CRI wants of the OOM score, without a pod network."""
    head, replacement = _CRI_HERE[containerd]
    assert head in text
    return text.replace(head, replacement.format(head=head))


def table(head: str) -> str:
    """The table that begins with this line's start."""
    begin = DOCUMENT.index(f"\n| {head} ") + 1
    return DOCUMENT[begin:].split("\n\n")[0].rstrip("\n")


def with_options(text: str) -> str:
    """The guide's text with every option of the configuration, as `bootseer config show` has them by default."""
    argv = [str(BOOTSEER), "config", "show", "--config", "/dev/null"]
    options = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    begin, end = "<!-- bootseer config show -->\n", "<!-- end of bootseer config show -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n```toml\n{options}```\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    guide = CHECKOUT / "docs" / "node-setup.md"
    guide.write_text(with_options(guide.read_text()))
