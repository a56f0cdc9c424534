"""What the arguments of `publish` and `copy` mean: where an image is read from, where artifacts go, who signs.

Credentials are looked for where the program `docker login` puts them for whoever runs this: here, at the edge, the
environment is read; the daemon's are root's, see `registry.credentials`.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from snapshotter.artifacts import opening
from snapshotter.artifacts.ocilayout import LayoutPlace
from snapshotter.artifacts.place import Place
from snapshotter.artifacts.registryplace import RegistryPlace
from snapshotter.config import Config, RegistryConfig
from snapshotter.errors import Denied, InvalidArgument, SnapshotterError, UserError
from snapshotter.imagesource import ImageSource, Layout, LayoutImage, RegistryImage, open_archive, parse_layout
from snapshotter.imagesource.dockerarchive import ARCHIVE_PREFIX
from snapshotter.imagesource.sources import LAYOUT_PREFIX
from snapshotter.registry import Platform, Registry, parse_platform, parse_reference
from snapshotter.registry.credentials import docker_config_path
from snapshotter.trust.keys import SecretKey

__all__ = [
    "client_config",
    "explained",
    "open_held",
    "open_place",
    "open_source",
    "platform_of",
    "readable",
    "signing_key",
    "taken_from",
]


_CONNECTIONS = 16
"""To one host, at least: a blob that is copied holds two, and several are on their way."""


def client_config(args: argparse.Namespace, config: Config, *named: str) -> RegistryConfig:
    """How to talk to registries, for a person or a job: with their own credentials, unless the configuration says
    otherwise; without TLS to the registries of `named`, as far as these are references, if --plain-http was given."""
    connections = max(config.registry.connections_per_host, _CONNECTIONS)
    found = replace(config.registry, connections_per_host=connections)
    if not found.docker_config:
        found = replace(found, docker_config=_docker_config())
    if args.plain_http:
        found = replace(found, plain_http=(*found.plain_http, *_hosts(named)))
    return found


def open_source(text: str, registry: Registry, image: str = "") -> ImageSource:
    """`REF`, `oci-layout:DIR[:TAG]` or `docker-archive:FILE`; `image` is the reference that the archive is known by."""
    if text.startswith(ARCHIVE_PREFIX):
        return open_archive(Path(text.removeprefix(ARCHIVE_PREFIX)), image, registry)
    if image:
        raise UserError(f"--image says what image {ARCHIVE_PREFIX}FILE is; {text} says so itself")
    try:
        if text.startswith(LAYOUT_PREFIX):
            directory, tag = parse_layout(text)
            return LayoutImage(Layout(directory), tag)
        return RegistryImage(registry, parse_reference(text))
    except InvalidArgument as error:
        hint = f": for an OCI layout write {LAYOUT_PREFIX}{text}" if Path(text).is_dir() else ""
        raise UserError(f"{error}{hint}") from error


def open_held(text: str, registry: Registry) -> Place:
    """The place of --from, from which artifacts are taken: `HOST/REPOSITORY`, `oci-layout:DIR`, a directory or a URL
    that fsspec knows. UserError for what is none; a layout has to be there."""
    try:
        if text.startswith(("http://", "https://")):
            raise InvalidArgument(
                f"{text}: a web server does not list what it has: name the directory it serves, or its storage"
            )
        if text.startswith(LAYOUT_PREFIX):
            Layout(parse_layout(text)[0])
        return opening.open_place(text, registry)
    except InvalidArgument as error:
        raise UserError(f"--from {error}") from error


def open_place(text: str, registry: Registry, source: ImageSource) -> Place:
    """`HOST/REPOSITORY`, `oci-layout:DIR`, a directory or a URL; beside the image where `text` is empty."""
    if not text:
        return _beside(source, registry)
    try:
        return opening.open_place(text, registry)
    except InvalidArgument as error:
        raise UserError(f"--to {error}") from error


def signing_key(path: Path | None, config: Config, place: Place) -> SecretKey | None:
    """The key of --key, or that of the configuration. UserError where the place keeps no signatures, but one was asked
    for."""
    if path is not None and not place.signs:
        raise UserError(f"{place.name} keeps plain files, which are not signed: leave --key out")
    if not place.signs:
        return None
    chosen = path or (Path(config.publish.key) if config.publish.key else None)
    return SecretKey.load(chosen) if chosen is not None else None


def platform_of(args: argparse.Namespace) -> Platform | None:
    """What --platform says; UserError where that is none."""
    try:
        return parse_platform(args.platform) if args.platform else None
    except InvalidArgument as error:
        raise UserError(str(error)) from error


@contextmanager
def readable(config: RegistryConfig) -> Iterator[None]:
    """A refusal to be read by a registry says where credentials were looked for."""
    try:
        yield
    except Denied as error:
        raise Denied(f"{error}{_looked(config, error)}") from error


@contextmanager
def taken_from(place: str, config: RegistryConfig) -> Iterator[None]:
    """As `readable`, for a place that artifacts are taken from; never a Denied, which is about the target."""
    try:
        yield
    except Denied as error:
        raise SnapshotterError(f"cannot read what {place} has: {error}{_looked(config, error)}") from error


@contextmanager
def explained(place: str, config: RegistryConfig, advice: str) -> Iterator[None]:
    """A refusal by a registry says where credentials were looked for, and what else could be done."""
    try:
        yield
    except Denied as error:
        raise SnapshotterError(f"cannot write to {place}: {error}{_looked(config, error)}: {advice}") from error


def _looked(config: RegistryConfig, error: Denied) -> str:
    """Where credentials were looked for, unless the error says it."""
    path = docker_config_path(config.docker_config)
    return "" if str(path) in str(error) else f" (credentials are looked for in {path})"


def _beside(source: ImageSource, registry: Registry) -> Place:
    if isinstance(source, LayoutImage):
        return LayoutPlace(source.layout)
    if source.home is None:
        raise UserError(f"{source.name} does not say which repository it is of: say where to publish with --to")
    return RegistryPlace(registry, source.home)


def _docker_config() -> str:
    """Where the docker command line keeps credentials; "" leaves it to the registry client."""
    directory = os.environ.get("DOCKER_CONFIG") or (os.environ.get("HOME") and f"{os.environ['HOME']}/.docker")
    return f"{directory}/config.json" if directory else ""


def _hosts(named: tuple[str, ...]) -> Iterator[str]:
    for text in named:
        if text and not text.startswith((LAYOUT_PREFIX, ARCHIVE_PREFIX, ".", "/")) and "://" not in text:
            try:
                yield parse_reference(text).api_host
            except InvalidArgument:
                continue  # said when it is opened
