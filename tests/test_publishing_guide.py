"""docs/publish.md, followed from its first command to its last, and the jobs of its two CI examples.

`registry.example` is a registry on loopback; `docker` is a program that builds nothing, but logs in, pushes and saves
as the real one does; /etc and /srv are directories of the test. A node's store is made of the image's layers. Commands
that are ours alone run in this process: starting Python for each would take most of the time.
"""

import contextlib
import io
import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from blockindex.builder import LayerBuilder
from blockindex.codec import encode_index
from snapshotter.artifacts.finder import Finder
from snapshotter.artifacts.model import Kind
from snapshotter.blockstore import BlockStore, LayerRecord, Staging
from snapshotter.cli import main
from snapshotter.config import Config, RegistryConfig
from snapshotter.hotstore import HotStore
from snapshotter.imagesource import Layout, LayoutImage, PlatformImage, platform_images
from snapshotter.registry import Registry, parse_reference
from tests.clients.guide import Guide
from tests.registries import Front, Tokens, docker_registry
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.imagesource.layouts import LayoutWriter, tagged
from tests.snapshotter.test_publish import recorded

pytestmark = pytest.mark.system

GUIDE = Guide("publish.md")
LAYERS = [gzip_layer({"usr/base": b"base" * 50_000}), gzip_layer({"app": b"app" * 3000})]
_DOCKER = """#!{python}
import base64, json, os, subprocess, sys
verb, *rest = sys.argv[1:]
if verb == "login":
    login = base64.b64encode(f"{{rest[1]}}:{{sys.stdin.read().strip()}}".encode()).decode()
    os.makedirs(os.path.expanduser("~/.docker"), exist_ok=True)
    with open(os.path.expanduser("~/.docker/config.json"), "w") as file:
        json.dump({{"auths": {{rest[3]: {{"auth": login}}}}}}, file)
elif verb == "push":
    copy = ["skopeo", "copy", "-q", "--insecure-policy", "--dest-tls-verify=false"]
    login = [f"--dest-authfile={{os.path.expanduser('~/.docker/config.json')}}"]
    subprocess.run([*copy, *login, "oci:{layout}:v2", f"docker://{{rest[0]}}"], check=True)
elif verb == "save":
    copy = ["skopeo", "copy", "-q", "--insecure-policy", "--src-tls-verify=false", f"docker://{{rest[2]}}"]
    subprocess.run([*copy, f"docker-archive:{{rest[1]}}:{{rest[2]}}"], check=True)
else:
    assert [verb, *rest[:1]] == ["build", "--tag"], verb
"""


class Place:
    """Where the guide is followed."""

    def __init__(self, root: Path, host: str) -> None:
        self.root = root
        self.host = host
        self.work = root / "work"
        writer = LayoutWriter(root / "images")
        versions = [writer.image(LAYERS), writer.image([LAYERS[0], gzip_layer({"app": b"newer" * 3000})])]
        writer.index([tagged(image, tag) for image, tag in zip(versions, ("v1", "v2"), strict=True)])
        self.layout = writer.directory
        for directory in ("bin", "home", "srv", "work"):
            (root / directory).mkdir()
        docker = root / "bin" / "docker"
        docker.write_text(_DOCKER.format(python=sys.executable, layout=self.layout))
        docker.chmod(0o755)
        self.env = {
            **{name: text for name, text in os.environ.items() if name != "DOCKER_CONFIG"},
            "PATH": f"{root / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(root / "home"),
        }
        self.ran: list[str] = []

    def run(self, command: str, **env: str) -> str:
        """Run a command of the guide, and return what it prints."""
        self.ran.append(command)
        settings = {**self.env, **{name: self.here(text) for name, text in env.items()}}
        here = self.here(command)
        if here.startswith("bootseer ") and not re.search(r"[|&;<>()]", here):
            code, printed = self._ours(here, settings)
        else:
            done = subprocess.run(
                ["sh", "-ec", here], env=settings, cwd=self.work, capture_output=True, text=True, timeout=120
            )
            code, printed = done.returncode, done.stdout + done.stderr
        assert code == 0, f"{command}: {printed}"
        return printed

    def _ours(self, command: str, settings: dict[str, str]) -> tuple[int, str]:
        """A command of bootseer, in this process."""
        printed = io.StringIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.work)
            patch.delenv("DOCKER_CONFIG", raising=False)
            for name, text in settings.items():
                patch.setenv(name, text)
            argv = shlex.split(os.path.expandvars(command))[1:]
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                return main(argv), printed.getvalue()

    def here(self, text: str) -> str:
        """The same with the names of this place."""
        text = text.replace("registry.example", self.host).replace("/etc/bootseer", f"{self.root}/etc")
        text = text.replace("/srv/", f"{self.root}/srv/")
        return re.sub(r"^sudo (bootseer .*)", rf"\1 --config {self.root}/node.toml", text).removeprefix("sudo ")

    def images(self, tag: str) -> list[PlatformImage]:
        found = platform_images(LayoutImage(Layout(self.layout), tag))
        return [image for image in found if isinstance(image, PlatformImage)]

    def node(self) -> None:
        """A node whose store holds all blocks of the first version, and which has recorded it."""
        root = self.root / "node"
        store = BlockStore(root)
        (image,) = self.images("v1")
        for digest, blob in zip(image.layers, LAYERS, strict=True):
            builder, staging = LayerBuilder(digest), Staging(store.layers, digest)
            for offset, data in builder.feed(blob):
                staging.write(offset, data)
            index = builder.finish()
            record = LayerRecord(
                digest=digest,
                blob_size=index.blob_size,
                meta_size=len(index.metadata),
                data_size=index.data_size,
                images=(self.here("registry.example/team/app:1"),),
                implied_dirs=index.implied_dirs,
                layout=index.layout(),
            )
            staging.publish(record, index.metadata, encode_index(index), ())
            staging.discard()
        HotStore(root).save(recorded(image, LAYERS, "default")[0])
        (self.root / "node.toml").write_text(f'root = "{root}"\nrun = "{self.root}/run"\n')

    def found(self, repository: str, tag: str) -> set[tuple[Kind, str]]:
        """Kind and workload of the artifacts of a version there; all are signed."""
        (image,) = self.images(tag)
        with closing(Registry(RegistryConfig())) as registry:
            listed = Finder(registry).list(parse_reference(self.here(repository)), image.image_key)
        assert all(it.artifact.signatures for it in listed)
        return {(it.artifact.kind, it.artifact.workload) for it in listed}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with docker_registry(tmp_path / "registry") as host:
        yield Place(tmp_path, host)


