"""Artifacts end to end: the real daemon, Debian's registry with an image and what was published there, real mounts."""

import contextlib
import json
import subprocess
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshotter.artifacts.model import Artifact
from snapshotter.artifacts.publisher import publish
from snapshotter.config import RegistryConfig
from snapshotter.registry import Registry, parse_reference
from snapshotter.registry.push import Pusher
from snapshotter.trust.keys import SecretKey, sign
from tests.registries import Front, Tokens, docker_registry
from tests.snapshotter.certificates import Authority
from tests.snapshotter.daemon import BOOTSEER, Daemon, Layer, expected, make_layer, reader
from tests.snapshotter.fetch.artifactsite import Site, blob_of
from tests.snapshotter.fetch.test_sources import manifest_of

pytestmark = pytest.mark.system

_FILES, _SIZE = 12, 128 << 10
_HOT_FILES = 4
_BLOCKS = _SIZE // 4096
_NO_BACKGROUND = "[fetch]\nbackground = false\n"


@pytest.fixture(scope="module")
def layers() -> list[Layer]:
    return [make_layer(files=_FILES, size=_SIZE, seed=seed) for seed in (31, 32)]


class Origin:
    """Debian's registry with the image `app:1`, for Daemon and for what publishes to it."""

    def __init__(self, host: str, layers: list[Layer], key: SecretKey) -> None:
        self.host = host
        self.site = Site(layers)
        self.key = key
        self.pusher = Pusher(Registry(RegistryConfig(hosts_dir="", docker_config="/nonexistent/config.json")))
        self.image = parse_reference(f"{host}/app:1")
        config = blob_of(b"{}", "")
        for digest, data in [(layer.digest, layer.blob) for layer in layers] + [(config.digest, b"{}")]:
            self.pusher.put_blob(self.image, digest, len(data), lambda data=data: iter((data,)))
        self.pusher.put_manifest(self.image, "1", manifest_of(self.site), "application/vnd.oci.image.manifest.v1+json")

    def publish(self, artifact: Artifact, repository: str = "app", signed: bool = True) -> None:
        """As CI does."""
        blobs = self.site.files
        publish(
            self.pusher,
            parse_reference(f"{self.host}/{repository}"),
            sign(artifact, self.key) if signed else artifact,
            lambda blob: iter((blobs[f"/v2/app/blobs/{blob.digest}"],)),
        )

    def hot(self) -> Artifact:
        extents = [
            (layer, number * _BLOCKS, (number + 1) * _BLOCKS) for number in range(_HOT_FILES) for layer in (0, 1)
        ]
        return self.site.hot(extents)[0]


@pytest.fixture
def origin(tmp_path: Path, layers: list[Layer]) -> Iterator[Origin]:
    key = SecretKey.generate()
    (tmp_path / "keys").mkdir()
    key.public.save(tmp_path / "keys" / "ci.pub")
    with docker_registry(tmp_path / "registry") as host:
        origin = Origin(host, layers, key)
        yield origin
        origin.pusher._registry.close()


def _toml(tmp_path: Path, rest: str = "") -> str:
    return f'{_NO_BACKGROUND}[trust]\nkeys = ["{tmp_path}/keys"]\n{rest}'


def _until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"does not happen: {what}"
        time.sleep(0.02)


def _prefetch(daemon: Daemon) -> dict[str, object]:
    """The image's, at its end."""

    def over() -> bool:
        return [row["state"] in ("over", "none") for row in daemon.status()["prefetches"]] == [True]

    _until(over, "the end of the prefetch")
    return dict(daemon.status()["prefetches"][0])


def _read(daemon: Daemon, layers: list[Layer]) -> None:
    for layer in layers:
        mount = daemon.root / "m" / layer.digest.partition(":")[2][:14]
        names = sorted(layer.contents)[:_HOT_FILES]
        process = reader("read", *(mount / name for name in names))
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and out.split() == expected(layer, *names)


def _layer_rows(daemon: Daemon) -> list[dict[str, object]]:
    return list(daemon.status()["layers"])


def test_a_second_node_that_shares_nothing_but_the_registry_starts_hot(
    tmp_path: Path, layers: list[Layer], origin: Origin
) -> None:
    origin.publish(origin.site.index())
    origin.publish(origin.hot())
    with Daemon(tmp_path, origin, _toml(tmp_path)) as daemon:  # type: ignore[arg-type]  # only its host is asked for
        daemon.prepare(*layers)
        prefetch = _prefetch(daemon)
        assert prefetch["blocks"] == prefetch["hot_blocks"] == 2 * _HOT_FILES * _BLOCKS
        assert str(prefetch["from"]).startswith(f"{origin.host}/app@sha256:") and prefetch["bytes_refused"] == ""
        _read(daemon, layers)
        rows = _layer_rows(daemon)
        assert [row["demand_fetches"] for row in rows] == [0, 0], "all of it came in the pack"
        assert all(str(row["index_from"]).startswith(f"{origin.host}/app@sha256:") for row in rows)
        assert daemon.status()["artifacts_refused"] == []
        shown = subprocess.run(
            [BOOTSEER, "status", "--config", str(tmp_path / "config.toml")], capture_output=True, text=True, check=True
        ).stdout
        assert str(prefetch["from"]) in shown


