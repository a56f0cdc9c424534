"""Measures an image's working set once, and keeps it beside the image in the cache.

The image's files are unpacked, made an EROFS file of, and mounted from a loop device with no read-ahead (`touched`);
each region of pages that the container touched is compressed by itself, as gzip -6 does. Of generated layers only the
files that the recipe says it reads are unpacked. The warm time comes from containerd with overlayfs (`coldstart`).
"""

import json
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.rig.errors import RigError
from scripts.rig.grid.floor import WorkingSet
from scripts.rig.grid.touched import EMPTIED, WITNESS
from scripts.rig.image import CACHE, Generated, Recipe, cached
from scripts.rig.image.generated import write_files
from scripts.rig.link import CHECKOUT
from scripts.rig.oci import Layout
from scripts.rig.process import run
from scripts.rig.workspace import Workspace

__all__ = ["METHOD", "Touched", "compressed_size", "load", "save", "touched"]

METHOD = "pages in the page cache after a run on EROFS with read-ahead 0, each region gzip -6; shortest warm start"
_PAGE = 4096
_STEP_S = 1800.0
_ATTEMPTS = 10


@dataclass(frozen=True, slots=True)
class Touched:
    """What a container read: see `floor.WorkingSet`, of which it lacks the times."""

    files: int
    regions: int
    page_bytes: int
    gzip_bytes: int


def load(recipe: Recipe, cache: Path = CACHE) -> WorkingSet | None:
    """What was measured of the recipe's image; None if it was not, or in another way."""
    try:
        document = json.loads(_path(recipe, cache).read_text())
    except (OSError, ValueError):
        return None
    if document.get("method") != METHOD or document.get("command") != list(recipe.command):
        return None
    return WorkingSet(**document["working_set"])


def save(recipe: Recipe, working_set: WorkingSet, machine: Mapping[str, object], cache: Path = CACHE) -> None:
    """Keep it beside the image, with the method and the machine."""
    document = {
        "method": METHOD,
        "command": list(recipe.command),
        "machine": dict(machine),
        "working_set": asdict(working_set),
    }
    _path(recipe, cache).write_text(json.dumps(document, indent=1) + "\n")


def touched(recipe: Recipe, layout: Layout, workspace: Workspace) -> Touched:
    """Run the recipe's container on a cold image, and count and compress what it touched."""
    directory = workspace.fresh(f"working-set-{recipe.name}")
    tree, image = directory / "tree", directory / "image.erofs"
    tree.mkdir()
    _unpack(recipe, layout, tree, workspace.env)
    (tree / WITNESS).write_bytes(os.urandom(_PAGE))
    run(["mkfs.erofs", "--quiet", str(image), str(tree)], workspace.env, "making an EROFS image", _STEP_S)
    subprocess.run(["sync", str(image)], check=True)
    answer = _run_without_readahead(recipe, image, directory, workspace.env)
    if not recipe.is_ready(answer["line"]):
        raise RigError(f"without read-ahead the container of {recipe.name} said {answer['line']!r}")
    found = _count(answer["files"], tree)
    shutil.rmtree(directory)  # up to twice the image
    return found


def _run_without_readahead(recipe: Recipe, image: Path, directory: Path, env: Mapping[str, str]) -> Any:
    """What `touched` says; again if somebody emptied the page cache meanwhile, as other benches and tests do."""
    alone = [
        "unshare",
        "--mount",
        "--pid",
        "--net",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "--propagation",
        "private",
    ]
    for attempt in range(_ATTEMPTS):
        mounts = directory / f"mounts-{attempt}"
        mounts.mkdir()
        argv = [*alone, sys.executable, "-m", "scripts.rig.grid.touched", str(image), str(mounts), *recipe.command]
        try:
            text = run(argv, {**env, "PYTHONPATH": str(CHECKOUT)}, "running the container without read-ahead", _STEP_S)
        except RigError as error:
            if f"exit code {EMPTIED} " not in str(error):
                raise
            continue
        return json.loads(text)
    raise RigError(f"{recipe.name}: in {_ATTEMPTS} attempts somebody emptied the page cache while the container ran")


def compressed_size(read: Callable[[int], bytes]) -> int:
    """Bytes of the gzip -6 stream of what `read` gives until it gives nothing."""
    deflate = zlib.compressobj(6, zlib.DEFLATED, 31)
    size = 0
    while chunk := read(1 << 20):
        size += len(deflate.compress(chunk))
    return size + len(deflate.flush())


def _path(recipe: Recipe, cache: Path) -> Path:
    return cached(recipe, cache) / f"working-set-{recipe.name}.json"


def _unpack(recipe: Recipe, layout: Layout, tree: Path, env: Mapping[str, str]) -> None:
    blobs = layout.path / "blobs" / "sha256"
    for step, digest in zip(recipe.steps, layout.layers, strict=True):
        if isinstance(step, Generated):
            write_files(step, tree, set(recipe.reads))
            continue
        blob = str(blobs / digest.removeprefix("sha256:"))
        names = run(["tar", "-tzf", blob], env, "listing a layer", _STEP_S).splitlines()
        for name in names:
            parent, _, base = name.rpartition("/")
            if base.startswith(".wh."):
                run(["rm", "-rf", "--", str(tree / parent / base.removeprefix(".wh."))], env, "applying a whiteout")
        options = ["--xattrs", "--xattrs-include=*", "--numeric-owner", "--exclude", ".wh.*", "-C", str(tree)]
        run(["tar", "-xpzf", blob, *options], env, "unpacking a layer", _STEP_S)


def _count(files: list[Any], tree: Path) -> Touched:
    pages = gzip_bytes = number = 0
    for name, regions in files:
        with (tree / name).open("rb") as file:
            for first, last in regions:
                file.seek(first * _PAGE)
                left = [(last - first) * _PAGE]

                def read(limit: int, left: list[int] = left, file: Any = file) -> bytes:
                    data: bytes = file.read(min(limit, left[0]))
                    left[0] -= len(data)
                    return data

                gzip_bytes += compressed_size(read)
                pages += last - first
                number += 1
    return Touched(len(files), number, pages * _PAGE, gzip_bytes)
