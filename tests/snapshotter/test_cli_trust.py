"""`bootseer key`, `artifact` and `alarm`: keys made and listed, artifacts signed where they are, verdicts, alarms."""

import json
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from snapshotter.alarms import Alarms
from snapshotter.artifacts.finder import Finder
from snapshotter.artifacts.model import Kind
from snapshotter.artifacts.publisher import publish
from snapshotter.cli import main
from snapshotter.cli.status import render
from snapshotter.config import RegistryConfig
from snapshotter.imagesource import Layout, LayoutImage, PlatformImage, platform_images
from snapshotter.registry import Registry, parse_reference
from snapshotter.registry.push import Pusher
from snapshotter.trust.keys import PublicKey, SecretKey
from snapshotter.trust.quarantine import Quarantine
from snapshotter.unproven import Pack
from tests.registries.servers import docker_registry
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.imagesource.layouts import LayoutWriter, tagged

Out = pytest.CaptureFixture[str]

BASE = gzip_layer({"usr/base": random.Random(1).randbytes(100_000)})
PACK = Pack("sha256:" + "c" * 64, "registry.test/app", "0123456789abcdef", "sha256:" + "d" * 64)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody's credentials are used."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("DOCKER_CONFIG", raising=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A node that trusts the keys in trusted.d."""
    (tmp_path / "trusted.d").mkdir()
    path = tmp_path / "config.toml"
    path.write_text(f'root = "{tmp_path}/root"\n[trust]\nkeys = ["{tmp_path}/trusted.d", "{tmp_path}/missing"]\n')
    return path


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    writer = LayoutWriter(tmp_path / "layout")
    writer.index([tagged(writer.image([BASE]), "v1")])
    return writer.directory


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as it:
        yield it


def said(capsys: Out, *argv: object, code: int = 0) -> Any:
    """The JSON of a command."""
    got = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    assert got == code, (out, err)
    return json.loads(out)


def mistake(capsys: Out, *argv: object) -> str:
    """The only line of a command that fails."""
    assert main(list(map(str, argv))) != 0
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bootseer: ") and err.count("\n") == 1, (out, err)
    return err


def verdicts(document: Any) -> list[tuple[str, bool, str]]:
    return [(row["type"].split(".")[-2], row["trusted"], row["reason"]) for row in document["artifacts"]]


# -- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_is_made_trusted_and_listed(tmp_path: Path, config: Path, capsys: Out) -> None:
    made = said(capsys, "key", "generate", "--out", tmp_path / "ci")
    assert made["public"] == f"{tmp_path}/ci.pub"
    assert SecretKey.load(tmp_path / "ci").public.name == PublicKey.load(tmp_path / "ci.pub").name == made["key"]
    assert main(["key", "list", "--config", str(config)]) == 0
    assert capsys.readouterr().out.startswith("no keys in ")
    (tmp_path / "ci.pub").rename(tmp_path / "trusted.d" / "ci.pub")
    listed = said(capsys, "key", "list", "--config", config)
    assert listed == {
        "policy": "signed",
        "keys": [{"key": made["key"], "file": f"{tmp_path}/trusted.d/ci.pub"}],
        "refused": [],
    }
    assert main(["key", "list", "--config", str(config)]) == 0
    assert made["key"] in capsys.readouterr().out
    assert main(["key", "generate", "--out", str(tmp_path / "second")]) == 0
    assert "mode 0600" not in capsys.readouterr().out and (tmp_path / "second").stat().st_mode & 0o777 == 0o600


def test_a_key_is_made_whole_or_not_at_all(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "ci.pub").write_text("something else")
    assert "ci.pub: exists already" in mistake(capsys, "key", "generate", "--out", tmp_path / "ci")
    assert not (tmp_path / "ci").exists()
    said(capsys, "key", "generate", "--out", tmp_path / "other")
    assert "other: exists already" in mistake(capsys, "key", "generate", "--out", tmp_path / "other")


def test_files_that_are_no_keys_are_named(tmp_path: Path, config: Path, capsys: Out) -> None:
    SecretKey.generate().save(tmp_path / "trusted.d" / "wrong.pem")
    listed = said(capsys, "key", "list", "--config", config, code=1)
    assert listed["keys"] == [] and "wrong.pem: is a secret key" in listed["refused"][0]
    config.write_text(f'[trust]\npolicy = "any"\nkeys = ["{tmp_path}/missing"]\n')
    assert main(["key", "list", "--config", str(config)]) == 0
    assert 'policy = "any"' in capsys.readouterr().out


# -- artifacts -------------------------------------------------------------------------------------------------------


