"""What the command files share: the type of a group of commands, and the options that several have."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from snapshotter.config import DEFAULT_PATH, RegistryConfig, load_config
from snapshotter.errors import InvalidArgument, UserError

__all__ = [
    "Commands",
    "add_config",
    "add_containerd_address",
    "add_plain_http",
    "add_publishing",
    "registry_config",
    "written_path",
]

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Commands = argparse._SubParsersAction  # not generic when the program runs


def written_path(text: str) -> Path:
    """A file or directory that a command writes. A URL, which would be a directory `s3:` here, is a mistake."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is a URL, and a path is meant: `publish --to` can write to URLs")
    return Path(text)


def add_config(command: argparse.ArgumentParser) -> None:
    """Declare `--config`; read it with `load_config(args.config)`."""
    command.add_argument(
        "--config", type=Path, metavar="FILE", help=f"configuration (default: {DEFAULT_PATH} if it exists)"
    )


def add_plain_http(command: argparse.ArgumentParser) -> None:
    """Declare `--plain-http`; `registry_config` reads it."""
    command.add_argument("--plain-http", action="store_true", help="speak to the registry without TLS")


def registry_config(args: argparse.Namespace) -> RegistryConfig:
    """How to talk to the registry of the reference `args.image`: as `--config` and `--plain-http` say. UserError where
    either is wrong."""
    from snapshotter.registry import parse_reference

    config = load_config(args.config).registry
    if not args.plain_http:
        return config
    try:
        return replace(config, plain_http=(*config.plain_http, parse_reference(args.image).api_host))
    except InvalidArgument as error:
        raise UserError(str(error)) from error


def add_publishing(command: argparse.ArgumentParser) -> None:
    """Declare what commands that publish have in common: where to, who signs, for which platform."""
    command.add_argument(
        "--to",
        metavar="PLACE",
        default="",
        help="HOST/REPOSITORY, oci-layout:DIR, DIR or URL (default: `to` in [publish], else beside the image)",
    )
    command.add_argument("--key", metavar="FILE", type=Path, help="secret key that signs (default: that in [publish])")
    command.add_argument("--replace", action="store_true", help="also in place of what another key has signed")
    command.add_argument("--platform", metavar="OS/ARCH", help="this platform's image only (default: all)")
    add_plain_http(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)


def add_containerd_address(command: argparse.ArgumentParser) -> None:
    """Declare `--containerd-address`, a path, with containerd's own default."""
    command.add_argument(
        "--containerd-address",
        metavar="SOCK",
        type=Path,
        default=Path("/run/containerd/containerd.sock"),
        help="containerd's socket (default: /run/containerd/containerd.sock)",
    )
