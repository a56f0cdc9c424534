"""References, manifests, tokens and answers: the parsers by tables, the flows against a true server."""

import contextlib
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, NotFound, Transient
from snapshotter.registry import (
    Descriptor,
    Platform,
    Registry,
    host_platform,
    parse_digest,
    parse_platform,
    parse_reference,
)
from snapshotter.registry.answers import plan_body, status_error
from snapshotter.registry.challenge import parse_challenges
from snapshotter.registry.manifest import choose
from tests.snapshotter.rangeserver import Behaviour, Hold, RangeServer, Status, TokenGate, in_order

HEX = "0123456789abcdef" * 4
FOREIGN = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=2.0, hosts_dir="", docker_config="/nonexistent")


@pytest.mark.parametrize(
    ("text", "canonical", "api_host", "target"),
    [
        ("debian", "docker.io/library/debian", "registry-1.docker.io", "latest"),
        ("debian:12", "docker.io/library/debian:12", "registry-1.docker.io", "12"),
        ("index.docker.io/a/b", "docker.io/a/b", "registry-1.docker.io", "latest"),
        ("user/app", "docker.io/user/app", "registry-1.docker.io", "latest"),
        ("localhost/app", "localhost/app", "localhost", "latest"),
        ("localhost:5000/a/b-c__d.e:T_1.x", "localhost:5000/a/b-c__d.e:T_1.x", "localhost:5000", "T_1.x"),
        ("[::1]:5000/app", "[::1]:5000/app", "[::1]:5000", "latest"),
        ("ghcr.io/o/r@sha256:" + HEX, "ghcr.io/o/r@sha256:" + HEX, "ghcr.io", "sha256:" + HEX),
        ("r.io/x:1@sha256:" + HEX, "r.io/x:1@sha256:" + HEX, "r.io", "sha256:" + HEX),
        ("Host/app:1", "Host/app:1", "Host", "1"),
    ],
)
def test_reference(text: str, canonical: str, api_host: str, target: str) -> None:
    ref = parse_reference(text)
    assert (str(ref), ref.api_host, ref.target) == (canonical, api_host, target)
    assert parse_reference(str(ref)) == ref


