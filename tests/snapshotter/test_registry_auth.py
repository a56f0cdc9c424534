"""Logging in: every way a registry may ask for credentials, against true servers, and that nothing secret gets out."""

import contextlib
import hashlib
import json
import logging
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, SnapshotterError, Transient
from snapshotter.log import configure
from snapshotter.registry import Registry
from snapshotter.registry.challenge import Challenge
from snapshotter.registry.credentials import Credential
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.tokens import Token, fetch_token
from snapshotter.registry.transport import Transport
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status, TokenGate, redirect

PASSWORD, IDENTITY = "s3cr:t", "id-s3cret-token"
CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=2.0, hosts_dir="")
LAYER = {"mediaType": "m", "digest": "sha256:" + "ab" * 32, "size": 1}
MANIFEST = json.dumps({"schemaVersion": 2, "config": LAYER, "layers": []}).encode()
PATHS = {f"/v2/{name}/manifests/1": MANIFEST for name in ("app", "other")}


def basic(user: str = "me", password: str = PASSWORD) -> str:
    return "Basic " + b64encode(f"{user}:{password}".encode()).decode()


class Gate:
    """A behaviour that wants `accepted` (a header's value) and challenges with `challenge`; 401, or `refuse`."""

    def __init__(self, accepted: str, challenge: str = 'Basic realm="r"', refuse: int = 401) -> None:
        self.accepted, self.challenge, self.refuse = accepted, challenge, refuse

    def __call__(self, request: Request) -> Action | None:
        if request.headers.get("Authorization") == self.accepted:
            return None
        return Status(self.refuse, {"WWW-Authenticate": self.challenge} if self.challenge else {})


class TokenServer:
    """A token server: answers by `grant`, which sees the parameters and the Authorization header of each request."""

    def __init__(self, grant: Callable[[dict[str, list[str]], str | None], object]) -> None:
        self.asked: list[tuple[str, dict[str, list[str]], str | None]] = []
        self._grant = grant

    def __call__(self, request: Request) -> Action | None:
        text = request.body.decode() if request.method == "POST" else urlsplit(request.path).query
        fields, authorization = parse_qs(text), request.headers.get("Authorization")
        self.asked.append((request.method, fields, authorization))
        answer = self._grant(fields, authorization)
        return answer if isinstance(answer, Status) else Status(200, {}, json.dumps(answer).encode())


@pytest.fixture
def login(tmp_path: Path) -> Callable[..., RegistryConfig]:
    """Writes a config.json with an entry for a host, and gives the configuration that names it."""
    path = tmp_path / "config.json"

    def write(host: str, user: str = "me", password: str = PASSWORD, identity: str = "") -> RegistryConfig:
        entry = {"identitytoken": identity} if identity else {"auth": basic(user, password).split()[1]}
        new = tmp_path / "new"
        new.write_text(json.dumps({"auths": {host: entry}}))
        new.replace(path)
        return replace(CONFIG, docker_config=str(path))

    return write


@contextlib.contextmanager
def registry(config: RegistryConfig) -> Iterator[Registry]:
    with contextlib.closing(Registry(config)) as made:
        yield made


# --- basic


@pytest.mark.parametrize("refuse", [401, 403])
def test_basic(login: Callable[..., RegistryConfig], refuse: int) -> None:
    with RangeServer(PATHS, Gate(basic(), refuse=refuse)) as server, registry(login(server.host)) as client:
        for _ in range(2):
            client.resolve(f"{server.host}/app:1")
        client.resolve(f"{server.host}/other:1")
        sent = [r.headers.get("Authorization") for r in server.requests]
        assert sent == [None, basic(), basic(), basic()], "one refusal for the host, then none"


def test_basic_with_a_new_password(login: Callable[..., RegistryConfig]) -> None:
    gate = Gate(basic())
    with RangeServer(PATHS, gate) as server, registry(login(server.host)) as client:
        client.resolve(f"{server.host}/app:1")
        gate.accepted = basic(password="new")
        gate.challenge, gate.refuse = "", 403  # as some registries refuse what is no longer valid
        with pytest.raises(Denied, match=r"403.*does not accept the password of 'me'"):
            client.resolve(f"{server.host}/app:1")
        login(server.host, password="new")
        client.resolve(f"{server.host}/app:1")
        seen = len(server.requests)
        gate.accepted = basic(password="newer")
        login(server.host, password="newer")
        client.resolve(f"{server.host}/app:1")
        assert len(server.requests) - seen == 2


