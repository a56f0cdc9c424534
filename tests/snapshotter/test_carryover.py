"""Which image is the earlier one, and what the node makes of its hot sets."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotset import HotSet, from_touches, image_key
from blockindex.model import BLOCK
from snapshotter import carryover
from snapshotter.blockstore import node_name
from snapshotter.carryover import carry_over
from snapshotter.errors import Precondition
from snapshotter.hotstore import HotStore
from snapshotter.model import Digest
from tests.snapshotter.images import gzip_layer
from tests.snapshotter.test_cli_hotset_carry import (
    BASE,
    INDEXES,
    NEW_APP,
    NEW_KEY,
    OLD,
    OLD_APP,
    WANTED,
    index_of,
    layers_of,
    noise,
    put,
    rows,
)

OTHER_APP = gzip_layer({"app/main": noise(8, 9)})
INDEXES[OTHER_APP] = index_of(OTHER_APP)
NEW_LAYERS = [Digest(it.digest) for it in layers_of(BASE, NEW_APP)]
REPOSITORY = "registry.example:5000/team/app"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The old image and the new one, of one repository, in the store; the old one has a hot set."""
    for blob, tag in ((BASE, ":1"), (OLD_APP, ":1"), (NEW_APP, ":2"), (OTHER_APP, "@sha256:" + "1" * 64)):
        put(tmp_path, blob, REPOSITORY + tag)
    HotStore(tmp_path).save(OLD)
    return tmp_path


def carried(root: Path) -> HotSet | None:
    pack = HotStore(root).load(NEW_KEY, "default")
    return None if pack is None else pack.hotset


def test_every_set_of_the_earlier_image(root: Path) -> None:
    HotStore(root).save(replace(OLD, workload="serve", argvs=("sha256:" + "7" * 64,)))
    made = carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS)
    assert [(it.workload, it.kept, it.changed, it.moved, it.lost) for it in made] == [
        ("default", 2, 2, 2, 1),
        ("serve", 2, 2, 2, 1),
    ]
    assert all((it.image_key, it.carried_from) == (NEW_KEY, OLD.image_key) for it in made)
    hotset = carried(root)
    assert hotset is not None and rows(hotset) == WANTED
    serve = HotStore(root).load(NEW_KEY, "serve")
    assert serve is not None and serve.hotset.argvs == ("sha256:" + "7" * 64,)
    assert carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS) == [], "there is nothing more to do"


@pytest.mark.parametrize("image", ["registry.example:5000/team/app2:2", "other:5000/team/app:2", "app"])
def test_of_another_repository_nothing_is_carried(root: Path, image: str) -> None:
    assert carry_over(root, image, NEW_LAYERS) == [] and carried(root) is None


def test_a_set_that_is_there_stays(root: Path) -> None:
    own = from_touches(layers_of(BASE, NEW_APP), [(0, 0, 1, 0)])
    HotStore(root).save(own)
    assert carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS) == [] and carried(root) == own
    assert not HotStore(root).add(replace(own, records=2)) and carried(root) == own


def test_without_all_layers_of_the_new_image_nothing_is_done(root: Path) -> None:
    (root / "layers" / node_name(NEW_LAYERS[1]) / "layer.json").unlink()
    assert carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS) == []


def test_neither_without_a_hot_layer_of_the_old_one(root: Path) -> None:
    (root / "layers" / node_name(Digest(OLD.layers[1].digest)) / "layer.json").unlink()
    assert carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS) == []
    HotStore(root).save(from_touches(OLD.layers, [(0, 3, 5, 0)]))
    assert [it.kept for it in carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS)] == [2], "that layer has no hot block"


def test_the_likeliest_of_several(root: Path) -> None:
    """Recorded rather than carried, then most layers in common, then the newest."""
    store = HotStore(root)
    alone = from_touches(layers_of(OTHER_APP), [(0, 0, 1, 0)])
    beside = from_touches(layers_of(BASE, OTHER_APP), [(0, 0, 1, 0)])
    swapped = from_touches(layers_of(OTHER_APP, BASE), [(0, 0, 1, 0)])
    sets = [alone, beside, swapped, replace(OLD, carried_from="sha256:" + "2" * 64)]
    for age, hotset in enumerate(sets):
        path = store.save(hotset)
        os.utime(path, (1000 - age, 1000 - age))

    def chosen() -> str:
        store.remove(NEW_KEY, "default")
        (made,) = carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS)
        return made.carried_from

    assert chosen() == beside.image_key
    os.utime(store.path(swapped.image_key, "default"), (2000, 2000))
    assert chosen() == swapped.image_key
    store.remove(swapped.image_key, "default")
    store.remove(beside.image_key, "default")
    assert chosen() == alone.image_key
    store.remove(alone.image_key, "default")
    assert chosen() == "sha256:" + "2" * 64, "where it was recorded"


def test_damage_is_passed_over(root: Path) -> None:
    store = HotStore(root)
    bad = store.path("sha256:" + "e" * 64, "default")
    bad.parent.mkdir()
    bad.write_bytes(b"not a set")
    assert len(carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS)) == 1


def test_nothing_hot_is_left_of_it(root: Path) -> None:
    """What was hot is gone: an empty set would only keep better ones away."""
    HotStore(root).save(from_touches(OLD.layers, [(1, 18, 20, 0)]))
    assert carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS) == [] and carried(root) is None


def test_as_a_program(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [str(root), f"{REPOSITORY}:2", *NEW_LAYERS]
    assert carryover.main(argv) == 0
    (made,) = json.loads(capsys.readouterr().out)
    assert (made["carried_from"], made["blocks"]) == (OLD.image_key, 6)
    HotStore(root).remove(NEW_KEY, "default")
    meta = root / "layers" / node_name(NEW_LAYERS[1]) / "meta"
    meta.write_bytes(bytes(len(meta.read_bytes())))
    assert carryover.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and "no EROFS superblock" in err and err.count("\n") == 1
    meta.write_bytes(b"\xff" * 2 * BLOCK)
    assert carryover.main(argv) == 0 and json.loads(capsys.readouterr().out) == [], "it is not what layer.json says"


def test_images_with_too_many_names_are_left_to_people(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(len(INDEXES[blob].metadata) for blob in (BASE, OLD_APP, NEW_APP))
    monkeypatch.setattr(carryover, "_MOST_METADATA", size - 1)
    with pytest.raises(Precondition, match="bootseer hotset carry"):
        carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS)
    monkeypatch.setattr(carryover, "_MOST_METADATA", size)
    assert len(carry_over(root, f"{REPOSITORY}:2", NEW_LAYERS)) == 1


def test_keys_of_the_images() -> None:
    assert NEW_KEY == image_key(NEW_LAYERS) != OLD.image_key
