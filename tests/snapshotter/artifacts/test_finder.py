"""Finding artifacts: what a look-up costs, what it takes for an answer, and that nothing goes wrong with it."""

import contextlib
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from snapshotter.artifacts.finder import Finder, Found
from snapshotter.artifacts.manifest import MANIFEST_TYPE, digest_of, encode, tags
from snapshotter.artifacts.model import Artifact, Kind
from snapshotter.artifacts.publisher import publish
from snapshotter.artifacts.referrers import REFERRERS_TYPE, fallback_tag, referrer_of
from snapshotter.config import RegistryConfig
from snapshotter.errors import Transient
from snapshotter.registry import Registry, parse_reference
from snapshotter.registry.push import Pusher
from tests.registries import Front, go_registry
from tests.snapshotter.artifacts.making import KEY, SUBJECT, digest, hot_set, layer_index, opener
from tests.snapshotter.rangeserver import Action, Hold, RangeServer, Request, Reset, Status, TokenGate, in_order

CONFIG = RegistryConfig(
    hosts_dir="", docker_config="/nonexistent/config.json", connect_timeout_s=20.0, read_timeout_s=20.0
)
HEX = KEY.removeprefix("sha256:")
SET = hot_set()[0]
BODY = encode(SET)
DIGEST = digest_of(BODY)
BY_KEY = f"/v2/app/manifests/{tags(Kind.HOT_SET, HEX, 'default')}"
FALLBACK = f"/v2/app/manifests/{fallback_tag(SUBJECT.digest)}"
REFERRERS = f"/v2/app/referrers/{SUBJECT.digest}"


@contextlib.contextmanager
def finder(
    clock: Callable[[], float] | None = None, timeout_s: float = 60.0, absent_s: float = 60.0
) -> Iterator[Finder]:
    with contextlib.closing(Registry(CONFIG)) as registry:
        yield Finder(registry, clock or (lambda: 0.0), timeout_s=timeout_s, absent_s=absent_s)


def find(made: Finder, server: RangeServer | Front, subject: bool = False, workload: str = "default") -> Found | None:
    ref = parse_reference(f"{server.host}/app:1")
    return made.find(ref, KEY, Kind.HOT_SET, workload, SUBJECT.digest if subject else None)


def index_of(*entries: object) -> bytes:
    return json.dumps({"schemaVersion": 2, "mediaType": REFERRERS_TYPE, "manifests": entries}).encode()


def entry_of(artifact: Artifact) -> dict[str, object]:
    body = encode(artifact)
    return referrer_of(artifact, body, digest_of(body))


def by_digest(*artifacts: Artifact) -> dict[str, bytes]:
    """The paths of the manifests by their digests."""
    return {f"/v2/app/manifests/{digest_of(encode(one))}": encode(one) for one in artifacts}


def asked(server: RangeServer) -> list[str]:
    return [urlsplit(request.path).path for request in server.requests]


def test_one_request_by_the_key() -> None:
    with RangeServer({BY_KEY: BODY}) as server, finder() as made:
        found = find(made, server, subject=True)
        assert found is not None
        assert (found.artifact, found.digest) == (SET, DIGEST)
        assert str(found.repository) == f"{server.host}/app"
        assert found.artifact.blobs[0].data, "the head came with it"
        assert asked(server) == [BY_KEY]
        assert server.requests[0].headers["Accept"] == MANIFEST_TYPE


@pytest.mark.parametrize(
    "wrong",
    [
        b"<html>log in</html>",
        b"{}",
        b'{"schemaVersion": 2, "config": {}, "layers": []}',
        encode(hot_set("other")[0]),
        encode(hot_set(key=digest("x"))[0]),
        encode(layer_index()[0]),
        b" " * (5 << 20),
    ],
)
def test_what_is_none_of_ours_is_none(wrong: bytes) -> None:
    with RangeServer({BY_KEY: wrong}) as server, finder() as made:
        assert find(made, server) is None and asked(server) == [BY_KEY]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 410, 429, 500, 503])
def test_a_status_is_none(status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "snapshotter.artifacts")
    with RangeServer({}, lambda _: Status(status, {}, b"no\n")) as server, finder() as made:
        assert find(made, server, subject=True) is None
        assert made.list(parse_reference(f"{server.host}/app"), KEY, SUBJECT.digest) == []
        said = [record.getMessage() for record in caplog.records if record.name == "snapshotter.artifacts.finder"]
        assert len(said) == (0 if status in (404, 410) else 1) and all(str(status) in line for line in said)


