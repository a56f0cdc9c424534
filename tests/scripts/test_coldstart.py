"""Cold starts of a small image through a real containerd, and what the bench says when one goes wrong."""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.rig import coldstart, node
from scripts.rig.artifacts import publish_hot_set, publish_indexes
from scripts.rig.coldstart import Bench, Extras, System, cold_start
from scripts.rig.errors import RigError
from scripts.rig.fileserver import FileServer
from scripts.rig.image import RECIPES, build, cached
from scripts.rig.link import Link
from scripts.rig.node import Node
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
        files = FileServer(workspace, link)
        reference = registry.push(layout, "bench/tiny")
        yield Bench(workspace, link, registry, files, RECIPES["tiny"], reference)
        files.close()
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
    cold = Node(bench.workspace, bench.link, "daemon", ("", ADDRESS))
    listing = run(cold.ctr("plugins", "ls"), bench.workspace.env, "listing plugins")
    assert [line for line in listing.splitlines() if "bootseer" in line and "ok" in line]
    cold.close()
    assert cold.left_mounted == []
    assert not mounts_below(bench.workspace.root)


def test_a_layer_that_stays_mounted_is_reported(bench: Bench, fake_bootseer: Path) -> None:
    (fake_bootseer / "keep").touch()
    cold = Node(bench.workspace, bench.link, "keeping", ("", ADDRESS))
    cold.close()
    assert [Path(point).name for point in cold.left_mounted] == ["layer"]
    assert not mounts_below(bench.workspace.root), "the node's mounts are in its own namespace"


def test_bootseer_streams_an_image_without_indexes(bench: Bench) -> None:
    result = cold_start(bench, System.BOOTSEER_FIRST, "first")
    assert result.output_ok and result.layers["blocks"] > 0


def test_what_is_published_is_found_by_a_node_that_shares_only_the_registry(bench: Bench) -> None:
    """Indexes, then a hot set too: nothing of the pack's blocks is fetched on demand."""
    with_index = publish_indexes(bench.workspace, bench.link, bench.reference, print)
    with_hot_set = publish_hot_set(bench.workspace, bench.link, bench.recipe, bench.reference, print)
    quiet = dataclasses.replace(
        bench,
        references={System.BOOTSEER.value: with_index, System.BOOTSEER_HOT.value: with_hot_set},
        background=False,
    )
    lazy = cold_start(quiet, System.BOOTSEER, "lazy")
    assert lazy.output_ok and lazy.layers["demand_fetches"] > 0, "an image that is streamed whole needs none"
    hot = cold_start(quiet, System.BOOTSEER_HOT, "hot", Extras(warm=2, together=2))
    assert hot.output_ok and len(hot.warm_s) == 2 and len(hot.ready_each_s) == 2
    assert hot.layers["hot_blocks"] > 0 and hot.layers["demand_fetches"] <= 1


def test_the_oracle_fetches_the_working_set_and_nothing_else(bench: Bench) -> None:
    result = cold_start(dataclasses.replace(bench, working_set_bytes=2_000_000), System.ORACLE, "oracle")
    assert result.output_ok and result.requests == 1
    assert 2_000_000 < result.size < 2_200_000
    assert result.pull_s > 2_000_000 * 8 / 100e6
    with pytest.raises(RigError, match="working set of the image was not measured"):
        cold_start(bench, System.ORACLE, "unmeasured")
