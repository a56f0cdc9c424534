"""Credentials that came with pulls: whose they are, in which order they are tried, and that others still work."""

import contextlib
import json
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied
from snapshotter.registry import Registry
from snapshotter.registry.credentials import Credential
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.passed import Passed, PassedCredentials
from snapshotter.registry.reference import parse_reference
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status, TokenGate

CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=2.0, hosts_dir="", docker_config="/nonexistent")
LAYER = {"mediaType": "m", "digest": "sha256:" + "ab" * 32, "size": 1}
MANIFEST = json.dumps({"schemaVersion": 2, "config": LAYER, "layers": []}).encode()
PATHS = {f"/v2/{name}/manifests/1": MANIFEST for name in ("app", "other")}


def basic(password: str) -> str:
    return "Basic " + b64encode(f"me:{password}".encode()).decode()


class Gate:
    """A registry that takes these headers."""

    def __init__(self, *accepted: str, challenge: str = 'Basic realm="r"') -> None:
        self.accepted, self.challenge = set(accepted), challenge
        self.seen: list[str | None] = []

    def __call__(self, request: Request) -> Action | None:
        sent = request.headers.get("Authorization")
        self.seen.append(sent)
        return None if sent in self.accepted else Status(401, {"WWW-Authenticate": self.challenge})


class Tokens(TokenGate):
    """A token server that gives everybody a token, but only those for `password` are of use; `asked` by whom."""

    def __init__(self, password: str) -> None:
        super().__init__()
        self.password = password
        self.asked: list[str | None] = []

    def __call__(self, request: Request) -> Action | None:
        if request.path.startswith("/token"):
            sent = request.headers.get("Authorization")
            self.asked.append(sent)
            if sent != basic(self.password):
                return Status(200, {}, b'{"token": "useless", "expires_in": 300}')
        return super().__call__(request)


def put(passed: PassedCredentials, image: str, *credentials: Credential, server: str = "") -> None:
    """The last one is the newest."""
    for credential in credentials:
        passed.put(parse_reference(image), Passed(credential, server))


@contextlib.contextmanager
def client(passed: PassedCredentials, config: RegistryConfig = CONFIG) -> Iterator[Registry]:
    with contextlib.closing(Registry(config, passed)) as made:
        yield made


def test_the_newest_that_works_is_used() -> None:
    passed = PassedCredentials()
    gate = Gate(basic("old"))
    with RangeServer(PATHS, gate) as server, client(passed) as registry:
        image = f"{server.host}/app:1"
        with pytest.raises(Denied, match="wants a user and password"):
            registry.resolve(image)
        put(passed, image, Credential("me", "old"), Credential("me", "new"), Credential("me", "newest"))
        gate.seen.clear()
        registry.resolve(image)
        assert gate.seen == [basic("newest"), basic("new"), basic("old")]
        gate.seen.clear()
        registry.resolve(image)
        assert gate.seen == [basic("old")], "what worked is remembered"
        gate.accepted = {basic("newest")}  # as when the old one has been withdrawn
        registry.resolve(image)


def test_they_are_for_their_repository_only() -> None:
    passed = PassedCredentials()
    gate = Gate(basic("it"))
    with RangeServer(PATHS, gate) as server, client(passed) as registry:
        put(passed, f"{server.host}/app:1", Credential("me", "it"))
        registry.resolve(f"{server.host}/app:1")
        gate.seen.clear()
        with pytest.raises(Denied):
            registry.resolve(f"{server.host}/other:1")
        assert basic("it") not in gate.seen


def test_those_of_the_configuration_come_after_them(tmp_path: Path) -> None:
    passed = PassedCredentials()
    gate = Gate(basic("configured"))
    with RangeServer(PATHS, gate) as server:
        auth = {server.host: {"auth": basic("configured").split()[1]}}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auth}))
        with client(passed, replace(CONFIG, docker_config=str(tmp_path / "config.json"))) as registry:
            put(passed, f"{server.host}/app:1", Credential("me", "expired"))
            registry.resolve(f"{server.host}/app:1")
            assert gate.seen == [None, basic("expired"), basic("configured")]


