"""Debian's docker-registry, for tests that push: a real one, which has no referrers API."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["PASSWORD", "docker_registry", "htpasswd"]

PASSWORD = "s3cr:t"
_HTPASSWD = "me:$2b$04$O/ZPZHr8qdVim0iVNP7auOuetfCC8TPWnv0KCuIdC2aJB45eTYM4m\n"


@contextlib.contextmanager
def docker_registry(directory: Path, **settings: Any) -> Iterator[str]:
    """Its host:port, while it runs; it keeps all in `directory`."""
    if shutil.which("docker-registry") is None:
        pytest.fail("docker-registry is missing (run: sudo ./scripts/setup)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{probe.getsockname()[1]}"
    config: dict[str, Any] = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(directory / "store")}, "delete": {"enabled": True}},
        "http": {"addr": host},
        **settings,
    }
    (directory / "registry.yml").write_text(json.dumps(config))
    with (directory / "registry.log").open("wb") as log:
        argv = ["docker-registry", "serve", str(directory / "registry.yml")]
        with subprocess.Popen(argv, stdout=log, stderr=log) as process:
            try:
                _wait_for(host, process, directory / "registry.log")
                yield host
            finally:
                process.terminate()


def htpasswd(directory: Path) -> Mapping[str, Any]:
    """Settings of a registry that lets in only the user `me` with PASSWORD."""
    (directory / "htpasswd").write_text(_HTPASSWD)
    return {"auth": {"htpasswd": {"realm": "private", "path": str(directory / "htpasswd")}}}


def _wait_for(host: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    name, _, port = host.partition(":")
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((name, int(port)), 1.0):
            return
        time.sleep(0.05)
    pytest.fail(f"docker-registry does not start: {log.read_text()}")