def test_what_nobody_we_trust_has_signed_is_refused_and_the_start_goes_on(
    tmp_path: Path, layers: list[Layer], origin: Origin
) -> None:
    """No index of theirs, and none of their bytes; but the blocks that they name are fetched from the layers."""
    origin.publish(origin.site.index(), signed=False)
    origin.publish(origin.hot(), signed=False)
    with Daemon(tmp_path, origin, _toml(tmp_path)) as daemon:  # type: ignore[arg-type]  # as above
        daemon.prepare(*layers)
        prefetch = _prefetch(daemon)
        assert prefetch["bytes_refused"] == "is not signed" and prefetch["bytes"] == 0
        rows = _layer_rows(daemon)
        assert [(row["index_from"], row["state"]) for row in rows] == [("", "complete")] * 2
        refused = daemon.status()["artifacts_refused"]
        assert sorted((row["artifact"], row["reason"]) for row in refused) == [
            ("hot-set", "is not signed"), ("layer-index", "is not signed"),
        ]  # fmt: skip
        _read(daemon, layers)
        shown = subprocess.run(
            [BOOTSEER, "status", "--config", str(tmp_path / "config.toml")], capture_output=True, text=True, check=True
        ).stdout
        assert "is not signed" in shown and "layer-index" in shown


def test_another_repository_has_them_for_a_registry_that_one_cannot_push_to(
    tmp_path: Path, layers: list[Layer], origin: Origin
) -> None:
    """The image's own has an index by somebody else, which is passed over; after a restart all is still known."""
    origin.publish(origin.site.index(), signed=False)
    origin.publish(origin.site.index(), "platform/artifacts")
    origin.publish(origin.hot(), "platform/artifacts")
    places = f'[lookup]\nplaces = ["{origin.host}/platform/artifacts"]\n'
    with Daemon(tmp_path, origin, _toml(tmp_path, places)) as daemon:  # type: ignore[arg-type]  # as above
        daemon.prepare(*layers)
        assert str(_prefetch(daemon)["from"]).startswith(f"{origin.host}/platform/artifacts@sha256:")
        daemon.kill("fetch")
        _until(lambda: _has_answer(daemon), "an answer of the successor")
        found = [str(row["index_from"]) for row in _layer_rows(daemon)]
        assert all(where.startswith(f"{origin.host}/platform/artifacts@sha256:") for where in found) and len(found) == 2
        _read(daemon, layers)


def _has_answer(daemon: Daemon) -> bool:
    with contextlib.suppress(Exception):  # while the process is being started again
        return len(_layer_rows(daemon)) == 2
    return False


def test_a_private_repository_is_asked_with_the_credentials_of_the_image(
    tmp_path: Path, layers: list[Layer], origin: Origin
) -> None:
    """Behind TLS and tokens, where nobody else may pull."""
    origin.publish(origin.site.index())
    origin.publish(origin.hot())
    authority = Authority(tmp_path)
    tokens = Tokens({"me": "s3cret"}, {"": set()})
    with Front(origin.host, tls=authority.server("127.0.0.1"), tokens=tokens) as front:
        hosts = tmp_path / "certs.d" / front.host
        hosts.mkdir(parents=True)
        (hosts / "hosts.toml").write_text(f'server = "{front.url}"\nca = "{authority.ca}"\n')
        auth = b64encode(b"me:s3cret").decode()
        (tmp_path / "docker.json").write_text(json.dumps({"auths": {front.host: {"auth": auth}}}))
        rest = f'[registry]\nhosts_dir = "{hosts.parent}"\ndocker_config = "{tmp_path}/docker.json"\n'
        with Daemon(tmp_path, front, _toml(tmp_path, rest)) as daemon:  # type: ignore[arg-type]  # as above
            daemon.prepare(*layers)
            prefetch = _prefetch(daemon)
            assert prefetch["blocks"] == 2 * _HOT_FILES * _BLOCKS
            assert str(prefetch["from"]).startswith(f"{front.host}/app@sha256:")
            _read(daemon, layers)
            assert all(str(row["index_from"]).startswith(front.host) for row in _layer_rows(daemon))
        assert tokens.scopes and set(tokens.scopes) == {"repository:app:pull"}


def test_an_image_without_artifacts_is_streamed_as_ever(tmp_path: Path, layers: list[Layer], origin: Origin) -> None:
    with Daemon(tmp_path, origin, _toml(tmp_path)) as daemon:  # type: ignore[arg-type]  # as above
        daemon.prepare(*layers)
        assert _prefetch(daemon)["state"] == "none"
        assert [row["state"] for row in _layer_rows(daemon)] == ["complete"] * 2
        _read(daemon, layers)


def test_a_place_that_is_none_ends_the_daemon_with_one_line(tmp_path: Path) -> None:
    """The block server may be there by then: readers of before are served first, and it goes with the daemon."""
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/r"\nrun = "{tmp_path}/x"\n[lookup]\nplaces = ["artifacts"]\n')
    argv = [BOOTSEER, "serve", "--config", str(tmp_path / "c.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    *before, last = done.stderr.splitlines()
    assert done.returncode == 2 and all("level=info" in line and "worker.started" in line for line in before)
    assert "[lookup] places: 'artifacts' is not a repository: expected HOST/REPOSITORY" in last
