"""Which library inflates, and that it does not matter to an index."""

import ctypes
import gzip
import random
from collections.abc import Callable

import pytest

from blockindex import deflate, inflatelib
from blockindex.codec import encode_index
from blockindex.deflate import Inflater
from blockindex.errors import Unsupported
from blockindex.inflatelib import InflateLibrary, inflate_library, system_zlib, zlib_ng
from tests.blockindex.layers import archive, build


def absent(*names: str) -> Callable[..., ctypes.CDLL]:
    """A loader for a machine on which these libraries are not."""
    load = ctypes.CDLL

    def found(name: str) -> ctypes.CDLL:
        if any(part in name for part in names):
            raise OSError(f"{name}: cannot open shared object file")
        return load(name)

    return found


@pytest.fixture(autouse=True)
def _fresh() -> None:
    inflate_library.cache_clear()


def test_zlib_ng_is_used() -> None:
    """A wheel that no longer exported its library would make the builder slow, and tell nobody."""
    assert inflate_library().name == "zlib-ng"


def test_without_zlib_ng_the_system_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflatelib.ctypes, "CDLL", absent("zlib_ng"))
    assert zlib_ng() is None
    assert inflate_library().name.startswith("zlib 1.")


def test_without_its_package_there_is_no_zlib_ng(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflatelib, "find_spec", lambda name: None)
    assert zlib_ng() is None


def test_a_library_without_the_functions_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL
    monkeypatch.setattr(inflatelib.ctypes, "CDLL", lambda name: load("libc.so.6"))
    assert zlib_ng() is None
    with pytest.raises(Unsupported, match="install zlib1g"):
        system_zlib()


def test_a_machine_without_any_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflatelib.ctypes, "CDLL", absent("zlib_ng", "libz"))
    with pytest.raises(Unsupported, match=r"install zlib1g"):
        Inflater()
    monkeypatch.undo()
    Inflater()


@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_both_make_the_same_index(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    blob = gzip.compress(archive(seed=5, files=12), level, mtime=0)
    made = []
    for library in (zlib_ng(), system_zlib()):
        assert isinstance(library, InflateLibrary)
        monkeypatch.setattr(deflate, "inflate_library", lambda library=library: library)
        index, region = build(blob, span_size=3000, chunk=random.Random(level))
        made.append((encode_index(index), region))
    assert made[0] == made[1]
