"""Which workload a container is: rules, then what the node's sets remember, then a name."""

from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.hotset import HotSet
from snapshotter.hotstore import HotStore
from snapshotter.workload import choice as choice_module
from snapshotter.workload.choice import Choice, WorkloadChoice
from snapshotter.workload.container import Container, argv_digest
from snapshotter.workload.naming import workload_name
from snapshotter.workload.rules import parse_rules
from tests.blockindex.hotsets import hotset

ARGV = ("python", "train.py")
DIGEST, NAME = argv_digest(ARGV), workload_name(ARGV)
SET = hotset((10,), (0, 0, 4, 0))
KEY = SET.image_key


def _saved(store: HotStore, workload: str, *argvs: str) -> HotSet:
    made = replace(SET, workload=workload, argvs=argvs)
    store.save(made)
    return made


def test_rules_then_sets_then_a_name(tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    choice = WorkloadChoice(parse_rules(["served label app=web"]), store)
    assert choice.choose(Container(ARGV), KEY) == Choice(NAME, DIGEST, "arguments")
    _saved(store, NAME, DIGEST)
    assert choice.choose(Container(ARGV), KEY) == Choice(NAME, DIGEST, "recorded")
    _saved(store, "default", DIGEST)
    assert choice.choose(Container(ARGV), KEY).workload == NAME
    _saved(store, "train", "sha256:" + "0" * 64, DIGEST)
    assert choice.choose(Container(ARGV), KEY) == Choice("train", DIGEST, "recorded"), "a person has named it"
    assert choice.choose(Container(ARGV, {"app": "web"}), KEY) == Choice("served", DIGEST, "rule")
    assert choice.choose(Container(ARGV), "sha256:" + "1" * 64).why == "arguments", "another image"
    assert choice.choose(Container((*ARGV, "x")), KEY).why == "arguments"


def test_a_set_that_is_replaced_or_removed_is_looked_at_again(tmp_path: Path) -> None:
    store = HotStore(tmp_path)
    choice = WorkloadChoice((), store)
    _saved(store, "train", DIGEST)
    assert choice.choose(Container(ARGV), KEY).workload == "train"
    _saved(store, "train")
    assert choice.choose(Container(ARGV), KEY).workload == NAME
    _saved(store, "train", DIGEST)
    store.remove(KEY, "train")
    assert choice.choose(Container(ARGV), KEY).workload == NAME


def test_what_differs_at_every_start_is_no_workload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_module, "_MOST_NAMED", 3)
    store = HotStore(tmp_path)
    choice = WorkloadChoice((), store)
    for number in range(3):
        argv = ("train", f"--rank={number}")
        chosen = choice.choose(Container(argv), KEY)
        assert chosen.why == "arguments"
        _saved(store, chosen.workload, chosen.argv)
    assert choice.choose(Container(("train", "--rank=3")), KEY) == Choice(
        "default", argv_digest(("train", "--rank=3")), "too many"
    )
    assert choice.choose(Container(("train", "--rank=1")), KEY).why == "recorded"
