"""Finding a registry by its host's name alone: containerd does not note ports."""

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import NotFound
from snapshotter.model import Digest
from snapshotter.registry import Registry
from snapshotter.registry.credentials import Credential
from snapshotter.registry.locate import locate
from snapshotter.registry.passed import Passed, PassedCredentials
from snapshotter.registry.reference import parse_reference
from tests.snapshotter.rangeserver import RangeServer

CONFIG = RegistryConfig(connect_timeout_s=2.0, read_timeout_s=2.0, hosts_dir="", docker_config="/nonexistent")
LAYER = {"mediaType": "m", "digest": "sha256:" + "ab" * 32, "size": 1}
MANIFEST = json.dumps({"schemaVersion": 2, "config": LAYER, "layers": []}).encode()
DIGEST = Digest(f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}")
PATHS = {f"/v2/team/app/manifests/{DIGEST}": MANIFEST}
SOURCES = [("127.0.0.1", "gone/app"), ("127.0.0.1", "team/app")]


@pytest.mark.parametrize("where", ["plain_http", "hosts_dir", "hosts_dir of Docker", "config.json", "passed"])
def test_by_a_name_with_a_port(tmp_path: Path, where: str) -> None:
    with RangeServer(PATHS) as server, RangeServer(dict.fromkeys(PATHS, b"{}")) as other:
        passed, config = PassedCredentials(), replace(CONFIG, plain_http=(other.host,))
        if where == "plain_http":
            config = replace(config, plain_http=(server.host, other.host))
        elif where.startswith("hosts_dir"):
            name = f"{server.host.replace(':', '_')}_" if where == "hosts_dir" else server.host
            (tmp_path / name).mkdir()
            config = replace(config, hosts_dir=str(tmp_path))
        elif where == "config.json":
            (tmp_path / "c").write_text(json.dumps({"auths": {server.host: {"auth": "bWU6eA=="}}}))
            config = replace(config, docker_config=str(tmp_path / "c"))
        else:
            passed.put(parse_reference(f"{server.host}/x:1"), Passed(Credential("me", "x")))
        with contextlib.closing(Registry(config, passed)) as registry:
            assert locate(registry, SOURCES, DIGEST) == f"{server.host}/team/app"


def test_a_registry_that_nobody_names() -> None:
    with RangeServer(PATHS) as server, contextlib.closing(Registry(CONFIG)) as registry:
        with pytest.raises(NotFound, match=r"no registry known here has the manifest: .* of 127\.0\.0\.1/team/app"):
            locate(registry, SOURCES, DIGEST)
        with pytest.raises(NotFound, match="none is named"):
            locate(registry, [], DIGEST)
        assert not server.requests


def test_what_containerd_noted_may_be_anything() -> None:
    with RangeServer(PATHS) as server:
        config = replace(CONFIG, plain_http=(server.host, "[", "127.0.0.1:x"))
        with contextlib.closing(Registry(config)) as registry:
            sources = [("127.0.0.1", "UPPER"), ("", ""), ("127.0.0.1", "team/app")]
            assert locate(registry, sources, DIGEST) == f"{server.host}/team/app"
