"""The guides docs/node-setup.md and docs/nerdctl.md, followed from a fresh machine to its end, as printed."""

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import pytest

from scripts.rig.image import RECIPES
from scripts.rig.workspace import Workspace
from tests.clients.cases import CONTAINERDS
from tests.clients.conftest import Images
from tests.clients.document import configuration, for_cri_here
from tests.clients.guide import Guide
from tests.clients.machine import PASSWORD, Machine
from tests.clients.node import BOOTSEER, Containerd

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]  # the first time the clients are built

SETUP = Guide("node-setup.md")
NERDCTL = Guide("nerdctl.md")
_READY = RECIPES["tiny"].ready
_CONTAINERD_CONFIG = "/etc/containerd/config.toml"


@pytest.mark.parametrize("name", CONTAINERDS)
def test_setting_up_a_node(name: str, containerds: Mapping[str, Containerd], images: Images) -> None:
    with _machine(containerds[name], images) as machine:
        version = machine.follow(*SETUP.steps("Install"))["bootseer --version"]
        assert version.startswith("bootseer ")
        shown = machine.follow(*SETUP.steps("Configure"))["bootseer config show"]
        assert 'exclude = ["registry.example/builds/*"]' in shown
        machine.follow(*SETUP.steps("Run"))
        machine.write(_CONTAINERD_CONFIG, _config(containerds[name], cri=True))
        machine.follow(*SETUP.steps("Registries"))
        printed = machine.follow(*SETUP.steps("Verify"))
        assert "fail" not in {line.split()[0] for line in printed["sudo bootseer doctor"].splitlines()}
        assert printed["sudo bootseer doctor --image registry.example/app:1"].count("-index ") == 3
        assert "3 layers by bootseer" in printed["sudo bootseer pull registry.example/app:1"]
        assert any(_READY in text for command, text in printed.items() if command.startswith("sudo ctr run"))
        assert "3 lazy, 3 reused, 0 ordinary, 0 refused, 0 fallback" in printed["sudo bootseer status"]
        removed = SETUP.steps("Remove")
        at = [step.text for step in removed].index("sudo systemctl restart containerd")
        machine.follow(*removed[:at])
        machine.write(_CONTAINERD_CONFIG, f"version = {containerds[name].config_version}\n")
        printed = machine.follow(*removed[at:])
        assert len(printed["sudo bootseer unmount"].splitlines()) <= 3
        left = machine.shell("ls -d /var/lib/bootseer /etc/bootseer /opt/bootseer /usr/local/bin/bootseer || true")
        assert left.count("No such file") == 4
        assert "/m/" not in machine.shell("cat /proc/self/mounts")
        assert "bootseer" not in machine.shell("ctr plugins ls")
        _nothing_left_out(SETUP, machine)


def _config(containerd: Containerd, cri: bool) -> str:
    """containerd's file with the guide's lines."""
    text = configuration(containerd.name, cri)
    if cri:
        text = for_cri_here(containerd.name, text)
    return f"version = {containerd.config_version}\n{text}"


@contextmanager
def _machine(containerd: Containerd, images: Images) -> Iterator[Machine]:
    """A machine, with images in its registry and their indexes."""
    with Workspace() as workspace, closing(Machine(workspace, containerd)) as machine:
        machine.push(images.app.path, "app:1")
        machine.push(images.pause.path, "pause:1")
        machine.shell(f"cp -r {images.indexes} /srv/indexes")
        yield machine


@contextmanager
def _ready(containerd: Containerd, images: Images) -> Iterator[Machine]:
    """A machine that is set up."""
    with _machine(containerd, images) as machine:
        machine.shell(f"mkdir -p /opt/bootseer/current/bin && ln -s {BOOTSEER} /opt/bootseer/current/bin/bootseer")
        machine.shell("ln -s /opt/bootseer/current/bin/bootseer /usr/local/bin/bootseer")
        for heading in ("Configure", "Run", "Registries"):
            machine.follow(*SETUP.steps(heading))
        machine.write(_CONTAINERD_CONFIG, _config(containerd, cri=False))
        private = next(step for step in SETUP.steps("Registries") if step.path)
        machine.write(
            *(text.replace("registry.example", "private.example:5000") for text in (private.path, private.text))
        )
        machine.restart("containerd")
        yield machine


@pytest.mark.usefixtures("nerdctl")
def test_nerdctl(containerds: Mapping[str, Containerd], images: Images) -> None:
    with _ready(containerds["2.4"], images) as machine:
        machine.write("password.txt", PASSWORD)
        printed = machine.follow(*NERDCTL.steps("Configure"), *NERDCTL.steps("Pull and run"))
        assert "Login Succeeded" in next(text for command, text in printed.items() if " login " in command)
        assert [_READY in text for command, text in printed.items() if "run --rm" in command] == [True, True]
        assert _READY in printed["sudo nerdctl exec app /bin/app"]
        _all_lazy(machine)
        printed = machine.follow(*NERDCTL.steps("Compose"))
        assert _READY in printed["sudo nerdctl compose up"]
        _all_lazy(machine)
        machine.follow(*NERDCTL.steps("Commit, save, push"))
        printed = machine.follow(*NERDCTL.steps("Remove"))
        assert "3 layers take" in printed["sudo bootseer cache ls"]
        printed = machine.follow(*NERDCTL.steps("When a pull is not lazy"))
        assert "fail" not in printed["sudo bootseer doctor --image registry.example/app:1"].split()
        _nothing_left_out(NERDCTL, machine, "With containerd 1.6")


@pytest.mark.usefixtures("nerdctl")
def test_nerdctl_with_containerd_1_6(containerds: Mapping[str, Containerd], images: Images) -> None:
    with _ready(containerds["1.6"], images) as machine:
        machine.write("password.txt", PASSWORD)
        headings = ("Configure", "Pull and run", "Compose")
        printed = machine.follow(*(step for heading in headings for step in NERDCTL.steps(heading)))
        for command in ("sudo nerdctl run --rm --network none registry.example/app:1", "sudo nerdctl compose up"):
            assert _READY in printed[command]
        _all_lazy(machine)
        machine.follow(*NERDCTL.steps("With containerd 1.6"), *NERDCTL.steps("Remove"))


def _nothing_left_out(guide: Guide, machine: Machine, *headings: str) -> None:
    """All steps of the guide were followed but those under `headings`."""
    left = [step for name in guide.sections() if name not in headings for step in guide.steps(name)]
    assert [step for step in left if step not in machine.followed] == []


def _all_lazy(machine: Machine) -> None:
    prepares = json.loads(machine.shell("bootseer status --json"))["prepares"]
    assert prepares["lazy"] >= 3
    assert not any(prepares[other] for other in ("ordinary", "refused", "fallback")), prepares
