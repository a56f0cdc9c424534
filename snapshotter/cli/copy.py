"""`bootseer copy`: an image and its artifacts, to another repository or through the air gap of an OCI layout."""

import argparse

from snapshotter.cli.tree import Commands, add_config, add_plain_http

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Copy an image, of all platforms and byte for byte, with the layer indexes and hot sets that are beside it, and"
        " those that other places have of it (--from). Signatures stay valid. What is there already is not sent again,"
        " and every blob is checked on its way. So an image is promoted, or gets over an air gap, with all that belongs"
        " to it. Needs no root, no daemon and no containerd."
    )
    command = commands.add_parser("copy", help="copy an image with its artifacts", description=text)
    what = "image reference, or oci-layout:DIR[:TAG]"
    command.add_argument("source", metavar="SRC", help=what)
    command.add_argument("target", metavar="DST", help=what)
    command.add_argument("--platform", metavar="OS/ARCH", help="this platform's image only (default: all)")
    command.add_argument(
        "--from",
        dest="places",
        metavar="PLACE",
        action="append",
        default=[],
        help="take artifacts from there too: HOST/REPOSITORY, oci-layout:DIR, DIR or URL; may be repeated. Of each kind"
        " and workload the first is taken; those beside the image are before all others",
    )
    add_plain_http(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)
    command.set_defaults(run=_copy)


def _copy(args: argparse.Namespace) -> int:
    from snapshotter.cli.copying import copy

    return copy(args)
