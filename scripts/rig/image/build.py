"""Building an image from its recipe, and the cache of finished ones.

A step runs in a mount and PID namespace of its own: nothing it mounts or starts outlives it. Layers are differences of
one tree between the steps; what only a package manager needs, or what differs from build to build (caches, logs, the
machine's names), is left out. The same packages give the same digests. Generated layers never are a tree: they go
straight into their blob.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.image.generated import write_generated
from scripts.rig.image.recipes import RECIPES, Generated, Recipe, Step, architecture
from scripts.rig.layers import Tree, read_tree
from scripts.rig.oci import Layout, LayoutWriter, read_layout
from scripts.rig.process import run

__all__ = ["CACHE", "build", "cached", "excluded"]

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

_REVISION = 1
"""Of the code that writes layers: raised when the same recipe would give other bytes. Some images take minutes."""


def excluded(path: str) -> bool:
    """Whether a path of the tree is left out of every layer."""
    return any(fnmatchcase(path, pattern) for pattern in _EXCLUDED)


def cached(recipe: Recipe, cache: Path = CACHE) -> Path:
    """Where the recipe's image is, or would be, in the cache."""
    return cache / recipe.key(json.dumps([_REVISION, _EXCLUDED, _BUILD_ENV]))


def build(recipe: Recipe, env: Mapping[str, str], progress: Callable[[str], None], cache: Path = CACHE) -> Layout:
    """The recipe's image from the cache, or built into it; needs root. Complete or nothing, and one build at a time."""
    cache.mkdir(parents=True, exist_ok=True)
    target = cached(recipe, cache)
    with _locked(cache / f".lock-{recipe.image}"):
        if (target / "index.json").exists():
            progress(f"image {recipe.image} from {target}")
            return read_layout(target)
        for leftover in cache.glob(f".build-{recipe.image}-*"):
            _remove_tree(leftover)
        work = Path(tempfile.mkdtemp(prefix=f".build-{recipe.image}-", dir=cache))
        try:
            _build(recipe, work, env, progress).path.rename(target)
        finally:
            _remove_tree(work)
        for older in set(cache.glob(f"{recipe.image}-*")) - {target}:
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
        progress(f"image {recipe.image}: building layer {step.name}")
        if isinstance(step, Generated):
            blob = writer.add_blob(partial(write_generated, step))
        else:
            _run_step(step, root, env)
            after = read_tree(root, excluded)
            blob = writer.add_layer(root, before, after, started_ns)
            before = after
        progress(f"image {recipe.image}: layer {step.name}: {blob.size / 1e6:.1f} MB, {blob.digest[:19]}")
    command = RECIPES[recipe.layers_of].command if recipe.layers_of else recipe.command
    return writer.finish(architecture(), command, (f"{recipe.image}: {step.name}" for step in recipe.steps))


def _run_step(step: Step, root: Path, env: Mapping[str, str]) -> None:
    kept = {name: value for name, value in env.items() if name.lower().endswith("_proxy") or name == "BOOTSEER_RIG"}
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
    script = f"set -eu; umask 022\n{step.script}"
    argv = [*alone, "sh", "-c", script, "sh", str(root)]
    run(argv, {**kept, **_BUILD_ENV}, f"building image layer {step.name}", timeout_s=900)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _remove_tree(path: Path) -> None:
    for pause_s in (0.0, 0.1, 0.5, 2.0, 5.0):  # an interrupted step writes until the kernel has ended its PID namespace
        time.sleep(pause_s)
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    raise RigError(f"cannot remove {path}; remove it by hand")
