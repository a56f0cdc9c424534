"""The daemon's configuration: frozen values, built once at the edge and passed inward.

This file is the one place where an option is documented: each is one line below, with default, unit, bounds and a
sentence; `bootseer config show` and the TOML reader walk these fields, so a new option needs no other change.
Reads no environment. A Config is always valid: `Config()` by its defaults, `Config.from_toml` by its checks.
"""

import dataclasses
import json
import math
import tomllib
import typing
from dataclasses import dataclass, field
from pathlib import Path

from snapshotter.errors import InvalidArgument, UserError

__all__ = [
    "DEFAULT_PATH",
    "CacheConfig",
    "Config",
    "ContainerdConfig",
    "CriConfig",
    "FetchConfig",
    "HotSetConfig",
    "IndexConfig",
    "LazyConfig",
    "LogConfig",
    "LookupConfig",
    "MountConfig",
    "PublishConfig",
    "RecordConfig",
    "RegistryConfig",
    "TrustConfig",
    "WorkloadConfig",
    "load_config",
]

DEFAULT_PATH = Path("/etc/bootseer/config.toml")
"""Read when no `--config` is given and it exists."""

_T = typing.TypeVar("_T")
_SOCKET_PATH_BYTES = 107  # sun_path less its final zero


def _option(
    default: _T,
    doc: str,
    *,
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    absolute: bool = False,
    may_be_empty: bool = False,
) -> _T:
    """One option. Bounds are inclusive; `absolute` asks for an absolute path, or "" if that is the default or
    `may_be_empty`."""
    metadata = {
        "doc": doc,
        "unit": unit,
        "low": low,
        "high": high,
        "choices": choices,
        "absolute": absolute,
        "may_be_empty": may_be_empty or not default,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """Where ready-made layer indexes are looked for."""

    url: str = _option(
        "", "Directory of layer indexes: an http(s) or file URL, another that fsspec knows, or a path; empty: none."
    )
    timeout_s: float = _option(
        5.0,
        "Time for one look-up, and 1 s more for each MB that comes; then the layer goes without.",
        unit="s",
        low=0.1,
        high=300,
    )


@dataclass(frozen=True, slots=True)
class ContainerdConfig:
    """The containerd that uses this daemon."""

    address: str = _option(
        "/run/containerd/containerd.sock",
        "Its socket: asked which image a layer belongs to, where a client does not say so; empty: not asked.",
        absolute=True,
        may_be_empty=True,
    )


@dataclass(frozen=True, slots=True)
class CriConfig:
    """The way for credentials that the kubelet passes with a pull."""

    enabled: bool = _option(False, "Whether the kubelet's image service is passed on to containerd, for credentials.")
    socket: str = _option("", "Where the kubelet connects; empty: <run>/cri.sock.", absolute=True)
    image_service: str = _option(
        "", "The image service behind it; empty: containerd at the address in [containerd].", absolute=True
    )


@dataclass(frozen=True, slots=True)
class RegistryConfig:
    """How registries are talked to."""

    plain_http: tuple[str, ...] = _option(
        (), "Registries (host or host:port) spoken to without TLS, if hosts_dir says nothing else; loopback is."
    )
    hosts_dir: str = _option(
        "/etc/containerd/certs.d",
        "containerd's hosts.toml files: mirrors, certificates; empty: none.",
        absolute=True,
        may_be_empty=True,
    )
    docker_config: str = _option(
        "", "Docker's config.json with credentials; empty: .docker/config.json in root's home.", absolute=True
    )
    connections_per_host: int = _option(16, "Connections to one host.", low=1, high=256)
    connect_timeout_s: float = _option(5.0, "Time to connect.", unit="s", low=0.1, high=300)
    read_timeout_s: float = _option(
        15.0, "Time without a byte after which a connection is dead.", unit="s", low=0.1, high=600
    )


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """How missing blocks are brought in."""

    read_timeout_s: float = _option(
        300.0, "Time after which a waiting reader gets an I/O error.", unit="s", low=1, high=86400
    )
    demand_threads: int = _option(8, "Spans fetched at once for waiting readers, per registry host.", low=1, high=128)
    background_threads: int = _option(
        2, "Streams that fill layers behind the readers, per registry host.", low=1, high=64
    )
    waiting_pulls: int = _option(
        64, "Layers that pulls wait for at once, per registry; those beyond go the ordinary way.", low=1, high=192
    )
    span_growth_kib: int = _option(
        4096, "Most bytes one demand read fetches when it keeps reading on.", unit="KiB", low=128, high=65536
    )
    background: bool = _option(True, "Whether the rest of a layer is streamed once nobody waits.")
    background_delay_s: float = _option(
        0.0, "Time after a layer's mount before its stream begins.", unit="s", low=0, high=86400
    )


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """How much room what is kept may take. Layers that an image on the node uses are never removed."""

    max_gib: float = _option(
        0.0,
        "Most that layers and hot sets may take; beyond it unused layers are removed; 0: no bound.",
        unit="GiB",
        low=0,
        high=1 << 20,
    )
    min_free_percent: float = _option(
        20.0, "Unused layers are removed while less of the disk is free; 0: never for that.", unit="%", low=0, high=90
    )
    unstored_mib: int = _option(
        64, "Memory for blocks that the disk refuses, until there is room.", unit="MiB", low=1, high=65536
    )


@dataclass(frozen=True, slots=True)
class HotSetConfig:
    """Where hot sets are looked for, and how their blocks are prefetched."""

    url: str = _option(
        "", "Directory of hot sets: an http(s) or file URL, another that fsspec knows, or a path; empty: none."
    )
    timeout_s: float = _option(
        5.0,
        "Time to find a hot set, and without a byte of one; then the start goes without.",
        unit="s",
        low=0.1,
        high=300,
    )
    prefetch: bool = _option(True, "Whether hot blocks are fetched before anything reads them.")
    streams: int = _option(3, "Requests for hot blocks at once, per image.", low=1, high=64)
    far_streams: int = _option(
        8, "The same, and connections opened ahead, where a round trip takes 40 ms or more.", low=1, high=64
    )


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """How hot sets are recorded."""

    auto: bool = _option(True, "Whether containers of images and workloads without a hot set are recorded.")
    window_s: float = _option(120.0, "Longest recording.", unit="s", low=1, high=86400)
    quiet_s: float = _option(
        10.0, "Time without a block that is new to the recording after which it ends.", unit="s", low=0.1, high=86400
    )


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """Which containers are which workload."""

    rules: tuple[str, ...] = _option(
        (),
        "Rules 'NAME argv REGEX', 'NAME label KEY=PATTERN' or 'NAME annotation KEY=PATTERN'; the first that fits a"
        " container names its workload.",
    )
    default_mib: int = _option(
        512, "Most bytes of the hot set that is fetched before the workload is known.", unit="MiB", low=1, high=65536
    )
    default_share: float = _option(0.5, "Most of an image that this hot set may have, as a share.", low=0.01, high=1)
    records: int = _option(8, "Recordings of a workload that its hot set is made of: the last so many.", low=1, high=64)
    stale_share: float = _option(
        0.1,
        "Share of blocks read that a prefetch did not bring, from which on a workload is recorded anew.",
        low=0.01,
        high=1,
    )


@dataclass(frozen=True, slots=True)
class LookupConfig:
    """Where indexes and hot sets are looked for in registries."""

    registry: bool = _option(True, "Whether the registry of an image is asked, in the image's own repository.")
    places: tuple[str, ...] = _option(
        (), "Further repositories, 'HOST/REPOSITORY', asked for every image, in this order."
    )
    timeout_s: float = _option(5.0, "Time for one look-up; then the start goes without.", unit="s", low=0.1, high=300)
    absent_s: float = _option(
        60.0, "Time for which what was not found is not asked for again.", unit="s", low=0, high=86400
    )


@dataclass(frozen=True, slots=True)
class TrustConfig:
    """Whose artifacts decide what a container runs."""

    policy: str = _option(
        "signed",
        "Whose indexes and packs of registries are used: those signed by one of the keys, or any.",
        choices=("signed", "any"),
    )
    keys: tuple[str, ...] = _option(
        ("/etc/bootseer/trusted.d",), "Files of public keys, or directories of them; what is missing is passed over."
    )


@dataclass(frozen=True, slots=True)
class PublishConfig:
    """Whether this node publishes what it learns."""

    enabled: bool = _option(False, "Whether indexes and hot sets made on this node are published.")
    to: str = _option("", "Repository 'HOST/REPOSITORY', directory or URL; empty: the image's own repository.")
    key: str = _option("", "Secret key that signs; empty: not signed.", absolute=True)
    every_s: float = _option(300.0, "Time between two looks for what is to be published.", unit="s", low=1, high=86400)
    jitter_s: float = _option(60.0, "Longest random delay, added to each.", unit="s", low=0, high=86400)
    min_records: int = _option(2, "Recordings that have to agree before a hot set is published.", low=2, high=64)


@dataclass(frozen=True, slots=True)
class LazyConfig:
    """Which images are lazy. Patterns are matched against whole image references; `*` matches slashes too."""

    include: tuple[str, ...] = _option((), "Shell patterns of images that may be lazy; empty: all.")
    exclude: tuple[str, ...] = _option((), "Shell patterns of images that containerd is to pull the ordinary way.")
    min_layer_kib: int = _option(
        0, "Layers with a smaller blob are brought in whole before they are mounted.", unit="KiB", low=0, high=1 << 30
    )


@dataclass(frozen=True, slots=True)
class MountConfig:
    """How layers are given to the kernel."""

    attach: str = _option(
        "loop", "Loop device, or EROFS straight on the file (fixed kernels only).", choices=("loop", "file")
    )
    readahead_cold_kib: int = _option(16, "Readahead of a layer that is not complete.", unit="KiB", low=0, high=65536)
    readahead_warm_kib: int = _option(1024, "Readahead of a complete layer.", unit="KiB", low=0, high=65536)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What the daemon says."""

    level: str = _option("info", "Least severe level that is written.", choices=("debug", "info", "warning", "error"))
    format: str = _option("kv", "key=value lines, or one JSON object a line.", choices=("kv", "json"))


@dataclass(frozen=True, slots=True)
class Config:
    """Everything an operator can set."""

    root: str = _option("/var/lib/bootseer", "State and block store; keep it on a local disk.", absolute=True)
    run: str = _option("/run/bootseer", "Sockets and the lock; emptied by a reboot.", absolute=True)
    socket: str = _option("", "Where containerd connects; empty: <run>/bootseer.sock.", absolute=True)
    resend: str = _option("auto", "Whether a new worker asks the kernel to repeat requests.", choices=("auto", "never"))
    index: IndexConfig = field(
        default_factory=IndexConfig,
        metadata={
            "doc": "Naming a directory says that you trust it: its files are checked for damage, but taken as genuine."
        },
    )
    containerd: ContainerdConfig = field(
        default_factory=ContainerdConfig, metadata={"doc": "The containerd that uses this daemon."}
    )
    cri: CriConfig = field(
        default_factory=CriConfig, metadata={"doc": "The way for credentials that the kubelet passes with a pull."}
    )
    registry: RegistryConfig = field(default_factory=RegistryConfig, metadata={"doc": "How registries are talked to."})
    fetch: FetchConfig = field(default_factory=FetchConfig, metadata={"doc": "How missing blocks are brought in."})
    cache: CacheConfig = field(
        default_factory=CacheConfig, metadata={"doc": "How much room layers that are not in use may take."}
    )
    hotset: HotSetConfig = field(
        default_factory=HotSetConfig,
        metadata={"doc": "Naming a directory says that you trust it, as with [index]."},
    )
    record: RecordConfig = field(default_factory=RecordConfig, metadata={"doc": "How hot sets are recorded."})
    workload: WorkloadConfig = field(
        default_factory=WorkloadConfig, metadata={"doc": "Which containers are which workload."}
    )
    lookup: LookupConfig = field(
        default_factory=LookupConfig, metadata={"doc": "Where registries are asked for indexes and hot sets."}
    )
    trust: TrustConfig = field(
        default_factory=TrustConfig,
        metadata={"doc": "Whose artifacts in registries are believed; which blocks are hot is taken from anybody."},
    )
    publish: PublishConfig = field(
        default_factory=PublishConfig, metadata={"doc": "Whether this node publishes what it learns."}
    )
    lazy: LazyConfig = field(default_factory=LazyConfig, metadata={"doc": "Which images are served lazily."})
    mount: MountConfig = field(default_factory=MountConfig, metadata={"doc": "How layers are given to the kernel."})
    log: LogConfig = field(default_factory=LogConfig, metadata={"doc": "What the daemon says."})

    @property
    def root_path(self) -> Path:
        """State and block store."""
        return Path(self.root)

    @property
    def mounts_path(self) -> Path:
        """Where layers are mounted, a short name because overlay options are short of room."""
        return Path(self.root, "m")

    @property
    def socket_path(self) -> Path:
        """The containerd socket."""
        return Path(self.socket or Path(self.run, "bootseer.sock"))

    @property
    def cri_path(self) -> Path:
        """The kubelet's socket."""
        return Path(self.cri.socket or Path(self.run, "cri.sock"))

    @property
    def control_path(self) -> Path:
        """The control socket of the command line."""
        return Path(self.run, "control.sock")

    @property
    def lock_path(self) -> Path:
        """Held by the live daemon."""
        return Path(self.run, "lock")

    @classmethod
    def from_toml(cls, path: Path) -> "Config":
        """The configuration in `path`, defaults for what it leaves out. UserError in one line for any mistake."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as exc:
            raise UserError(f"{path}: cannot read the configuration: {_reason(exc)}") from exc
        except tomllib.TOMLDecodeError as exc:
            raise UserError(f"{path}: not valid TOML: {exc}") from exc
        config = _build(cls, data, str(path), "")
        if config.cri.enabled and not (config.cri.image_service or config.containerd.address):
            raise UserError(f"{path}: [cri] enabled needs an image_service, or an address in [containerd]")
        if config.workload.rules:
            _check_rules(config.workload.rules, path)
        for sock in (config.socket_path, config.control_path, config.cri_path):
            if len(bytes(sock)) > _SOCKET_PATH_BYTES:
                raise UserError(f"{path}: socket path {sock} is longer than {_SOCKET_PATH_BYTES} bytes: shorten `run`")
        return config

    def to_toml(self) -> str:
        """This configuration as commented TOML that `from_toml` reads back."""
        return "\n".join(_lines(self, "")).strip() + "\n"


def _check_rules(rules: tuple[str, ...], path: Path) -> None:
    from snapshotter.workload.rules import parse_rules  # here: a daemon without rules starts sooner

    try:
        parse_rules(rules)
    except InvalidArgument as error:
        raise UserError(f"{path}: [workload] rules: {error}") from error


def load_config(path: Path | None) -> Config:
    """The configuration in `path`; without a path that of DEFAULT_PATH where it exists, else the defaults."""
    if path is None:
        return Config.from_toml(DEFAULT_PATH) if DEFAULT_PATH.exists() else Config()
    return Config.from_toml(path)


def _build(kind: type[_T], data: dict[str, object], path: str, section: str) -> _T:
    """One section's dataclass out of its TOML table."""
    hints = typing.get_type_hints(kind)
    known = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]  # only called for dataclasses
    where = f"{path}: [{section}] " if section else f"{path}: "
    values: dict[str, object] = {}
    for key, value in data.items():
        if key not in known:
            raise UserError(f"{where}unknown key {key!r}{_suggestion(key, section, list(known))}")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise UserError(f"{where}{key} is a section: write [{key}]")
            values[key] = _build(typing.cast(type[object], hint), value, path, key)
        else:
            values[key] = _checked(known[key], hint, value, f"{where}{key}")
    return kind(**values)


