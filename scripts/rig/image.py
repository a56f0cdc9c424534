"""The images of the bench: what goes into each layer, how it is built, and a cache of finished ones.

- `numpy`: Debian bookworm by debootstrap, python3, python3-numpy, one layer each, as people build images.
- `tiny`: a static or dynamic busybox of this machine, a few generated files and a script: seconds, for tests.

A recipe runs in a mount and PID namespace of its own: nothing it mounts or starts outlives it. Layers are
differences of one tree between the steps; what only a package manager needs, or what differs from build to build
(caches, logs, the machine's names), is left out. The same packages give the same digests.
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.layers import Tree, read_tree
from scripts.rig.oci import Layout, LayoutWriter, read_layout
from scripts.rig.process import run

__all__ = ["CACHE", "RECIPES", "Recipe", "Step", "build", "excluded"]

CACHE = Path("/var/cache/bootseer/images")

_EXCLUDED = (
    "debootstrap",
    "dev/*",
    "etc/hostname",
    "etc/machine-id",
    "etc/resolv.conf",
    "proc/*",
    "root/.*",
    "run/*",
    "sys/*",
    "tmp/*",
    "var/cache/apt/*",
    "var/cache/debconf/*-old",
    "var/cache/ldconfig/aux-cache",
    "var/lib/apt/lists/*",
    "var/lib/dpkg/*-old",
    "var/lib/dpkg/lock*",
    "var/lib/systemd/*",
    "var/log/*",
    "var/tmp/*",
)

# The same for every build, whatever the caller's environment: apt's proxy variables apart, nothing gets in.
_BUILD_ENV = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "LC_ALL": "C.UTF-8",
    "HOME": "/root",
    "DEBIAN_FRONTEND": "noninteractive",
    "PYTHONHASHSEED": "0",
    "SOURCE_DATE_EPOCH": "1700000000",
}

_APT = "apt-get -qq -y -o Dpkg::Use-Pty=0 --no-install-recommends"


@dataclass(frozen=True, slots=True)
class Step:
    """One layer: its name and a shell script run with the tree's root as `$1`."""

    name: str
    script: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """An image: steps from the lowest layer up, the container's command, and the line it prints when it is ready."""

    name: str
    steps: tuple[Step, ...]
    command: tuple[str, ...]
    ready: str

    def key(self) -> str:
        """Name of the image in the cache: changes with the recipe and with the code that builds it."""
        code = [Path(__file__).with_name(name).read_bytes() for name in ("image.py", "layers.py", "oci.py")]
        text = json.dumps([self.name, [[s.name, s.script] for s in self.steps], self.command, _architecture()])
        return f"{self.name}-{hashlib.sha256(text.encode() + b''.join(code)).hexdigest()[:16]}"


_NUMPY_PROGRAM = "import numpy; print('ready', int(numpy.arange(10).sum()), flush=True)"

NUMPY = Recipe(
    "numpy",
    (
        Step("base", 'debootstrap --variant=minbase bookworm "$1"'),
        Step("runtime", f'chroot "$1" sh -ec "apt-get -qq update; {_APT} install python3"'),
        Step("app", f'chroot "$1" sh -ec "{_APT} install python3-numpy"'),
    ),
    ("/usr/bin/python3", "-c", _NUMPY_PROGRAM),
    "ready 45",
)

_TINY_BASE = """
busybox=$(command -v busybox)
mkdir -p "$1/bin" "$1/etc" "$1/tmp"
cp "$busybox" "$1/bin/busybox"
for applet in sh cat sha256sum wc ls; do ln -s busybox "$1/bin/$applet"; done
for library in $(ldd "$busybox" 2>/dev/null | grep -o '/[^ )]*'); do
    mkdir -p "$1$(dirname "$library")"
    cp -L "$library" "$1$library"
done
echo tiny > "$1/etc/name"
"""
_TINY_DATA = """
mkdir -p "$1/data"
for n in 1 2 3 4 5 6 7 8; do
    awk -v n="$n" 'BEGIN { for (i = 0; i < 20000; i++) printf "%d %d\\n", n, (i * 7919 + n) % 104729 }' >"$1/data/$n"
done
ln "$1/data/1" "$1/data/one"
"""
_TINY_APP = """
rm "$1/data/8"
printf '#!/bin/sh\\necho ready $(cat /data/[1-3] | sha256sum)\\n' >"$1/bin/app"
chmod 755 "$1/bin/app"
"""

