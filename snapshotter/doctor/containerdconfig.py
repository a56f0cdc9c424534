"""containerd's configuration file, as far as it decides whether pulls are lazy. Versions 1, 2 and 3 of its format.

Reads the file and its `imports`; does not run containerd. As in containerd, an imported file replaces whole sections of
`plugins` and `proxy_plugins`. The checks take parsed values and are pure.
"""

import glob
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from snapshotter.errors import UserError
from snapshotter.registry import host_platform

from .model import Check, fail, ok, warn

__all__ = ["DEFAULT_CONFIG", "ContainerdConfig", "check_config", "read_config"]

DEFAULT_CONFIG = Path("/etc/containerd/config.toml")

_CRI_PLUGINS = ("io.containerd.cri.v1.images", "io.containerd.grpc.v1.cri", "cri")  # versions 3, 2, 1
_TRANSFER = "io.containerd.transfer.v1.local"
_FORCE_LOCAL = ("discard_unpacked_layers", "image_pull_with_sync_fs")
_DOWNLOADS = 3
_RESTART = "then restart containerd"


@dataclass(frozen=True, slots=True)
class ContainerdConfig:
    """The parts that matter. `proxy` is our plugin's name and table, or None; `cri` the table that holds the CRI's
    snapshotter, empty where none is written, and `cri_path` how it is called in the file; `unpack` the snapshotters
    that the transfer service unpacks for."""

    path: Path
    version: int
    proxy: tuple[str, Mapping[str, Any]] | None
    cri: Mapping[str, Any]
    cri_path: str
    cri_disabled: bool
    unpack: frozenset[str]


def read_config(path: Path, socket: Path) -> ContainerdConfig:
    """The configuration in `path` as it concerns the snapshotter at `socket`. UserError when it cannot be read."""
    data = _merged(path, set())
    plugins = _table(data, "plugins")
    cri_path, cri = _cri(plugins)
    unpack = _table(plugins, _TRANSFER).get("unpack_config", [])
    proxies = _table(data, "proxy_plugins")
    ours = [
        (name, table)
        for name, table in proxies.items()
        if isinstance(table, dict) and _same_socket(table.get("address"), socket)
    ]
    disabled = {str(name) for name in data.get("disabled_plugins", [])}
    return ContainerdConfig(
        path=path,
        version=int(data.get("version", 1)),
        proxy=ours[0] if ours else None,
        cri=cri,
        cri_path=cri_path,
        cri_disabled=bool(disabled & set(_CRI_PLUGINS)),
        unpack=frozenset(str(entry.get("snapshotter", "")) for entry in unpack if isinstance(entry, dict)),
    )


def check_config(config: ContainerdConfig, socket: Path, root: Path, containerd: str) -> list[Check]:
    """The checks of the file; `root` is our own, `containerd` the version of the running one, "" when unknown."""
    if config.proxy is None:
        what = f"no plugin with address {socket} in {config.path}"
        lines = f'[proxy_plugins.bootseer]\ntype = "snapshot"\naddress = "{socket}"'
        why = "containerd does not know bootseer"
        return [fail("containerd-config", what, why, f"restart containerd with this in {config.path}:\n{lines}")]
    name, table = config.proxy
    if table.get("type") != "snapshot":
        what = f"plugin {name} in {config.path} has type {table.get('type')!r}"
        fix = f'set type = "snapshot" in [proxy_plugins.{name}]; {_RESTART}'
        return [fail("containerd-config", what, "only a plugin of type snapshot makes snapshots", fix)]
    release = _release(containerd) or ((2, 1) if config.version >= 3 else (1, 0))
    missing = _transfer_missing(config, name, table)
    by_transfer = release >= (2, 1) and not _pulls_itself(config.cri)
    cri = _cri_checks(config, name, root, by_transfer, bool(missing))
    checks = [ok("containerd-config", f"plugin {name} in {config.path}"), *cri]
    if release >= (2, 0):
        checks.append(_transfer_check(config, missing))
    return checks


def _release(containerd: str) -> tuple[int, int] | None:
    """Major and minor number of a version of containerd; None where it is not known."""
    match = re.match(r"v?(\d+)\.(\d+)", containerd)
    return (int(match[1]), int(match[2])) if match else None


def _pulls_itself(cri: Mapping[str, Any]) -> bool:
    """Whether an option keeps the CRI plugin of containerd 2.1 and later from pulling by the transfer service, which
    knows no such option."""
    registry = _table(cri, "registry")
    return (
        any(cri.get(option, False) for option in ("use_local_image_pull", *_FORCE_LOCAL))
        or not cri.get("disable_snapshot_annotations", True)
        or cri.get("max_concurrent_downloads", _DOWNLOADS) != _DOWNLOADS
        or any(registry.get(table) for table in ("mirrors", "configs", "auths"))
    )


