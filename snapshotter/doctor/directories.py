"""The directories of indexes and hot sets in the configuration: whether they can be asked.

Asks for a file that cannot be there: a directory that works says so. The daemon itself only logs that one does not.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

from snapshotter.config import Config
from snapshotter.errors import InvalidArgument, NotFound, SnapshotterError
from snapshotter.model import Digest
from snapshotter.registry import IndexDirectory
from snapshotter.registry.hotdir import HotDirectory
from snapshotter.registry.storage import shown

from .model import Check, fail, ok, warn

__all__ = ["check_directories", "check_directory"]

_NOTHING = Digest("sha256:" + "0" * 64)


def check_directories(config: Config) -> Iterator[Check]:
    """A check for each one that is named."""
    if config.index.url:
        yield check_directory("index", config.index.url, lambda: _ask_for_index(config))
    if config.hotset.url:
        yield check_directory("hotset", config.hotset.url, lambda: _ask_for_hot_set(config))


def check_directory(section: str, url: str, ask: Callable[[], None]) -> Check:
    """Whether `url` of this section works; `ask` asks for what is not there."""
    name, url = f"{section}-url", shown(url)
    try:
        ask()
    except NotFound:
        pass
    except InvalidArgument as error:
        fix = f"mend url in [{section}], or install what it needs; then bootseer reload"
        return fail(name, f"{url} cannot be asked", str(error), fix)
    except SnapshotterError as error:
        fix = f"check the network and proxies; or change url in [{section}], then bootseer reload"
        return warn(name, f"{url} does not work", str(error), fix)
    return ok(name, url)


def _ask_for_index(config: Config) -> None:
    with closing(IndexDirectory(config.index.url, config.index.timeout_s)) as directory:
        directory.read(_NOTHING)


def _ask_for_hot_set(config: Config) -> None:
    with closing(HotDirectory(config.hotset.url, config.hotset.timeout_s)) as directory:
        directory.open(_NOTHING, "default")