def _suggestion(key: str, section: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(key, known, 1)
    if close:
        return f": did you mean {close[0]!r}?"
    for other in [Config, *(f.default_factory for f in dataclasses.fields(Config))]:
        if not dataclasses.is_dataclass(other):
            continue
        if key in {f.name for f in dataclasses.fields(other)}:
            home = next((f.name for f in dataclasses.fields(Config) if f.default_factory is other), "")
            return f": it belongs {f'into [{home}]' if home else 'before the first section'}"
    return f": known are {', '.join(known)}"


def _checked(option: "dataclasses.Field[object]", hint: object, value: object, where: str) -> object:
    """`value` in the option's type and bounds, else UserError."""
    value = _typed(hint, value, where)
    meta = option.metadata
    unit = f" {meta['unit']}" if meta["unit"] else ""
    if meta["choices"] and value not in meta["choices"]:
        raise UserError(f"{where} = {json.dumps(value)}: must be one of {', '.join(meta['choices'])}")
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = meta["low"], meta["high"]
        if (low is not None and value < low) or (high is not None and value > high):
            raise UserError(f"{where} = {value}: must be between {low} and {high}{unit}")
    if meta["absolute"] and value and not Path(str(value)).is_absolute():
        raise UserError(f"{where} = {json.dumps(value)}: must be an absolute path")
    if meta["absolute"] and not value and not meta["may_be_empty"]:
        raise UserError(f"{where} must not be empty")
    return value


def _typed(hint: object, value: object, where: str) -> object:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is float and number and math.isfinite(typing.cast(float, value)):
        return float(typing.cast(float, value))
    if hint is int and number and isinstance(value, int):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint == tuple[str, ...] and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    names = {float: "a number", int: "a whole number", bool: "true or false", str: "a string in quotes"}
    expected = names.get(hint, "a list of strings") if isinstance(hint, type) else "a list of strings"
    raise UserError(f"{where} = {_toml(value)}: must be {expected}")


def _lines(values: object, section: str) -> list[str]:
    """`values` as TOML lines; plain options first, as TOML asks, then the sections."""
    lines: list[str] = []
    options = dataclasses.fields(values)  # type: ignore[arg-type]  # only called for dataclasses
    for option in options:
        value = getattr(values, option.name)
        if not dataclasses.is_dataclass(value):
            unit = f" Unit: {option.metadata['unit']}." if option.metadata["unit"] else ""
            choices = f" One of: {', '.join(option.metadata['choices'])}." if option.metadata["choices"] else ""
            lines += [f"# {option.metadata['doc']}{unit}{choices}", f"{option.name} = {_toml(value)}"]
    for option in options:
        value = getattr(values, option.name)
        if dataclasses.is_dataclass(value):
            lines += ["", f"# {option.metadata['doc']}", f"[{option.name}]", *_lines(value, option.name)]
    return lines


def _toml(value: object) -> str:
    """A TOML literal; JSON's strings, numbers, booleans and arrays are TOML's."""
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)


def _reason(exc: OSError | UnicodeDecodeError) -> str:
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else "it is not UTF-8 text"
