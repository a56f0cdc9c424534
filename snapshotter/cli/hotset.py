"""`bootseer hotset`: the hot sets of this node, and packs of them for others. Needs no daemon and no containerd."""

import argparse
from pathlib import Path

from blockindex.hotset import DEFAULT_GAP
from snapshotter.cli.tree import Commands, add_config, add_publishing, written_path

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "hotset",
        help="hot sets and hot packs",
        description="Hot sets are the blocks that a start needs, in order; a hot pack holds their bytes as well.",
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_ls(verbs)
    _add_show(verbs)
    _add_build(verbs)
    _add_carry(verbs)
    _add_merge(verbs)
    _add_export(verbs)
    _add_import(verbs)
    _add_publish(verbs)
    _add_rm(verbs)


_WHICH = "hot set file, image key (or its first 6 digits), or image reference"


def _add_ls(verbs: Commands) -> None:
    text = "List the hot sets in the node's own directory of them (DIR/hot, DIR being `root` of the configuration)."
    ls = verbs.add_parser("ls", help="list the node's hot sets", description=text)
    ls.set_defaults(run=_ls)
    _finish(ls)


def _add_show(verbs: Commands) -> None:
    text = (
        "Show what hot sets hold: workload, recordings, frames, hot and total bytes of each layer and directory. The"
        " directories come from the layer indexes, in the block store or where --indexes says."
    )
    show = verbs.add_parser("show", help="what a hot set holds", description=text)
    show.add_argument("image", metavar="FILE|KEY|REF", help=_WHICH)
    show.add_argument("--indexes", metavar="DIR|URL", help="more layer indexes (default: as configured)")
    show.add_argument("--depth", metavar="N", type=_natural, default=3, help="names in a directory's path (default: 3)")
    show.set_defaults(run=_show)
    _add_workload(show, "all")
    _finish(show)


def _add_build(verbs: Commands) -> None:
    text = (
        "Make a hot pack of a hot set: DIR/hot/<image key>/<workload>.bsh, for `url` in [hotset] of other nodes. The"
        " bytes come from this node's block store; blocks that are not there are read through the layer's mount, if a"
        " daemon serves it. Otherwise nothing is written, and the message says what is missing."
    )
    build = verbs.add_parser("build", help="make a hot pack", description=text)
    build.add_argument("image", metavar="FILE|KEY|REF", help=_WHICH)
    build.add_argument("--out", metavar="DIR", type=written_path, required=True, help="directory of hot sets")
    build.set_defaults(run=_build)
    _add_workload(build, "default")
    _add_packing(build)
    _finish(build)


def _add_carry(verbs: Commands) -> None:
    text = (
        "Make the hot sets of an image out of those of the one before it: the hot blocks of each file that both have,"
        " at the same path or moved, those of changed files where they were. The result is a guess and has no bytes. It"
        " goes into the node's own directory, where the next recording of the image replaces it. A node does the same"
        " by itself where an image has no hot set and an earlier one of its repository has."
    )
    carry = verbs.add_parser("carry", help="hot sets of a rebuilt image", description=text)
    carry.add_argument("old", metavar="OLD", help=f"whose hot sets: {_WHICH}")
    carry.add_argument("new", metavar="NEW", help="image reference, oci-layout:DIR[:TAG], or a hot set of that image")
    carry.add_argument("--indexes", metavar="DIR|URL", help="more layer indexes (default: as configured)")
    carry.add_argument("--platform", metavar="OS/ARCH", help="of NEW, if it has several (default: this machine's)")
    carry.add_argument("--out", metavar="FILE", type=written_path, help="write the set there")
    carry.set_defaults(run=_carry)
    _add_workload(carry, "all")
    _finish(carry)


def _add_merge(verbs: Commands) -> None:
    text = (
        "Make one hot set of several of one image: the blocks that are in at least a share of their recordings, those"
        " touched early first. The result has no bytes: `build` adds them. Workload is that of the first file."
    )
    merge = verbs.add_parser("merge", help="one hot set out of several", description=text)
    merge.add_argument("files", metavar="FILE", type=Path, nargs="+", help="hot set file")
    merge.add_argument("--out", metavar="FILE", type=written_path, required=True, help="where the merged set goes")
    merge.add_argument(
        "--min-share", metavar="SHARE", type=_share, default=0.0, help="0 to 1 (default: 0, blocks of any recording)"
    )
    merge.set_defaults(run=_merge)
    _finish(merge)


