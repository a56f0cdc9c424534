"""The same hosts.toml given to a running containerd and to us: both ask the same hosts for the same things.

What counts is the order of hosts, the path and query, and the configured header, for a tag and for a blob; containerd
asks for more (HEADs, manifests by digest), which is left out. So is what containerd 1.6 does not do as 2.x does: https
before http, and files without a [host]. The containerd is the one on the PATH.
"""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import SnapshotterError
from snapshotter.registry import Registry
from tests.snapshotter.certificates import Authority
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status

pytestmark = pytest.mark.system

KIND = "application/vnd.oci.image."


def _digest(body: bytes) -> str:
    return f"sha256:{hashlib.sha256(body).hexdigest()}"


class Image:
    """An image that containerd has not got yet: it never fetches the same bytes twice."""

    def __init__(self, serial: int) -> None:
        rootfs = {"type": "layers", "diff_ids": []}
        config = json.dumps({"architecture": "amd64", "os": "linux", "rootfs": rootfs, "serial": serial}).encode()
        self.layer = f"layer {serial}, which nobody unpacks".encode()
        self.manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": KIND + "manifest.v1+json",
                "config": _descriptor(config, "config.v1+json"),
                "layers": [_descriptor(self.layer, "layer.v1.tar")],
            }
        ).encode()
        self.bodies = {"1": self.manifest, **{_digest(body): body for body in (self.manifest, config, self.layer)}}


def _descriptor(body: bytes, kind: str) -> dict[str, object]:
    return {"mediaType": KIND + kind, "digest": _digest(body), "size": len(body)}


Asked = list[tuple[str, str, str | None]]
"""(server, path with query, configured header), in order, each once."""


class Server:
    """A registry, or a mirror, that has the image at any path unless it `lacks` it."""

    def __init__(self, name: str, closing: contextlib.ExitStack, authority: Authority | None = None) -> None:
        self.name = name
        self.image = Image(0)
        self.lacks: Callable[[Request], bool] = lambda request: False
        tls = authority.server("127.0.0.1", ask_client=name == "client") if authority else None
        self.http = closing.enter_context(RangeServer({}, self._answer, tls))

    def _answer(self, request: Request) -> Action | None:
        body = self.image.bodies.get(request.path.partition("?")[0].rpartition("/")[2])
        if body is None or self.lacks(request):
            return Status(404)
        kind = KIND + "manifest.v1+json" if body is self.image.manifest else "application/octet-stream"
        return Status(200, {"Content-Type": kind, "Docker-Content-Digest": _digest(body)}, body)


@dataclass
class Bench:
    """Servers by name, a place for hosts.toml files, and a containerd."""

    servers: dict[str, Server]
    hosts: Path
    authority: Authority
    socket: str

    @property
    def image(self) -> Image:
        return self.servers["one"].image

    def by_containerd(self, reference: str) -> Asked:
        command = ["ctr", "-a", self.socket, "content", "fetch", "--hosts-dir", str(self.hosts), reference]
        subprocess.run(command, capture_output=True, timeout=60, check=False)
        return self._asked()

    def by_us(self, reference: str) -> Asked:
        config = RegistryConfig(hosts_dir=str(self.hosts), docker_config="/nonexistent")
        # A registry for each, since we remember who lacks an image, which containerd does not.
        with contextlib.suppress(SnapshotterError):
            with contextlib.closing(Registry(config)) as registry:
                registry.resolve(reference)
            with contextlib.closing(Registry(config)) as registry:
                blob = registry.blob(reference, _digest(self.image.layer))
                assert b"".join(blob.stream(0, None)) == self.image.layer
        return self._asked()

    def _asked(self) -> Asked:
        """What has been asked since the last time: for the tag, then for the layer."""
        found: Asked = []
        for end in ("manifests/1", f"blobs/{_digest(self.image.layer)}"):
            for name, server in self.servers.items():
                for request in server.http.requests:
                    one = (name, request.path, request.headers.get("x-test") or request.headers.get("X-Test"))
                    if end in request.path and one not in found:
                        found.append(one)
        for server in self.servers.values():
            server.http.requests.clear()
        return found


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    for tool in ("containerd", "ctr"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is missing (run: sudo ./scripts/setup)")
    with contextlib.ExitStack() as closing:
        authority = Authority(tmp_path)
        servers = [Server(name, closing) for name in ("one", "two", "three")]
        servers += [Server(name, closing, authority) for name in ("tls", "client")]
        root = closing.enter_context(tempfile.TemporaryDirectory(prefix="bs", dir="/tmp"))
        address = closing.enter_context(_containerd(Path(root)))
        yield Bench({server.name: server for server in servers}, tmp_path / "certs.d", authority, address)


@contextlib.contextmanager
def _containerd(root: Path) -> Iterator[str]:
    config = f'version = 2\nroot = "{root}/c"\nstate = "{root}/s"\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
    (root / "c.toml").write_text(f'{config}[grpc]\naddress = "{root}/c.sock"\n')
    with (root / "log").open("wb") as log:
        command = ["containerd", "-c", f"{root}/c.toml"]
        with subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL) as process:
            try:
                end = time.monotonic() + 20
                version = ["ctr", "-a", f"{root}/c.sock", "version"]
                while subprocess.run(version, capture_output=True, check=False).returncode != 0:
                    assert time.monotonic() < end, (root / "log").read_text()
                    time.sleep(0.05)
                yield f"{root}/c.sock"
            finally:
                process.terminate()
                process.wait(20)


