"""Publishing to real registries: whole, once, found afterwards, whoever else publishes at the same time."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.artifacts.displacement import Displacement
from snapshotter.artifacts.finder import Finder
from snapshotter.artifacts.manifest import MANIFEST_TYPE, digest_of, encode, place_tags
from snapshotter.artifacts.model import Artifact, Kind, Signature, Subject
from snapshotter.artifacts.publisher import Published, publish
from snapshotter.artifacts.referrers import REFERRERS_TYPE, fallback_tag, parse_referrers
from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, Transient
from snapshotter.registry import ImageRef, Registry, parse_reference
from snapshotter.registry.push import Pusher
from tests.registries import Front, Tokens, docker_registry, go_registry
from tests.snapshotter.artifacts.making import KEY, SUBJECT, digest, hot_set, layer_index, opener
from tests.snapshotter.certificates import Authority
from tests.snapshotter.rangeserver import Action, Lose, Request, Reset, Status

pytestmark = pytest.mark.system

CHECKOUT = Path(__file__).resolve().parents[3]
CONFIG = RegistryConfig(
    hosts_dir="", docker_config="/nonexistent/config.json", connect_timeout_s=60.0, read_timeout_s=60.0
)
PROCESSES = 20
_names = (f"team/app{number}" for number in itertools.count())


@pytest.fixture(scope="module", params=["docker", "go"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, bool]]:
    """host:port of a registry, and whether it has the referrers API."""
    if request.param == "docker":
        with docker_registry(tmp_path_factory.mktemp("registry")) as host:
            yield host, False
    else:
        with go_registry(announce=True, page=3) as host:
            yield host, True


@pytest.fixture(scope="module")
def go_backend() -> Iterator[str]:
    with go_registry(page=2) as host:
        yield host


@contextlib.contextmanager
def registry() -> Iterator[Registry]:
    with contextlib.closing(Registry(CONFIG)) as made:
        yield made


def repository(host: str) -> ImageRef:
    """A repository that nobody has used."""
    return parse_reference(f"{host}/{next(_names)}")


def put(host: str, ref: ImageRef, made: tuple[Artifact, dict[str, bytes]]) -> tuple[Published, list[str]]:
    """Publish by way of a front; gives also what was written."""
    artifact, blobs = made
    with Front(host) as front, registry() as client:
        there = ImageRef(front.host, ref.repository, None, None)
        published = publish(Pusher(client), there, artifact, opener(blobs))
        return published, front.asked("POST", "PUT", "PATCH", "DELETE")


def fallback(client: Registry, ref: ImageRef) -> list[str]:
    """The digests in the fallback tag of the subject."""
    found = Pusher(client).get(ref, f"manifests/{fallback_tag(SUBJECT.digest)}", REFERRERS_TYPE, "fallback tag")
    return [one.digest for one in parse_referrers(found[0])] if found is not None else []


@pytest.mark.parametrize("subject", [SUBJECT, None])
def test_all_of_it_is_there(backend: tuple[str, bool], subject: Subject | None) -> None:
    host, api = backend
    ref = repository(host)
    artifact, blobs = hot_set(subject=subject)
    published, _ = put(host, ref, (artifact, blobs))
    assert published.tags == place_tags(artifact) and len(published.tags) == (2 if subject else 1)
    assert not published.existed and published.referrers == (api and subject is not None)
    with registry() as client:
        for tag in published.tags:
            manifest = client.resolve(f"{ref}:{tag}")
            assert manifest.digest == published.digest
            assert [layer.digest for layer in manifest.layers] == list(blobs)
        for one, data in blobs.items():
            assert b"".join(client.blob(str(ref), one).stream(0, None)) == data
        assert fallback(client, ref) == ([published.digest] if subject and not api else [])
        if api and subject:
            listed = Pusher(client).get(ref, f"referrers/{subject.digest}", REFERRERS_TYPE, "referrers")
            assert listed is not None and [one.digest for one in parse_referrers(listed[0])] == [published.digest]
        found = Finder(client).find(ref, KEY, artifact.kind, artifact.workload)
        assert found is not None and (found.artifact, found.digest) == (artifact, published.digest)


def test_a_referrers_api_that_is_not_announced(go_backend: str) -> None:
    ref = repository(go_backend)
    for workload in "abcde":
        published, written = put(go_backend, ref, hot_set(workload))
        assert published.referrers and not any(one.endswith(fallback_tag(SUBJECT.digest)) for one in written)
        again, written = put(go_backend, ref, hot_set(workload))
        assert again == replace(published, existed=True) and written == []


def test_equal_content_is_not_written_again(backend: tuple[str, bool]) -> None:
    host, api = backend
    ref = repository(host)
    first, _ = put(host, ref, hot_set(created=1_796_082_424))
    again, written = put(host, ref, hot_set(created=1_796_099_999))
    assert written == [] and again == replace(first, existed=True) and again.referrers == api


def test_signatures_are_content(backend: tuple[str, bool]) -> None:
    host, _ = backend
    ref = repository(host)
    artifact, blobs = hot_set()
    signed = replace(artifact, signatures=(Signature("ci", bytes(64)),))
    first, _ = put(host, ref, (artifact, blobs))
    second, written = put(host, ref, (signed, blobs))
    assert second.digest != first.digest and not any("blobs" in one for one in written)
    third, written = put(host, ref, (artifact, blobs))
    assert written == [] and third.digest == second.digest, "a signature is not lost to who has none"


@pytest.mark.parametrize("tagged", [True, False])
def test_what_is_signed_is_not_displaced(backend: tuple[str, bool], tagged: bool) -> None:
    """At its tags, or, as another publisher has taken these, only listed among the referrers."""
    host, _ = backend
    ref = repository(host)
    artifact, blobs = hot_set(seed="1")
    ci, other = Signature("ci", bytes(64)), Signature("other", bytes(64))
    signed, _ = put(host, ref, (replace(artifact, signatures=(ci,)), blobs))
    with registry() as client:
        push = Pusher(client)
        if not tagged:
            foreign = encode(hot_set("another", subject=None)[0]).replace(b'"dev.bootseer', b'"not.bootseer')
            for blob, data in hot_set("another")[1].items():
                push.put_blob(ref, blob, len(data), lambda data=data: iter([data]))  # type: ignore[misc]
            for tag in signed.tags:
                push.put_manifest(ref, tag, foreign, MANIFEST_TYPE)
        newer, blobs = hot_set(seed="2")
        for signatures in ((), (other,)):
            for again in (False, True) if not signatures else (False,):
                with pytest.raises(Displacement, match="hot set default there is signed by ci") as caught:
                    publish(push, ref, replace(newer, signatures=signatures), opener(blobs), replace=again)
                assert "\n" not in str(caught.value) and ("--replace" in str(caught.value)) == bool(signatures)
        assert push.get(ref, f"manifests/{signed.digest}", MANIFEST_TYPE, "signed") is not None
        done = publish(push, ref, replace(newer, signatures=(other,)), opener(blobs), replace=True)
        both = replace(newer, signatures=(other, ci))
        assert publish(push, ref, both, opener(blobs)).digest != done.digest, "one key in common is enough"
        assert push.get(ref, f"manifests/{signed.digest}", MANIFEST_TYPE, "signed") is None


def test_only_missing_blobs_are_uploaded(backend: tuple[str, bool]) -> None:
    host, _ = backend
    ref = repository(host)
    _, written = put(host, ref, layer_index(f"{ref}", layers=2))
    first = sum(one.startswith("POST") for one in written)
    _, written = put(host, ref, layer_index(f"{ref}", layers=5))
    assert first in (2, 3), "the configuration is, in some registries, there already from another repository"
    assert sum(one.startswith("POST") for one in written) == 3


def test_what_is_superseded_goes(backend: tuple[str, bool]) -> None:
    host, _ = backend
    ref = repository(host)
    other, _ = put(host, ref, hot_set("other"))
    old, _ = put(host, ref, hot_set(seed="old"))
    new, written = put(host, ref, hot_set(seed="new"))
    assert [one for one in written if one.startswith("DELETE")] == [
        f"DELETE /v2/{ref.repository}/manifests/{old.digest}"
    ]
    with registry() as client:
        push = Pusher(client)
        assert push.get(ref, f"manifests/{old.digest}", MANIFEST_TYPE, "old") is None
        found = Finder(client).list(ref, KEY, SUBJECT.digest)
        assert [one.digest for one in found] == [new.digest, other.digest]
        assert old.digest not in fallback(client, ref)


def test_what_is_of_another_subject_stays(backend: tuple[str, bool]) -> None:
    """Two images may have equal layers, and so one key."""
    host, _ = backend
    ref = repository(host)
    elsewhere = replace(SUBJECT, digest=digest("another image"))
    first, _ = put(host, ref, hot_set(seed="1", subject=elsewhere))
    second, _ = put(host, ref, hot_set(seed="2"))
    with registry() as client:
        finder = Finder(client)
        found = finder.find(ref, KEY, Kind.HOT_SET, "default")
        assert found is not None and found.digest == second.digest
        listed = finder.list(ref, KEY, elsewhere.digest)
        assert {one.digest for one in listed} == {first.digest, second.digest}
    again, written = put(host, ref, hot_set(seed="1", subject=elsewhere))
    assert again == replace(first, existed=True) and written == [], "whoever came last keeps the key's tag"
    third, _ = put(host, ref, hot_set(seed="3", subject=None))
    fourth, written = put(host, ref, hot_set(seed="4", subject=None))
    assert f"DELETE /v2/{ref.repository}/manifests/{third.digest}" in written and fourth.digest != third.digest


def test_where_nothing_may_be_deleted(tmp_path: Path) -> None:
    with docker_registry(tmp_path, delete=False) as host, registry() as client:
        ref = repository(host)
        old, _ = put(host, ref, hot_set(seed="old"))
        new, _ = put(host, ref, hot_set(seed="new"))
        assert Pusher(client).get(ref, f"manifests/{old.digest}", MANIFEST_TYPE, "old") is not None
        found = Finder(client).find(ref, KEY, Kind.HOT_SET, "default")
        assert found is not None and found.digest == new.digest
        assert fallback(client, ref) == [new.digest]


@pytest.mark.parametrize("lost", [2, 5, 6, 7])
def test_a_publisher_that_was_cut_short_is_finished_by_the_next(backend: tuple[str, bool], lost: int) -> None:
    """The registry goes away after the n-th request that writes."""
    host, api = backend
    ref = repository(host)
    artifact, blobs = hot_set(seed=f"{ref}")
    writes = itertools.count(1)

    def gone(request: Request) -> Action | None:
        return Status(403) if request.method != "GET" and request.method != "HEAD" and next(writes) >= lost else None

    with Front(host, gone) as front, registry() as client, contextlib.suppress(Denied):
        publish(Pusher(client), ImageRef(front.host, ref.repository, None, None), artifact, opener(blobs))
    published, _ = put(host, ref, (artifact, blobs))
    with registry() as client:
        for tag in published.tags:
            assert client.resolve(f"{ref}:{tag}").digest == published.digest
        assert fallback(client, ref) == ([] if api else [published.digest])


def test_others_in_the_fallback_tag_stay(tmp_path: Path) -> None:
    with docker_registry(tmp_path) as host, registry() as client:
        ref = repository(host)
        push = Pusher(client)
        other = layer_index(key=digest("another image's layers"), subject=None)
        there, _ = put(host, ref, other)
        size = len(encode(other[0]))
        entry = {"mediaType": MANIFEST_TYPE, "digest": there.digest, "size": size, "artifactType": "x/y", "new": [1]}
        index = {"schemaVersion": 2, "mediaType": REFERRERS_TYPE, "manifests": [entry]}
        push.put_manifest(ref, fallback_tag(SUBJECT.digest), json.dumps(index).encode(), REFERRERS_TYPE)
        published, _ = put(host, ref, hot_set())
        found = push.get(ref, f"manifests/{fallback_tag(SUBJECT.digest)}", REFERRERS_TYPE, "fallback tag")
        assert found is not None
        manifests = json.loads(found[0])["manifests"]
        assert manifests[0] == entry and [one["digest"] for one in manifests[1:]] == [published.digest]
        # One that was deleted without regard to the list: the registry would refuse the list for it.
        assert push.delete_manifest(ref, there.digest)
        another, _ = put(host, ref, hot_set("another"))
        assert fallback(client, ref) == [published.digest, another.digest]


def test_something_else_under_the_fallback_tag_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with docker_registry(tmp_path) as host, registry() as client:
        ref = repository(host)
        put(host, ref, layer_index(subject=None))
        body = encode(layer_index(subject=None)[0])
        Pusher(client).put_manifest(ref, fallback_tag(SUBJECT.digest), body, MANIFEST_TYPE)
        published, _ = put(host, ref, hot_set())
        assert "artifact.unlisted" in caplog.text
        found = Finder(client).find(ref, KEY, Kind.HOT_SET, "default")
        assert found is not None and found.digest == published.digest


def test_who_may_only_read_publishes_nothing(go_backend: str) -> None:
    with Front(go_backend, tokens=Tokens({})) as front, registry() as client:
        artifact, blobs = hot_set()
        with pytest.raises(Denied, match="writing needs the right to it: no credentials for it"):
            publish(Pusher(client), repository(front.host), artifact, opener(blobs))
        assert front.asked("PUT", "DELETE") == []


@pytest.mark.parametrize(("status", "kind"), [(503, Transient), (400, InvalidArgument)])
def test_a_registry_that_refuses(go_backend: str, status: int, kind: type[Exception]) -> None:
    def refuses(request: Request) -> Action | None:
        return Status(status) if request.method == "PUT" and "manifests" in request.path else None

    with Front(go_backend, refuses) as front, registry() as client:
        artifact, blobs = hot_set()
        with pytest.raises(kind, match=f"push of manifest .* HTTP status {status}"):
            publish(Pusher(client, sleep=lambda _: None), repository(front.host), artifact, opener(blobs))


def test_through_tls_tokens_and_faults(backend: tuple[str, bool], tmp_path: Path) -> None:
    """Every third request is answered with 503, lost, or has its answer lost; readers come without a password."""
    host, _ = backend
    authority = Authority(tmp_path)
    faults = itertools.cycle([None, None, Status(503), None, None, Reset(-1), None, None, Lose()])
    tokens = Tokens({"me": "pw"})
    with Front(host, lambda _: next(faults), authority.server("127.0.0.1"), tokens) as front:
        certs = tmp_path / "certs.d" / front.host
        certs.mkdir(parents=True)
        (certs / "hosts.toml").write_text(f'server = "{front.url}"\nca = "{authority.ca}"\n')
        login = tmp_path / "config.json"
        login.write_text(json.dumps({"auths": {front.host: {"auth": b64encode(b"me:pw").decode()}}}))
        anybody = replace(CONFIG, hosts_dir=str(tmp_path / "certs.d"))
        ref = repository(front.host)
        made = [hot_set(seed="old"), layer_index(layers=4), hot_set(seed="new")]
        with contextlib.closing(Registry(replace(anybody, docker_config=str(login)))) as client:
            for artifact, blobs in made:
                published = publish(Pusher(client, sleep=lambda _: None), ref, artifact, opener(blobs))
        front.behaviour = None
        with contextlib.closing(Registry(anybody)) as client:
            listed = Finder(client).list(ref, KEY, SUBJECT.digest)
            assert [one.artifact for one in listed] == [made[1][0], made[2][0]]
            assert listed[1].digest == published.digest
            for one in listed:
                for blob in one.artifact.blobs:
                    assert digest_of(b"".join(client.blob(str(ref), blob.digest).stream(0, None))) == blob.digest
        scopes = {scope.rpartition(":")[2] for scope in tokens.scopes}
        assert scopes == {"pull,push", "delete", "pull"}


def test_twenty_processes_at_once(backend: tuple[str, bool]) -> None:
    host, api = backend
    ref = repository(host)
    argv = [sys.executable, "-m", "tests.snapshotter.artifacts.at_once", str(ref), str(PROCESSES)]
    done = subprocess.run(argv, cwd=CHECKOUT, env=os.environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    workloads = [f"w{number}" for number in range(PROCESSES)]
    with registry() as client:
        finder = Finder(client, timeout_s=60.0)
        for workload in workloads:
            found = finder.find(ref, KEY, Kind.HOT_SET, workload)
            assert found is not None and found.artifact == hot_set(workload)[0]
            assert client.blob(str(ref), found.artifact.blobs[1].digest).size() == found.artifact.blobs[1].size
        for subject in (None, SUBJECT.digest):
            listed = finder.list(ref, KEY, subject)
            assert sorted(one.artifact.workload for one in listed) == sorted(workloads)
        if not api:
            assert fallback(client, ref), "as many as one is lucky to have"
            print(f"{len(fallback(client, ref))} of {PROCESSES} in the fallback tag")