TINY = Recipe(
    "tiny",
    (Step("base", _TINY_BASE), Step("runtime", _TINY_DATA), Step("app", _TINY_APP)),
    ("/bin/app",),
    "ready 32738c7922b4ed007ba198c1591acab9b736ff5d1cc4649aac4ce680ef7fdb59 -",
)

RECIPES: Mapping[str, Recipe] = {recipe.name: recipe for recipe in (NUMPY, TINY)}


def excluded(path: str) -> bool:
    """Whether a path of the tree is left out of every layer."""
    return any(fnmatchcase(path, pattern) for pattern in _EXCLUDED)


def build(recipe: Recipe, env: Mapping[str, str], progress: Callable[[str], None], cache: Path = CACHE) -> Layout:
    """The recipe's image from the cache, or built into it; needs root. One build at a time, complete or nothing."""
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / recipe.key()
    with _locked(cache / ".lock"):
        if (target / "index.json").exists():
            progress(f"image {recipe.name} from {target}")
            return read_layout(target)
        for leftover in cache.glob(".build-*"):
            _remove_tree(leftover)
        work = Path(tempfile.mkdtemp(prefix=".build-", dir=cache))
        try:
            _build(recipe, work, env, progress).path.rename(target)
        finally:
            _remove_tree(work)
        for older in set(cache.glob(f"{recipe.name}-*")) - {target}:
            _remove_tree(older)
    return read_layout(target)


def _build(recipe: Recipe, work: Path, env: Mapping[str, str], progress: Callable[[str], None]) -> Layout:
    root = work / "root"
    root.mkdir(mode=0o755)
    (work / "layout").mkdir(mode=0o755)
    writer = LayoutWriter(work / "layout")
    # Not the precise clock: that runs up to a tick ahead of the one that stamps files.
    started_ns = root.stat().st_mtime_ns
    before: Tree = {}
    for step in recipe.steps:
        progress(f"image {recipe.name}: building layer {step.name}")
        _run_step(step, root, env)
        after = read_tree(root, excluded)
        blob = writer.add_layer(root, before, after, started_ns)
        progress(f"image {recipe.name}: layer {step.name}: {blob.size / 1e6:.1f} MB, {blob.digest[:19]}")
        before = after
    return writer.finish(_architecture(), recipe.command, (f"{recipe.name}: {step.name}" for step in recipe.steps))


def _run_step(step: Step, root: Path, env: Mapping[str, str]) -> None:
    kept = {name: value for name, value in env.items() if name.lower().endswith("_proxy") or name == "BOOTSEER_RIG"}
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    script = f"set -eu; umask 022\n{step.script}"
    argv = [*alone, "sh", "-c", script, "sh", str(root)]
    run(argv, {**kept, **_BUILD_ENV}, f"building image layer {step.name}", timeout_s=900)


def _architecture() -> str:
    """This machine's architecture, in the words of OCI."""
    names = {"x86_64": "amd64", "aarch64": "arm64"}
    machine = os.uname().machine
    if machine not in names:
        raise RigError(f"no image recipe for machine type {machine}; known: {', '.join(names)}")
    return names[machine]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> None:
    deadline = time.monotonic() + 5
    while path.exists():  # an interrupted step may still write until the kernel has ended its PID namespace
        shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > deadline:
            raise RigError(f"cannot remove {path}; remove it by hand")
