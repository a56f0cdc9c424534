"""Two who publish the same at the same time: wherever the one interrupts the other, one artifact is left, and found."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from snapshotter.artifacts.displacement import Displacement
from snapshotter.artifacts.manifest import digest_of, place_tags
from snapshotter.artifacts.model import Artifact, Signature
from snapshotter.artifacts.publisher import Published, publish
from snapshotter.artifacts.referrers import REFERRERS_TYPE, fallback_tag, parse_referrers
from snapshotter.config import RegistryConfig
from snapshotter.model import Digest
from snapshotter.registry import ImageRef, Registry, parse_reference
from snapshotter.registry.manifest import ACCEPT
from snapshotter.registry.push import Pusher
from tests.registries import docker_registry, go_registry
from tests.snapshotter.artifacts.making import SUBJECT, hot_set, opener

pytestmark = pytest.mark.system

CONFIG = RegistryConfig(
    hosts_dir="", docker_config="/nonexistent/config.json", connect_timeout_s=60.0, read_timeout_s=60.0
)
A, B = hot_set(seed="a"), hot_set(seed="b")


@pytest.fixture(scope="module", params=["docker", "no deletes", "go"])
def host(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if request.param == "go":
        with go_registry(announce=True) as it:
            yield it
    else:
        with docker_registry(tmp_path_factory.mktemp("registry"), delete=request.param == "docker") as it:
            yield it


class Interrupted(Pusher):
    """Calls `between` before its question or command number `at`."""

    def __init__(self, registry: Registry, at: int, between: Callable[[], object]) -> None:
        super().__init__(registry)
        self.at = at
        self._between = between

    def _count(self) -> None:
        self.at -= 1
        if self.at == -1:
            self._between()

    def has_blob(self, ref: ImageRef, digest: Digest) -> bool:
        self._count()
        return super().has_blob(ref, digest)

    def get(self, ref: ImageRef, path: str, accept: str, what: str) -> tuple[bytes, str | None] | None:
        self._count()
        return super().get(ref, path, accept, what)

    def put_manifest(self, ref: ImageRef, target: str, data: bytes, media_type: str) -> Mapping[str, str]:
        self._count()
        return super().put_manifest(ref, target, data, media_type)

    def delete_manifest(self, ref: ImageRef, digest: Digest) -> bool:
        self._count()
        return super().delete_manifest(ref, digest)


def interrupted(registry: Registry, ref: ImageRef, at: int, other: Artifact) -> list[Digest]:
    """Publish A, and `other` whole before its step `at`; the digest of that, or none: A has fewer steps."""
    done: list[Published] = []
    pusher = Interrupted(registry, at, lambda: done.append(publish(Pusher(registry), ref, other, opener(B[1]))))
    with suppress(Displacement):
        publish(pusher, ref, A[0], opener(A[1]))
    return [it.digest for it in done]


def listed(registry: Registry, ref: ImageRef) -> list[Digest]:
    """What the registry says refers to the subject; those that are there."""
    pusher = Pusher(registry)
    found = pusher.get(ref, f"referrers/{SUBJECT.digest}", REFERRERS_TYPE, "referrers")
    found = found or pusher.get(ref, f"manifests/{fallback_tag(SUBJECT.digest)}", REFERRERS_TYPE, "fallback tag")
    assert found is not None
    return [one.digest for one in parse_referrers(found[0]) if pusher.get(ref, f"manifests/{one.digest}", ACCEPT, "it")]


def test_one_is_left_wherever_it_is_interrupted(host: str) -> None:
    left: set[str] = set()
    with closing(Registry(CONFIG)) as registry:
        for at in itertools.count():
            ref = parse_reference(f"{host}/team/step{at}")
            other = interrupted(registry, ref, at, B[0])
            bodies = [Pusher(registry).get(ref, f"manifests/{tag}", ACCEPT, "it") for tag in place_tags(A[0])]
            found = {digest_of(body[0]) if body is not None else "" for body in bodies}
            assert found == set(listed(registry, ref)) and len(found) == 1, f"step {at}"
            left |= found
            if not other:
                break
    assert at > 10 and len(left) == 2, "now the one, now the other"


def test_what_is_signed_is_never_deleted(host: str) -> None:
    """Not by one who has looked before it came."""
    signed = replace(B[0], signatures=(Signature("ab" * 8, bytes(64)),))
    with closing(Registry(CONFIG)) as registry:
        for at in itertools.count():
            ref = parse_reference(f"{host}/signed/step{at}")
            other = interrupted(registry, ref, at, signed)
            if not other:
                break
            assert other[0] in listed(registry, ref), f"step {at}"
    assert at > 10
