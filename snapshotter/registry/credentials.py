"""Users, passwords and tokens for registries, out of Docker's `config.json` and the helpers that it names.

How the file is to be read is the `docker` package's business. Read again whenever the file has changed. What cannot be
read counts as no credentials, for public images need none; `problem` then tells why. Secrets are in no repr, message or
log line; the output of a helper is not repeated either.

Shared state: `_lock` guards the parsed file; helpers, which may ask the network, run outside of it.
"""

import json
import logging
import os
import pwd
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import docker.auth  # type: ignore[import-untyped]  # it has no types
from docker.errors import DockerException  # type: ignore[import-untyped]  # as above

from snapshotter.log import fields
from snapshotter.registry.reference import DOCKER, DOCKER_API

__all__ = ["Credential", "DockerConfig", "docker_config_path"]

_HELPER_S = 30.0  # a helper that takes longer counts as broken; those of clouds ask a server, for a second or so

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Credential:
    """A user and a password, or an identity token (what OAuth2 calls a refresh token), or a registry token (a Bearer
    token as it is)."""

    user: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)


def docker_config_path(configured: str) -> Path | None:
    """The file to read: `configured`, or `.docker/config.json` in the home of the user that we run as."""
    if configured:
        return Path(configured)
    try:
        return Path(pwd.getpwuid(os.geteuid()).pw_dir, ".docker", "config.json")
    except KeyError:
        return None


class DockerConfig:
    """The credentials in one file; None or an absent file holds none. Thread-safe."""

    def __init__(self, path: Path | None, helper_timeout_s: float = _HELPER_S) -> None:
        self._path = path
        self._helper_timeout_s = helper_timeout_s
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._config = docker.auth.AuthConfig({})
        self._file_problem = ""
        self._problems: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"<DockerConfig {self._path}{', ' + self._file_problem if self._file_problem else ''}>"

    def lookup(self, host: str) -> Credential | None:
        """What to show to host[:port], or None. A helper gets 30 s."""
        config = self._current()
        name = DOCKER if host == DOCKER_API else host
        helper = config.get_credential_store(name)
        if helper is None:
            return _credential(config.resolve_authconfig(name))
        found, problem = self._ask_helper(config, str(helper), name)
        with self._lock:
            told = self._problems.get(host, "") == problem
            self._problems[host] = problem
        if problem and not told:
            log.warning("credentials.failed %s", fields(host=host, file=self._path, error=problem))
        return found

    def hosts(self) -> set[str]:
        """The hosts[:port] that the file names; Docker's own spelling of its registry is not among them."""
        config = self._current()
        return {str(name) for name in (*config.auths, *config.cred_helpers) if "/" not in str(name)}

    def problem(self, host: str) -> str:
        """Why there may be no credentials for `host`, for an error message."""
        with self._lock:
            trouble = self._file_problem or self._problems.get(host, "")
        return f"no credentials for it in {self._path}{': ' + trouble if trouble else ''}"

    def _ask_helper(self, config: docker.auth.AuthConfig, helper: str, name: str) -> tuple[Credential | None, str]:
        program = f"docker-credential-{helper}"
        if shutil.which(program) is None:
            return None, f"{program} is not on the daemon's PATH"
        try:
            return _credential(_bounded(lambda: config.resolve_authconfig(name), self._helper_timeout_s)), ""
        except TimeoutError:
            return None, f"{program} did not answer within {self._helper_timeout_s:g} s"
        except (DockerException, OSError, ValueError, KeyError, TypeError):
            return None, f"{program} failed (see for yourself: echo {name} | {program} get)"

    def _current(self) -> docker.auth.AuthConfig:
        """The parsed file, parsed anew if it is another than before."""
        with self._lock:
            try:
                found = os.stat(self._path) if self._path is not None else None
            except OSError:
                found = None
            stamp = (found.st_mtime_ns, found.st_size, found.st_ino) if found is not None else None
            if stamp != self._stamp:
                self._stamp = stamp
                self._config, self._file_problem = _parsed(self._path if stamp else None)
                self._problems.clear()
                if self._file_problem:
                    log.warning("credentials.unreadable %s", fields(file=self._path, error=self._file_problem))
            return self._config


def _parsed(path: Path | None) -> tuple[docker.auth.AuthConfig, str]:
    """The file's credentials, and what is wrong with it; one bad entry does not hide the others."""
    if path is None:
        return docker.auth.AuthConfig({}), ""
    try:
        data = json.loads(path.read_bytes())
    except OSError as exc:
        return docker.auth.AuthConfig({}), f"the file cannot be read: {exc.strerror}"
    except ValueError:
        return docker.auth.AuthConfig({}), "the file is not JSON"
    kinds = {"auths": dict, "credHelpers": dict, "credsStore": str}
    if not isinstance(data, dict) or not all(isinstance(data.get(key, kind()), kind) for key, kind in kinds.items()):
        return docker.auth.AuthConfig({}), "the file is not a Docker config"
    auths, bad = {}, []
    for registry, entry in data.get("auths", {}).items():
        try:
            kept = {key: value for key, value in entry.items() if value}
            auths.update(docker.auth.parse_auth({registry: kept}, raise_on_error=True))
        except (DockerException, ValueError, AttributeError, TypeError):
            bad.append(str(registry))
    known = {key: data[key] for key in ("credHelpers", "credsStore") if data.get(key)}
    problem = f"its entry for {', '.join(bad)} is malformed" if bad else ""
    return docker.auth.AuthConfig({"auths": auths, **known}), problem


def _credential(entry: object) -> Credential | None:
    """docker's answer as a value; its keys are upper case when they come from a helper."""
    if not isinstance(entry, dict):
        return None
    known = {str(key).lower(): str(value or "") for key, value in entry.items()}
    found = Credential(known.get("username", ""), known.get("password", ""), known.get("identitytoken", ""))
    return found if found.identity_token or found.password else None


def _bounded(call: Callable[[], object], timeout_s: float) -> object:
    """What `call` returns or raises; TimeoutError when it takes too long. It then runs on in its own thread."""
    outcome: list[object] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            outcome.append(call())
        except Exception as exc:  # handed to the caller
            errors.append(exc)

    thread = threading.Thread(target=work, name="credential-helper", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError
    return outcome[0]
