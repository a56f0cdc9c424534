"""Whose artifacts this node uses, whether one of them was found out, and whether others can use its own."""

from collections.abc import Sequence
from pathlib import Path

from snapshotter.alarms import Alarm
from snapshotter.config import Config
from snapshotter.errors import SnapshotterError
from snapshotter.trust.keys import KeyRing, SecretKey

from .model import Check, fail, ok, warn

__all__ = ["check_publishing", "check_trust"]


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
        fix = "bootseer alarm ls; restart the containers of the images it names; bootseer alarm clear"
        checks.append(fail("alarms", what, why, fix))
    return checks


def check_publishing(config: Config) -> list[Check]:
    """Whether what this node publishes is of use to others; nothing where it does not publish."""
    if not config.publish.enabled:
        return []
    checks = []
    if config.workload.records < config.publish.min_records:
        what = (
            f"records in [workload] is {config.workload.records}, min_records in [publish] {config.publish.min_records}"
        )
        why = "hot sets are never published"
        fix = f"set records to at least {config.publish.min_records}, then bootseer reload"
        checks.append(warn("publish-records", what, why, fix))
    elif not (config.record.auto and config.containerd.address):
        why = "recordings that agree are not made here, and hot sets not published; indexes are"
        what = "address in [containerd] is empty" if config.record.auto else "auto in [record] is off"
        checks.append(warn("publish-records", what, why, "set it, then bootseer reload"))
    if not config.publish.key:
        why = "nodes that trust signed artifacts alone use only which blocks are hot, and no index"
        fix = "set key in [publish], then bootseer reload"
        checks.append(warn("publish-key", "artifacts are published unsigned", why, fix))
    else:
        try:
            SecretKey.load(Path(config.publish.key))
        except SnapshotterError as error:
            checks.append(fail("publish-key", str(error), "nothing is published", "bootseer key generate"))
    where = config.publish.to or "the images' own repositories"
    return checks or [ok("publish", f"to {where}, signed")]
