"""All checks in order: looks up the facts, hands them to the checks, and carries facts from one to the next."""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from snapshotter.alarms import Alarms
from snapshotter.config import Config
from snapshotter.containerd.client import DEFAULT_ADDRESS, Containerd, Plugin
from snapshotter.errors import Denied, SnapshotterError, UserError
from snapshotter.fetch.sources import Sources, check_sources
from snapshotter.lazyswitch import LazySwitch
from snapshotter.registry import Registry
from snapshotter.rpc import Unanswered, call
from snapshotter.trust.keys import KeyRing

from .containerdconfig import DEFAULT_CONFIG, check_config, read_config
from .directories import check_directories
from .image import check_image
from .kernel import KernelFacts, check_kernel
from .model import Check, fail, ok, warn
from .node import START, RootFacts, check_cri, check_daemon, check_ordinary, check_root
from .trust import check_publishing, check_trust

__all__ = ["Subject", "check_containerd", "examine"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is to be examined. `image`: also this image's registry and layers."""

    config: Config
    containerd_config: Path = DEFAULT_CONFIG
    containerd_address: Path = DEFAULT_ADDRESS
    image: str = ""


def examine(subject: Subject) -> Iterator[Check]:
    """The checks one after the other, as they are made."""
    config = subject.config
    if os.geteuid() != 0:
        yield fail("rights", "not root", "most of what follows can only be seen by root", "sudo bootseer doctor")
    yield from check_kernel(KernelFacts.probe(), config.mount.attach)
    yield from check_root(RootFacts.probe(config.root_path))
    status, problem, fix = _ask(config.control_path)
    yield from check_daemon(status, problem, version("bootseer"), fix)
    yield from check_ordinary(status or {"lazy_off_since": LazySwitch(config.root_path).off_since()})
    yield from _trust(config)
    yield from check_directories(config)
    yield from _containerd(subject)
    if config.cri.enabled:
        yield check_cri(config.cri_path)
    if subject.image:
        yield from _image(subject)


def _ask(control: Path) -> tuple[Mapping[str, Any] | None, str, str]:
    """The daemon's status; or why there is none, and what to do."""
    renew = "bootseer reload: its processes are replaced, and readers do not notice; look into its log"
    try:
        status: Mapping[str, Any] = call(control, "status")
        return status, "", ""
    except Unanswered as error:
        cause = error.__cause__
        if isinstance(cause, TimeoutError):
            return None, f"the daemon does not answer at {control}", renew
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EPERM):
            return None, f"only root may ask the daemon at {control}", "sudo bootseer doctor"
        return None, f"no daemon answers at {control}", START
    except SnapshotterError as error:
        return None, str(error), renew


def _trust(config: Config) -> Iterator[Check]:
    try:
        alarms = Alarms(config.root_path).entries()
    except SnapshotterError:  # not root, which was said
        alarms = []
    yield from check_trust(config.trust.policy, KeyRing.load(map(Path, config.trust.keys)), alarms)
    yield from check_publishing(config)


def _containerd(subject: Subject) -> Iterator[Check]:
    socket = subject.config.socket_path
    containerd = Containerd(subject.containerd_address)
    running = ""
    try:
        running = containerd.version()
        plugins = containerd.snapshotters()
    except SnapshotterError as error:
        fix = "start containerd, or name its socket with --containerd-address"
        fix = "run as root" if isinstance(error, Denied) else fix
        yield fail("containerd", "not reachable", str(error), fix)
    else:
        yield ok("containerd", f"version {running} at {subject.containerd_address}")
        yield check_containerd(plugins, socket)
    try:
        config = read_config(subject.containerd_config, socket)
    except SnapshotterError as error:
        fix = "name the file that containerd was started with by --containerd-config"
        yield warn("containerd-config", "cannot be read", str(error), fix)
        return
    yield from check_config(config, socket, subject.config.root_path, running)


def check_containerd(plugins: list[Plugin], socket: Path) -> Check:
    """Whether the running containerd has us among its snapshotters."""
    for plugin in plugins:
        address = plugin.exports.get("address", "").removeprefix("unix://")
        if not address or os.path.realpath(address) != os.path.realpath(socket):
            continue
        if plugin.problem:
            return fail("containerd-plugin", f"{plugin.name} is not in use", plugin.problem, "restart containerd")
        if "rebase" in plugin.capabilities:
            fix = f"remove it from [proxy_plugins.{plugin.name}], then restart containerd"
            return fail("containerd-plugin", 'the capability "rebase" is set', "bootseer cannot do that", fix)
        return ok("containerd-plugin", f"containerd runs it as {plugin.name}")
    known = ", ".join(plugin.name for plugin in plugins if not plugin.problem)
    what = f"the running containerd has no snapshotter at {socket} (it has {known})"
    fix = "see containerd-config, then restart containerd"
    return fail("containerd-plugin", what, "it reads its configuration only when it starts", fix)


def _image(subject: Subject) -> Iterator[Check]:
    with closing(Registry(subject.config.registry)) as registry:
        try:
            check_sources(subject.config)
        except UserError as error:
            yield fail(
                "lookup", "the configuration names what cannot be asked", str(error), "change it, then bootseer reload"
            )
            return
        with closing(Sources(subject.config, registry)) as sources:
            yield from check_image(subject.image, registry, sources)
