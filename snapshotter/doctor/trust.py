"""Whose artifacts this node uses, and whether one of them was found out."""

from collections.abc import Sequence

from snapshotter.alarms import Alarm
from snapshotter.trust.keys import KeyRing

from .model import Check, fail, ok, warn

__all__ = ["check_trust"]


def check_trust(policy: str, ring: KeyRing, alarms: Sequence[Alarm]) -> list[Check]:
    """Whether the trusted keys can be read, and nothing waits for an operator."""
    if policy == "any":
        checks = [ok("trust", 'policy "any": artifacts are used whoever signed them')]
    elif ring.keys:
        checks = [ok("trust", f"{len(ring.keys)} trusted keys: {', '.join(ring.keys)}")]
    else:
        checks = [ok("trust", "no trusted keys: of registries' artifacts only the extents of hot sets are used")]
    for line in ring.refused:
        path, _, reason = line.partition(": ")
        why = "what that key signed is not trusted"
        checks.append(warn("trust-keys", f"{path} is not used", why, reason))
    if alarms:
        layers = sorted({alarm.layer.removeprefix("sha256:")[:12] for alarm in alarms})
        what = f"{len(alarms)} alarms: hot packs brought wrong bytes of {', '.join(layers)}"
        why = "containers of these layers' images may have read them"
        checks.append(fail("alarms", what, why, "bootseer alarm ls; restart what it names; bootseer alarm clear"))
    return checks