def _add_export(verbs: Commands) -> None:
    text = (
        "Write all hot sets of images into DIR as packs, with the indexes of their layers: what other nodes look for"
        " at `url` in [hotset] and [index]. A set whose blocks are not all here is written without bytes; exit code 1"
        " then."
    )
    export = verbs.add_parser("export", help="packs and indexes for other nodes", description=text)
    export.add_argument("images", metavar="KEY|REF", nargs="+", help="image key (or its beginning), or image reference")
    export.add_argument(
        "--to", metavar="DIR", type=written_path, required=True, help="directory of hot sets and indexes"
    )
    export.set_defaults(run=_export)
    _add_packing(export)
    _finish(export)


def _add_import(verbs: Commands) -> None:
    text = (
        "Take hot sets into the node's own directory, in place of what is there of the same image and workload. Every"
        " frame is checked first. DIR is laid out as by `export`."
    )
    import_ = verbs.add_parser("import", help="take hot sets from elsewhere", description=text)
    import_.add_argument("source", metavar="DIR|FILE", type=Path, help="hot set file, or directory of hot sets")
    import_.set_defaults(run=_import)
    _finish(import_)


def _add_publish(verbs: Commands) -> None:
    text = (
        "Publish hot sets of an image: one artifact for each workload, beside the image or where --to says, with the"
        " bytes of the blocks where they can be had. Without --from the sets are this node's own. What is there already"
        " is left alone. Exit codes: 0 published, or there already; 1 something failed; 2 a mistake in the call."
    )
    publish = verbs.add_parser("publish", help="publish hot sets", description=text)
    publish.add_argument("image", metavar="IMAGE", help="image reference, or oci-layout:DIR[:TAG]")
    publish.add_argument(
        "--from",
        dest="sources",
        metavar="DIR|FILE",
        type=Path,
        nargs="+",
        default=[],
        help="hot set files, or directories as `build` and `export` make them",
    )
    _add_workload(publish, "all")
    add_publishing(publish)
    publish.set_defaults(run=_publish)


def _add_rm(verbs: Commands) -> None:
    text = (
        "Remove an image's hot sets from the node's own directory. Its next container is recorded anew, if [record] of"
        " the configuration says so."
    )
    rm = verbs.add_parser("rm", help="remove hot sets", description=text)
    rm.add_argument("image", metavar="KEY|REF", help="image key (or its first 6 digits), or image reference")
    rm.set_defaults(run=_rm)
    _add_workload(rm, "all")
    _finish(rm)


def _finish(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)


def _add_workload(command: argparse.ArgumentParser, default: str) -> None:
    value = None if default == "all" else default
    command.add_argument(
        "--workload", metavar="NAME", type=_workload, default=value, help=f"of this workload (default: {default})"
    )


def _add_packing(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--codec",
        choices=("zstd", "lz4"),
        default="zstd",
        help="zstd is there first up to about 1 Gbit/s, lz4 beyond (default: zstd)",
    )
    command.add_argument(
        "--gap",
        metavar="BLOCKS",
        type=_natural,
        default=DEFAULT_GAP,
        help=f"largest gap to close between hot blocks (default: {DEFAULT_GAP})",
    )


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return share


def _workload(text: str) -> str:
    from blockindex.errors import Corrupt
    from blockindex.hotset import check_workload

    try:
        check_workload(text)
    except Corrupt as error:
        raise argparse.ArgumentTypeError(error.problem) from error
    return text


def _ls(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetshow import ls

    return ls(args)


def _show(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetshow import show

    return show(args)


def _build(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetbuild import build

    return build(args)


def _carry(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetcarry import carry

    return carry(args)


def _export(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetbuild import export

    return export(args)


def _merge(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetfiles import merge_files

    return merge_files(args)


def _import(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetfiles import import_sets

    return import_sets(args)


def _publish(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetpublish import publish

    return publish(args)


def _rm(args: argparse.Namespace) -> int:
    from snapshotter.cli.hotsetfiles import remove

    return remove(args)
