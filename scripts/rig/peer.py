"""Lazy snapshotters of others, used where they are found on PATH; the project neither brings nor needs one.

A peer is one value: its daemon's command line, and how an image becomes what it can start lazily.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PEERS", "Convert", "Peer", "found"]

Convert = Callable[[str, str], Sequence[Sequence[str]]]
"""(plain reference, wanted reference) -> words of `ctr-remote`, one list a command, on a node that has the image."""


@dataclass(frozen=True, slots=True)
class Peer:
    """`name` is that of the snapshotter for containerd. `serve` takes socket, root and configuration file; `config` is
    the text of that file, in which `{registry}` stands for the registry that is spoken to without TLS."""

    name: str
    program: str
    config: str
    serve: Callable[[Path, Path, Path], Sequence[str]]
    convert: Convert
    suffix: str


_STARGZ_CONFIG = """
noprefetch = true
no_background_fetch = true

[[resolver.host."{registry}".mirrors]]
host = "{registry}"
insecure = true
"""


def _stargz_serve(socket: Path, root: Path, config: Path) -> list[str]:
    return ["containerd-stargz-grpc", "--address", str(socket), "--root", str(root), "--config", str(config)]


def _stargz_convert(plain: str, wanted: str) -> list[list[str]]:
    return [
        ["images", "convert", "--estargz", "--oci", plain, wanted],
        ["images", "push", "--plain-http", wanted],
    ]


PEERS: Mapping[str, Peer] = {
    "stargz": Peer("stargz", "containerd-stargz-grpc", _STARGZ_CONFIG, _stargz_serve, _stargz_convert, "-esgz"),
}
"""By the name of the system."""


def found(peer: Peer) -> bool:
    """Whether its daemon is on PATH."""
    return shutil.which(peer.program) is not None
