"""`bootseer explain` on the running daemon: finds the container's snapshot, asks the fetch process what happened."""

from collections.abc import Iterable, Mapping
from typing import Any

from blockindex.hotset import image_key
from snapshotter.blockstore import node_name
from snapshotter.containerd.model import Kind, Snapshot
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import NotFound, Precondition
from snapshotter.explain import explain
from snapshotter.layers import Layers, NoLayers
from snapshotter.workload.starts import Starts

__all__ = ["explain_container"]


def explain_container(
    snapshots: Snapshots, layers: Layers | NoLayers, starts: Starts | None, request: Mapping[str, Any]
) -> dict[str, Any]:
    """`container`: the id or the beginning of it, `seconds`: of its life to look at. NotFound when no container has
    that id, Precondition when none of its image is lazy or the id is not enough."""
    rows = {snapshot.key: snapshot for snapshot in snapshots.select()}
    snapshot = _of_container(rows.values(), request["container"])
    chain = _lazy_chain(rows, snapshot)
    if not chain:
        raise Precondition(f"container {request['container']}: its image is not lazy, containerd has unpacked it")
    refs = [below.lazy.ref for below in chain if below.lazy is not None]
    digests = list(dict.fromkeys(ref.digest for ref in refs))
    known = layers.mount_times()
    rows_of_layers: list[dict[str, Any]] = []
    for digest in digests:
        ready_s, mount_s = known.get(digest, (None, None))
        rows_of_layers.append({"digest": digest, "name": node_name(digest), "ready_s": ready_s, "mount_s": mount_s})
    since = snapshot.created_ns / 1e9
    until = since + float(request["seconds"])
    journal, prefetches = layers.history([row["name"] for row in rows_of_layers], since, until)
    workload = starts.workload(snapshot.key) if starts is not None else ""
    its = [it for it in prefetches if it["image_key"] == image_key(digests)]
    its.sort(key=lambda it: (it["state"] == "none", it["workload"] != workload))  # its own, else what there was
    container = snapshot.key.rpartition("/")[2]
    hot = its[0] if its else {}
    return explain(container, refs[-1].image, rows_of_layers, journal, hot, since, until, workload).as_json()


def _is(name: str, container: str) -> bool:
    return name == container


def _of_container(rows: Iterable[Snapshot], container: str) -> Snapshot:
    """containerd prefixes the key of a container's snapshot with namespace and number: `<namespace>/<number>/<id>`."""
    active = [row for row in rows if row.kind is Kind.ACTIVE]
    for matches in (_is, str.startswith):
        found = [row for row in active if matches(row.key.rpartition("/")[2], container)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(row.key for row in found[:4])
            raise Precondition(f"container {container}: {len(found)} match: {names}; give more of the id")
    raise NotFound(f"there is no container {container} with a snapshot of ours: `ctr containers ls` names them")


def _lazy_chain(rows: Mapping[str, Snapshot], snapshot: Snapshot) -> list[Snapshot]:
    """The lazy snapshots below, from the bottom up."""
    chain = []
    parent = snapshot.parent
    while parent:
        chain.append(rows[parent])
        parent = rows[parent].parent
    return [row for row in reversed(chain) if row.lazy is not None]