BOTH = {(Kind.LAYER_INDEX, ""), (Kind.HOT_SET, "default")}


def test_the_guide(place: Place) -> None:
    for tag in ("1", "2"):
        place.run(f"bootseer copy oci-layout:{place.layout}:v{tag} registry.example/team/app:{tag}")
    place.run(f"bootseer copy oci-layout:{place.layout}:v1 oci-layout:build")
    place.node()
    place.ran.clear()
    printed = {}
    sections = [title for title in GUIDE.sections() if title not in ("GitHub Actions", "GitLab CI")]
    for step in (step for title in sections for step in GUIDE.steps(title)):
        printed[step.text] = place.run(step.text)
    key = place.work / "bootseer.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600 and (place.root / "etc/trusted.d/ci.pub").exists()
    verified = next(text for command, text in printed.items() if command.startswith("bootseer artifact verify"))
    assert "layer index" in verified and "linux/amd64" in verified
    reused = next(text for command, text in printed.items() if "--reuse" in command)
    assert "1 built, 1 reused" in reused
    for repository in ("team/app", "prod/app", "lab/app", "site/app"):
        assert place.found(f"registry.example/{repository}", "v1") == BOTH
    assert place.found("registry.example/team/indexes", "v1") == {(Kind.LAYER_INDEX, "")}
    assert place.found("registry.example/team/app", "v2") == {(Kind.LAYER_INDEX, "")}
    assert len(list((place.root / "srv/bootseer").rglob("*.bsi"))) == 2
    assert len(list((place.root / "srv/bootseer").rglob("*.bsh"))) == 1
    pack = next(text for command, text in printed.items() if command.startswith("sudo bootseer hotset publish"))
    assert "without bytes" not in pack and "no bytes" not in pack
    assert "there" in next(text for command, text in printed.items() if "docker-archive:" in command)


def _lines(heading: str, marker: str) -> list[str]:
    """The commands of a CI job, which begin with `marker`."""
    (job,) = (step for step in GUIDE.steps(heading) if step.path)
    return [line.strip().removeprefix(marker) for line in job.text.splitlines() if line.strip().startswith(marker)]


def _settings(heading: str) -> dict[str, str]:
    """The variables of the job that are not secrets."""
    (job,) = (step for step in GUIDE.steps(heading) if step.path)
    return dict(re.findall(r"^ +([A-Z_]+): ([^$\n]+)$", job.text, re.MULTILINE))


def test_the_github_job(place: Place) -> None:
    """Twice, as for two pushes, with a registry that wants a login."""
    place.run("bootseer key generate --out k")
    secret = (place.work / "k").read_text()
    with Front(place.host, tokens=Tokens({"me": "pw"})) as front:
        place.host = front.host
        lines = _lines("GitHub Actions", "- run: ")
        for sha in ("aaaa", "bbbb"):
            env = {**_settings("GitHub Actions"), "GITHUB_SHA": sha, "PASSWORD": "pw", "BOOTSEER_KEY": secret}
            printed = {line: place.run(line, **env) for line in lines}
            lines = [line for line in lines if line.startswith(("docker push", "bootseer"))]  # all else is done
            (published,) = (text for line, text in printed.items() if " publish " in line)
            assert ("nothing is taken over" in published) == (sha == "aaaa")
            assert ("published" in published) == (sha == "aaaa"), "equal layers, equal image: it is there"
            assert place.found("registry.example/team/web", "v2") == {(Kind.LAYER_INDEX, "")}
        assert len(lines) == 3


def test_the_gitlab_job(place: Place) -> None:
    place.run("bootseer key generate --out k")
    (place.work / "k").chmod(0o644)
    image = "registry.example/team/api"
    place.run(f"bootseer copy oci-layout:{place.layout}:v1 {image}:latest")
    place.run(f"bootseer copy oci-layout:{place.layout}:v2 {image}:abcd")
    env = {
        **_settings("GitLab CI"),
        "CI_COMMIT_SHA": "abcd",
        "BOOTSEER_KEY": str(place.work / "k"),
        "DOCKER_AUTH_CONFIG": json.dumps({"auths": {}}),
    }
    lines = _lines("GitLab CI", "- ")
    for line in lines:
        place.run(line, **env)
    assert len(lines) == 5 and place.found(image, "v2") == {(Kind.LAYER_INDEX, "")}


def test_the_configuration_is_taken(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(GUIDE.blocks("Other places", "toml")[0])
    (place,) = Config.from_toml(tmp_path / "c.toml").lookup.places
    assert f"--to {place} " in GUIDE.section("Other places")