def test_basic_without_or_with_wrong_credentials(login: Callable[..., RegistryConfig], tmp_path: Path) -> None:
    with RangeServer(PATHS, Gate(basic())) as server:
        with (
            registry(login("another.example")) as client,
            pytest.raises(Denied, match=f"wants a user and password; no credentials for it in {tmp_path}/config.json"),
        ):
            client.resolve(f"{server.host}/app:1")
        assert len(server.requests) == 1
        with registry(login(server.host, password="wrong")) as client:
            for _ in range(2):
                with pytest.raises(Denied, match="401"):
                    client.resolve(f"{server.host}/app:1")
        assert len(server.requests) <= 1 + 4
        with registry(login(server.host, identity=IDENTITY)) as client, pytest.raises(Denied, match="wants a user"):
            client.resolve(f"{server.host}/app:1")


# --- tokens


def bearer(realm: str, scope: str = "repository:app:pull") -> str:
    return f'Bearer realm="{realm}",service="the service",scope="{scope}"'


def test_password_goes_to_the_token_server_only(login: Callable[..., RegistryConfig]) -> None:
    tokens = TokenServer(lambda fields, sent: {"token": "t", "expires_in": 300} if sent == basic() else Status(401))
    with RangeServer({}, tokens) as issuer:
        challenge = 'Basic realm="r", ' + bearer(f"{issuer.url}/token?x=1", "repository:app:pull repository:base:pull")
        gate = Gate("Bearer t", challenge)
        with RangeServer(PATHS, gate) as server, registry(login(server.host)) as client:
            client.resolve(f"{server.host}/app:1")
            client.resolve(f"{server.host}/other:1")
            sent = [r.headers.get("Authorization") for r in server.requests]
            assert sent == [None, "Bearer t", "Bearer t"]
        assert tokens.asked[0] == (
            "GET",
            {"x": ["1"], "service": ["the service"], "scope": ["repository:app:pull", "repository:base:pull"]},
            basic(),
        )
        assert tokens.asked[1][1]["scope"] == ["repository:other:pull"]


def test_token_server_refuses_the_password(login: Callable[..., RegistryConfig]) -> None:
    tokens = TokenServer(lambda fields, sent: Status(401))
    with RangeServer({}, tokens) as issuer, RangeServer(PATHS, Gate("Bearer t", bearer(issuer.url))) as server:
        with registry(login(server.host)) as client, pytest.raises(Denied, match="password of 'me' is not accepted"):
            client.resolve(f"{server.host}/app:1")
        assert len(tokens.asked) == 1


def test_identity_token_is_posted_as_a_form(login: Callable[..., RegistryConfig]) -> None:
    tokens = TokenServer(lambda fields, sent: {"access_token": "t", "expires_in": 300})
    with RangeServer({}, tokens) as issuer, RangeServer(PATHS, Gate("Bearer t", bearer(issuer.url))) as server:
        with registry(login(server.host, identity=IDENTITY)) as client:
            client.resolve(f"{server.host}/app:1")
        (asked,) = tokens.asked
        assert asked == (
            "POST",
            {
                "grant_type": ["refresh_token"],
                "service": ["the service"],
                "client_id": ["bootseer"],
                "scope": ["repository:app:pull"],
                "refresh_token": [IDENTITY],
            },
            None,
        )
        assert issuer.requests[0].headers["Content-Type"] == "application/x-www-form-urlencoded"


