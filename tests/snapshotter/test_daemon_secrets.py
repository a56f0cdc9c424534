"""What a pull with credentials leaves behind: no secret in logs, status or files; nothing that others may open; and no
name out of an image on any path."""

import json
import os
import re
import stat
from base64 import b64decode, b64encode
from pathlib import Path

import pytest

from snapshotter.cli import main
from snapshotter.errors import SnapshotterError
from snapshotter.rpc import call
from tests.snapshotter.daemon import Daemon, expected, make_layer, reader, write_index
from tests.snapshotter.rangeserver import Action, RangeServer, Request, Status, redirect

pytestmark = pytest.mark.system

PASSWORD, TOKEN, SIGNATURE = "passw0rd-of-team", "t0ken-of-registry", "s1gnature-of-url"


def test_secrets_names_and_modes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    layer = make_layer(files=16, size=256 << 10)
    write_index(tmp_path / "indexes", layer)
    failing = [False]
    with RangeServer({"/signed": layer.blob}) as storage:

        def private(request: Request) -> Action | None:
            """A token for the password, a signed URL for the token."""
            if request.path.startswith("/token"):
                scheme, _, sent = request.headers.get("Authorization", "").partition(" ")
                if scheme == "Basic" and b64decode(sent).decode() == f"me:{PASSWORD}":
                    return Status(200, {}, json.dumps({"token": TOKEN}).encode())
                return Status(401)
            if request.headers.get("Authorization") != f"Bearer {TOKEN}":
                return Status(401, {"WWW-Authenticate": f'Bearer realm="{registry.url}/token",service="s"'})
            return Status(503) if failing[0] else redirect(f"{storage.url}/signed?X-Signature={SIGNATURE}")

        with RangeServer({layer.path: layer.blob}, private) as registry:
            auth = b64encode(f"me:{PASSWORD}".encode()).decode()
            (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.host: {"auth": auth}}}))
            toml = (
                f'[index]\nurl = "{tmp_path}/indexes"\n[fetch]\nbackground = false\n[log]\nlevel = "debug"\n'
                f'[registry]\ndocker_config = "{tmp_path}/config.json"\n[lookup]\nregistry = false\n'
            )
            with Daemon(tmp_path, registry, toml) as daemon:
                mount = daemon.prepare(layer)
                assert (mount / "f0000").read_bytes() == layer.contents["f0000"]
                assert storage.requests, "the signed URL was used"
                failing[0] = True
                storage.behaviour = lambda request: Status(403)
                reading = reader("read", mount / "f0015")
                said = ""
                while "attempt=2" not in said:
                    said += capfd.readouterr().err
                failing[0], storage.behaviour = False, None
                assert reading.communicate(timeout=60)[0].split() == expected(layer, "f0015")
                shown = [
                    json.dumps(daemon.status()),
                    json.dumps(call(daemon.run / "control.sock", "cache")),
                    json.dumps(call(daemon.run / "fetch.sock", "status")),
                    json.dumps(
                        call(daemon.run / "fetch.sock", "journal", names=[mount.name], since=0.0, until=2.0**33)
                    ),
                ]
                with pytest.raises(SnapshotterError):
                    call(daemon.run / "fetch.sock", "ensure", image="UPPER", digest="x", siblings=[])
                main(["config", "show", "--config", str(tmp_path / "config.toml")])
                main(["status", "--config", str(tmp_path / "config.toml")])
                out = capfd.readouterr()
                shown += [said, out.err, out.out]
                shown += [path.read_text("latin-1") for path in _files(daemon.root) + _files(daemon.run)]
                for secret in (PASSWORD, TOKEN, SIGNATURE, auth):
                    assert not [text[:200] for text in shown if secret in text], secret
                _check_modes(daemon)
                names = [str(path.relative_to(daemon.root)) for path in _tree(daemon.root)]
                assert not [name for name in names if re.search(r"f00\d\d|app|127\.0\.0\.1", name)], names


def _tree(top: Path) -> list[Path]:
    """All below `top`, but what is mounted."""
    found = []
    for directory, names, files in os.walk(top):
        names[:] = [name for name in names if not os.path.ismount(os.path.join(directory, name))]
        found += [Path(directory) / name for name in (*names, *files)]
    return found


def _files(top: Path) -> list[Path]:
    return [path for path in _tree(top) if path.is_file() and path.name != "data"]


def _check_modes(daemon: Daemon) -> None:
    """Sockets, and what holds images, snapshots and alarms, are root's alone."""
    sockets = [path for path in daemon.run.iterdir() if path.is_socket()]
    assert {path.name for path in sockets} == {"bootseer.sock", "control.sock", "fetch.sock"}
    closed = [*sockets, *(daemon.root / name for name in ("layers", "m", "s"))]
    closed += [path for path in daemon.root.iterdir() if path.name.startswith(("metadata.db", "record", "alarms"))]
    for path in closed:
        status = path.lstat()
        assert status.st_uid == 0 and not stat.S_IMODE(status.st_mode) & 0o077, (path, oct(status.st_mode))
    for path in _tree(daemon.root):
        assert not path.is_symlink() and not stat.S_IMODE(path.lstat().st_mode) & 0o022, path
