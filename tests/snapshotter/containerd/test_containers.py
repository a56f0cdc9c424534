"""What a container's record in containerd says of it; `test_workloads` asks a real one."""

import json
from pathlib import Path

import pytest

from snapshotter.containerd.containers import ContainerdContainers, _described
from snapshotter.workload.container import Container


def test_a_specification_is_read_where_there_is_one() -> None:
    spec = {"process": {"args": ["sh", "-c", "x"]}, "annotations": {"a": "b"}, "root": {}}
    assert _described(json.dumps(spec).encode(), {"l": "v"}) == Container(("sh", "-c", "x"), {"l": "v"}, {"a": "b"})
    for bare in (b"", b"{}", b'{"process": null, "annotations": null}', b'{"process": {}}'):
        assert _described(bare, {}) == Container(())


@pytest.mark.parametrize("spec", [b"{", b"[]", b'"x"', b'{"process": 1}', b'{"annotations": [1]}'])
def test_what_is_none_is_refused(spec: bytes) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError)):
        _described(spec, {})


def test_nobody_answers_is_no_container(tmp_path: Path) -> None:
    containers = ContainerdContainers(tmp_path / "none.sock")
    heard: list[tuple[str, str]] = []
    containers.listen(lambda namespace, name: heard.append((namespace, name)))
    assert containers.find("default", "x") is None
    containers.close()
    assert heard == []
