"""What the bench would see if something did reach a reader: wrong bytes, errors, ends before the time, what is left."""

import collections
import hashlib
import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import cast

import pytest

from scripts.rig.chaos import reader
from scripts.rig.chaos.containers import Client, Container, told
from scripts.rig.chaos.disturbers import RegistryFaults
from scripts.rig.chaos.faultproxy import KINDS, FaultProxy
from scripts.rig.chaos.images import ChaosImage
from scripts.rig.chaos.leaks import left_over
from scripts.rig.chaos.record import Record
from scripts.rig.errors import RigError
from scripts.rig.faults import Action, Request
from scripts.rig.node import Node
from scripts.rig.oci import Layout
from scripts.rig.workspace import Workspace

RIGHT = hashlib.sha256(b"right").hexdigest()


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "actions.log")


def test_what_a_container_prints_is_judged(tmp_path: Path, record: Record) -> None:
    image = ChaosImage("i", Layout(tmp_path, "", (), 0), {"/data/0/000": RIGHT})
    client = Client(cast(Workspace, None), cast(Node, None), record)
    log = tmp_path / "out"
    container = Container(client, image, "r", "c", log, always=False)
    log.write_text(f"sum {RIGHT} /data/0/000\nsum {'0' * 64} /data/0/000\nfailed /data/0/000\nsum {RIGHT} /data")
    container.harvest()
    assert (record.counts.reads, record.counts.mismatches, record.counts.io_errors) == (1, 1, 1)
    with log.open("a") as more:
        more.write("/0/000\nsh: Bus error\nfinished\n")
    container.harvest()
    assert (record.counts.reads, record.counts.mismatches, record.counts.io_errors) == (2, 1, 2)
    assert container.finished and container.right == 2 and not record.counts.clean
    assert "PROBLEM io_errors: c said: sh: Bus error" in record.path.read_text()


def test_the_reader_sees_wrong_bytes_and_errors(tmp_path: Path) -> None:
    for name, data in (("good", b"right"), ("bad", b"wrong")):
        (tmp_path / name).write_bytes(data)
    listing = tmp_path / "listing"
    listing.write_text(json.dumps({f"/{name}": RIGHT for name in ("good", "bad", "gone")}))
    wanted, seen = {"ok", "mismatch /bad", "error 2 /gone"}, set()
    argv = [sys.executable, reader.__file__, str(tmp_path), str(listing), "1"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            seen.add("ok" if line.startswith("ok ") else line.strip())
            if wanted <= seen:
                break
        process.kill()
    assert seen == wanted


def test_what_is_left_is_named() -> None:
    before = collections.Counter({"mount /m/a": 1})
    assert left_over(before, lambda: before, 0.0) == []
    assert left_over(before, lambda: collections.Counter({"mount /m/a": 2, "file x": 1}), 0.0) == [
        "1 x file x",
        "1 x mount /m/a",
    ]


def test_every_kind_of_fault_comes_before_one_comes_again(record: Record) -> None:
    begun: list[str] = []

    class Proxy:
        def begin(self, kind: str, share: float, seconds: float, seed: int) -> None:
            begun.append(kind)

    faults = RegistryFaults(cast(FaultProxy, Proxy()), record)
    source = random.Random(1)
    for _ in KINDS:
        faults.act(source)
    assert sorted(begun) == sorted(KINDS)


def test_every_kind_of_fault_is_one_that_the_server_can_commit() -> None:
    for asked in (None, (1000, None), (1000, 3000)):
        request = Request(0, "GET", "/v2/i/blobs/sha256:1", {}, asked)
        actions = [kind(request, threading.Event()) for kind in KINDS.values()]
        assert all(isinstance(action, Action) for action in actions)
        assert len(set(map(repr, actions))) == len(KINDS), "two kinds are the same"


def test_of_what_a_client_prints_its_complaint_is_told() -> None:
    error = RigError("ctr images rpull: exit code 1 of `ctr`:\nctr-remote: no room\nfetching sha256:12\n")
    assert told(error) == "ctr-remote: no room"