def test_identity_token_that_is_replaced(login: Callable[..., RegistryConfig]) -> None:
    """Each use gives the next one; when that one is lost, the one in the file is tried again."""
    valid = [IDENTITY]

    def grant(fields: dict[str, list[str]], sent: str | None) -> object:
        if fields["refresh_token"] != valid[-1:]:
            return Status(400, {}, b'{"error": "invalid_grant"}')
        valid.append(f"next{len(valid)}")
        return {"access_token": "t", "refresh_token": valid[-1], "expires_in": 1}

    tokens = TokenServer(grant)
    with (
        RangeServer({}, tokens) as issuer,
        RangeServer(PATHS, Gate("Bearer t", bearer(issuer.url))) as server,
        registry(login(server.host, identity=IDENTITY)) as client,
    ):
        clock = [0.0]
        client._auth._clock = lambda: clock[0]
        for at in (0.0, 10.0, 20.0):
            clock[0] = at
            client.resolve(f"{server.host}/app:1")
        assert [fields["refresh_token"] for _, fields, _ in tokens.asked] == [[IDENTITY], ["next1"], ["next2"]]
        valid.append(IDENTITY)
        clock[0] = 30.0
        client.resolve(f"{server.host}/app:1")
        assert [fields["refresh_token"] for _, fields, _ in tokens.asked[3:]] == [["next3"], [IDENTITY]]
        valid.append("unknown to us")
        clock[0] = 40.0
        with pytest.raises(Denied, match="identity token is not accepted; log in again"):
            client.resolve(f"{server.host}/app:1")
        seen = len(tokens.asked)
        with pytest.raises(Denied):
            client.resolve(f"{server.host}/app:1")
        assert [fields["refresh_token"] for _, fields, _ in tokens.asked[seen:]] == [[IDENTITY]], (
            "the lost one is forgotten"
        )


def test_redirected_token_form_is_not_sent_on(login: Callable[..., RegistryConfig]) -> None:
    with RangeServer({}) as away, RangeServer({}, lambda request: redirect(f"{away.url}/token", 307)) as issuer:
        with (
            RangeServer(PATHS, Gate("Bearer t", bearer(issuer.url))) as server,
            registry(login(server.host, identity=IDENTITY)) as client,
            pytest.raises(SnapshotterError, match="307"),
        ):
            client.resolve(f"{server.host}/app:1")
        assert away.requests == []


def test_redirected_token_request_loses_the_password(login: Callable[..., RegistryConfig]) -> None:
    tokens = TokenServer(lambda fields, sent: {"token": "t"})
    with RangeServer({}, tokens) as away, RangeServer({}, lambda request: redirect(f"{away.url}/token")) as issuer:
        with RangeServer(PATHS, Gate("Bearer t", bearer(issuer.url))) as server, registry(login(server.host)) as client:
            client.resolve(f"{server.host}/app:1")
        assert issuer.requests[0].headers["Authorization"] == basic() and tokens.asked[0][2] is None


@pytest.mark.parametrize("credential", [Credential("me", PASSWORD), Credential(identity_token=IDENTITY)])
def test_credentials_never_leave_tls(credential: Credential) -> None:
    with contextlib.closing(Transport(connections=1, connect_timeout_s=1.0, read_timeout_s=1.0)) as transport:
        challenge = Challenge("bearer", {"realm": "http://tokens.example/token"})
        with pytest.raises(Denied, match=r"sent to tokens\.example without TLS; they are not"):
            fetch_token(transport, Endpoint("https://r.io/v2"), challenge, "s", credential, "token")


def test_expired_token_with_credentials_is_fetched_once_for_all(login: Callable[..., RegistryConfig]) -> None:
    """Eight readers meet the end of a token together: one login."""
    held, waiting = threading.Event(), threading.Semaphore(0)
    issued: list[str] = []
    gate = Gate("", "")

    def grant(fields: dict[str, list[str]], sent: str | None) -> object:
        if issued:
            held.wait(5)
        issued.append(f"t{len(issued)}")
        gate.accepted = f"Bearer {issued[-1]}"
        return {"token": issued[-1], "expires_in": 300}

    def behaviour(request: Request) -> Action | None:
        action = gate(request)
        if issued and action is not None:
            waiting.release()
        return action

    with RangeServer({}, TokenServer(grant)) as issuer, RangeServer(PATHS, behaviour) as server:
        gate.challenge = bearer(issuer.url)
        with registry(login(server.host)) as client:
            client.resolve(f"{server.host}/app:1")
            gate.accepted, gate.refuse = "none", 403
            errors: list[Exception] = []

            def work() -> None:
                try:
                    client.resolve(f"{server.host}/app:1")
                except Exception as exc:
                    errors.append(exc)

            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            assert waiting.acquire(timeout=5)
            held.set()
            for thread in threads:
                thread.join(10)
            assert errors == [] and issued == ["t0", "t1"]


