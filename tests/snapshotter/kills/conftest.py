"""One armed daemon for all tests here whose points are not the supervisor's; tiny layers, a new one for each test."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from tests.snapshotter.daemon import Layer, make_layer, origin, write_index
from tests.snapshotter.kills.stack import Stack
from tests.snapshotter.rangeserver import RangeServer

SPAN = 1 << 14
"""Of the indexes here: a layer has a dozen spans."""

TOML = """\
[index]
url = "{indexes}"
[hotset]
url = "{hot}"
[fetch]
background = false
span_growth_kib = 128
[containerd]
address = ""
[record]
quiet_s = 0.3
[cache]
max_gib = 0.002
[lookup]
registry = false
"""

_seeds = count(1000)

NewLayer = Callable[..., Layer]


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="package")
def registry() -> Iterator[RangeServer]:
    with origin() as server:
        yield server


@pytest.fixture(scope="package")
def stack(home: Path, registry: RangeServer) -> Iterator[Stack]:
    toml = TOML.format(indexes=home / "indexes", hot=home / "hotsets")
    for name in ("indexes", "hotsets"):
        (home / name).mkdir()
    with Stack(home, registry, toml).running() as it:
        yield it


@pytest.fixture
def new_layer(home: Path, registry: RangeServer) -> Iterator[NewLayer]:
    """`new_layer(files, size, indexed, span)`: one that nobody has seen yet, at the registry."""

    def make(files: int = 4, size: int = 48 << 10, indexed: bool = True, span: int = SPAN) -> Layer:
        layer = make_layer(files, size, next(_seeds))
        registry.blobs[layer.path] = layer.blob
        if indexed:
            write_index(home / "indexes", layer, span)
        return layer

    yield make
    registry.drop_connections()  # each has a thread of ours
