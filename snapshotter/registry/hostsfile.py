"""The text of a `hosts.toml`, parsed into endpoints with the meaning that containerd gives it.

Sans-IO. The mirrors come first, in the order of the file, then the server. Keys that are not known are ignored, as
containerd does; a value of a wrong type or an unknown capability makes the file invalid as a whole (HostsFileError).
"""

import math
import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast
from urllib.parse import urlsplit

from snapshotter.registry.endpoint import Endpoint, Line
from snapshotter.registry.trust import TlsFiles

__all__ = ["HostsFileError", "parse_duration", "parse_hosts"]

_CAPABILITIES = {"pull", "resolve", "push", "referrers"}
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_T = TypeVar("_T")
_Table = dict[str, object]


class HostsFileError(ValueError):
    """The file cannot be understood; the text says where. Never holds a header's value."""


def parse_hosts(text: str, directory: Path) -> tuple[Endpoint, ...]:
    """The endpoints of a hosts.toml that lies in `directory`, in the order in which they are to be asked.

    The last one has the URL "" when the file names no server: the registry itself, with these settings.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise HostsFileError(f"not valid TOML: {exc}") from exc
    hosts: _Table = _value(data, "host", dict, {}, "")
    mirrors = []
    for url, table in hosts.items():
        if not isinstance(table, dict):
            raise HostsFileError(f"host.{url!r} must be a table")
        mirrors.append(_endpoint(url, table, directory, mirror=True))
    return (*mirrors, _endpoint(_value(data, "server", str, "", ""), data, directory, mirror=False))


def parse_duration(text: str) -> float:
    """Seconds of a duration as Go writes it, such as `1m30s` or `500ms`."""
    at, seconds = 0, 0.0
    while match := _DURATION.match(text, at):
        seconds += float(match[1]) * _UNITS_S[match[2]]
        at = match.end()
    if not text or (at != len(text) and text != "0") or not math.isfinite(seconds):
        raise HostsFileError(f"dial_timeout {text!r} is not a duration: expected a number and a unit, as in 5s")
    return seconds


def _endpoint(url: str, table: _Table, directory: Path, *, mirror: bool) -> Endpoint:
    where = f"{url or 'server'}: "
    named = {name.lower() for name in _strings(table, "capabilities", where)}
    capabilities = named or _CAPABILITIES
    if unknown := capabilities - _CAPABILITIES:
        raise HostsFileError(f"{where}unknown capability {min(unknown)!r}")
    dial = _value(table, "dial_timeout", str, "", where)
    line = Line(_tls(table, directory, where), (parse_duration(dial) or None) if dial else None)
    headers = _headers(_value(table, "header", dict, {}, where), where)
    if not url:  # containerd ignores capabilities without a server: a registry can do everything for itself
        return Endpoint("", line=line, headers=headers)
    root = _root(url, _value(table, "override_path", bool, False, where))
    # A mirror takes pushes only where the file says so: what lies in a cache alone is not published.
    pushes = "push" in (named if mirror else capabilities)
    return Endpoint(root, "pull" in capabilities, {"pull", "resolve"} <= capabilities, line, headers, pushes)


def _root(url: str, override_path: bool) -> str:
    """The root of the API at `url`: with `/v2` at its end unless the path is to be taken as it is."""
    full = url if url.startswith("http") else f"https://{url}"
    try:
        parts = urlsplit(full)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid or not full.isprintable() or " " in full:
        raise HostsFileError("a server or host is not an http or https URL")
    path = posixpath.normpath(f"/{parts.path.lstrip('/')}").rstrip("/")
    if not override_path and not path.endswith("/v2"):
        path += "/v2"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"


def _tls(table: _Table, directory: Path, where: str) -> TlsFiles | None:
    """What the table says of TLS, None if it says nothing."""
    if not {"ca", "client", "skip_verify"} & table.keys():
        return None
    clients = table.get("client", [])
    pairs = [_pair(item, where) for item in (clients if isinstance(clients, list) else [clients])]
    return TlsFiles(
        ca=tuple(directory / name for name in _strings(table, "ca", where)),
        client=tuple((directory / certificate, directory / key if key else None) for certificate, key in pairs),
        skip_verify=_value(table, "skip_verify", bool, False, where),
    )


def _pair(item: object, where: str) -> tuple[str, str]:
    """One client certificate: a file with both, or a pair of certificate and key, the latter perhaps empty."""
    words = [item, ""] if isinstance(item, str) else item
    if not isinstance(words, list) or len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise HostsFileError(f"{where}client must be a path, a list of paths, or a list of pairs of paths")
    return words[0], words[1]


def _headers(table: _Table, where: str) -> tuple[tuple[str, str], ...]:
    """Names and values; several values become one header, as HTTP allows."""
    found = []
    for name in table:
        value = ", ".join(_strings(table, name, f"{where}header "))
        # A line break in a value would let one header become two.
        if not _TOKEN.fullmatch(name) or not value.isprintable():
            raise HostsFileError(f"{where}header {name!r} cannot be sent")
        found.append((name, value))
    return tuple(found)


def _strings(table: _Table, key: str, where: str) -> list[str]:
    """A string or a list of strings."""
    value = table.get(key, [])
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise HostsFileError(f"{where}{key} must be a string or a list of strings")
    return values


def _value(table: _Table, key: str, kind: Callable[..., _T], default: _T, where: str) -> _T:
    value = table.get(key, default)
    if not isinstance(value, cast(type, kind)):
        raise HostsFileError(f"{where}{key} is of a wrong type")
    return cast(_T, value)