def test_artifacts_of_a_layout_are_judged_and_signed(tmp_path: Path, layout: Path, config: Path, capsys: Out) -> None:
    image = f"oci-layout:{layout}:v1"
    assert "has no artifacts of" in mistake(capsys, "artifact", "verify", image, "--config", config)
    said(capsys, "index", "publish", image, "--config", config)
    found = said(capsys, "artifact", "verify", image, "--config", config, code=1)
    assert verdicts(found) == [("layerindex", False, "is not signed")]
    names = []
    for name in ("ours", "theirs"):
        names.append(said(capsys, "key", "generate", "--out", tmp_path / name)["key"])
        done = said(capsys, "artifact", "sign", image, "--key", tmp_path / name, "--config", config)
        assert [row["status"] for row in done["artifacts"]] == ["signed"] and done["key"] == names[-1]
    again = said(capsys, "artifact", "sign", image, "--key", tmp_path / "ours", "--config", config)
    assert [row["status"] for row in again["artifacts"]] == ["there"]
    found = said(capsys, "artifact", "verify", image, "--config", config, code=1)
    assert verdicts(found)[0][1:] == (
        False,
        f"is signed by {names[0]}, {names[1]}, which no trusted key is (none is: see [trust] keys)",
    )
    (tmp_path / "trusted.d" / "theirs.pub").write_bytes((tmp_path / "theirs.pub").read_bytes())
    found = said(capsys, "artifact", "verify", image, "--config", config)
    assert verdicts(found) == [("layerindex", True, f"is signed by the trusted key {names[1]}")]
    assert found["artifacts"][0]["keys"] == names and found["artifacts"][0]["key"] == names[1]
    said(capsys, "artifact", "verify", image, "--keys", tmp_path / "ours.pub", "--config", config)
    assert main(["artifact", "verify", image, "--keys", str(tmp_path / "missing"), "--config", str(config)]) == 1
    out = capsys.readouterr().out
    assert "layer index" in out and "refused" in out


@pytest.mark.system
def test_artifacts_in_a_registry(tmp_path: Path, layout: Path, config: Path, host: str, capsys: Out) -> None:
    """Signed in their place, and found there by a node; one that somebody changed is refused."""
    where = f"{host}/signed/app:1"
    said(capsys, "copy", f"oci-layout:{layout}:v1", where)
    said(capsys, "index", "publish", where, "--config", config)
    name = said(capsys, "key", "generate", "--out", tmp_path / "trusted.d" / "ci")["key"]
    said(capsys, "artifact", "sign", where, "--key", tmp_path / "trusted.d" / "ci", "--config", config)
    good = said(capsys, "artifact", "verify", where, "--config", config)
    assert verdicts(good) == [("layerindex", True, f"is signed by the trusted key {name}")]
    [image] = [it for it in platform_images(LayoutImage(Layout(layout), "v1")) if isinstance(it, PlatformImage)]
    with closing(Registry(RegistryConfig())) as registry:
        found = Finder(registry).find(parse_reference(where), image.image_key, Kind.LAYER_INDEX)
        assert found is not None and found.digest == good["artifacts"][0]["digest"]
        blobs = (replace(found.artifact.blobs[0], layer="sha256:" + "9" * 64),)
        bad = replace(found.artifact, blobs=blobs)
        publish(Pusher(registry), parse_reference(where), bad, lambda blob: iter(()))
    refused = said(capsys, "artifact", "verify", where, "--config", config, code=1)
    assert (False, f"does not match its signature by the trusted key {name}") in [it[1:] for it in verdicts(refused)]


def test_mistakes_are_one_line(tmp_path: Path, layout: Path, config: Path, capsys: Out) -> None:
    image = f"oci-layout:{layout}:v1"
    assert "plain files" in mistake(capsys, "artifact", "verify", image, "--from", tmp_path)
    said(capsys, "key", "generate", "--out", tmp_path / "k")
    (tmp_path / "k").chmod(0o644)
    assert "chmod 600" in mistake(capsys, "artifact", "sign", image, "--key", tmp_path / "k")
    assert "A B" in mistake(capsys, "artifact", "verify", "A B")


# -- alarms ----------------------------------------------------------------------------------------------------------


def raise_alarm(root: Path, name: str = "0123456789abcd", served: bool = True) -> None:
    root.mkdir(exist_ok=True)
    layer = f"sha256:{name}{'0' * 50}"
    Alarms(root).raise_(
        layer, name, ["registry.test/app:1"], PACK, [(3, 5), (9, 10)], ["/etc/passwd", "/bin/a"], served
    )


def test_alarms_are_listed_shown_by_status_and_cleared(
    tmp_path: Path, config: Path, capsys: Out, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    assert main(["alarm", "ls", "--config", str(config)]) == 0
    assert capsys.readouterr().out == "no alarms\n"
    raise_alarm(root)
    raise_alarm(root, "ffffffffffffff", served=False)
    caplog.clear()
    [first, second] = said(capsys, "alarm", "ls", "--config", config)["alarms"]
    assert first["id"] == "0123456789abcd-cccccccccccc" and first["runs"] == [[3, 5], [9, 10]]
    assert first["pack"]["key"] == PACK.key and not second["served"]
    assert main(["alarm", "ls", "--config", str(config)]) == 0
    shown = capsys.readouterr().out
    for text in (shown, render({"alarms": [first, second], "layers": []})):
        for word in ("0123456789abcd-cccccccccccc", "registry.test/app:1", "/etc/passwd", PACK.key, PACK.where):
            assert word in text
    assert "ALARM: " in render({"alarms": [first]}) and "ALARM" not in render({"alarms": []})
    mounted = root / "m" / "0123456789abcd" / "etc"
    mounted.mkdir(parents=True)
    (mounted / "passwd").write_text("root")
    done = said(capsys, "alarm", "clear", first["id"], "--config", config)
    assert done == {"cleared": [first["id"]], "files_dropped": 1}
    assert "no such alarm" in mistake(capsys, "alarm", "clear", first["id"], "--config", config)
    assert main(["alarm", "clear", "--config", str(config)]) == 0
    assert "1 alarms cleared" in capsys.readouterr().out
    assert not Alarms(root).entries() and Quarantine(root).is_quarantined(PACK.digest), "the pack stays out"
