"""Docker's config.json and its helpers: what is found, what is told, and that no secret gets out."""

import json
import logging
import os
import pwd
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshotter.registry.credentials import Credential, DockerConfig, docker_config_path

SECRET = "s3cr:t"


def auth(user: str = "me", password: str = SECRET) -> dict[str, str]:
    return {"auth": b64encode(f"{user}:{password}".encode()).decode()}


def write(path: Path, **content: object) -> DockerConfig:
    path.write_text(json.dumps(content))
    return DockerConfig(path)


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Makes `docker-credential-NAME` out of a line of shell, on the PATH; `$host` is what was asked for."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")

    def make(name: str, line: str) -> Path:
        path = directory / f"docker-credential-{name}"
        path.write_text(f'#!/bin/sh\nread -r host; echo "$1 $host" >> {tmp_path}/asked\n{line}\n')
        path.chmod(0o755)
        return path

    return make


def test_auths_by_host(tmp_path: Path) -> None:
    config = write(
        tmp_path / "c",
        auths={
            "r.io:5000": auth(),
            "https://old.example/v1/": auth("old"),
            "https://index.docker.io/v1/": auth("hub"),
            "token.example": {"identitytoken": "idt", **auth("<token>", "")},
            "both.example": {"identitytoken": "", **auth("both")},
            "empty.example": {},
        },
    )
    assert config.lookup("r.io:5000") == Credential("me", SECRET)
    assert config.lookup("old.example") == Credential("old", SECRET)
    assert config.lookup("registry-1.docker.io") == Credential("hub", SECRET)
    assert config.lookup("token.example") == Credential(identity_token="idt")
    assert config.lookup("both.example") == Credential("both", SECRET)
    assert config.lookup("empty.example") is None and config.lookup("r.io") is None
    assert config.problem("r.io") == f"no credentials for it in {tmp_path / 'c'}"


def test_absent_and_changed(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = DockerConfig(path)
    assert config.lookup("r.io") is None
    write(path, auths={"r.io": auth()})
    assert config.lookup("r.io") == Credential("me", SECRET)
    write(tmp_path / "new", auths={"r.io": auth("you")})
    (tmp_path / "new").replace(path)
    assert config.lookup("r.io") == Credential("you", SECRET)
    path.unlink()
    assert config.lookup("r.io") is None
    assert DockerConfig(None).lookup("r.io") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"[{SECRET}", "is not JSON"),
        (f'["{SECRET}"]', "is not a Docker config"),
        (f'{{"auths": "{SECRET}"}}', "is not a Docker config"),
        (f'{{"credsStore": ["{SECRET}"]}}', "is not a Docker config"),
        (f'{{"auths": {{"bad.io": "{SECRET}"}}}}', "its entry for bad.io is malformed"),
        (f'{{"auths": {{"bad.io": {{"auth": "{SECRET}"}}}}}}', "its entry for bad.io is malformed"),
        ('{"auths": {"bad.io": {"auth": 7}}}', "its entry for bad.io is malformed"),
        ("\xff", "is not JSON"),
    ],
)
def test_malformed(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    config = DockerConfig(path)
    assert config.lookup("bad.io") is None and config.lookup("r.io") is None
    assert words in config.problem("bad.io") and words in repr(config)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and words in record.getMessage()
    assert SECRET not in f"{config.problem('bad.io')} {config!r} {record.getMessage()}"


def test_a_bad_entry_hides_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = write(tmp_path / "c", auths={"bad.io": {"auth": "!"}, "r.io": auth()})
    assert config.lookup("r.io") == Credential("me", SECRET)
    caplog.clear()


def test_unreadable(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").mkdir()
    config = DockerConfig(tmp_path / "config.json")
    assert config.lookup("r.io") is None and "cannot be read: Is a directory" in config.problem("r.io")
    caplog.clear()


def test_helper_for_one_registry(tmp_path: Path, helper: Callable[[str, str], Path]) -> None:
    helper("one", f'echo \'{{"Username": "me", "Secret": "{SECRET}"}}\'')
    helper("all", "echo credentials not found in native keychain; exit 1")
    config = write(tmp_path / "c", credHelpers={"r.io:5000": "one"}, credsStore="all", auths={"x.io": auth("x")})
    assert config.lookup("r.io:5000") == Credential("me", SECRET)
    assert config.lookup("x.io") == Credential("x", SECRET), "what the store does not know may be in the file"
    assert config.lookup("y.io") is None and "native" not in config.problem("y.io")
    assert config.lookup("registry-1.docker.io") is None
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["get r.io:5000", "get x.io", "get y.io", "get https://index.docker.io/v1/"]


def test_store_with_an_identity_token(tmp_path: Path, helper: Callable[[str, str], Path]) -> None:
    helper("all", 'echo \'{"Username": "<token>", "Secret": "idt"}\'')
    assert write(tmp_path / "c", credsStore="all").lookup("r.io") == Credential(identity_token="idt")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (f"echo {SECRET}; exit 1", "docker-credential-all failed (see for yourself: echo r.io |"),
        (f"echo {SECRET}", "docker-credential-all failed"),
        (f'echo \'{{"Secret": "{SECRET}"}}\'', "docker-credential-all failed"),
        ("", "docker-credential-all failed"),
        ("exec sleep 2", "docker-credential-all did not answer within 0.3 s"),
        (None, "docker-credential-all is not on the daemon's PATH"),
    ],
)
def test_broken_helper(
    tmp_path: Path, helper: Callable[[str, str], Path], caplog: pytest.LogCaptureFixture, line: str | None, words: str
) -> None:
    if line is not None:
        helper("all", line)
    config = write(tmp_path / "c", credsStore="all")
    config._helper_timeout_s = 0.3 if line and "sleep" in line else 10.0
    assert config.lookup("r.io") is None and config.lookup("r.io") is None
    assert words in config.problem("r.io") and "problem" not in config.problem("other.io")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and words in record.getMessage(), "said once"
    assert SECRET not in f"{config.problem('r.io')} {record.getMessage()} {config!r}"
    helper("all", 'echo \'{"Username": "me", "Secret": "again"}\'')
    config._helper_timeout_s = 10.0
    assert config.lookup("r.io") == Credential("me", "again")
    assert config.problem("r.io") == f"no credentials for it in {tmp_path / 'c'}"
    caplog.clear()


def test_no_secret_in_reprs() -> None:
    assert repr(Credential("me", SECRET, SECRET)) == "Credential(user='me')"


def test_which_file() -> None:
    assert docker_config_path("/x/config.json") == Path("/x/config.json")
    home = pwd.getpwuid(os.geteuid()).pw_dir
    assert docker_config_path("") == Path(home, ".docker", "config.json")