@pytest.mark.parametrize("status", [200, 401, 403])
def test_a_redirect_to_a_login_is_none(status: int, caplog: pytest.LogCaptureFixture) -> None:
    page = Status(status, {"Content-Type": "text/html; charset=utf-8"}, b"<!doctype html><title>Log in</title>")

    def login(request: Request) -> Action:
        return page if request.path.startswith("/login") else Status(302, {"Location": f"/login?from={request.number}"})

    with RangeServer({}, login) as server, finder() as made:
        assert find(made, server, subject=True) is None
        assert find(made, server, subject=True) is None
        assert len([one for one in caplog.records if "lookup.refused" in one.getMessage()]) == 1


def test_trouble_is_said_again_after_it_was_over(caplog: pytest.LogCaptureFixture) -> None:
    broken = [True]
    now = [0.0]
    behaviour = lambda _: Status(403) if broken[0] else None  # noqa: E731  # one line of a fake
    with RangeServer({BY_KEY: BODY}, behaviour) as server, finder(lambda: now[0]) as made:
        for state in (True, True, False, True):
            broken[0] = state
            now[0] += 100.0
            assert (find(made, server) is None) == state
    assert len([one for one in caplog.records if "lookup.refused" in one.getMessage()]) == 2


def test_resets_and_dead_hosts_are_none() -> None:
    with RangeServer({BY_KEY: BODY}, lambda _: Reset(-1)) as server, finder() as made:
        assert find(made, server, subject=True) is None
    with finder() as made:
        assert made.find(parse_reference(f"{server.host}/app"), KEY, Kind.HOT_SET, "default") is None


@pytest.mark.parametrize("path", ["/tags/", BY_KEY, "/referrers/", f"/{DIGEST}"])
def test_who_is_strict_is_told_what_could_not_be_asked(path: str) -> None:
    paths = {BY_KEY: BODY, REFERRERS: index_of(entry_of(SET)), **by_digest(SET)}
    paths["/v2/app/tags/list"] = json.dumps({"tags": [BY_KEY.rpartition("/")[2]]}).encode()
    answer = [Status(503)]

    def behaviour(request: Request) -> Action | None:
        if path == f"/{DIGEST}" and request.path == BY_KEY:
            return Status(404)
        return answer[0] if path in request.path else None

    with RangeServer(paths, behaviour) as server, contextlib.closing(Registry(CONFIG)) as registry:
        made = Finder(registry, strict=True)
        with pytest.raises(Transient, match="HTTP status 503"):
            made.list(parse_reference(f"{server.host}/app"), KEY, SUBJECT.digest)
        answer[0] = Status(403)
        found = made.list(parse_reference(f"{server.host}/app"), KEY, SUBJECT.digest)
        assert [one.digest for one in found] == ([] if path == f"/{DIGEST}" else [DIGEST])


def test_a_host_in_trouble_is_left_alone_for_a_while() -> None:
    now = [0.0]
    broken = Status(503, {"Retry-After": "30"})
    with RangeServer({BY_KEY: BODY}, in_order([broken])) as server, finder(lambda: now[0], absent_s=0.0) as made:
        for now[0], workload in ((0.0, "default"), (1.0, "other"), (29.0, "default")):
            assert find(made, server, workload=workload) is None
        assert asked(server) == [BY_KEY]
        now[0] = 31.0
        assert find(made, server) is not None


def test_a_mirror_without_artifacts_is_not_blamed(tmp_path: Path) -> None:
    """It may have all layers, and is still asked first for them."""
    with RangeServer({}) as mirror, RangeServer({BY_KEY: BODY}) as origin:
        (tmp_path / "registry.example").mkdir()
        text = f'server = "{origin.url}"\n[host."{mirror.url}"]\n'
        (tmp_path / "registry.example" / "hosts.toml").write_text(text)
        with contextlib.closing(Registry(replace(CONFIG, hosts_dir=str(tmp_path)))) as registry:
            ref = parse_reference("registry.example/app")
            assert Finder(registry).find(ref, KEY, Kind.HOT_SET, "default") is not None
            assert (asked(mirror), asked(origin)) == ([BY_KEY], [BY_KEY])
            mirror.blobs[f"/v2/app/blobs/{DIGEST}"] = BODY
            assert b"".join(registry.blob(str(ref), DIGEST).stream(0, None)) == BODY
            assert len(mirror.requests) == 2 and len(origin.requests) == 1


# --- referrers


