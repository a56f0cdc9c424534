"""`bootseer artifact`: whether a node would believe an image's layer indexes and hot sets, and signing them."""

import argparse
from pathlib import Path

from snapshotter.cli.tree import Commands, add_config, add_plain_http

__all__ = ["add"]


def add(commands: Commands) -> None:
    """Declare the commands."""
    noun = commands.add_parser(
        "artifact",
        help="layer indexes and hot sets in registries",
        description="The layer indexes and hot sets that a registry, or an OCI layout, has of an image.",
    )
    verbs = noun.add_subparsers(title="commands", metavar="COMMAND", required=True)
    text = (
        "List an image's artifacts, each with the verdict of the configuration, or of the keys that are named here, and"
        " the reason. Exit code 1 if one is refused, or there is none."
    )
    verify = verbs.add_parser("verify", help="list artifacts, and who signed them", description=text)
    verify.add_argument(
        "--keys",
        metavar="FILE|DIR",
        type=Path,
        action="append",
        help="trust these public keys (default: as configured)",
    )
    verify.set_defaults(run=_verify)
    text = (
        "Add a signature to all artifacts of an image, in their place. Says nothing about what is in them: sign what"
        " you have made yourself, or have checked with `bootseer index verify`."
    )
    sign = verbs.add_parser("sign", help="sign artifacts that are there", description=text)
    sign.add_argument("--key", metavar="FILE", type=Path, required=True, help="secret key that signs")
    sign.set_defaults(run=_sign)
    for verb in (verify, sign):
        verb.add_argument("image", metavar="REF", help="image reference, or oci-layout:DIR[:TAG]")
        verb.add_argument(
            "--from",
            dest="place",
            metavar="PLACE",
            default="",
            help="HOST/REPOSITORY or oci-layout:DIR where they are (default: beside the image)",
        )
        verb.add_argument("--platform", metavar="OS/ARCH", help="this platform's image only (default: all)")
        add_plain_http(verb)
        verb.add_argument("--json", action="store_true", help="print the result as JSON")
        add_config(verb)


def _verify(args: argparse.Namespace) -> int:
    from snapshotter.cli.signing import verify

    return verify(args)


def _sign(args: argparse.Namespace) -> int:
    from snapshotter.cli.signing import sign

    return sign(args)
