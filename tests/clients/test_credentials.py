"""Credentials that only crictl has, as the kubelet has those of `imagePullSecrets`: they reach our registry client.

crictl's image endpoint is our socket, its runtime endpoint containerd's. Nothing on the node but crictl's command line
holds a password, so whatever is read after the pull was fetched with what came by it.
"""

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES
from scripts.rig.namespace import inside_network
from scripts.rig.oci import Layout
from scripts.rig.snapshotcalls import SnapshotCalls
from tests.clients.cases import CASES, INCOMPLETE, Case
from tests.clients.conftest import Images
from tests.clients.node import Containerd, Node
from tests.clients.ready import ready_node
from tests.clients.test_clients import Pod
from tests.snapshotter.daemon import drop_caches
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status, TokenGate
from tests.snapshotter.test_registry_real import HTPASSWD, PASSWORD

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]  # the first time the clients are built

_READY = RECIPES["tiny"].ready
_RIGHT = b64encode(f"me:{PASSWORD}".encode()).decode()
_WRONG = b64encode(b"me:wr0ng-s3cret").decode()
_PORT = 5001
_TYPE = "application/vnd.oci.image.manifest.v1+json"


class PrivateTokens(TokenGate):
    """A registry that wants tokens, and gives them for a user and password only."""

    def __call__(self, request: Request) -> Action | None:
        if request.path.startswith("/token") and request.headers.get("Authorization") != f"Basic {_RIGHT}":
            return Status(401)
        return super().__call__(request)


@contextmanager
def _basic(node: Node, app: Layout) -> Iterator[str]:
    """Debian's registry with a password file."""
    (node.home / "htpasswd").write_text(HTPASSWD)
    config = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": f"{node.home}/private"}},
        "http": {"addr": f"127.0.0.1:{_PORT}"},
        "auth": {"htpasswd": {"realm": "private", "path": f"{node.home}/htpasswd"}},
    }
    (node.home / "private.json").write_text(json.dumps(config))
    node._spawn("private", ["docker-registry", "serve", f"{node.home}/private.json"])
    image = f"127.0.0.1:{_PORT}/app:1"
    copy = ["skopeo", "--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]
    push = [*copy, f"--dest-creds=me:{PASSWORD}", f"oci:{app.path}", f"docker://{image}"]

    def pushed() -> bool:
        try:
            node.run(*push)
        except RigError:
            return False
        return True

    _until(pushed)
    yield image


@contextmanager
def _tokens(node: Node, app: Layout) -> Iterator[str]:
    """A registry with a token server, whose tokens live 2 s."""
    blobs = {path.name: path.read_bytes() for path in (app.path / "blobs" / "sha256").iterdir()}
    manifest = app.manifest.removeprefix("sha256:")

    def manifests(request: Request) -> Action | None:
        if "/manifests/" not in request.path:
            return None
        return Status(200, {"Content-Type": _TYPE, "Docker-Content-Digest": app.manifest}, blobs[manifest])

    gate = PrivateTokens(manifests, expires_in=2)
    paths = {f"/v2/app/blobs/sha256:{name}": data for name, data in blobs.items()}
    server = inside_network(node._namespace.pid, lambda: RangeServer(paths, gate))
    with closing(server):
        gate.realm = f"{server.url}/token"
        yield f"{server.host}/app:1"


@contextmanager
def _proxied(case: Case, containerd: Containerd, images: Images) -> Iterator[Node]:
    """A node whose daemon passes the image service on, and fetches nothing that nobody reads."""
    with ready_node(case, containerd, images) as node:
        config = node.home / "b.toml"
        config.write_text(f"{config.read_text()}[cri]\nenabled = true\n[fetch]\nbackground = false\n")
        node.restart("bootseer")
        SnapshotCalls(node.home / "r" / "cri.sock").close()  # it is served, which is another matter than being there
        yield node


@pytest.fixture(params=["1.6", "2.4"])
def node(request: pytest.FixtureRequest, containerds: Mapping[str, Containerd], images: Images) -> Iterator[Node]:
    """A node set up as the documents say."""
    version: str = request.param
    case = next(case for case in CASES if case.client == "crictl" and case.containerd == version)
    with _proxied(case, containerds[version], images) as node:
        yield node


@pytest.mark.parametrize("registry", [_basic, _tokens])
def test_credentials_that_come_with_a_pull(
    node: Node, images: Images, registry: Callable[[Node, Layout], Iterator[str]]
) -> None:
    ours = ("crictl", "--image-endpoint", f"unix://{node.home}/r/cri.sock")
    with registry(node, images.app) as image:  # type: ignore[attr-defined]  # both are context managers
        refusals = []
        for crictl in (("crictl",), ours):
            with pytest.raises(RigError) as refused:
                node.run(*crictl, "pull", "--auth", _WRONG, image)
            refusals.append(_message(str(refused.value)))
            with pytest.raises(RigError):
                node.run(*crictl, "pull", image)
        assert refusals[0] == refusals[1], "not the same error as without us"
        assert "401" in refusals[0] or "uthoriz" in refusals[0]

        pod = Pod(node)
        way = ("--creds", f"me:{PASSWORD}") if registry is _basic else ("--auth", _RIGHT)
        node.run(*ours, "pull", *way, image)
        assert not set(images.app.layers) & node.blobs()
        assert all(row["state"] == "partial" for row in node.status()["layers"] if row["image"] == image)
        for worker in ("fetch", "service", "fetch"):  # each has them from the other
            node.kill(worker)
        drop_caches()
        container = pod.start(image=image)
        _until(lambda: '"CONTAINER_EXITED"' in node.run("crictl", "inspect", container))
        assert _READY in node.run("crictl", "logs", container)
        rows = [row for row in node.status()["layers"] if row["image"] == image]
        assert len(rows) == len(images.app.layers) and sum(row["demand_bytes"] for row in rows)
        pod.remove()
    said = (node.home / "bootseer.log").read_text()
    for secret in (PASSWORD, _RIGHT, _WRONG, "wr0ng-s3cret"):
        assert secret not in said
        assert not [path for path in _files(node.home / "b", node.home / "r") if secret.encode() in path.read_bytes()]


def test_an_image_without_labels_is_that_of_the_pull(containerds: Mapping[str, Containerd], images: Images) -> None:
    """containerd notes the registry without its port, and nothing else names it."""
    case = next(case for case in INCOMPLETE if case.client == "crictl" and case.containerd == "1.6")
    with _proxied(case, containerds["1.6"], images) as node, _basic(node, images.app) as image:
        pull = ("pull", "--creds", f"me:{PASSWORD}", image)
        node.run("crictl", "--image-endpoint", f"unix://{node.home}/r/cri.sock", *pull)
        assert [row["image"] for row in node.status()["layers"]] == [image] * len(images.app.layers)
        assert node.status()["prepares"]["lazy"] == len(images.app.layers)
        assert not set(images.app.layers) & node.blobs()
        node.run("crictl", "rmi", image)


def _message(text: str) -> str:
    """What crictl printed of an error, without the time that its log line begins with."""
    line = next(line for line in text.splitlines() if "rpc error" in line)
    return line[line.index("rpc error") :]


def _files(*directories: Path) -> list[Path]:
    return [path for directory in directories for path in directory.rglob("*") if path.is_file()]


def _until(holds: Callable[[], bool], limit_s: float = 30) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)
