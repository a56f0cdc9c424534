"""The daemon and its registries: a mounted layer outlives its mirror and a change of password, and nothing is told."""

import os
from base64 import b64encode
from pathlib import Path

import pytest

from tests.snapshotter.certificates import Authority
from tests.snapshotter.daemon import Daemon, make_layer, write_index
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status

pytestmark = pytest.mark.system

HELPER = """#!/bin/sh
read -r host
test "$host" = "$EXPECTED_HOST" || { echo credentials not found in native keychain; exit 1; }
printf '{"Username": "me", "Secret": "%s"}' "$(cat "$PASSWORD_FILE")"
"""


def test_a_layer_outlives_its_mirror_and_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    layer = make_layer(files=64, size=256 << 10)
    write_index(tmp_path / "indexes", layer)
    authority = Authority(tmp_path)
    password = tmp_path / "password"
    password.write_text("first-s3cret")

    def private(request: Request) -> Action | None:
        accepted = "Basic " + b64encode(f"me:{password.read_text()}".encode()).decode()
        if request.headers.get("Authorization") == accepted:
            return None
        return Status(401, {"WWW-Authenticate": 'Basic realm="private"'})

    with RangeServer({layer.path: layer.blob}, private, authority.server("127.0.0.1")) as registry:
        (tmp_path / "docker-credential-test").write_text(HELPER)
        (tmp_path / "docker-credential-test").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        monkeypatch.setenv("PASSWORD_FILE", str(password))
        monkeypatch.setenv("EXPECTED_HOST", registry.host)
        (tmp_path / "config.json").write_text(f'{{"credHelpers": {{"{registry.host}": "test"}}}}')
        hosts = tmp_path / "certs.d" / registry.host
        hosts.mkdir(parents=True)
        toml = (
            f'[index]\nurl = "{tmp_path}/indexes"\n[fetch]\nbackground = false\n'
            '[log]\nlevel = "debug"\n[lookup]\nregistry = false\n'
            f'[registry]\nhosts_dir = "{hosts.parent}"\ndocker_config = "{tmp_path}/config.json"\n'
        )
        with RangeServer({layer.path: layer.blob}) as mirror:
            (hosts / "hosts.toml").write_text(
                f'server = "{registry.url}"\nca = "{authority.ca}"\n[host."{mirror.url}"]\ncapabilities = ["pull"]\n'
            )
            with Daemon(tmp_path, registry, toml) as daemon:
                mount = daemon.prepare(layer)
                assert (mount / "f0000").read_bytes() == layer.contents["f0000"]
                assert mirror.requests and not registry.requests
                assert {request.path for request in mirror.requests} == {
                    f"{layer.path}?ns={registry.host.replace(':', '%3A')}"
                }
                mirror.close()
                assert (mount / "f0031").read_bytes() == layer.contents["f0031"]
                assert registry.requests
                password.write_text("second-s3cret")
                assert (mount / "f0063").read_bytes() == layer.contents["f0063"]
                assert len({request.headers.get("Authorization") for request in registry.requests}) == 3
                assert daemon.status()["layers"][0]["failures"] == 0, "a mirror that dies is no failed flight"
    said = capfd.readouterr().err
    assert "layer.mounted" in said
    for secret in ("s3cret", *(b64encode(f"me:{which}-s3cret".encode()).decode() for which in ("first", "second"))):
        assert secret not in said
