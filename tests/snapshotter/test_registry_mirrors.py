"""Mirrors: who is asked, in which order, for what; and that a lone registry costs nothing more."""

import contextlib
import hashlib
import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, NotFound, SnapshotterError, Transient
from snapshotter.registry import Registry
from snapshotter.registry.endpoint import Endpoint
from snapshotter.registry.standing import Standing
from tests.snapshotter.rangeserver import RangeServer, Status, TokenGate, Truncate, in_order

DATA = bytes(range(256)) * 40
DIGEST = "sha256:" + hashlib.sha256(DATA).hexdigest()
OTHER = "sha256:" + "ab" * 32
BLOB, OTHER_BLOB = f"/v2/app/blobs/{DIGEST}", f"/v2/app/blobs/{OTHER}"
LAYER = {"mediaType": "m", "digest": DIGEST, "size": len(DATA)}
MANIFEST = json.dumps({"schemaVersion": 2, "config": LAYER, "layers": [LAYER]}).encode()
MANIFEST_DIGEST = "sha256:" + hashlib.sha256(MANIFEST).hexdigest()
IMAGE = {BLOB: DATA, "/v2/app/manifests/1": MANIFEST, f"/v2/app/manifests/{MANIFEST_DIGEST}": MANIFEST}
CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=2.0, docker_config="/nonexistent")


