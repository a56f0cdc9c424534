"""Which registry an image is from, where only its host's name without the port and its repository are known.

That is all containerd notes beside contents. Registries of that name that the configuration or credentials name with a
port are asked first, then the name alone. The manifest is fetched by its digest: whoever has it is the right one.
"""

from collections.abc import Iterable
from urllib.parse import urlsplit

from snapshotter.errors import NotFound, SnapshotterError
from snapshotter.model import Digest
from snapshotter.registry.client import Registry
from snapshotter.registry.reference import parse_reference

__all__ = ["locate"]

_MOST = 8  # each may take a connect time-out


def locate(registry: Registry, sources: Iterable[tuple[str, str]], manifest: Digest) -> str:
    """`host[:port]/repository` of the first that has the manifest; `sources` are pairs (host's name, repository).
    Raises NotFound with what each said."""
    named = sorted(registry.named())
    places = [
        f"{host}/{repository}"
        for name, repository in sources
        for host in [*(one for one in named if one != name and _name(one) == name), name]
    ]
    said = []
    for place in places[:_MOST]:
        try:
            parse_reference(place)
            registry.resolve(f"{place}@{manifest}")
            return place
        except SnapshotterError as error:
            said.append(str(error))
    raise NotFound(f"no registry known here has the manifest: {'; '.join(said) or 'none is named'}")


def _name(host: str) -> str:
    """The host's name of host[:port]."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