def test_by_the_referrers_api() -> None:
    other, old = hot_set("other")[0], hot_set(seed="old", created=1_700_000_000)[0]
    new = hot_set(seed="new", created=1_800_000_000)[0]
    strange = {"mediaType": MANIFEST_TYPE, "digest": "sha512:1", "size": 1, "artifactType": SET.kind.value}
    entries = [entry_of(one) for one in (new, other, old, layer_index()[0])]
    paths = {REFERRERS: index_of(7, {}, strange, *entries), **by_digest(new, other, old)}
    with RangeServer(paths) as server, finder() as made:
        found = find(made, server, subject=True)
        assert found is not None and found.artifact == new
        assert asked(server) == [BY_KEY, REFERRERS, f"/v2/app/manifests/{found.digest}"]
        assert parse_qs(urlsplit(server.requests[1].path).query) == {"artifactType": [Kind.HOT_SET.value]}
        found = find(made, server, subject=True, workload="other")
        assert found is not None and found.artifact == other
        assert asked(server).count(REFERRERS) == 1, "one list for all workloads"


def test_entries_without_annotations_are_looked_at() -> None:
    other = hot_set("other")[0]
    bare = [{**entry_of(one), "annotations": None} for one in (other, SET)]
    with RangeServer({REFERRERS: index_of(*bare), **by_digest(other, SET)}) as server, finder() as made:
        found = find(made, server, subject=True)
        assert found is not None and found.artifact == SET


def test_a_manifest_that_is_not_the_one_asked_for() -> None:
    lie = {f"/v2/app/manifests/{DIGEST}": encode(replace(SET, created=5))}
    header = {"Docker-Content-Digest": DIGEST, "Content-Type": MANIFEST_TYPE}

    def behaviour(request: Request) -> Action | None:
        return Status(200, header, lie[request.path]) if request.path in lie else None

    with RangeServer({REFERRERS: index_of(entry_of(SET))}, behaviour) as server, finder() as made:
        assert find(made, server, subject=True) is None
        assert asked(server)[-1] == f"/v2/app/manifests/{DIGEST}"


def test_the_fallback_tag_and_a_host_that_is_remembered() -> None:
    now = [0.0]
    paths = {FALLBACK: index_of(entry_of(SET)), **by_digest(SET)}
    with RangeServer(paths) as server, finder(lambda: now[0]) as made:
        found = find(made, server, subject=True)
        assert found is not None and found.artifact == SET
        assert asked(server) == [BY_KEY, REFERRERS, FALLBACK, f"/v2/app/manifests/{DIGEST}"]
        now[0] += 100.0
        find(made, server, subject=True)
        assert asked(server).count(REFERRERS) == 1
        now[0] += 3600.0
        find(made, server, subject=True)
        assert asked(server).count(REFERRERS) == 2, "the host may have been renewed"


@pytest.mark.parametrize(
    "answer",
    [
        Status(404, {"Content-Type": "text/plain"}, b"404 page not found"),
        Status(405),
        Status(400),
        Status(200, {"Content-Type": "text/html"}, b"<html>"),
        Status(200, {}, b"[]"),
        Status(200, {}, b'{"manifests": 7}'),
    ],
)
def test_what_means_no_referrers_api(answer: Status) -> None:
    paths = {FALLBACK: index_of(entry_of(SET)), **by_digest(SET)}
    behaviour = lambda request: answer if "/referrers/" in request.path else None  # noqa: E731  # one line of a fake
    with RangeServer(paths, behaviour) as server, finder() as made:
        found = find(made, server, subject=True)
        assert found is not None and found.artifact == SET


def test_a_repository_that_is_not_there_says_nothing_of_its_host() -> None:
    unknown = Status(404, {}, b'{"errors": [{"code": "NAME_UNKNOWN"}]}')
    behaviour = lambda request: unknown if "/app/" in request.path else None  # noqa: E731  # one line of a fake
    paths = {REFERRERS.replace("app", "there"): index_of(entry_of(SET))}
    paths[f"/v2/there/manifests/{DIGEST}"] = BODY
    with RangeServer(paths, behaviour) as server, finder() as made:
        assert find(made, server, subject=True) is None
        ref = parse_reference(f"{server.host}/there")
        assert made.find(ref, KEY, Kind.HOT_SET, "default", SUBJECT.digest) is not None