@dataclass
class Site:
    """Two mirrors and the server of the registry r.test, and a client that is told of them."""

    first: RangeServer
    second: RangeServer
    server: RangeServer
    registry: Registry
    hosts: Path

    def configure(self, *options: str) -> None:
        """hosts.toml anew, with these lines for the first and the second mirror."""
        mirrors = [
            f'[host."{mirror.url}"]\n{lines}\n'
            for mirror, lines in zip((self.first, self.second), (*options, "", ""), strict=False)
        ]
        self.hosts.write_text(f'server = "{self.server.url}"\n{"".join(mirrors)}')
        self.registry._hosts._known.clear()

    def read(self, digest: str = DIGEST) -> bytes:
        return b"".join(self.registry.blob("r.test/app:1", digest).stream(0, None))

    def counts(self) -> list[int]:
        """Requests so far at each."""
        return [len(one.requests) for one in (self.first, self.second, self.server)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    hosts = tmp_path / "r.test" / "hosts.toml"
    hosts.parent.mkdir()
    with contextlib.ExitStack() as closing:
        servers = [closing.enter_context(RangeServer(IMAGE)) for _ in range(3)]
        registry = Registry(replace(CONFIG, hosts_dir=str(tmp_path)))
        closing.callback(registry.close)
        made = Site(*servers, registry, hosts)
        made.configure()
        yield made


def test_the_first_mirror_serves_and_is_told_the_registry(site: Site) -> None:
    assert site.registry.resolve("r.test/app:1").digest == MANIFEST_DIGEST
    assert site.read() == DATA
    assert [r.path for r in site.first.requests] == ["/v2/app/manifests/1?ns=r.test", f"{BLOB}?ns=r.test"]
    assert site.counts() == [2, 0, 0] and site.first.connections == 1


@pytest.mark.parametrize("failure", [Status(404), Status(503), Status(429), Status(401), Status(400), Truncate(-1)])
def test_a_failing_mirror_is_followed_by_the_next(site: Site, failure: Status | Truncate) -> None:
    site.first.behaviour = site.second.behaviour = lambda request: failure
    assert site.registry.resolve("r.test/app:1").digest == MANIFEST_DIGEST
    assert site.counts() == [1, 1, 1]
    assert site.read() == DATA
    assert site.counts() == [1, 1, 2], "who served the image is asked first"
    assert site.server.connections == 1


def test_a_mirror_with_other_bytes_is_followed_by_the_next(site: Site) -> None:
    """Whoever decodes them says so; a redirect is not believed any longer either."""
    site.first.blobs[BLOB] = DATA[::-1]
    blob = site.registry.blob("r.test/app:1", DIGEST)
    blob.refuted("nothing was asked yet: nobody to blame")
    assert b"".join(blob.stream(0, None)) == DATA[::-1]
    blob.refuted("blocks 0 to 10 do not match their digest")
    assert b"".join(blob.stream(0, None)) == DATA
    assert site.counts() == [1, 1, 0]


def test_a_mirror_gets_its_turn_again(site: Site) -> None:
    clock = [0.0]
    site.registry._standing = Standing(lambda: clock[0])
    site.first.behaviour = in_order([Status(503)])
    assert site.read() == DATA and site.read() == DATA
    assert site.counts() == [1, 2, 0]
    clock[0] = 61.0
    assert site.read() == DATA
    assert site.counts() == [2, 2, 0]


def test_a_mirror_that_lacks_one_image_is_asked_for_others(site: Site) -> None:
    site.second.blobs[OTHER_BLOB] = site.first.blobs["/v2/other/manifests/1"] = MANIFEST
    assert site.read(OTHER) == MANIFEST
    assert site.counts() == [1, 1, 0]
    assert site.read() == DATA
    assert site.counts() == [1, 2, 0]
    site.registry.resolve("r.test/other:1")
    assert site.counts() == [2, 2, 0]


def test_a_mirror_of_several_registries(site: Site) -> None:
    """That it lacks an image of one registry says nothing of the same name at another."""
    site.first.behaviour = lambda request: Status(404) if request.path.endswith("ns=r.test") else None
    (site.hosts.parent.parent / "_default").mkdir()
    (site.hosts.parent.parent / "_default" / "hosts.toml").write_text(site.hosts.read_text())
    assert site.read() == DATA
    assert b"".join(site.registry.blob("other.test/app:1", DIGEST).stream(0, None)) == DATA
    assert site.counts() == [2, 1, 0]


def test_a_mirror_that_breaks_off_is_left_for_a_while(site: Site) -> None:
    site.first.behaviour = lambda request: Truncate(100)
    with pytest.raises(Transient, match="short body"):
        site.read()
    assert site.read() == DATA, "the caller's next try"
    assert site.counts() == [1, 1, 0]


def test_a_mirror_with_another_manifest_is_left_for_a_while(site: Site) -> None:
    site.first.blobs[f"/v2/app/manifests/{MANIFEST_DIGEST}"] = MANIFEST + b" "
    with pytest.raises(Transient, match=f"at {site.first.host}: what came has the digest"):
        site.registry.resolve(f"r.test/app@{MANIFEST_DIGEST}")
    assert site.registry.resolve(f"r.test/app@{MANIFEST_DIGEST}").digest == MANIFEST_DIGEST
    assert site.counts() == [1, 1, 0]


def test_capabilities(site: Site) -> None:
    site.configure('capabilities = ["pull"]', 'capabilities = ["push", "resolve"]')
    assert site.registry.resolve("r.test/app:1").digest == MANIFEST_DIGEST
    assert site.counts() == [0, 0, 1], "neither may say what a tag means"
    site.registry.resolve(f"r.test/app@{MANIFEST_DIGEST}")
    assert site.read() == DATA
    assert site.counts() == [2, 0, 1]
    site.hosts.write_text(f'server = "{site.server.url}"\ncapabilities = ["pull"]\n')
    site.registry._hosts._known.clear()
    with pytest.raises(NotFound, match="no host is configured that may be asked for a tag"):
        site.registry.resolve("r.test/app:1")


def test_unreachable_mirror_costs_its_dial_timeout_once(site: Site) -> None:
    with socket.socket() as full:  # a queue of one that is full: further connections are not answered
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        with contextlib.ExitStack() as closing:
            for _ in range(2):
                filler = closing.enter_context(socket.socket())
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
            site.hosts.write_text(
                f'server = "{site.server.url}"\n[host."http://127.0.0.1:{port}"]\ndial_timeout = "300ms"\n'
            )
            started = time.monotonic()
            assert site.read() == DATA
            assert 0.25 < time.monotonic() - started < 1.5
            started = time.monotonic()
            assert site.read() == DATA
            assert time.monotonic() - started < 0.25


@pytest.mark.parametrize(
    ("statuses", "kind", "words"),
    [
        ((404, 404, 404), NotFound, "status 404"),
        ((404, 404, 503), Transient, "status 503"),
        ((503, 404, 404), Transient, "503"),
        ((404, 404, 403), Denied, "access denied"),
        ((403, 400, 400), InvalidArgument, "status 400"),
    ],
)
def test_when_all_fail(site: Site, statuses: Sequence[int], kind: type[SnapshotterError], words: str) -> None:
    for one, status in zip((site.first, site.second, site.server), statuses, strict=True):
        one.behaviour = lambda request, status=status: Status(status)  # type: ignore[misc]  # a default
    with pytest.raises(kind, match=words) as caught:
        site.read()
    assert str(caught.value).startswith(f"layer {DIGEST}") and site.server.host in str(caught.value).split(";")[0]
    assert all(one.host in str(caught.value) for one in (site.first, site.second))
    site.server.behaviour = None
    assert site.read() == DATA, "all are asked again, however lately they failed"


def test_a_refused_head_says_nothing_against_a_mirror(site: Site) -> None:
    site.first.behaviour = lambda request: Status(405) if request.method == "HEAD" else None
    blob = site.registry.blob("r.test/app:1", DIGEST)
    assert blob.size() == len(DATA)
    assert site.read() == DATA
    assert [r.method for r in site.first.requests] == ["HEAD", "GET"] and site.counts() == [2, 1, 0]


def test_each_mirror_has_its_own_token_and_headers(site: Site) -> None:
    gates = [TokenGate(), TokenGate()]
    for mirror, gate in zip((site.first, site.second), gates, strict=True):
        gate.realm = f"{mirror.url}/token"
        mirror.behaviour = gate
    gates[0].deny_all = True
    site.configure('header.x-one = "1"\nheader.Authorization = "Basic Zml4ZWQ="', 'header.X-Two = ["2", "3"]')
    assert site.read() == DATA
    asked = [
        (r.path.split("?")[0], r.headers.get("x-one"), r.headers["Authorization"]) for r in site.first.requests[::2]
    ]
    assert asked == [(BLOB, "1", "Basic Zml4ZWQ="), (BLOB, "1", "Bearer t1")]
    token = site.first.requests[1]
    assert token.headers.get("x-one") == "1" and "Authorization" not in token.headers
    assert all("x-one" not in r.headers and r.headers["X-Two"] == "2, 3" for r in site.second.requests)
    assert gates[1].issued == 1 and site.counts() == [3, 3, 0]


def test_override_path(site: Site) -> None:
    site.first.blobs = {f"/odd/app/blobs/{DIGEST}": DATA}
    site.hosts.write_text(f'server = "{site.server.url}"\n[host."{site.first.url}/odd/"]\noverride_path = true\n')
    assert site.read() == DATA
    assert site.counts() == [1, 0, 0]


def test_a_lone_anonymous_registry_gets_one_request_each(tmp_path: Path) -> None:
    """No ping, no HEAD, no look at a token server, with the files of the operator absent or present."""
    (tmp_path / "_default").mkdir()
    (tmp_path / "config.json").write_text('{"auths": {"other.example": {"auth": "dTpw"}}}')
    with RangeServer(IMAGE) as server:
        for config in (
            replace(CONFIG, hosts_dir=""),
            replace(CONFIG, hosts_dir=str(tmp_path), docker_config=str(tmp_path / "config.json")),
        ):
            server.requests.clear()
            with contextlib.closing(Registry(config)) as registry:
                assert registry.resolve(f"{server.host}/app:1").digest == MANIFEST_DIGEST
                blob = registry.blob(f"{server.host}/app:1", DIGEST)
                assert b"".join(blob.stream(0, 10)) == DATA[:10] and b"".join(blob.stream(10, None)) == DATA[10:]
            assert [(r.method, r.path) for r in server.requests] == [
                ("GET", "/v2/app/manifests/1"),
                ("GET", BLOB),
                ("GET", BLOB),
            ]
            assert not any("Authorization" in r.headers for r in server.requests)


def test_standing() -> None:
    clock = [0.0]
    standing = Standing(lambda: clock[0])
    a, b, c = endpoints = [Endpoint(f"https://{name}/v2") for name in "abc"]
    standing.failed(a, "app", NotFound(""))
    assert standing.order(endpoints, "app") == [b, c, a] and standing.order(endpoints, "other") == endpoints
    standing.failed(b, "app", Transient("", 100.0))
    assert standing.order(endpoints, "app") == [c, a, b] and standing.order(endpoints, "other") == [a, c, b]
    clock[0] = 99.0
    assert standing.order(endpoints, "other") == [a, c, b], "as long as it asked for"
    clock[0] = 301.0
    assert standing.order(endpoints, "app") == endpoints
    standing.failed(c, "app", Denied(""))
    assert repr(standing) == "<Standing 1 failures remembered>"
