"""What `bootseer artifact verify` and `sign` do. Places that keep plain files have no signatures, and are refused."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass

from snapshotter.artifacts.model import Kind
from snapshotter.artifacts.place import Held, Place
from snapshotter.cli.places import client_config, explained, open_place, open_source, platform_of
from snapshotter.cli.publishing import Sending, image_name, is_signed_by
from snapshotter.cli.table import table
from snapshotter.config import Config, RegistryConfig, load_config
from snapshotter.errors import NotFound, UserError
from snapshotter.imagesource import PlatformImage, platform_images
from snapshotter.registry import Registry
from snapshotter.trust.keys import SecretKey
from snapshotter.trust.keys import sign as signed
from snapshotter.trust.policy import Policy
from snapshotter.trust.quarantine import Quarantine

__all__ = ["sign", "verify"]

_NAMES = {Kind.LAYER_INDEX: "layer index", Kind.HOT_SET: "hot set"}


@dataclass(frozen=True, slots=True)
class Judged:
    """One artifact. `keys`: the names of the keys that say that they signed it; `trusted`, `key`, `reason`: the
    verdict."""

    platform: str
    type: str
    workload: str
    digest: str
    created: int
    keys: tuple[str, ...]
    trusted: bool
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Signed:
    """One artifact. `status`: signed, or there (this key had signed it before); `digest`: of the manifest now."""

    platform: str
    type: str
    workload: str
    digest: str
    status: str


def verify(args: argparse.Namespace) -> int:
    """Show the verdicts."""
    config = load_config(args.config)
    quarantine = Quarantine(config.root_path)
    policy = Policy(False, args.keys, quarantine) if args.keys else Policy.of(config.trust, quarantine)
    for line in policy.keys().refused:
        print(f"bootseer: {line}", file=sys.stderr)
    with _artifacts(args, config) as (place, _, found):
        rows = [_judged(platform, held, policy) for platform, held in found]
    if args.json:
        print(json.dumps({"place": place.name, "artifacts": [asdict(row) for row in rows]}, indent=2))
    else:
        print(f"{place.name}:")
        head = ("PLATFORM", "ARTIFACT", "MANIFEST", "MADE", "VERDICT", "WHY")
        print(table(head, [_row(row) for row in rows]))
    return 0 if all(row.trusted for row in rows) else 1


def sign(args: argparse.Namespace) -> int:
    """Sign what is there."""
    key, config = SecretKey.load(args.key), load_config(args.config)
    with (
        _artifacts(args, config) as (place, client, found),
        explained(place.name, client, "log in with `docker login`"),
    ):
        rows = [_signed(platform, held, key, place) for platform, held in found]
    if args.json:
        print(json.dumps({"place": place.name, "key": key.public.name, "artifacts": list(map(asdict, rows))}, indent=2))
    else:
        for row in rows:
            what = {"signed": "signed by", "there": "was signed before by"}[row.status]
            print(f"{row.platform}: {_name(row.type, row.workload)} {what} {key.public.name}, {row.digest}")
    return 0


@contextmanager
def _artifacts(
    args: argparse.Namespace, config: Config
) -> Iterator[tuple[Place, RegistryConfig, list[tuple[str, Held]]]]:
    """The place, how to talk to it, and the artifacts there with the platforms of the images they are of."""
    client = client_config(args, config, args.image, args.place)
    with closing(Registry(client)) as registry:
        source = open_source(args.image, registry)
        place = open_place(args.place, registry, source)
        if not place.signs:
            raise UserError(f"{place.name} keeps plain files, which are not signed: whoever names it trusts it")
        images = [it for it in platform_images(source, platform_of(args)) if isinstance(it, PlatformImage)]
        found = [(str(image.platform), held) for image in images for held in place.held(image_name(image))]
        if not found:
            raise NotFound(
                f"{place.name} has no artifacts of {source.name}: publish some with `bootseer index publish`"
            )
        yield place, client, found


def _judged(platform: str, held: Held, policy: Policy) -> Judged:
    artifact, verdict = held.artifact, policy.judge(held.artifact)
    keys = tuple(it.key for it in artifact.signatures)
    return Judged(
        platform,
        artifact.kind.value,
        artifact.workload,
        held.digest,
        artifact.created,
        keys,
        verdict.trusted,
        verdict.key,
        verdict.reason,
    )


def _signed(platform: str, held: Held, key: SecretKey, place: Place) -> Signed:
    artifact = held.artifact
    if is_signed_by(artifact, key):
        return Signed(platform, artifact.kind.value, artifact.workload, held.digest, "there")
    sending = Sending(artifact, _name(artifact.kind.value, artifact.workload))
    try:
        placed = place.put(signed(artifact, key), sending.through(held.open))
    finally:
        sending.end()
    return Signed(platform, artifact.kind.value, artifact.workload, placed.digest, "signed")


def _row(row: Judged) -> tuple[str, ...]:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.created)) if row.created else "-"
    verdict = "trusted" if row.trusted else "refused"
    return row.platform, _name(row.type, row.workload), row.digest[:19], made, verdict, row.reason


def _name(type_: str, workload: str) -> str:
    return f"{_NAMES[Kind(type_)]} {workload}".strip()
