"""Making room: how much, what, in which order, and what is never taken."""

import io
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from blockindex.hotpack import Codec, write_pack
from blockindex.hotset import HotExtent, HotSet, image_key
from blockindex.model import BLOCK
from snapshotter import eviction
from snapshotter.cache import CachedLayer
from snapshotter.cli.status import render
from snapshotter.config import CacheConfig
from snapshotter.errors import Precondition
from snapshotter.eviction import Disk, Evictor, Expected, excess
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from tests.blockindex.hotsets import hotset
from tests.snapshotter.test_cache import cached

GIB, TIB = 1 << 30, 1 << 40
NOW = 1e9


@pytest.mark.parametrize(
    ("config", "taken", "free", "wanted"),
    [
        (CacheConfig(0, 0), 900, 0, 0),
        (CacheConfig(max_gib=0.5, min_free_percent=0), GIB, 0, GIB // 2),
        (CacheConfig(max_gib=2, min_free_percent=0), GIB, 0, 0),
        (CacheConfig(min_free_percent=10), GIB, TIB // 20, TIB // 20),
        (CacheConfig(min_free_percent=10), GIB, TIB // 5, 0),
        (CacheConfig(max_gib=0.5, min_free_percent=10), GIB, 0, TIB // 10),
    ],
)
def test_how_much_has_to_go(config: CacheConfig, taken: int, free: int, wanted: int) -> None:
    assert abs(excess(config, taken, Disk(TIB, free)) - wanted) <= 1


class Bench:
    """A store of made-up layers, on a disk of made-up size."""

    def __init__(self, root: Path, *layers: CachedLayer) -> None:
        self.layers = list(layers)
        self.removed: list[str] = []
        self.refused: dict[str, Exception] = {}
        self.expected: set[Digest] = set()
        self.disk_refuses = False
        self.missing = 0  # bytes that have to go
        self.evictor = Evictor(
            CacheConfig(min_free_percent=50),
            root,
            lambda: sorted(self.layers, key=lambda layer: layer.last_used_s),
            self.remove,
            lambda: self.expected,
            lambda: self.disk_refuses,
        )
        self.evictor._disk = lambda path: Disk(TIB, TIB // 2 - self.missing)
        self.evictor._now = lambda: NOW

    def remove(self, name: str) -> None:
        if name in self.refused:
            raise self.refused[name]
        self.removed.append(name[0])
        self.layers = [layer for layer in self.layers if layer.name != name]

    def look(self, missing: int) -> str:
        """What goes when so many bytes are missing, in this order."""
        self.missing, self.removed = missing, []
        self.evictor.look()
        return "".join(self.removed)


def hours(character: str, age: float, size: int, *images: str) -> CachedLayer:
    """A layer that was used so many hours ago."""
    return replace(cached(character, age * 3600, size, *images), last_used_s=NOW - age * 3600)


def test_those_unused_for_longest_go_and_no_more_than_needed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hours("a", 4, 10), hours("b", 9, 10, "app"), hours("c", 8, 10), hours("d", 1, 10))
    assert [bench.look(missing) for missing in (0, 10, 11)] == ["", "c", "ad"]
    assert bench.evictor.status()["evicted"] == 3


def test_what_is_in_use_stays_whatever_is_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path, hours("a", 4, 10, "app"), hours("b", 0.01, 10), hours("c", 5, 10), hours("d", 6, 10))
    bench.expected = {Digest(f"sha256:{'c' * 64}")}
    bench.refused = {"d" * 14: Precondition("a container still runs with it")}
    for _ in range(3):
        assert bench.look(1000) == ""
    said = [record.getMessage().split()[0] for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["cache.no_room"], "once, until there is room again"
    caplog.clear()
    assert bench.look(0) == ""
    bench.look(1000)
    assert "cache.no_room" in caplog.text
    caplog.clear()


def test_one_that_cannot_be_removed_does_not_keep_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path, hours("a", 4, 10), hours("b", 3, 10))
    bench.refused = {"a" * 14: OSError("read-only file system")}
    assert bench.look(5) == "b"


def test_a_disk_that_refuses_bytes_gets_room_although_the_figures_are_fine(tmp_path: Path) -> None:
    """A quota, which no figure shows: a layer at each look."""
    bench = Bench(tmp_path, hours("a", 4, 10), hours("b", 3, 10))
    bench.disk_refuses = True
    assert [bench.look(0), bench.look(0)] == ["a", "b"]


def test_a_broken_layer_goes_like_any_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, replace(hours("a", 4, 10), digest="", state="broken"))
    assert bench.look(1) == "a"


def test_hot_packs_go_last_and_small_sets_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eviction, "_SMALL_PACK", 200_000)
    store = HotStore(tmp_path)
    sets = {name: _of_another_image(hotset((300,), (0, 0, 300, 1)), name) for name in ("old", "used", "new")}
    paths = {}
    for age, (name, its) in enumerate(sets.items()):
        packed = io.BytesIO()
        write_pack(its, _noise, Codec.LZ4, packed)
        paths[name] = store.put(its.image_key, "default", _writer(packed.getvalue()))
        os.utime(paths[name], (age, age))
    paths["small"] = store.save(hotset((300,), (0, 0, 300, 1)))
    used = replace(hours("a", 4, 10, "app"), digest=sets["used"].layers[0].digest)
    bench = Bench(tmp_path, used, hours("b", 3, 10))

    def left() -> set[str]:
        return {name for name, path in paths.items() if path.exists()}

    assert bench.look(10) == "b" and left() == set(paths)
    bench.look(1)
    assert left() == {"used", "new", "small"}
    bench.look(1 << 30)
    assert left() == {"used", "small"}
    caplog.clear()


def _of_another_image(its: HotSet, name: str) -> HotSet:
    digest = f"sha256:{sha256(name.encode()).hexdigest()}"
    return replace(its, image_key=image_key([digest]), layers=(replace(its.layers[0], digest=digest),))


def _writer(data: bytes) -> Callable[[io.BufferedWriter], object]:
    return lambda file: file.write(data)


def _noise(extent: HotExtent) -> bytes:
    return os.urandom((extent.end - extent.start) * BLOCK)


def test_a_pull_expects_its_layers_while_it_asks_and_a_while_after() -> None:
    now = [0.0]
    expected = Expected(lambda: now[0])
    a, b, c = (Digest(character) for character in "abc")
    with expected.pull((a, b)):
        now[0] += 10_000
        with expected.pull((b, c)):
            assert expected.current() == {a, b, c}
        now[0] += 10_000
        assert expected.current() == {a, b}
    assert expected.current() == {a, b}
    now[0] += 61
    assert expected.current() == set()


def test_status_says_how_much_room_there_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "data").write_bytes(os.urandom(8 << 20))
    status = bench.evictor.status()
    assert status["taken_bytes"] >= 8 << 20 and status["disk_bytes"] == TIB and status["max_bytes"] == 0
    text = render({"cache": {**status, "max_bytes": 20 * 10**9, "taken_bytes": 10**7}, "unstored_bytes": 5 * 10**6})
    assert "store: 10.0 MB of 20000.0 MB; free on its disk: 549755.8 MB of 1099511.6 MB" in text
    assert "THE DISK IS FULL: 5.0 MB wait" in text
    assert "FULL" not in render({"unstored_bytes": 0})


def test_looks_go_on_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(eviction, "_LOOK_S", 0.001)
    bench = Bench(tmp_path, hours("a", 4, 10))
    looked, failures = threading.Event(), [ValueError("a bug")]

    def disk(path: Path) -> Disk:
        if failures:
            raise failures.pop()
        looked.set()
        return Disk(TIB, TIB)

    bench.evictor._disk = disk
    bench.evictor.start()
    assert looked.wait(20)
    bench.evictor.close()
    assert "evictor.failed" in caplog.text
    caplog.clear()