def test_after_a_login_the_next_token_is_not_anonymous(login: Callable[..., RegistryConfig]) -> None:
    tokens = TokenServer(lambda fields, sent: {"token": "mine" if sent == basic() else "anonymous"})
    with (
        RangeServer({}, tokens) as issuer,
        RangeServer(PATHS, Gate("Bearer mine", bearer(issuer.url))) as server,
        registry(login("another.example")) as client,
    ):
        with pytest.raises(Denied, match="does it need credentials"):
            client.resolve(f"{server.host}/app:1")
        login(server.host)
        client.resolve(f"{server.host}/app:1")


def test_a_refusal_after_a_redirect_costs_no_login(login: Callable[..., RegistryConfig]) -> None:
    """It is the storage's, which knows nothing of our token: a fresh one would not help."""
    with RangeServer({}, lambda request: Status(403)) as storage:
        gate = TokenGate(lambda request: redirect(f"{storage.url}/signed"))
        with RangeServer({}, gate) as server, registry(login(server.host)) as client:
            gate.realm = f"{server.url}/token"
            for asked in (1, 2):
                with pytest.raises(Denied, match="403"):
                    client.resolve(f"{server.host}/app:1")
                assert gate.issued == 1 and len(storage.requests) == asked


# --- secrets


def test_no_secret_in_logs_errors_or_reprs(
    login: Callable[..., RegistryConfig], caplog: pytest.LogCaptureFixture
) -> None:
    """Everything at DEBUG, the libraries' loggers as the daemon sets them, good and bad answers of both kinds."""
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    said: list[str] = []
    try:
        configure("debug", "kv")
        root.addHandler(caplog.handler)
        for identity in ("", IDENTITY):
            answers = iter([{"token": "t0ken-secret"}, Status(400), Status(500), Status(200, {}, b"?")])
            tokens = TokenServer(lambda fields, sent, answers=answers: next(answers))  # type: ignore[misc]  # a default
            gate = Gate("Bearer t0ken-secret", "")
            with RangeServer({}, tokens) as issuer, RangeServer(PATHS, gate) as server:
                gate.challenge = bearer(issuer.url)
                with registry(login(server.host, identity=identity)) as client:
                    client.resolve(f"{server.host}/app:1")
                    said += map(repr, (client, client._auth, client._auth._grants, client._auth._keyring))
                    gate.accepted = "another"
                    for _ in range(3):
                        with pytest.raises((Denied, Transient)) as caught:
                            client.resolve(f"{server.host}/app:1")
                        said.append(f"{caught.value!r} {caught.value} {caught.value.__cause__!r}")
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]
    said += [record.getMessage() for record in caplog.records]
    caplog.clear()
    assert len(said) >= 14
    text = "\n".join(said)
    encoded = basic().split()[1]
    for secret in (PASSWORD, IDENTITY, "t0ken-secret", encoded, hashlib.sha256(PASSWORD.encode()).hexdigest()):
        assert secret not in text
    assert "Bearer" not in repr(Token("Bearer x", 1.0, "y"))


def test_a_day_of_tokens_that_expire() -> None:
    """24 h in steps of 100 s, tokens of 300 s: each is renewed before its end, by one request, and nothing grows."""
    gate = TokenGate()
    with RangeServer(PATHS, gate) as server, registry(CONFIG) as client:
        gate.realm = f"{server.url}/token"
        clock = [0.0]
        client._auth._clock = lambda: clock[0]
        for at in range(0, 86400, 100):
            clock[0] = float(at)
            client.resolve(f"{server.host}/app:1")
        asked = [request for request in server.requests if "/manifests/" in request.path]
        assert len(asked) == 864 + 1, "one challenge, at the very first"
        assert gate.issued == 864 // 3, "each is used three times: at 0, 100, and 200 s"
        assert len(client._auth._grants) == 1 and not client._auth._flights
        assert server.connections <= 2
