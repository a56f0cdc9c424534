"""Registries as processes: each a context manager that gives host:port."""

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).resolve().parents[2]
_START_S = 60.0  # on a machine that has other things to do


@contextlib.contextmanager
def docker_registry(directory: Path, delete: bool = True) -> Iterator[str]:
    """Debian's docker-registry, with its files in `directory`: no referrers API; `delete`: manifests may be deleted."""
    if shutil.which("docker-registry") is None:
        pytest.fail("docker-registry is missing (run: sudo ./scripts/setup)")
    directory.mkdir(parents=True, exist_ok=True)
    for _ in range(5):  # the port may be taken between the look and the start
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            host = f"127.0.0.1:{probe.getsockname()[1]}"
        settings = {
            "version": 0.1,
            "log": {"level": "error", "accesslog": {"disabled": True}},
            "storage": {"filesystem": {"rootdirectory": str(directory / "store")}, "delete": {"enabled": delete}},
            "http": {"addr": host},
        }
        (directory / "registry.yml").write_text(json.dumps(settings))
        with (directory / "registry.log").open("wb") as log:
            process = subprocess.Popen(
                ["docker-registry", "serve", directory / "registry.yml"],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        try:
            if _answers(process, host):
                yield host
                return
        finally:
            process.terminate()
            process.wait()
    pytest.fail(f"docker-registry does not start: {(directory / 'registry.log').read_text()}")


@contextlib.contextmanager
def go_registry(referrers: bool = True, announce: bool = False, page: int = 0) -> Iterator[str]:
    """The registry of main.go, in memory; deletes. `announce`: answers a PUT with OCI-Subject, as most registries with
    referrers do; `page`: entries of one page of referrers."""
    built = subprocess.run([_CHECKOUT / "scripts" / "tools", "registry"], capture_output=True, text=True)
    assert built.returncode == 0, f"the registry cannot be built:\n{built.stderr}"
    argv = [f"{built.stdout.strip()}/registry", f"-referrers={referrers}", f"-announce={announce}", f"-page={page}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host = process.stdout.readline().strip()
            assert host, "the registry does not start"
            yield host
        finally:
            process.kill()


def _answers(process: "subprocess.Popen[bytes]", host: str) -> bool:
    """Waits until it listens; False when it ends instead."""
    name, _, port = host.partition(":")
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((name, int(port)), 1.0):
            return True
        time.sleep(0.02)
    return False