def test_a_token_that_is_of_no_use_is_followed_by_that_of_the_next() -> None:
    passed = PassedCredentials()
    gate = Tokens("right")
    with RangeServer(PATHS, gate) as server, client(passed) as registry:
        gate.realm = f"{server.url}/token"
        put(passed, f"{server.host}/app:1", Credential("me", "right"), Credential("me", "no rights"))
        registry.resolve(f"{server.host}/app:1")
        assert gate.asked == [basic("no rights"), basic("right")]
        gate.asked.clear()
        registry.resolve(f"{server.host}/app:1")
        assert gate.asked == []


def test_all_refused(tmp_path: Path) -> None:
    passed = PassedCredentials()
    gate = Tokens("right")
    with RangeServer(PATHS, gate) as server, client(passed) as registry:
        gate.realm = f"{server.url}/token"
        put(passed, f"{server.host}/app:1", *(Credential("me", f"wrong-s3cret{n}") for n in range(4)))
        with pytest.raises(Denied, match="401") as refused:
            registry.resolve(f"{server.host}/app:1")
        assert len(gate.asked) == 5, "four that were passed, and none at all"
        assert "s3cret" not in str(refused.value)


def test_a_registry_token_is_sent_as_it_is() -> None:
    passed = PassedCredentials()
    gate = Gate("Bearer tok-s3cret", challenge='Bearer realm="http://127.0.0.1:1/none",service="s"')
    with RangeServer(PATHS, gate) as server, client(passed) as registry:
        put(passed, f"{server.host}/app:1", Credential(registry_token="tok-s3cret"))
        registry.resolve(f"{server.host}/app:1")
        assert gate.seen == [None, "Bearer tok-s3cret"]
        assert "s3cret" not in repr((passed, registry, registry._auth))


@pytest.mark.parametrize(
    ("server", "url", "seen"),
    [
        ("", "https://mirror.example/v2", True),
        ("r.io", "https://r.io/v2", True),
        ("r.io", "https://r.io:5000/v2", False),
        ("r.io", "https://mirror.example/v2", False),
        ("docker.io", "https://registry-1.docker.io/v2", True),
        ("index.docker.io", "https://registry-1.docker.io/v2", True),
        ("index.docker.io", "https://mirror.example/v2", False),
    ],
)
def test_who_may_see_them(server: str, url: str, seen: bool) -> None:
    passed = PassedCredentials()
    put(passed, "r.io/app:1", Credential("me", "x"), server=server)
    assert bool(passed.lookup(Endpoint(url), parse_reference("r.io/app@sha256:" + "a" * 64))) is seen


def test_bounds(caplog: pytest.LogCaptureFixture) -> None:
    passed = PassedCredentials()
    assert not passed.put(parse_reference("r.io/app:1"), Passed(Credential("me", "s3cret" * 2000)))
    assert passed.rows() == [] and "credentials.too_long" in caplog.text and "s3cret" not in caplog.text
    assert passed.put(parse_reference("r.io/app:1"), Passed(Credential("me", "x" * 7000)))
    put(passed, "r.io/app:1", *(Credential("me", str(n)) for n in range(9)))
    assert [row["password"] for row in passed.rows()] == ["8", "7", "6", "5"]
    assert not passed.put(parse_reference("r.io/app:2"), Passed(Credential("me", "5")))
    assert [row["password"] for row in passed.rows()] == ["5", "8", "7", "6"]
    for n in range(300):
        put(passed, f"r.io/n{n}:1", *(Credential("me", f"{m}" + "x" * 7900) for m in range(4)))
    assert len(passed.rows()) == 4 * 256
    assert len(json.dumps(passed.rows())) < 16 << 20, "the longest line between our processes"
    assert passed.lookup(Endpoint("https://r.io/v2"), parse_reference("r.io/app:1")) == []