@pytest.mark.parametrize(
    "text",
    ["", ":", "/", "app:", "app@", "app@sha256:12", "app@sha512:" + HEX, "r.io/", "r.io/App", "a//b", "http://r.io/a",
     "r.io:port/a", "r.io/a b", "-a", "a:-x", "r.io/a\n", "r.io/a?x=1", "r.io/../a"],
)  # fmt: skip
def test_not_a_reference(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_reference(text)


@given(st.text(max_size=60))
def test_reference_never_fails_otherwise(text: str) -> None:
    with contextlib.suppress(InvalidArgument):
        assert str(parse_reference(str(parse_reference(text)))) == str(parse_reference(text))


def test_challenges() -> None:
    text = (
        'Bearer realm="https://a.example/token?x=1, y",service="s",scope="repository:a:pull,push", BASIC realm="r\\"q"'
    )
    bearer, basic = parse_challenges(text)
    assert bearer.scheme == "bearer" and bearer.params["scope"] == "repository:a:pull,push"
    assert bearer.params["realm"] == "https://a.example/token?x=1, y"
    assert basic.scheme == "basic" and basic.params == {"realm": 'r"q'}
    assert parse_challenges("Negotiate, Bearer service=plain")[1].params == {"service": "plain"}
    assert parse_challenges("") == []


@given(st.text(max_size=80))
def test_challenges_never_fail(text: str) -> None:
    parse_challenges(text)


def test_retry_after_forms() -> None:
    def asked(value: str) -> float | None:
        error = status_error(429, {"Retry-After": value}, "x")
        assert isinstance(error, Transient)
        return error.retry_after_s

    assert asked("12") == 12.0
    assert asked("999999") == 3600.0
    assert asked("soon") is None and asked("") is None and asked("-3") is None
    date = asked(formatdate(time.time() + 30, usegmt=True))
    assert date is not None and 25 < date <= 31
    assert asked(formatdate(time.time() - 30, usegmt=True)) == 0.0


def test_plan_body_accepts_what_can_be_used() -> None:
    assert plan_body(206, {"Content-Range": "bytes 10-19/100"}, 10, 20, "x").length == 10
    assert plan_body(206, {"Content-Range": "Bytes 10-19/*"}, 10, 20, "x").total is None
    assert plan_body(206, {"Content-Length": "10"}, 10, 20, "x").length == 10
    plan = plan_body(200, {"Content-Length": "100"}, 10, None, "x")
    assert (plan.skip, plan.length, plan.ranges) == (10, 90, False)
    assert plan_body(206, {"Content-Range": "bytes 90-99/100"}, 90, None, "x").length == 10
    with pytest.raises(Transient):
        plan_body(206, {}, 0, None, "x")
    for bad in ("bytes 9-19/100", "bytes 10-20/100", "bytes */100", "items 10-19/100", "multipart"):
        with pytest.raises(Transient):
            plan_body(206, {"Content-Range": bad}, 10, 20, "x")


# --- resolve


def document(**fields: object) -> bytes:
    return json.dumps({"schemaVersion": 2, **fields}).encode()


def descriptor(body: bytes, **more: object) -> dict[str, object]:
    return {"mediaType": "m", "digest": "sha256:" + hashlib.sha256(body).hexdigest(), "size": len(body), **more}


def image(name: str) -> bytes:
    return document(config=descriptor(b"c" + name.encode()), layers=[descriptor(b"l1"), descriptor(b"l2")])


def index(*images: tuple[bytes, str]) -> bytes:
    def entry(body: bytes, text: str) -> dict[str, object]:
        os, arch, *variant = text.split("/")
        return descriptor(body, platform={"os": os, "architecture": arch, "variant": "".join(variant)})

    return document(manifests=[entry(*one) for one in images])


@contextlib.contextmanager
def registry_with(
    manifests: dict[str, bytes], behaviour: Behaviour | None = None
) -> Iterator[tuple[RangeServer, Registry, Callable[[str], str]]]:
    paths = {f"/v2/app/manifests/{tag}": body for tag, body in manifests.items()}
    for body in manifests.values():
        paths[f"/v2/app/manifests/sha256:{hashlib.sha256(body).hexdigest()}"] = body
    with RangeServer(paths, behaviour) as server, contextlib.closing(Registry(CONFIG)) as registry:
        yield server, registry, lambda tag: f"{server.host}/app{tag}"


def test_resolve_picks_the_platform() -> None:
    amd, v7, v8 = image("amd"), image("v7"), image("v8")
    attestation = image("att")
    tagged = index((attestation, "unknown/unknown"), (amd, "linux/amd64"), (v7, "linux/arm/v7"), (v8, "linux/arm64/v8"))
    manifests = {"1": tagged, "plain": amd, "a": amd, "b": v7, "c": v8, "d": attestation}
    with registry_with(manifests) as (server, registry, ref):
        for platform, body in (("linux/amd64", amd), ("linux/arm64", v8), ("linux/arm/v7", v7), ("linux/arm", v7)):
            manifest = registry.resolve(ref(":1"), parse_platform(platform))
            assert manifest.digest == descriptor(body)["digest"]
            assert [layer.size for layer in manifest.layers] == [2, 2]
        assert registry.resolve(ref(":plain")).digest == descriptor(amd)["digest"]
        pinned = registry.resolve(ref(f"@{descriptor(tagged)['digest']}"), Platform("linux", "amd64"))
        assert pinned.digest == descriptor(amd)["digest"]
        with pytest.raises(
            NotFound, match="no image for linux/s390x; there is linux/amd64, linux/arm/v7, linux/arm64/v8"
        ):
            registry.resolve(ref(":1"), Platform("linux", "s390x"))
        assert server.connections == 1


def test_docker_schema_2_as_docker_pushes_it() -> None:
    kind = "application/vnd.docker."
    layer = {**descriptor(b"l"), "mediaType": kind + "image.rootfs.diff.tar.gzip"}
    config = {**descriptor(b"c"), "mediaType": kind + "container.image.v1+json"}
    body = document(mediaType=kind + "distribution.manifest.v2+json", config=config, layers=[layer])
    entry = descriptor(body, platform={"os": "linux", "architecture": "amd64"})
    tagged = document(mediaType=kind + "distribution.manifest.list.v2+json", manifests=[entry])
    with registry_with({"1": tagged, "a": body}) as (server, registry, ref):
        manifest = registry.resolve(ref(":1"), Platform("linux", "amd64"))
        assert (manifest.media_type, manifest.config.media_type) == (
            "application/vnd.docker.distribution.manifest.v2+json",
            "application/vnd.docker.container.image.v1+json",
        )
        assert [one.media_type for one in manifest.layers] == [kind + "image.rootfs.diff.tar.gzip"]
        accepted = server.requests[0].headers["Accept"]
        assert kind + "distribution.manifest.v2+json" in accepted
        assert kind + "distribution.manifest.list.v2+json" in accepted


def test_attestations_are_no_images() -> None:
    """An index around one image without a platform, as some builders write it, stays one after an attestation."""
    only = image("only")
    notes = {"vnd.docker.reference.type": "attestation-manifest"}
    unknown = {"os": "unknown", "architecture": "unknown"}
    about = [descriptor(image("a"), annotations=notes, platform=unknown), descriptor(image("b"), annotations=notes)]
    tagged = document(manifests=[*about, descriptor(only)])
    with registry_with({"1": tagged, "a": only}) as (_, registry, ref):
        assert registry.resolve(ref(":1"), Platform("linux", "s390x")).digest == descriptor(only)["digest"]


@pytest.mark.parametrize(
    ("wanted", "offered", "chosen"),
    [
        ("linux/arm/v7", "linux/arm/v6 linux/arm/v5", "linux/arm/v6"),
        ("linux/arm/v7", "linux/arm/v6 linux/arm", "linux/arm"),
        ("linux/arm/v6", "linux/arm linux/arm/v7 linux/arm/v5", "linux/arm/v5"),
        ("linux/arm/v6", "linux/arm linux/arm/v7", None),
        ("linux/arm64/v8", "linux/arm/v7 linux/arm64", "linux/arm64"),
        ("linux/amd64/v3", "linux/amd64/v2 linux/amd64", "linux/amd64"),
    ],
)
def test_variants(wanted: str, offered: str, chosen: str | None) -> None:
    entries = tuple(Descriptor("m", parse_digest("sha256:" + HEX), 1, parse_platform(text)) for text in offered.split())
    if chosen is None:
        with pytest.raises(NotFound, match=f"no image for {wanted}; there is"):
            choose(entries, parse_platform(wanted), "x")
    else:
        assert str(choose(entries, parse_platform(wanted), "x").platform) == chosen


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>", "not JSON"),
        (b"[]", "not a JSON object"),
        (document(), "neither"),
        (document(schemaVersion=1, fsLayers=[]), "schema 1"),
        (document(config={}, layers=[]), "valid size"),
        (document(config=descriptor(b""), layers=[descriptor(b"", urls=["https://a.example/l"])]), "foreign layer"),
        (document(config=descriptor(b""), layers=[{**descriptor(b""), "mediaType": FOREIGN}]), "foreign layer"),
        (document(config=descriptor(b""), layers=[{"size": 1, "digest": "sha256:zz"}]), "not a digest"),
        (document(config=descriptor(b""), layers=[{"size": True, "digest": "sha256:" + HEX}]), "valid size"),
    ],
)
def test_bad_manifest(body: bytes, words: str) -> None:
    with registry_with({"1": body}) as (_, registry, ref), pytest.raises(InvalidArgument, match=words):
        registry.resolve(ref(":1"))


