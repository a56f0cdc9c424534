"""Which artifact may take the place of which: what is signed stays, until its signer or a person says otherwise.

An unsigned artifact never displaces a signed one: nodes that used the bytes would be left with extents. One signed by
none of the keys that signed what is there does so only when told to. Whose signature it is goes by the key's name, as
the manifest has it: this guards against accidents, as a job that lost its key. Who may push can delete and put, and is
held off by the registry's rights, and by the trust of nodes.
"""

from collections.abc import Iterable

from snapshotter.artifacts.model import Artifact, Kind
from snapshotter.errors import Precondition

__all__ = ["Displacement", "refusal", "refuse_displacing"]

_NAMES = {Kind.LAYER_INDEX: "layer index", Kind.HOT_SET: "hot set"}


class Displacement(Precondition):
    """A signed artifact would lose its place; nothing was written."""


def refuse_displacing(new: Artifact, there: Artifact, where: str, *, replace: bool) -> None:
    """Displacement, in one line, if `there`, of the same kind, image and workload, has to stay."""
    reason = refusal({it.key for it in new.signatures}, there, where, replace=replace)
    if reason:
        raise Displacement(reason)


def refusal(signers: Iterable[str], there: Artifact, where: str, *, replace: bool) -> str:
    """Why what is signed by the keys of these names must not take the place of `there`; "" if it may."""
    theirs, ours = {it.key for it in there.signatures}, set(signers)
    if not theirs or theirs & ours or (ours and replace):
        return ""
    what = f"{where}: the {' '.join(filter(None, (_NAMES[there.kind], there.workload)))} there is signed by"
    if not ours:
        return f"{what} {_listed(theirs)}, the new one is not signed: sign it (--key), or publish elsewhere (--to)"
    return (
        f"{what} {_listed(theirs)}, the new one by {_listed(ours)}: "
        "sign with that key, say --replace to put this in its place, or publish elsewhere (--to)"
    )


def _listed(keys: Iterable[str]) -> str:
    names = sorted(key if key.isprintable() else "a key without a proper name" for key in keys)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
