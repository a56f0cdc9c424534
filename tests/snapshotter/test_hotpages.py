"""What has landed is asked of the kernel, by files, once their layer is mounted; and never anything outside of it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from blockindex.model import BLOCK
from snapshotter import hotpages as hotpages_module
from snapshotter.hotpages import HotPages
from snapshotter.rpc import Server
from tests.blockindex.tarcases import END, file, header, unpack

NAME = "0123456789abcd"
WILL, WONT = os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED


class FakeAttacher:
    """A directory in the place of each mount."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []

    def mounted(self) -> dict[str, str]:
        return {name: str(self.root / name) for name in self.names if "." not in name}

    def mounts_of(self, name: str) -> list[Path]:
        return [self.root / it for it in self.names if it.partition(".")[0] == name]


class Bench:
    """One layer (`d/one` in the blocks 0 and 1, `d/two` in 2, `sixsix` in 3), and a fetch process that says what the
    test wants."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layer = unpack(
            header(b"d/", b"5", mode=0o755)
            + file(b"d/one", b"1" * 5000)
            + file(b"d/two", b"2")
            + file(b"sixsix", b"6")
            + END
        )
        self.layers = root / "layers"
        (self.layers / NAME).mkdir(parents=True)
        (self.layers / NAME / "meta").write_bytes(self.layer.metadata)
        self.attacher = FakeAttacher(root)
        self.batch: dict[str, Any] = {}
        self.advice: list[tuple[str, int, int, int]] = []  # file, offset, size, advice
        self._root = root
        self._server = Server(root / "fetch.sock", {"landed": self._answer})
        self.pages = HotPages(self.layers, root / "fetch.sock", self.attacher)  # type: ignore[arg-type]  # a fake
        monkeypatch.setattr(os, "posix_fadvise", self._advised)

    def _answer(self, request: object) -> dict[str, Any]:
        batch, self.batch = self.batch, {}
        return {"landed": {}, "doubted": {}, **batch}

    def _advised(self, fd: int, offset: int, size: int, advice: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{fd}")).relative_to(self._root)
        self.advice.append((str(path), offset, size, advice))

    def mount(self, name: str = NAME) -> Path:
        point = self._root / name
        (point / "d").mkdir(parents=True)
        for file_name in ("one", "two"):
            (point / "d" / file_name).write_bytes(b"x")
        self.attacher.names.append(name)
        return point

    def step(self, **batch: Any) -> None:
        self.batch = batch
        self.pages.step(0.0)

    def close(self) -> None:
        self._server.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(tmp_path, monkeypatch)
    yield bench
    bench.close()


def test_what_lands_is_read_once_by_files_and_no_block_more(bench: Bench) -> None:
    bench.mount()
    bench.step(landed={NAME: [(1, 3)]})
    bench.step()
    assert bench.advice == [(f"{NAME}/d/one", BLOCK, BLOCK, WILL), (f"{NAME}/d/two", 0, BLOCK, WILL)]


def test_what_lands_before_the_mount_waits_for_it(bench: Bench) -> None:
    bench.step(landed={NAME: [(0, 1)]})
    bench.step(landed={NAME: [(2, 3)]})
    assert bench.advice == []
    bench.mount()
    bench.step()
    assert [(name, advice) for name, _, _, advice in bench.advice] == [(f"{NAME}/d/one", WILL), (f"{NAME}/d/two", WILL)]


def test_a_layer_that_is_never_mounted_is_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotpages_module, "_PENDING_S", -1.0)
    bench.step(landed={NAME: [(0, 1)]})
    bench.mount()
    bench.step()
    assert bench.advice == []


def test_what_is_in_doubt_is_dropped_from_private_mounts_too(bench: Bench) -> None:
    bench.mount()
    bench.mount(f"{NAME}.01")
    bench.step(doubted={NAME: [(0, 2)]})
    assert bench.advice == [(f"{it}/d/one", 0, 2 * BLOCK, WONT) for it in (NAME, f"{NAME}.01")]


def test_what_is_in_doubt_is_dropped_once_more(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that the kernel was just reading could not be dropped the first time."""
    monkeypatch.setattr(hotpages_module, "_AGAIN_S", 0.0)
    bench.mount()
    bench.step(doubted={NAME: [(0, 2)]})
    bench.step()
    bench.step()
    assert bench.advice == [(f"{NAME}/d/one", 0, 2 * BLOCK, WONT)] * 2


@pytest.mark.parametrize("at", ["file", "directory"])
def test_nothing_is_opened_through_a_symbolic_link(bench: Bench, tmp_path: Path, at: str) -> None:
    """Unjudged metadata may call a directory what is a link for the kernel."""
    point = bench.mount()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "one").write_bytes(b"secret")
    if at == "file":
        (point / "d" / "one").unlink()
        (point / "d" / "one").symlink_to(outside / "one")
    else:
        (point / "d").rename(tmp_path / "moved")
        (point / "d").symlink_to(outside)
    bench.step(landed={NAME: [(0, 3)]})
    assert bench.advice == ([(f"{NAME}/d/two", 0, BLOCK, WILL)] if at == "file" else [])


def test_names_that_lead_out_of_the_layer_are_not_followed(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"secret")
    (bench.layers / NAME / "meta").write_bytes(bench.layer.metadata.replace(b"sixsix", b"../one"))
    bench.mount()
    bench.step(landed={NAME: [(3, 4)]})
    assert bench.advice == []


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8192, None], ids=["empty", "nonsense", "missing"])
def test_a_layer_that_is_odd_is_left_alone(bench: Bench, damage: bytes | None) -> None:
    bench.mount()
    path = bench.layers / NAME / "meta"
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)
    bench.step(landed={NAME: [(0, 3)]})
    assert bench.advice == []


def test_very_many_files_and_very_many_bytes_are_left_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.mount()
    monkeypatch.setattr(hotpages_module, "_MOST_BYTES", 2 * BLOCK)
    bench.step(landed={NAME: [(0, 2)]})
    bench.step(landed={NAME: [(2, 3)]})
    assert [name for name, *_ in bench.advice] == [f"{NAME}/d/one"]
    bench.step()  # nothing for a while: what is remembered of layers goes
    monkeypatch.setattr(hotpages_module, "_MOST_METADATA", BLOCK - 1)
    bench.step(landed={NAME: [(2, 3)]})
    assert len(bench.advice) == 1