def test_manifest_with_another_digest_and_endless_nesting() -> None:
    manifests = {"1": image("x"), "sha256:" + HEX: image("y")}
    with registry_with(manifests) as (_, registry, ref), pytest.raises(Transient, match="has the digest"):
        registry.resolve(ref("@sha256:" + HEX))
    inner = image("x")
    layers = {"0": inner}
    for level in range(4):
        inner = index((inner, "linux/amd64"))
        layers[str(level + 1)] = inner
    with registry_with(layers) as (_, registry, ref), pytest.raises(InvalidArgument, match="nested"):
        registry.resolve(ref(":4"), Platform("linux", "amd64"))


def test_manifest_too_long() -> None:
    with (
        registry_with({"1": b" " * (5 << 20)}) as (_, registry, ref),
        pytest.raises(InvalidArgument, match="longer than"),
    ):
        registry.resolve(ref(":1"))


def test_missing_image_and_host_platform() -> None:
    with registry_with({}) as (_, registry, ref), pytest.raises(NotFound, match="manifest 1 of 127"):
        registry.resolve(ref(":1"))
    assert host_platform().os == "linux"
    for text in ("linux", "linux/", "a/b/c/d", ""):
        with pytest.raises(InvalidArgument):
            parse_platform(text)


# --- tokens


