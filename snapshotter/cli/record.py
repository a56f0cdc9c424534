"""`bootseer record`: run a workload under containerd, and keep what it reads until it is ready as its hot set."""

import argparse
import json
import re
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapshotter.cli.table import megabytes
from snapshotter.cli.tree import Commands, add_config, add_containerd_address
from snapshotter.config import Config, load_config
from snapshotter.errors import NotFound, SnapshotterError

if TYPE_CHECKING:
    from snapshotter.containerd.pull import Pulled
    from snapshotter.record.workload import Container, HttpProbe

__all__ = ["add"]

_TICK_S = 0.02
_SHOWN_S = 1.0
_TIMEOUT_S = 300.0
_SPARE_S = 60.0  # what the daemon waits longer for us than we do: it ends the recording of a command that was killed
_WORKLOAD = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


def add(commands: Commands) -> None:
    """Declare the command."""
    text = (
        "Run a container of the image under containerd, record which blocks of its layers it reads until it is ready,"
        " and keep them as the image's hot set, in place of one that is there. The image is pulled lazily first."
        " Without a --ready option the container is ready when it exits with 0, or has read nothing new for quiet_s of"
        " the configuration. It is killed and removed in the end. If it fails or does not get ready, nothing is kept."
        " CMD takes the place of the image's own arguments (its CMD). Needs the daemon, and `ctr`."
    )
    usage = "bootseer record REF [OPTION ...] [-- CMD ...]"
    command = commands.add_parser("record", help="record what a workload reads", description=text, usage=usage)
    command.add_argument("image", metavar="REF", help="image reference")
    command.add_argument(
        "--workload", metavar="NAME", type=_workload, default="default", help="name of the hot set (default: default)"
    )
    ready = command.add_mutually_exclusive_group()
    ready.add_argument("--ready-regex", metavar="RE", type=_pattern, help="ready when a line of its output matches")
    ready.add_argument("--ready-exit", action="store_true", help="ready when it exits with 0")
    ready.add_argument(
        "--ready-http", metavar="URL", help="ready when the URL answers 2xx; the container has the host's network then"
    )
    command.add_argument(
        "--timeout", metavar="S", type=_seconds, default=_TIMEOUT_S, help=f"give up then (default: {_TIMEOUT_S:.0f})"
    )
    command.add_argument("--namespace", metavar="NAME", default="default", help="containerd's (default: default)")
    command.add_argument("--snapshotter", metavar="NAME", help="plugin's name (default: the one with our socket)")
    add_containerd_address(command)
    command.add_argument("--json", action="store_true", help="print the result as JSON")
    add_config(command)
    command.set_defaults(run=_record, command=[])  # what stands after `--`


def _workload(text: str) -> str:
    if not _WORKLOAD.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: a-z, 0-9, then also . _ -, up to 64 characters")
    return text


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from error


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to 86400")
    return seconds


def _record(args: argparse.Namespace) -> int:
    from snapshotter.cli.pull import pulled_image
    from snapshotter.record.workload import Container, Ctr, HttpProbe

    config = load_config(args.config)
    pulled, snapshotter = pulled_image(args, config)
    ctr = Ctr(args.containerd_address, args.namespace, snapshotter)
    name = Container.new_name()
    its = _Recording(config, args.namespace, name)
    with ExitStack() as closing:
        probe = HttpProbe(args.ready_http) if args.ready_http else None
        if probe is not None:
            closing.callback(probe.close)
        its.arm(args.workload, pulled.manifest, args.timeout + _SPARE_S)
        container = Container(ctr, pulled.image, name, args.command, args.ready_regex, args.ready_http is not None)
        closing.callback(container.close)
        result = _until_ready(args, config, its, container, probe)
    _print(args, pulled, result)
    return 0


@dataclass(frozen=True, slots=True)
class _Recording:
    """The daemon's recording of our container."""

    config: Config
    namespace: str
    name: str

    def _ask(self, op: str, **fields: Any) -> Any:
        from snapshotter.rpc import call

        return call(self.config.control_path, op, 30.0, namespace=self.namespace, name=self.name, **fields)

    def arm(self, workload: str, manifest: str, window_s: float) -> None:
        """Have the container recorded that will come."""
        self._ask("record-arm", workload=workload, manifest=manifest, window_s=window_s)

    def progress(self) -> dict[str, Any] | None:
        """How far it is; None before the container has its snapshot."""
        try:
            progress: dict[str, Any] = self._ask("record-progress")
            return progress
        except NotFound:
            return None

    def end(self, keep: bool, why: str) -> dict[str, Any]:
        """End it; says what has become of it."""
        try:
            result: dict[str, Any] = self._ask("record-end", keep=keep, why=why)
        except NotFound as error:
            raise SnapshotterError(
                "the daemon has not recorded the container: its log says why; all layers of the image must be lazy"
            ) from error
        if keep and not result["kept"]:
            raise SnapshotterError(f"nothing is recorded: {result['why']}")
        return result


def _until_ready(
    args: argparse.Namespace, config: Config, its: _Recording, container: "Container", probe: "HttpProbe | None"
) -> dict[str, Any]:
    """Wait until the container is ready, and end the recording at once; what has become of it."""
    by_quiet = not (args.ready_regex or args.ready_exit or args.ready_http)
    give_up = time.monotonic() + args.timeout
    shown = time.monotonic()
    while True:
        code = container.ended()  # before the line is looked for: all output has been seen then
        if container.matched.is_set():
            return its.end(True, "a line of its output matches")
        if probe is not None and probe.answered.is_set():
            return its.end(True, f"{args.ready_http} answers")
        if code is not None:
            if code == 0 and (args.ready_exit or by_quiet):
                return its.end(True, "the container exited with 0")
            raise SnapshotterError(
                f"the container ended with exit code {code} before it was ready: nothing is recorded, see its output"
            )
        now = time.monotonic()
        if now > give_up:
            raise SnapshotterError(f"the container was not ready within {args.timeout:g} s: nothing is recorded")
        if now - shown >= _SHOWN_S:
            shown = now
            progress = its.progress()
            _show(progress)
            quiet_s = (progress or {}).get("quiet_s")
            if by_quiet and quiet_s is not None and quiet_s >= config.record.quiet_s:
                return its.end(True, f"no new block for {config.record.quiet_s:g} s")
        time.sleep(_TICK_S)


def _show(progress: dict[str, Any] | None) -> None:
    if progress is not None:
        print(f"recording: {progress['seconds']:.1f} s, {megabytes(progress['bytes'])} read", file=sys.stderr)


def _print(args: argparse.Namespace, pulled: "Pulled", result: dict[str, Any]) -> None:
    if args.json:
        names = ("image_key", "workload", "blocks", "bytes", "extents", "seconds", "why", "path")
        document = {"image": pulled.image, "manifest": pulled.manifest, **{name: result[name] for name in names}}
        print(json.dumps(document, indent=2))
        return
    print(f"{pulled.image}: workload {result['workload']} ready after {result['seconds']} s ({result['why']})")
    print(f"hot: {megabytes(result['bytes'])} in {result['extents']} extents of {len(pulled.layers)} layers")
    print(f"lies in {result['path']}")
    print(f"for other nodes: bootseer hotset export {pulled.image} --to DIR")
