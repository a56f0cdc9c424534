"""Credentials that came with a pull outlive every process of the daemon, and reach neither disk nor log."""

import json
import os
import signal
import tempfile
from base64 import b64decode
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from proto import cri_pb2, snapshots_pb2, snapshots_pb2_grpc
from tests.snapshotter.cri.conftest import Upstream
from tests.snapshotter.daemon import expected, make_layer, reader, write_index
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status
from tests.systemd.managed import Managed

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PASSWORD, TOKEN = "passw0rd-of-a-pod", "t0ken-of-registry"


def test_they_outlive_every_process() -> None:
    """Blocks of a private layer are fetched with what one pull brought, after each process was killed, after the daemon
    was killed and ended, and after an upgrade. When the image is removed they are gone, for every successor too."""
    layer = make_layer(files=24, size=256 << 10)
    asked: list[str] = []

    def private(request: Request) -> Action | None:
        if request.path.startswith("/token"):
            scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
            asked.append(b64decode(sent).decode() if scheme == "Basic" else "")
            good = asked[-1] == f"pod:{PASSWORD}"
            return Status(200, {}, json.dumps({"token": TOKEN}).encode()) if good else Status(401)
        if request.headers.get("Authorization") == f"Bearer {TOKEN}":
            return None
        return Status(401, {"WWW-Authenticate": f'Bearer realm="{registry.url}/token",service="s"'})

    with (
        tempfile.TemporaryDirectory(prefix="bk", dir="/tmp") as directory,
        RangeServer({layer.path: layer.blob}, private) as registry,
        closing(Upstream(Path(directory, "c.sock"))) as containerd,
    ):
        home = Path(directory)
        for method in ("PullImage", "RemoveImage"):
            containerd.answers[method] = lambda request, context: iter([b""])
        write_index(home / "indexes", layer)
        toml = (
            f'[index]\nurl = "{home}/indexes"\n[fetch]\nbackground = false\nspan_growth_kib = 256\n'
            f'[cri]\nenabled = true\nimage_service = "{home}/c.sock"\n[lookup]\nregistry = false\n'
            f'[containerd]\naddress = ""\n[registry]\ndocker_config = "{home}/none"\n[log]\nlevel = "debug"\n'
        )
        with Managed(home, registry, toml) as daemon:
            image = cri_pb2.ImageSpec(image=f"{registry.host}/app:1")
            auth = cri_pb2.AuthConfig(username="pod", password=PASSWORD)
            _ask(daemon, "PullImage", cri_pb2.PullImageRequest(image=image, auth=auth).SerializeToString())
            mount = daemon.prepare(layer)
            events: list[Callable[[], object]] = [
                lambda: None,
                lambda: daemon.kill("fetch"),
                lambda: [daemon.kill("service"), daemon.kill("fetch")],
                lambda: _restart(daemon, signal.SIGKILL),
                lambda: _restart(daemon, signal.SIGTERM),
                lambda: daemon.reload().check_returncode(),
            ]
            for number, event in enumerate(events):
                event()
                name = f"f{4 * number:04}"  # what is read ahead of one is not the next
                assert reader("read", mount / name).communicate(timeout=60)[0].split() == expected(layer, name), number
            assert set(asked) == {f"pod:{PASSWORD}"} and len(asked) >= len(events)

            memory = os.dup(daemon.manager.stored["passed"])
            with os.fdopen(memory, "rb") as view:
                view.seek(0)
                assert PASSWORD.encode() in view.read()
                with daemon.snapshots() as snapshots:
                    _remove_all(snapshots)
                _ask(daemon, "RemoveImage", b"")
                view.seek(0)
                assert PASSWORD.encode() not in view.read()
            written = [
                path for path in home.rglob("*") if path.is_file() and not path.is_relative_to(daemon.root / "m")
            ]
            assert daemon.manager._log in written
            for path in written:
                content = path.read_bytes()
                assert PASSWORD.encode() not in content and TOKEN.encode() not in content, path


def _ask(daemon: Managed, method: str, request: bytes) -> None:
    """As the kubelet does."""
    with grpc.insecure_channel(f"unix://{daemon.run}/cri.sock") as channel:
        channel.unary_unary(f"/runtime.v1.ImageService/{method}", bytes, bytes)(request, timeout=60)


def _remove_all(snapshots: snapshots_pb2_grpc.SnapshotsStub) -> None:
    for message in snapshots.List(snapshots_pb2.ListSnapshotsRequest(snapshotter="b")):
        for info in message.info:
            snapshots.Remove(snapshots_pb2.RemoveSnapshotRequest(snapshotter="b", key=info.name))


def _restart(daemon: Managed, number: int) -> None:
    daemon.manager.restart(number)
    daemon.manager.until("READY=1")