@pytest.mark.parametrize(
    ("link", "more"),
    [
        ('<{path}?last=1>; rel="next"', True),
        ("<{url}{path}?last=1>; rel=next", True),
        ('<x>; rel="prev", <{path}?last=1>; rel="next"', True),
        ('<https://elsewhere.example{path}?last=1>; rel="next"', False),
        ('<http://[>; rel="next"', False),
        ('</v2/other/referrers/x>; rel="next"', False),
        ("nonsense", False),
    ],
)
def test_pages(link: str, more: bool) -> None:
    def pages(request: Request) -> Action | None:
        if "/referrers/" not in request.path:
            return None
        if "last=1" in request.path:
            return Status(200, {}, index_of(entry_of(SET)))
        return Status(200, {"Link": link.format(url=server.url, path=REFERRERS)}, index_of())

    with RangeServer(by_digest(SET), pages) as server, finder() as made:
        assert (find(made, server, subject=True) is not None) == more


def test_pages_without_an_end() -> None:
    def pages(request: Request) -> Action | None:
        number = request.number
        return Status(200, {"Link": f"<{REFERRERS}?last={number}>; rel=next"}, index_of()) if number else None

    with RangeServer({}, pages) as server, finder() as made:
        assert find(made, server, subject=True) is None
        assert asked(server).count(REFERRERS) == 16


@pytest.mark.system
@pytest.mark.parametrize("tags_work", [True, False])
def test_all_of_an_image_at_a_real_registry(tags_work: bool) -> None:
    """More than a page of referrers; and, where tags cannot be asked for, these alone."""
    made = [hot_set(f"w{number}") for number in range(7)] + [layer_index(), hot_set("w1", key=digest("x"))]

    def no_tags(request: Request) -> Action | None:
        tagged = "/tags/" in request.path or "/manifests/sha256-" in request.path
        return Status(404) if tagged and not tags_work else None

    with go_registry(announce=True, page=2) as host, contextlib.closing(Registry(CONFIG)) as registry:
        for artifact, blobs in made:
            publish(Pusher(registry), parse_reference(f"{host}/app"), artifact, opener(blobs))
        with Front(host, no_tags) as front:
            ref = parse_reference(f"{front.host}/app")
            listed = Finder(registry).list(ref, KEY, SUBJECT.digest)
            assert [one.artifact for one in listed] == [made[7][0], *(artifact for artifact, _ in made[:7])]
            found = find(Finder(registry), front, subject=True, workload="w5")
            assert found is not None and found.artifact == made[5][0]
            assert (len(Finder(registry).list(ref, KEY)) == 8) == tags_work


# --- how long it takes


def test_who_asks_the_same_shares_one_request() -> None:
    gate = threading.Event()
    with RangeServer({BY_KEY: BODY}, lambda _: Hold(-1, gate)) as server, finder() as made:
        with ThreadPoolExecutor(30) as pool:
            waiting = [pool.submit(find, made, server) for _ in range(30)]
            while not server.requests:
                threading.Event().wait(0.005)
            gate.set()
            assert {one.result().digest for one in waiting if one.result()} == {DIGEST}  # type: ignore[union-attr]
        assert all(find(made, server) is not None for _ in range(3))
        assert asked(server) == [BY_KEY]


def test_answers_are_remembered_for_a_while() -> None:
    now = [0.0]
    with RangeServer({}) as server, finder(lambda: now[0], absent_s=60.0) as made:
        for now[0], requests in ((0.0, 1), (59.0, 1), (61.0, 2), (100.0, 2), (125.0, 3)):
            assert find(made, server) is None
            assert len(server.requests) == requests
        server.blobs[BY_KEY] = BODY
        now[0] = 200.0
        assert find(made, server) is not None


def test_the_wait_is_bounded_and_nobody_waits_again_for_that_host() -> None:
    gate = threading.Event()
    with RangeServer({BY_KEY: BODY}, lambda _: Hold(-1, gate)) as server:
        with finder(timeout_s=0.05) as made:
            assert find(made, server) is None
            asked_then = len(server.requests)
            for number in range(30):
                assert find(made, server, workload=f"w{number}") is None
            assert len(server.requests) == max(asked_then, 1), "nor is it asked anything else meanwhile"
            gate.set()
            while find(made, server) is None:
                threading.Event().wait(0.005)
        assert asked(server) == [BY_KEY], "what came late was kept"


def test_a_host_that_wants_tokens() -> None:
    gate = TokenGate()
    with RangeServer({BY_KEY: BODY}, gate) as server, finder() as made:
        gate.realm = f"{server.url}/token"
        assert find(made, server) is not None
        assert gate.scopes == ["repository:app:pull"]
