"""The registry client and `bootseer index build` against Debian's docker-registry, with an image pushed by skopeo."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest

from blockindex.codec import index_name
from snapshotter.cli import main
from snapshotter.config import RegistryConfig
from snapshotter.errors import Denied, NotFound, Precondition
from snapshotter.registry import Registry, host_platform
from tests.snapshotter.certificates import Authority
from tests.snapshotter.images import gzip_layer, write_layout

pytestmark = pytest.mark.system

LAYERS = [gzip_layer({"noise": random.Random(3).randbytes(3_000_000)}), gzip_layer({"etc/x": b"x" * 5000})]

PASSWORD = "s3cr:t"
HTPASSWD = "me:$2b$04$O/ZPZHr8qdVim0iVNP7auOuetfCC8TPWnv0KCuIdC2aJB45eTYM4m\n"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def pushed(tmp_path: Path) -> Iterator[str]:
    """The reference of the image in a registry of its own."""
    with _pushed(tmp_path, {}) as reference:
        yield reference


@contextlib.contextmanager
def _pushed(tmp_path: Path, settings: dict[str, object], *skopeo: str) -> Iterator[str]:
    """The same in a registry with these settings, pushed with these options."""
    for tool in ("docker-registry", "skopeo"):
        if shutil.which(tool) is None:
            pytest.fail(f"{tool} is missing (run: sudo ./scripts/setup)")
    host = f"127.0.0.1:{_free_port()}"
    http = {"addr": host, **({"tls": settings["tls"]} if "tls" in settings else {})}
    config = tmp_path / "registry.yml"
    config.write_text(
        json.dumps(
            {
                "version": 0.1,
                "log": {"level": "error", "accesslog": {"disabled": True}},
                "storage": {"filesystem": {"rootdirectory": str(tmp_path / "store")}},
                "http": http,
                **({"auth": settings["auth"]} if "auth" in settings else {}),
            }
        )
    )
    log = (tmp_path / "registry.log").open("wb")
    with log, subprocess.Popen(["docker-registry", "serve", config], stdout=log, stderr=log) as process:
        try:
            _wait_for(host, process, Path(log.name))
            write_layout(tmp_path / "layout", LAYERS, host_platform().arch)
            copy = ["skopeo", "copy", "--insecure-policy", "--dest-tls-verify=false", "--quiet", *skopeo]
            target = f"docker://{host}/team/app:1"
            subprocess.run([*copy, f"oci:{tmp_path / 'layout'}", target], check=True, timeout=60)
            yield f"{host}/team/app:1"
        finally:
            process.terminate()


def _wait_for(host: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    name, _, port = host.partition(":")
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((name, int(port)), 1.0):
            return
        time.sleep(0.05)
    pytest.fail(f"docker-registry does not start: {log.read_text()}")


def test_a_private_registry(tmp_path: Path) -> None:
    """TLS by an authority of its own, a password by a helper; without either there is no access."""
    authority = Authority(tmp_path)
    authority.server("127.0.0.1")
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    settings = {
        "tls": {"certificate": str(tmp_path / "server.cert"), "key": str(tmp_path / "server.key")},
        "auth": {"htpasswd": {"realm": "private", "path": str(tmp_path / "htpasswd")}},
    }
    with _pushed(tmp_path, settings, f"--dest-creds=me:{PASSWORD}") as reference:
        host = reference.partition("/")[0]
        certs = tmp_path / "certs.d" / host
        certs.mkdir(parents=True)
        (certs / "hosts.toml").write_text(f'server = "https://{host}"\n')
        auth = b64encode(f"me:{PASSWORD}".encode()).decode()
        login = tmp_path / "config.json"
        config = RegistryConfig(hosts_dir=str(tmp_path / "certs.d"), docker_config=str(login))
        with contextlib.closing(Registry(config)) as registry, pytest.raises(Precondition, match="not trusted"):
            registry.resolve(reference)
        (certs / "hosts.toml").write_text(f'server = "https://{host}"\nca = "{authority.ca}"\n')
        with contextlib.closing(Registry(config)) as registry:
            with pytest.raises(Denied, match="wants a user and password"):
                registry.resolve(reference)
            login.write_text(json.dumps({"auths": {host: {"auth": auth}}}))
            manifest = registry.resolve(reference)
            blob = registry.blob(reference, manifest.layers[0].digest)
            assert b"".join(blob.stream(10, 5000)) == LAYERS[0][10:5000]


def test_resolve_size_and_stream(pushed: str) -> None:
    with contextlib.closing(Registry(RegistryConfig())) as registry:
        manifest = registry.resolve(pushed)
        assert [layer.size for layer in manifest.layers] == [len(layer) for layer in LAYERS]
        for layer, data in zip(manifest.layers, LAYERS, strict=True):
            blob = registry.blob(pushed, layer.digest)
            assert blob.size() == len(data)
            assert b"".join(blob.stream(0, None)) == data
            assert b"".join(blob.stream(10, len(data) - 5)) == data[10:-5]
            assert not blob.ranges_ignored
        pinned = f"{pushed.removesuffix(':1')}@{manifest.digest}"
        assert registry.resolve(pinned) == manifest
        with pytest.raises(NotFound):
            registry.resolve(pushed.removesuffix("1") + "2")
        with pytest.raises(NotFound):
            list(registry.blob(pushed, "sha256:" + "0" * 64).stream(0, 10))


def test_index_build(pushed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["index", "build", pushed, "--out", str(out), "--plain-http", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["status"] for layer in layers] == ["built", "built"]
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*.bsi")) == sorted(
        index_name(layer["digest"]) for layer in layers
    )