@pytest.mark.parametrize("refuse", [401, 403])
def test_token_is_fetched_once_kept_and_renewed_once(refuse: int) -> None:
    gate = TokenGate(refuse=401)
    with registry_with({"1": image("x")}, gate) as (server, registry, ref):
        gate.realm = f"{server.url}/token"
        registry.resolve(ref(":1"))
        registry.resolve(ref(":1"))
        assert gate.issued == 1 and gate.scopes == ["repository:app:pull"] and len(server.requests) == 4
        gate._refuse = refuse  # some registries say 403 for an expired token
        gate.revoke()
        registry.resolve(ref(":1"))
        assert gate.issued == 2
        gate.deny_all = True
        with pytest.raises(Denied, match=str(refuse)):
            registry.resolve(ref(":1"))
        assert gate.issued == 3, "one fresh token, not more"
        assert server.connections == 1


def test_second_repository_of_a_known_host_needs_no_challenge() -> None:
    gate = TokenGate()
    body = image("x")
    with registry_with({"1": body}, gate) as (server, registry, ref):
        server.blobs["/v2/other/manifests/1"] = body
        gate.realm = f"{server.url}/token"
        registry.resolve(ref(":1"))
        seen = len(server.requests)
        registry.resolve(f"{server.host}/other:1")
        assert [r.path.split("?")[0] for r in server.requests[seen:]] == ["/token", "/v2/other/manifests/1"]
        assert gate.scopes[-1] == "repository:other:pull"


def test_short_lived_token_is_not_used_when_old() -> None:
    gate = TokenGate(expires_in=1)
    with registry_with({"1": image("x")}, gate) as (server, registry, ref):
        gate.realm = f"{server.url}/token"
        registry.resolve(ref(":1"))
        grant = next(iter(registry._auth._grants.values()))
        assert 0 < grant.until - time.monotonic() < 1
        registry._auth._clock = lambda: grant.until + 0.01
        seen = len(server.requests)
        registry.resolve(ref(":1"))
        assert [r.path.split("?")[0] for r in server.requests[seen:]] == ["/token", "/v2/app/manifests/1"]


def test_many_threads_fetch_one_token() -> None:
    release = threading.Event()
    gate = TokenGate()
    waiting = threading.Semaphore(0)

    def behaviour(request: object) -> object:
        if request.path.startswith("/token"):  # type: ignore[attr-defined]  # a Request
            waiting.release()
            release.wait(5)
        return gate(request)  # type: ignore[arg-type]  # as above

    with registry_with({"1": image("x")}, behaviour) as (server, registry, ref):  # type: ignore[arg-type]  # as above
        gate.realm = f"{server.url}/token"
        errors: list[Exception] = []

        def work() -> None:
            try:
                registry.resolve(ref(":1"))
            except Exception as exc:
                errors.append(exc)

        threads = [threading.Thread(target=work) for _ in range(6)]
        for thread in threads:
            thread.start()
        assert waiting.acquire(timeout=5)
        release.set()
        for thread in threads:
            thread.join(10)
        assert errors == [] and gate.issued == 1


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (Status(503, {"Retry-After": "3"}), Transient),
        (Status(401), Denied),
        (Status(200, {}, b"<html>"), Transient),
        (Status(200, {}, b"[1]"), Transient),
        (Status(200, {}, b'{"expires_in": 5}'), Transient),
        (Status(200, {}, b'{"token": "a\\nb"}'), Transient),
    ],
)
def test_token_server_trouble(answer: Status, kind: type[Exception]) -> None:
    gate = TokenGate()
    with registry_with({"1": image("x")}) as (server, registry, ref):
        gate.realm = f"{server.url}/token"
        server.behaviour = lambda request: answer if request.path.startswith("/token") else gate(request)
        with pytest.raises(kind, match="token for 127"):
            registry.resolve(ref(":1"))
        server.behaviour = gate
        assert registry.resolve(ref(":1")).layers, "the failed fetch leaves nothing behind"


@pytest.mark.parametrize("challenge", ['Basic realm="r"', 'Bearer realm="file:///etc/passwd"', "Bearer", "", "\x80;;;"])
def test_challenge_that_we_cannot_answer(challenge: str) -> None:
    refusal = Status(401, {"WWW-Authenticate": challenge})
    with (
        registry_with({"1": image("x")}, lambda request: refusal) as (_, registry, ref),
        pytest.raises(Denied, match=r"401|token"),
    ):
        registry.resolve(ref(":1"))


def test_stalled_manifest_is_transient() -> None:
    config = replace(CONFIG, read_timeout_s=0.2)
    with registry_with({"1": image("x")}, in_order([Hold(3)])) as (server, _, ref):
        with contextlib.closing(Registry(config)) as registry, pytest.raises(Transient, match="stalled"):
            registry.resolve(ref(":1"))
        assert len(server.requests) == 1
