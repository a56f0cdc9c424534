"""Cold starts of a small image through a real containerd, and what the bench says when one goes wrong."""

import dataclasses
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.rig import coldstart, node
from scripts.rig.artifacts import build_indexes, record_hot_set
from scripts.rig.coldstart import Bench, Extras, System, cold_start
from scripts.rig.errors import RigError
from scripts.rig.image import RECIPES, build, cached
from scripts.rig.indexserver import IndexServer
from scripts.rig.link import Link
from scripts.rig.node import BOOTSEER, Node
from scripts.rig.oci import Layout, read_layout
from scripts.rig.process import run
from scripts.rig.registry import ADDRESS, Registry
from scripts.rig.workspace import Workspace, mounts_below

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def bench(cache: Path) -> Iterator[Bench]:
    """Everything for cold starts of the tiny image at 100 Mbit/s and 20 ms, without indexes."""
    with Workspace() as workspace:
        layout = build(RECIPES["tiny"], workspace.env, print, cache)
        link = Link(workspace, 100, 20)
        registry = Registry(workspace, link)
        index_server = IndexServer(workspace, link)
        reference = registry.push(layout, "bench/tiny")
        yield Bench(workspace, link, registry, index_server, RECIPES["tiny"], reference, None)
        index_server.close()
        registry.close()
        link.close()


def _layout(cache: Path) -> Layout:
    return read_layout(cached(RECIPES["tiny"], cache))


def test_overlayfs_downloads_the_whole_image(bench: Bench, cache: Path) -> None:
    result = cold_start(bench, System.OVERLAYFS, "overlayfs")
    layout = _layout(cache)
    assert result.output_ok
    assert 0.1 < result.pull_s < result.ready_s < 20
    assert layout.size < result.size < 1.2 * layout.size
    assert result.requests == 6, "manifest by HEAD and GET, config, three layers"
    assert not list((bench.workspace.root / "nodes").iterdir())


def test_a_failed_pull_names_its_reason(bench: Bench) -> None:
    wrong = dataclasses.replace(bench, reference=f"{ADDRESS}/bench/nothing:bench")
    with pytest.raises(RigError, match=r"(?s)cold start with overlayfs: the pull failed.*not found"):
        cold_start(wrong, System.OVERLAYFS, "missing")


def test_other_output_is_not_ok(bench: Bench) -> None:
    other = dataclasses.replace(bench, recipe=dataclasses.replace(bench.recipe, ready="something else"))
    assert not cold_start(other, System.OVERLAYFS, "output").output_ok


def test_a_start_beyond_the_deadline_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coldstart, "DEADLINE_S", 0.3)
    with pytest.raises(RigError, match=r"did not end within|no line from the container in time"):
        cold_start(bench, System.OVERLAYFS, "late")


@pytest.fixture
def fake_bootseer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the stand-in in place of the `bootseer` command; returns its directory."""
    program = tmp_path / "bootseer"
    program.write_text(f"#!{sys.executable}\n" + (Path(__file__).with_name("fake_bootseer.py")).read_text())
    program.chmod(0o755)
    monkeypatch.setattr(node, "BOOTSEER", program)
    return tmp_path


def test_the_daemon_is_stopped_and_its_layers_unmounted(bench: Bench, fake_bootseer: Path) -> None:
    cold = Node(bench.workspace, bench.link, "daemon", (bench.index_server.url, ADDRESS))
    listing = run(cold.ctr("plugins", "ls"), bench.workspace.env, "listing plugins")
    assert [line for line in listing.splitlines() if "bootseer" in line and "ok" in line]
    cold.close()
    assert cold.left_mounted == []
    assert not mounts_below(bench.workspace.root)


def test_a_layer_that_stays_mounted_is_reported(bench: Bench, fake_bootseer: Path) -> None:
    (fake_bootseer / "keep").touch()
    cold = Node(bench.workspace, bench.link, "keeping", (bench.index_server.url, ADDRESS))
    cold.close()
    assert [Path(point).name for point in cold.left_mounted] == ["layer"]
    assert not mounts_below(bench.workspace.root), "the node's mounts are in its own namespace"


@pytest.mark.parametrize("system", [System.BOOTSEER_FIRST, System.BOOTSEER])
def test_bootseer_starts_the_image_lazily(bench: Bench, system: System, tmp_path: Path) -> None:
    argv = [str(BOOTSEER), "index", "build", bench.reference, "--plain-http", "--out", str(tmp_path / "indexes")]
    run(bench.link.far.command(argv), bench.workspace.env, "building the indexes")
    assert len(list((tmp_path / "indexes" / "sha256").glob("*.bsi"))) == 3
    result = cold_start(dataclasses.replace(bench, indexes=tmp_path / "indexes"), system, system.value)
    assert result.output_ok
    assert result.requests > 0
    assert result.layers["blocks"] > 0
    shutil.rmtree(tmp_path / "indexes")


def test_a_hot_start_reads_nothing_on_demand_from_a_pack(bench: Bench, tmp_path: Path) -> None:
    indexes, hot = tmp_path / "indexes", tmp_path / "hot"
    build_indexes(bench.workspace, bench.link, bench.reference, indexes, print)
    record_hot_set(bench.workspace, bench.link, bench.recipe, bench.reference, indexes, hot, print)
    assert len(list(hot.glob("hot/*/default.bsh"))) == 1
    quiet = dataclasses.replace(bench, indexes=indexes, hot=hot, background=False)
    result = cold_start(quiet, System.BOOTSEER_HOT, "hot", Extras(warm=2, together=2))
    assert result.output_ok and len(result.warm_s) == 2 and len(result.ready_each_s) == 2
    assert result.layers["hot_blocks"] > 0 and result.layers["demand_fetches"] <= 1


def test_the_oracle_fetches_the_working_set_and_nothing_else(bench: Bench) -> None:
    result = cold_start(dataclasses.replace(bench, working_set_bytes=2_000_000), System.ORACLE, "oracle")
    assert result.output_ok and result.requests == 1
    assert 2_000_000 < result.size < 2_200_000
    assert result.pull_s > 2_000_000 * 8 / 100e6
    with pytest.raises(RigError, match="working set of the image was not measured"):
        cold_start(bench, System.ORACLE, "unmeasured")