ONE, TWO, THREE = '[host."{one}"]\n', '[host."{two}"]\n', 'server = "{three}"\n'

TREES: dict[str, tuple[dict[str, str], str]] = {
    "mirrors, then the server": ({"r.test": THREE + ONE + TWO}, "r.test/team/app:1"),
    "capabilities": (
        {"r.test": f'{THREE}{ONE}capabilities = ["pull"]\n{TWO}capabilities = ["Pull", "resolve"]\n'},
        "r.test/app:1",
    ),
    "a default for all": ({"_default": ONE, "other": 'server = "{two}"\n'}, "r.test/app:1"),
    "underscores before the colon": (
        {"r.test_5000_": 'server = "{one}"\n', "r.test:5000": 'server = "{two}"\n', "_default": THREE},
        "r.test:5000/app:1",
    ),
    "the colon before the default": (
        {"r.test:5000": 'server = "{two}"\n', "_default": THREE},
        "r.test:5000/app:1",
    ),
    "paths": ({"r.test": f'{THREE}[host."{{one}}/a/"]\n[host."{{two}}/b/v2/"]\n'}, "r.test/app:1"),
    "paths as they are": (
        {"r.test": f'{THREE}[host."{{one}}/a"]\noverride_path = true\n{TWO}override_path = true\n'},
        "r.test/app:1",
    ),
    "headers": (
        {"r.test": f'{THREE}[header]\nx-test = "s"\n[host."{{one}}".header]\nx-test = ["a"]\n{TWO}'},
        "r.test/app:1",
    ),
    "the registry itself": ({"{one_host}": TWO}, "{one_host}/app:1"),
    "a file that is not valid": ({"{one_host}": 'server = "{two}"\ncapabilities = ["fly"]\n'}, "{one_host}/app:1"),
    "no file": ({}, "{one_host}/app:1"),
    "a CA": ({"r.test": 'server = "{tls}"\nca = "{ca}"\n'}, "r.test/app:1"),
    "an unknown CA, then the server": ({"r.test": 'server = "{one}"\n[host."{tls}"]\n'}, "r.test/app:1"),
    "no verification": ({"r.test": 'server = "{tls}"\nskip_verify = true\n'}, "r.test/app:1"),
    "a client certificate": (
        {"r.test": 'server = "{client}"\nca = ["{ca}"]\nclient = [["{certificate}", "{key}"]]\n'},
        "r.test/app:1",
    ),
    "http after https": ({"r.test": 'server = "http://{one_host}"\nskip_verify = true\n'}, "r.test/app:1"),
}


def test_hosts_files(bench: Bench) -> None:
    certificate, key = bench.authority.client("node")
    words = {"ca": str(bench.authority.ca), "certificate": str(certificate), "key": str(key)}
    for name, server in bench.servers.items():
        words |= {name: server.http.url, f"{name}_host": server.http.host}

    def filled(text: str) -> str:
        for word, value in words.items():
            text = text.replace(f"{{{word}}}", value)
        return text

    compared = 0
    for title, (files, reference) in TREES.items():
        shutil.rmtree(bench.hosts, ignore_errors=True)
        bench.hosts.mkdir()
        for directory, text in files.items():
            (bench.hosts / filled(directory)).mkdir()
            # containerd 1.6 takes a file without any [host] for invalid.
            text += "" if "[host." in text else "[host]\n"
            (bench.hosts / filled(directory) / "hosts.toml").write_text(filled(text))
        for lacking in _lacking(bench, "one" in filled(str(files)) or "{one}" in str(files)):
            compared += 1
            image = Image(compared)
            for server in bench.servers.values():
                server.image = image
            theirs = bench.by_containerd(filled(reference))
            ours = bench.by_us(filled(reference))
            assert ours == theirs, f"{title}, {lacking}"
            assert ours, f"{title}: nobody was asked"
    assert compared > len(TREES)


def _lacking(bench: Bench, several: bool) -> Iterator[str]:
    """With all servers whole, and then, if there may be several, with the first without its layer and without all."""
    one = bench.servers["one"]
    rules: Sequence[tuple[str, Callable[[Request], bool]]] = (
        ("all whole", lambda request: False),
        ("one without the layer", lambda request: _digest(one.image.layer) in request.path),
        ("one empty", lambda request: True),
    )
    for title, rule in rules if several else rules[:1]:
        one.lacks = rule
        yield title
    one.lacks = rules[0][1]


def test_containerd_is_the_one_expected() -> None:
    """The comparison means something only with a containerd whose `ctr` knows --hosts-dir."""
    shown = subprocess.run(["ctr", "content", "fetch", "--help"], capture_output=True, text=True, check=True).stdout
    assert "--hosts-dir" in shown and os.geteuid() == 0