def _cri_checks(
    config: ContainerdConfig, name: str, root: Path, by_transfer: bool, transfer_lacks: bool
) -> list[Check]:
    if config.cri_disabled:
        return [ok("labels-cri", "the CRI plugin is disabled: no Kubernetes here")]
    used = config.cri.get("snapshotter", "overlayfs")
    where = f"[{config.cri_path}]"
    if used != name:
        return [ok("labels-cri", f"Kubernetes (CRI) uses {used}; for lazy pods set snapshotter = {name!r} in {where}")]
    checks = []
    if by_transfer and transfer_lacks:
        why = "the CRI plugin pulls by it, and every pod's image is pulled in full"
        checks.append(fail("labels-cri", "the transfer service is not set up", why, "see labels-transfer"))
    elif by_transfer:
        checks.append(ok("labels-cri", "the CRI plugin pulls by the transfer service, which sends image labels"))
    elif config.cri.get("disable_snapshot_annotations", True):
        why = "the CRI plugin then sends no image labels, and every pod's image is pulled in full"
        fix = f"set disable_snapshot_annotations = false in {where}; {_RESTART}"
        checks.append(fail("labels-cri", "disable_snapshot_annotations is not false", why, fix))
    else:
        checks.append(ok("labels-cri", "the CRI plugin sends image labels"))
    if config.cri.get("discard_unpacked_layers", False):
        why = "with containerd 2.x it forces the CRI plugin's own pull; and layers of ordinary pulls cannot be pushed"
        fix = f"set discard_unpacked_layers = false in {where}; {_RESTART}"
        checks.append(warn("cri-discard", "discard_unpacked_layers is true", why, fix))
    if "root" not in _table(config.proxy[1] if config.proxy else {}, "exports"):
        why = "kubelet then does not see what images take on bootseer's disk (containerd 1.7.16 and later)"
        fix = f'restart containerd with this in {config.path}:\n[proxy_plugins.{name}.exports]\nroot = "{root}"'
        checks.append(warn("cri-exports-root", "the plugin exports no root", why, fix))
    return checks


def _transfer_missing(config: ContainerdConfig, name: str, table: Mapping[str, Any]) -> list[str]:
    """What the file lacks for lazy pulls by the transfer service, as lines of it."""
    missing = []
    if name not in config.unpack:
        # an entry of one's own replaces containerd's default
        for snapshotter in (name,) if config.unpack else ("overlayfs", name):
            unpack = f'platform = "{host_platform()}"\nsnapshotter = "{snapshotter}"'
            missing.append(f'[[plugins."{_TRANSFER}".unpack_config]]\n{unpack}')
    exports = _table(table, "exports")
    if str(exports.get("enable_remote_snapshot_annotations", "")).lower() != "true":
        missing.append(f'[proxy_plugins.{name}.exports]\nenable_remote_snapshot_annotations = "true"')
    return missing


def _transfer_check(config: ContainerdConfig, missing: Sequence[str]) -> Check:
    """containerd 2.x: `ctr images pull`, nerdctl 2.3 and later, and the CRI plugin pull by the transfer service."""
    if not missing:
        return ok("labels-transfer", "the transfer service unpacks for us and sends image labels")
    why = "ctr and nerdctl pull by the transfer service: it then fetches whole images, or does not unpack them"
    fix = "\n".join([f"restart containerd with this in {config.path}:", *missing])
    return warn("labels-transfer", "the transfer service is not set up", why, fix)


def _cri(plugins: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    for plugin in _CRI_PLUGINS:
        if plugin in plugins:
            table = _table(plugins, plugin)
            if plugin == _CRI_PLUGINS[0]:
                return f'plugins."{plugin}"', table
            return f'plugins."{plugin}".containerd', _table(table, "containerd")
    return 'plugins."io.containerd.grpc.v1.cri".containerd', {}


def _merged(path: Path, seen: set[Path]) -> dict[str, Any]:
    """The file with those it imports."""
    seen.add(path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{path}: {reason}", exit_code=1) from error
    for pattern in data.get("imports", []):
        for found in sorted(glob.glob(os.path.join(path.parent, str(pattern)))):
            if Path(found) not in seen:
                other = _merged(Path(found), seen)
                for key in ("plugins", "proxy_plugins"):
                    data[key] = {**_table(data, key), **_table(other, key)}
                data["disabled_plugins"] = [*data.get("disabled_plugins", []), *other.get("disabled_plugins", [])]
    return data


def _table(data: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key, {})
    return value if isinstance(value, dict) else {}


def _same_socket(address: object, socket: Path) -> bool:
    return isinstance(address, str) and os.path.realpath(address.removeprefix("unix://")) == os.path.realpath(socket)
