"""Pushing to real registries, through TLS, tokens and faults."""

import contextlib
import itertools
import json
import logging
import random
import socketserver
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from snapshotter.artifacts.manifest import digest_of
from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, NotFound, Precondition, Transient
from snapshotter.registry import ImageRef, Registry, parse_reference
from snapshotter.registry.push import Pusher
from snapshotter.registry.transport import PIECE_BYTES, Upload
from tests.registries import Front, Tokens, docker_registry, go_registry
from tests.snapshotter.certificates import Authority
from tests.snapshotter.rangeserver import Action, Lose, RangeServer, Request, Reset, Status

pytestmark = pytest.mark.system

CONFIG = RegistryConfig(
    hosts_dir="", docker_config="/nonexistent/config.json", connect_timeout_s=20.0, read_timeout_s=20.0
)
DATA = random.Random(5).randbytes(700_000)
DIGEST = digest_of(DATA)
OCI = "application/vnd.oci.image.manifest.v1+json"
PASSWORD = "s3cret"


@pytest.fixture(scope="module", params=["docker", "go"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """host:port of a registry."""
    made = docker_registry(tmp_path_factory.mktemp("registry")) if request.param == "docker" else go_registry()
    with made as host:
        yield host


@pytest.fixture(scope="module")
def go_backend() -> Iterator[str]:
    with go_registry() as host:
        yield host


@contextlib.contextmanager
def pusher(config: RegistryConfig = CONFIG, pauses: list[float] | None = None) -> Iterator[Pusher]:
    """One that notes its pauses, and makes none."""
    noted = pauses if pauses is not None else []
    with contextlib.closing(Registry(config)) as registry:
        yield Pusher(registry, sleep=noted.append)


def login(path: Path, host: str, password: str = PASSWORD) -> RegistryConfig:
    """The configuration of somebody who is logged in as `me`."""
    auth = b64encode(f"me:{password}".encode()).decode()
    path.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
    return replace(CONFIG, docker_config=str(path))


def manifest_of(digest: str, size: int) -> bytes:
    descriptor = {"mediaType": "application/x", "digest": digest, "size": size}
    document = {"schemaVersion": 2, "mediaType": OCI, "config": descriptor, "layers": [descriptor]}
    return json.dumps(document).encode()


def chunks(data: bytes = DATA) -> Iterator[bytes]:
    for start in range(0, len(data), 100_000):
        yield data[start : start + 100_000]


def test_blobs_and_manifests(backend: str) -> None:
    ref = parse_reference(f"{backend}/team/push")
    with pusher() as push, contextlib.closing(Registry(CONFIG)) as registry:
        assert not push.has_blob(ref, DIGEST)
        push.put_blob(ref, DIGEST, len(DATA), chunks)
        assert push.has_blob(ref, DIGEST)
        push.put_blob(ref, digest_of(b""), 0, lambda: iter(()))
        assert b"".join(registry.blob(str(ref), DIGEST).stream(0, None)) == DATA
        body = manifest_of(DIGEST, len(DATA)) + b" " * PIECE_BYTES
        push.put_manifest(ref, "one", body, OCI)
        push.put_manifest(ref, digest_of(body), body, OCI)
        assert registry.resolve(f"{ref}:one").digest == digest_of(body)
        found = push.get(ref, "manifests/one", OCI, "manifest")
        assert found is not None and found[0] == body
        assert push.get(ref, "manifests/two", OCI, "manifest") is None
        assert push.delete_manifest(ref, digest_of(body))
        assert push.delete_manifest(ref, digest_of(body)), "it is not there any more"
        with pytest.raises(NotFound):
            registry.resolve(f"{ref}@{digest_of(body)}")


def test_a_blob_that_is_not_what_was_said(backend: str) -> None:
    ref = parse_reference(f"{backend}/team/wrong")
    right = DATA[::-1]
    digest = digest_of(right)
    with pusher() as push:
        for data in (right[:-1], b"x" + right):
            with pytest.raises(InvalidArgument, match=r"has (more|less) than its 700000 bytes"):
                push.put_blob(ref, digest, len(right), lambda data=data: chunks(data))  # type: ignore[misc]
        with pytest.raises(InvalidArgument, match="HTTP status 400"):
            push.put_blob(ref, digest, 5, lambda: iter((b"other",)))
        assert not push.has_blob(ref, digest)
        push.put_blob(ref, digest, len(right), lambda: chunks(right))
        assert push.has_blob(ref, digest), "the connections are fit for use after that"


def test_a_blob_is_sent_in_pieces() -> None:
    """One call has the connect time-out for all that it sends."""
    pieces = list(Upload(len(DATA), lambda: iter((DATA,)), "upload"))
    assert b"".join(pieces) == DATA and max(map(len, pieces)) == PIECE_BYTES


def test_mounting(backend: str) -> None:
    source, target = parse_reference(f"{backend}/team/source"), parse_reference(f"{backend}/team/target")
    with pusher() as push:
        assert not push.mount_blob(target, digest_of(b"nowhere"), "team/source")
        push.put_blob(source, DIGEST, len(DATA), chunks)
        if push.mount_blob(target, DIGEST, "team/source"):
            assert push.has_blob(target, DIGEST)


def test_deletion_that_is_not_allowed(tmp_path: Path) -> None:
    with docker_registry(tmp_path, delete=False) as host, pusher() as push:
        ref = parse_reference(f"{host}/team/kept")
        push.put_blob(ref, DIGEST, len(DATA), chunks)
        body = manifest_of(DIGEST, len(DATA))
        push.put_manifest(ref, "one", body, OCI)
        assert not push.delete_manifest(ref, digest_of(body))
        assert push.get(ref, "manifests/one", OCI, "manifest") is not None


def test_tls_and_tokens(backend: str, tmp_path: Path) -> None:
    """Behind TLS the registry names itself without it, in the location of an upload."""
    authority = Authority(tmp_path)
    tokens = Tokens({"me": PASSWORD, "reader": PASSWORD}, {"reader": {"pull"}})
    with Front(backend, tls=authority.server("127.0.0.1"), tokens=tokens) as front:
        ref = parse_reference(f"{front.host}/team/tls")
        hosts = tmp_path / "certs.d" / front.host
        hosts.mkdir(parents=True)
        (hosts / "hosts.toml").write_text(f'server = "{front.url}"\nca = "{authority.ca}"\n')
        config = replace(login(tmp_path / "config.json", front.host), hosts_dir=str(tmp_path / "certs.d"))
        with contextlib.closing(Registry(config)) as registry:
            push = Pusher(registry)
            assert push.get(ref, "manifests/one", OCI, "manifest") is None
            push.put_blob(ref, DIGEST, len(DATA), chunks)
            body = manifest_of(DIGEST, len(DATA))
            push.put_manifest(ref, "one", body, OCI)
            assert tokens.scopes == ["repository:team/tls:pull,push"], "one token for all that"
            assert registry.resolve(f"{ref}:one").digest == digest_of(body)
            assert tokens.scopes[1:] == ["repository:team/tls:pull"], "readers are not shown more than they need"
            assert push.delete_manifest(ref, digest_of(body))
            assert tokens.scopes[2:] == ["repository:team/tls:delete"]


def test_who_may_not_push(go_backend: str, tmp_path: Path) -> None:
    tokens = Tokens({"me": PASSWORD}, {"me": {"pull"}})
    with Front(go_backend, tokens=tokens) as front:
        ref = parse_reference(f"{front.host}/team/denied")
        for config, words in (
            (login(tmp_path / "wrong.json", front.host, "wrong"), "password of 'me' is not accepted"),
            (login(tmp_path / "me.json", front.host), "shown were the credentials of 'me'"),
            (
                replace(CONFIG, docker_config=str(tmp_path / "none.json")),
                f"no credentials for it in {tmp_path}/none.json",
            ),
        ):
            with pusher(config) as push, pytest.raises(Denied) as caught:
                push.put_blob(ref, DIGEST, len(DATA), chunks)
            assert words in str(caught.value) and "\n" not in str(caught.value)
            assert PASSWORD not in str(caught.value)
        assert front.asked("PUT") == []


def test_a_token_of_less_than_was_asked_for(go_backend: str, tmp_path: Path) -> None:
    """A token is fetched anew where the one in hand turns out not to be enough."""
    tokens = Tokens({"me": PASSWORD}, {"me": {"pull"}})
    with Front(go_backend, tokens=tokens) as front, pusher(login(tmp_path / "me.json", front.host)) as push:
        ref = parse_reference(f"{front.host}/team/more")
        assert not push.has_blob(ref, DIGEST)
        tokens.rights["me"] = {"pull", "push"}
        push.put_blob(ref, DIGEST, len(DATA), chunks)
        assert tokens.scopes == ["repository:team/more:pull,push"] * 2


@pytest.mark.parametrize(
    ("challenged", "asked"),
    [
        ("", "repository:app:pull,push"),
        ("repository:app:pull", "repository:app:pull,push"),
        ("repository:app:push,pull", "repository:app:push,pull"),
        ("repository:app:*", "repository:app:*"),
        ("repository:other:pull", "repository:app:pull,push repository:other:pull"),
    ],
)
def test_what_a_token_is_asked_for(challenged: str, asked: str) -> None:
    """What the registry names, and never less than what is to be done."""
    scopes = []

    def gate(request: Request) -> Action:
        if request.path.startswith("/token"):
            scopes.extend(parse_qs(urlsplit(request.path).query)["scope"])
            return Status(200, {}, b'{"token": "t"}')
        if "Authorization" in request.headers:
            return Status(200)
        return Status(401, {"WWW-Authenticate": f'Bearer realm="{server.url}/token",scope="{challenged}"'})

    with RangeServer({}, gate) as server, pusher() as push:
        assert push.has_blob(parse_reference(f"{server.host}/app"), DIGEST)
    assert " ".join(scopes) == asked


def faults(*steps: tuple[str, str, Action]) -> Callable[[Request], Action | None]:
    """Each step waits for the first request of this method and part of the path, then the next step is up."""
    left = list(steps)

    def behaviour(request: Request) -> Action | None:
        if left and request.method == left[0][0] and left[0][1] in request.path:
            return left.pop(0)[2]
        return None

    return behaviour


@pytest.mark.parametrize(
    ("fault", "posts"),
    [
        (("POST", "uploads", Status(503)), 2),
        (("POST", "uploads", Reset(-1)), 2),
        (("PUT", "uploads", Status(500)), 2),
        (("PUT", "uploads", Reset(-1)), 2),
        (("PUT", "uploads", Lose()), 2),
        (("PUT", "uploads", Status(404)), 2),
        (("HEAD", "blobs", Status(502)), 1),
        (("PUT", "manifests", Status(500)), 1),
        (("PUT", "manifests", Lose()), 1),
    ],
)
def test_faults_that_pass(backend: str, fault: tuple[str, str, Action], posts: int) -> None:
    pauses: list[float] = []
    with Front(backend, faults(fault)) as front, pusher(pauses=pauses) as push:
        number = random.Random(str(fault)).randrange(10**9)
        data = DATA + str(number).encode()
        ref = parse_reference(f"{front.host}/team/faults")
        assert not push.has_blob(ref, digest_of(data))
        push.put_blob(ref, digest_of(data), len(data), lambda: chunks(data))
        push.put_manifest(ref, f"t{number}", manifest_of(digest_of(data), len(data)), OCI)
        assert push.has_blob(ref, digest_of(data))
        assert len(front.asked("POST")) == posts
        assert pauses in ([0.5], []), "a connection that was kept too long is no reason to wait"


def test_faults_that_stay(go_backend: str, caplog: pytest.LogCaptureFixture) -> None:
    pauses: list[float] = []
    caplog.set_level(logging.INFO)
    with Front(go_backend, lambda _: Status(503)) as front, pusher(pauses=pauses) as push:
        with pytest.raises(Transient, match="HTTP status 503"):
            push.put_blob(parse_reference(f"{front.host}/team/down"), DIGEST, len(DATA), chunks)
        assert pauses == [0.5, 1.0, 2.0, 4.0]
        levels = [record.levelno for record in caplog.records if "push.again" in record.getMessage()]
        assert levels == [logging.INFO] * 3 + [logging.WARNING]


def test_retry_after(go_backend: str) -> None:
    pauses: list[float] = []
    later = Status(429, {"Retry-After": "7"})
    with Front(go_backend, faults(("PUT", "uploads", later))) as front, pusher(pauses=pauses) as push:
        push.put_blob(parse_reference(f"{front.host}/team/later"), DIGEST, len(DATA), chunks)
        assert pauses == [7.0]
    much_later = Status(429, {"Retry-After": "3000"})
    with Front(go_backend, faults(("POST", "uploads", much_later))) as front, pusher() as push:
        with pytest.raises(Transient, match="429") as caught:
            push.put_blob(parse_reference(f"{front.host}/team/much-later"), DIGEST, len(DATA), chunks)
        assert caught.value.retry_after_s == 3000.0


class Hasty(socketserver.StreamRequestHandler):
    """A registry that refuses an upload after the first bytes, and hangs up on the rest."""

    puts = 0

    def handle(self) -> None:
        while line := self.rfile.readline():
            while self.rfile.readline().strip():
                pass
            if line.startswith(b"PUT"):
                Hasty.puts += 1
                self.wfile.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
                return
            self.wfile.write(b"HTTP/1.1 202 Accepted\r\nLocation: /up\r\nContent-Length: 0\r\n\r\n")


def test_a_refusal_before_all_is_sent() -> None:
    Hasty.puts = 0
    with socketserver.TCPServer(("127.0.0.1", 0), Hasty) as server, pusher() as push:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            ref = parse_reference(f"127.0.0.1:{server.server_address[1]}/app")
            with pytest.raises(InvalidArgument, match="HTTP status 413"):
                push.put_blob(ref, DIGEST, 64 << 20, lambda: itertools.repeat(bytes(1 << 20), 64))
        finally:
            server.shutdown()
            thread.join()
    assert Hasty.puts == 1


class Sink:
    """A registry of uploads only, whose locations are what the test says; notes what was sent where."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.put: list[str] = []

    def __call__(self, request: Request) -> Action:
        if request.method == "POST":
            return Status(202, {"Location": self.location} if self.location else {})
        self.put.append(request.path)
        return Status(201)


@pytest.mark.parametrize(
    ("location", "path"),
    [
        ("/up/1", f"/up/1?digest=sha256%3A{DIGEST[7:]}"),
        ("/up/1?state=a%3D&x=", f"/up/1?state=a%3D&x=&digest=sha256%3A{DIGEST[7:]}"),
        ("next", f"/v2/app/blobs/uploads/next?digest=sha256%3A{DIGEST[7:]}"),
    ],
)
def test_locations(go_backend: str, location: str, path: str) -> None:
    sink = Sink(location)
    with Front(go_backend, sink) as front, pusher() as push:
        push.put_blob(parse_reference(f"{front.host}/app"), DIGEST, len(DATA), chunks)
        assert sink.put == [path]
        sink.location = f"{front.url}/up/2"
        push.put_blob(parse_reference(f"{front.host}/app"), DIGEST, len(DATA), chunks)
        assert sink.put[1].startswith("/up/2?digest=")


def test_a_location_elsewhere_gets_no_credentials(go_backend: str, tmp_path: Path) -> None:
    sink = Sink("")
    tokens = Tokens({"me": PASSWORD})
    with Front(go_backend, sink) as other, Front(go_backend, sink, tokens=tokens) as front:
        sink.location = f"{other.url}/elsewhere?signed=1"
        with pusher(login(tmp_path / "me.json", front.host)) as push:
            push.put_blob(parse_reference(f"{front.host}/app"), DIGEST, len(DATA), chunks)
        assert other.asked() == ["PUT /elsewhere"]
        assert "Authorization" not in other.requests[0].headers
        assert "Authorization" in front.requests[-1].headers


@pytest.mark.parametrize("location", ["", "ftp://example/x", "http://["])
def test_a_location_that_is_none(go_backend: str, location: str) -> None:
    with (
        Front(go_backend, Sink(location)) as front,
        pusher() as push,
        pytest.raises(InvalidArgument, match="names no URL for the upload"),
    ):
        push.put_blob(parse_reference(f"{front.host}/app"), DIGEST, len(DATA), chunks)


def test_pushes_go_past_mirrors(go_backend: str, tmp_path: Path) -> None:
    ref = ImageRef("registry.example", "team/mirrored", None, None)
    with RangeServer({}) as mirror, Front(go_backend) as front, Front(go_backend) as staging:
        (tmp_path / ref.host).mkdir()
        hosts = tmp_path / ref.host / "hosts.toml"
        hosts.write_text(f'server = "{front.url}"\n[host."{mirror.url}"]\n')
        with pusher(replace(CONFIG, hosts_dir=str(tmp_path))) as push:
            push.put_blob(ref, DIGEST, len(DATA), chunks)
            assert push.has_blob(ref, DIGEST)
        assert mirror.requests == [] and len(front.asked("PUT")) == 1
        hosts.write_text(f'server = "{front.url}"\n[host."{staging.url}"]\ncapabilities = ["push"]\n')
        with pusher(replace(CONFIG, hosts_dir=str(tmp_path))) as push:
            push.put_blob(ref, DIGEST, len(DATA), chunks)
        assert len(front.asked("PUT")) == 1 and len(staging.asked("PUT")) == 1
        hosts.write_text(f'server = "{front.url}"\ncapabilities = ["pull"]\n')
        refused = pytest.raises(Precondition, match=r"hosts\.toml of registry\.example names no host")
        with pusher(replace(CONFIG, hosts_dir=str(tmp_path))) as push, refused:
            push.put_blob(ref, DIGEST, len(DATA), chunks)
