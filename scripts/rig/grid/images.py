"""`scripts/bench images`: builds the images of the bench into the cache, one after the other, and lists them."""

import argparse
import os
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.rig.errors import RigError
from scripts.rig.grid.table import text_table
from scripts.rig.image import CACHE, RECIPES, Generated, Recipe, build, cached
from scripts.rig.interrupt import Interrupted, arm, disarm
from scripts.rig.oci import Layout, read_layout
from scripts.rig.process import MARKER
from scripts.rig.progress import Progress
from scripts.rig.workspace import Workspace

__all__ = ["files_of", "listing", "main"]

_HEAD = ("image", "layers", "MB", "files", "command")


def main(argv: Sequence[str] | None = None) -> int:
    """Build and list; 1 if an image cannot be built, 2 without root."""
    parser = argparse.ArgumentParser(prog="scripts/bench images", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], metavar="NAME", help=f"{', '.join(RECIPES)} (all)")
    parser.add_argument("--list", action="store_true", help="build nothing, list those that are there")
    args = parser.parse_args(argv)
    recipes = [RECIPES[name] for name in args.names or RECIPES]
    if not args.list:
        if os.geteuid() != 0:
            print("scripts/bench images: building an image needs root", file=sys.stderr)
            return 2
        code = _build_all(recipes, Progress())
        if code:
            return code
    print(listing(recipes))
    return 0


def _build_all(recipes: Sequence[Recipe], progress: Progress) -> int:
    arm()
    try:
        with Workspace() as workspace:
            try:
                for recipe in recipes:
                    started = time.monotonic()
                    build(recipe, {**os.environ, MARKER: str(workspace.root)}, progress)
                    progress(f"image {recipe.name}: {time.monotonic() - started:.0f} s")
            finally:
                disarm()
    except Interrupted as interrupted:
        print("scripts/bench images: interrupted", file=sys.stderr)
        return 128 + interrupted.number
    except RigError as error:
        print(f"scripts/bench images: {error}", file=sys.stderr)
        return 1
    return 0


def listing(recipes: Sequence[Recipe], cache: Path = CACHE) -> str:
    """A table of those images that are in the cache, and what it all takes on disk."""
    rows = [_HEAD]
    for recipe in recipes:
        path = cached(recipe, cache)
        if (path / "index.json").exists():
            layout = read_layout(path)
            files = str(files_of(recipe, layout))
            rows.append((recipe.name, str(len(layout.layers)), f"{layout.size / 1e6:.1f}", files, _short(recipe)))
        else:
            rows.append((recipe.name, "-", "-", "-", "not built"))
    used = sum(path.lstat().st_blocks * 512 for path in cache.rglob("*")) if cache.exists() else 0
    return f"{text_table(rows)}\n\n{cache}: {used / 1e6:.0f} MB on disk"


def files_of(recipe: Recipe, layout: Layout) -> int:
    """Regular files in all layers together."""
    count = 0
    for step, digest in zip(recipe.steps, layout.layers, strict=True):
        if isinstance(step, Generated):
            count += len(step.files)
            continue
        blob = layout.path / "blobs" / "sha256" / digest.removeprefix("sha256:")
        with tarfile.open(blob, "r:gz") as archive:
            count += sum(
                1 for entry in archive if entry.isreg() and not entry.name.rpartition("/")[2].startswith(".wh.")
            )
    return count


def _short(recipe: Recipe) -> str:
    text = " ".join(recipe.command)
    return text if len(text) <= 60 else f"{text[:57]}..."
