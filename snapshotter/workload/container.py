"""A container as containerd describes it: what workloads are told apart by. Pure values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

__all__ = ["Container", "argv_digest"]


@dataclass(frozen=True, slots=True)
class Container:
    """`argv`: the arguments of its first process, with the program; `labels`: containerd's; `annotations`: those of its
    OCI runtime specification, Kubernetes' own among them where the CRI plugin passes them on."""

    argv: tuple[str, ...]
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def argv_digest(argv: Sequence[str]) -> str:
    """The name of these arguments, `sha256:<hex>`: docs/format.md says of what. Arguments themselves are never kept:
    they may hold secrets."""
    data = b"".join(argument.encode("utf-8", "surrogatepass") + b"\0" for argument in argv)
    return "sha256:" + sha256(data).hexdigest()
