"""containerd's rules for snapshots, and what becomes of layers."""

import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from snapshotter.containerd.model import Counters, Kind, Usage
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.errors import AlreadyExists, InvalidArgument, NotFound, Precondition, Transient
from snapshotter.model import Digest, LayerRef
from tests.snapshotter.containerd.fake_provider import CRI, STARGZ, TARGET, FakeProvider, digest, layer_labels

A, B, C = digest("a"), digest("b"), digest("c")


def _lazy(snapshots: Snapshots, target: str, layer: str, parent: str = "", key: str = "") -> None:
    """Prepare a layer the way containerd does, and expect it to be served."""
    labels = layer_labels(target, digest(layer))
    with pytest.raises(AlreadyExists, match=f'target snapshot "{target}": already exists'):
        snapshots.prepare(key or f"ns/1/extract-1-x {target}", parent, labels)


def _committed(snapshots: Snapshots, name: str, parent: str = "") -> None:
    snapshots.prepare(f"key of {name}", parent, {})
    snapshots.commit(name, f"key of {name}", {})


def _upper(snapshots: Snapshots, key: str) -> Path:
    (mount,) = snapshots.mounts(key)
    if mount.type == "bind":
        return Path(mount.source)
    return Path(next(option for option in mount.options if option.startswith("upperdir=")).removeprefix("upperdir="))


def _lowers(snapshots: Snapshots, key: str) -> list[Path]:
    (mount,) = snapshots.mounts(key)
    return [Path(text) for text in mount.options[-1].removeprefix("lowerdir=").split(":")]


# --- implied directories


def _chmod(provider: FakeProvider, layer: str, name: str, mode: int) -> None:
    (provider.sources[digest(layer)] / name).chmod(mode)


def test_an_implied_directory_gets_its_attributes_from_below(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {"tmp/a": b"1", "opt/a": b"1"})
    _chmod(provider, "a", "tmp", 0o1777)
    provider.add(B, {"tmp/b": b"2", "opt/b": b"2"})
    provider.implied[B] = (b"/opt", b"/tmp")
    _lazy(snapshots, "one", "a")
    _lazy(snapshots, "two", "b", "one")
    snapshots.prepare("key", "two", {})
    skeleton, *layers = _lowers(snapshots, "key")
    assert layers == [provider.mount_point(B), provider.mount_point(A)]
    assert {path.name: path.stat().st_mode & 0o7777 for path in skeleton.iterdir()} == {"tmp": 0o1777}
    lazy = snapshots.stat("two").lazy
    assert lazy is not None and lazy.skeleton


def test_a_skeleton_lives_as_long_as_its_snapshot(snapshots: Snapshots, provider: FakeProvider, tmp_path: Path) -> None:
    provider.add(A, {"tmp/a": b"1"})
    _chmod(provider, "a", "tmp", 0o1777)
    provider.add(B, {"tmp/b": b"2"})
    provider.implied[B] = (b"/tmp",)
    _lazy(snapshots, "one", "a")
    _lazy(snapshots, "two", "b", "one")
    snapshots.close()
    again = Snapshots(tmp_path / "root", provider)
    again.cleanup()
    again.view("view", "two", {})
    assert len(_lowers(again, "view")) == 3
    again.remove("view")
    again.remove("two")
    again.cleanup()
    assert list((tmp_path / "root" / "s").iterdir()) == []
    again.close()


def test_no_skeleton_without_need(snapshots: Snapshots, provider: FakeProvider, tmp_path: Path) -> None:
    provider.add(A, {"opt/a": b"1"})
    provider.add(B, {"opt/b": b"2", "new/b": b"2"})
    provider.implied = {A: (b"/opt",), B: (b"/new", b"/opt")}
    _lazy(snapshots, "one", "a")
    _lazy(snapshots, "two", "b", "one")
    assert list((tmp_path / "root" / "s").iterdir()) == []


def test_a_layer_whose_skeleton_cannot_be_made_is_unpacked(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {"tmp/a": b"1"})
    _chmod(provider, "a", "tmp", 0o1777)
    provider.add(B, {})
    provider.implied[B] = (b"/tmp",)
    _lazy(snapshots, "one", "a")
    provider.sources[A].joinpath("tmp/b").mkdir()
    provider.implied[B] = (b"/" + b"x" * 300,)
    assert snapshots.prepare("key", "one", layer_labels("two", B))
    assert snapshots.counters() == Counters(lazy=1, fallback=1)
    assert provider.released == [B]


# --- rules


def test_life_of_an_ordinary_layer(snapshots: Snapshots) -> None:
    before = time.time_ns()
    (mount,) = snapshots.prepare("key", "", {"a": "1"})
    active = snapshots.stat("key")
    assert (active.kind, active.parent, active.labels) == (Kind.ACTIVE, "", {"a": "1"})
    assert before <= active.created_ns == active.updated_ns <= time.time_ns()
    (Path(mount.source) / "file").write_bytes(b"x" * 10_000)
    assert snapshots.usage("key").inodes == 2
    snapshots.commit("name", "key", {"b": "2"})
    committed = snapshots.stat("name")
    assert (committed.kind, committed.labels) == (Kind.COMMITTED, {"b": "2"})
    assert committed.created_ns == committed.updated_ns > active.created_ns
    assert snapshots.usage("name") == committed.usage
    assert committed.usage.inodes == 2 and committed.usage.size >= 10_000
    with pytest.raises(NotFound):
        snapshots.stat("key")
    assert snapshots.prepare("key", "name", {})[0].type == "overlay"
    assert (_lowers(snapshots, "key")[0] / "file").read_bytes() == b"x" * 10_000


def test_view_has_nothing_of_its_own(snapshots: Snapshots, tmp_path: Path) -> None:
    _committed(snapshots, "base")
    (mount,) = snapshots.view("view", "base", {"l": "1"})
    assert (mount.type, mount.options) == ("bind", ("ro", "rbind"))
    assert snapshots.mounts("view") == [mount]
    assert snapshots.usage("view") == Usage(0, 0)
    assert len(list((tmp_path / "root" / "s").iterdir())) == 1
    with pytest.raises(Precondition, match="is view"):
        snapshots.commit("name", "view", {})
    snapshots.remove("view")


def test_keys_are_taken(snapshots: Snapshots) -> None:
    _committed(snapshots, "name")
    snapshots.prepare("key", "", {})
    for key in ("key", "name"):
        with pytest.raises(AlreadyExists):
            snapshots.prepare(key, "", {})
        with pytest.raises(AlreadyExists):
            snapshots.view(key, "name", {})
    with pytest.raises(AlreadyExists):
        snapshots.commit("name", "key", {})
    assert snapshots.stat("key").kind is Kind.ACTIVE


def test_failed_prepares_leave_no_directory(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.prepare("key", "", {})
    with pytest.raises(AlreadyExists):
        snapshots.prepare("key", "", {})
    assert len(list((tmp_path / "root" / "s").iterdir())) == 1


def test_parents_must_be_committed(snapshots: Snapshots) -> None:
    snapshots.prepare("active", "", {})
    for call in (snapshots.prepare, snapshots.view):
        with pytest.raises(NotFound, match="absent"):
            call("key", "absent", {})
        with pytest.raises(InvalidArgument, match="active"):
            call("key", "active", {})


def test_commit_may_give_a_parent_once(snapshots: Snapshots) -> None:
    _committed(snapshots, "base")
    snapshots.prepare("rootless", "", {})
    snapshots.prepare("on base", "base", {})
    with pytest.raises(NotFound):
        snapshots.commit("new", "rootless", {}, "absent")
    with pytest.raises(Precondition):
        snapshots.commit("new", "rootless", {}, "on base")
    with pytest.raises(InvalidArgument):
        snapshots.commit("new", "on base", {}, "base")
    snapshots.commit("new", "rootless", {}, "base")
    assert snapshots.stat("new").parent == "base"
    snapshots.remove("on base")
    with pytest.raises(Precondition):
        snapshots.remove("base")


@pytest.mark.parametrize("call", ["mounts", "stat", "usage", "remove"])
def test_absent(snapshots: Snapshots, call: str) -> None:
    with pytest.raises(NotFound, match='"absent"'):
        getattr(snapshots, call)("absent")


def test_wrong_states(snapshots: Snapshots) -> None:
    _committed(snapshots, "base")
    snapshots.prepare("child", "base", {})
    with pytest.raises(Precondition):
        snapshots.mounts("base")
    with pytest.raises(Precondition, match="committed, only"):
        snapshots.commit("again", "base", {})
    with pytest.raises(Precondition, match="cannot remove"):
        snapshots.remove("base")
    with pytest.raises(NotFound):
        snapshots.commit("name", "absent", {})
    with pytest.raises(NotFound):
        snapshots.update("absent", {})
    with pytest.raises(InvalidArgument):
        snapshots.prepare("", "", {})
    with pytest.raises(InvalidArgument):
        snapshots.commit("", "child", {})


def test_update(snapshots: Snapshots) -> None:
    snapshots.prepare("key", "", {"a": "1", "b": "2"})
    created = snapshots.stat("key").created_ns
    assert snapshots.update("key", {"b": "3", "c": "4", "d": "5"}, ["labels.a", "labels.c"]).labels == {
        "b": "2",
        "c": "4",
    }
    assert snapshots.update("key", {"x": "1"}, ["labels"]).labels == {"x": "1"}
    updated = snapshots.update("key", {"a.b/c": "1"})
    assert updated.labels == {"a.b/c": "1"}
    assert updated == snapshots.stat("key")
    assert updated.created_ns == created < updated.updated_ns
    assert snapshots.update("key", {}, ["labels.a.b/c"]).labels == {}
    for path in ("name", "parent", "kind", "labelsx"):
        with pytest.raises(InvalidArgument, match=path):
            snapshots.update("key", {}, [path])


def test_select(snapshots: Snapshots) -> None:
    _committed(snapshots, "base")
    snapshots.prepare("key", "base", {"l": "1"})
    assert [found.key for found in snapshots.select()] == ["base", "key"]
    assert [found.key for found in snapshots.select(["labels.l==1", "kind==view"])] == ["key"]
    with pytest.raises(InvalidArgument):
        snapshots.select(["=="])


def test_remove_and_cleanup(snapshots: Snapshots, tmp_path: Path) -> None:
    upper = Path(snapshots.prepare("key", "", {})[0].source)
    (upper / "file").touch()
    orphan = tmp_path / "root" / "s" / "4711"
    orphan.mkdir()
    snapshots.remove("key")
    assert not upper.exists()
    snapshots.prepare("key", "", {})
    snapshots.cleanup()
    assert [entry.name for entry in (tmp_path / "root" / "s").iterdir()] == ["2"]


# --- lazy layers


def test_lazy_chain(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {"etc/base": b"a"})
    provider.add(B, {"etc/top": b"b"})
    _lazy(snapshots, "sha256:c1", "a")
    _lazy(snapshots, "sha256:c2", "b", "sha256:c1")
    top = snapshots.stat("sha256:c2")
    assert (top.kind, top.parent, top.labels) == (Kind.COMMITTED, "sha256:c1", layer_labels("sha256:c2", B))
    assert top.lazy is not None and top.lazy.ref == LayerRef("registry.test/app:1", B, (B,))
    assert snapshots.usage("sha256:c2") == Usage(0, 0)
    assert [found.key for found in snapshots.select(['labels."containerd.io/snapshot.ref"==sha256:c2'])] == [top.key]
    snapshots.prepare("container", "sha256:c2", {})
    assert _lowers(snapshots, "container") == [provider.mount_point(B), provider.mount_point(A)]
    (view,) = snapshots.view("view", "sha256:c1", {})
    assert (view.type, view.source, view.options) == ("bind", str(provider.mount_point(A)), ("ro", "rbind"))
    assert snapshots.counters() == Counters(lazy=2, containers=1)


def _cri_labels(target: str, layers: list[Digest]) -> dict[str, str]:
    """The labels of the first of these layers, which lists those above."""
    facts = {"image-ref": "registry.test/app:1", "layer-digest": layers[0], "image-layers": ",".join(layers)}
    return {TARGET: target, **{CRI + key: value for key, value in facts.items()}}


def test_every_layer_names_all_layers_of_its_image(snapshots: Snapshots, provider: FakeProvider) -> None:
    """From the bottom up, each once: the key of the image's hot set is made of them."""
    image = [A, B, A, C]
    for layer in (A, B, C):
        provider.add(layer, {})
    for number in range(len(image)):
        labels = _cri_labels(f"{number}", image[number:])
        with pytest.raises(AlreadyExists):
            snapshots.prepare(f"ns/1/extract-1-x {number}", f"{number - 1}" if number else "", labels)
    assert [ref.layers for ref in provider.refs] == [(A, B, C)] * len(provider.refs)
    assert {ref.digest for ref in provider.refs} == {A, B, C}


def test_an_image_of_which_not_all_layers_are_known_names_none(snapshots: Snapshots, provider: FakeProvider) -> None:
    for layer in (A, B):
        provider.add(layer, {})
    _committed(snapshots, "ordinary")
    with pytest.raises(AlreadyExists):
        snapshots.prepare("ns/1/extract-1-x 1", "ordinary", _cri_labels("1", [A, B]))
    long = [B, *(Digest(f"sha256:{number:064x}") for number in range(60))]
    with pytest.raises(AlreadyExists):
        snapshots.prepare("ns/1/extract-1-x 2", "", _cri_labels("2", long))
    assert len(provider.refs) == 2 and [ref.layers for ref in provider.refs] == [(), ()]


def test_mixed_chain(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    provider.add(C, {})
    _lazy(snapshots, "1", "a")
    snapshots.prepare("extract", "1", layer_labels("2", B))  # not there: fallback
    middle = _upper(snapshots, "extract")
    snapshots.commit("2", "extract", layer_labels("2", B))
    _lazy(snapshots, "3", "c", "2")
    snapshots.prepare("container", "3", {})
    assert _lowers(snapshots, "container") == [provider.mount_point(C), middle, provider.mount_point(A)]
    assert snapshots.counters() == Counters(lazy=2, fallback=1, containers=1)


def test_upper_has_owner_and_mode_of_a_lazy_root(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    provider.sources[A].chmod(0o1751)
    _lazy(snapshots, "1", "a")
    snapshots.prepare("container", "1", {})
    assert _upper(snapshots, "container").stat().st_mode & 0o7777 == 0o1751


def test_one_layer_twice_in_an_image(snapshots: Snapshots, provider: FakeProvider) -> None:
    """The empty layer is in many images several times."""
    provider.add(A, {})
    provider.add(B, {})
    for target, layer, parent in (("1", "a", ""), ("2", "b", "1"), ("3", "a", "2")):
        _lazy(snapshots, target, layer, parent)
    snapshots.prepare("container", "3", {})
    assert _lowers(snapshots, "container") == [provider.mount_point(A), provider.mount_point(B)]
    for key in ("container", "3"):
        snapshots.remove(key)
    assert provider.released == []
    snapshots.remove("2")
    snapshots.remove("1")
    assert provider.released == [B, A]


@pytest.mark.parametrize("failure", [Transient("registry is down"), OSError("bug in the provider")])
def test_fallback(
    snapshots: Snapshots, provider: FakeProvider, failure: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    provider.failure = failure
    (mount,) = snapshots.prepare("ns/1/extract-1-x sha256:c1", "", layer_labels("sha256:c1", A))
    assert (mount.type, mount.options) == ("bind", ("rw", "rbind"))
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert A in record.getMessage()
    assert str(failure) in caplog.text
    assert snapshots.counters() == Counters(fallback=1)
    assert provider.released == []
    snapshots.commit("sha256:c1", "ns/1/extract-1-x sha256:c1", {TARGET: "sha256:c1"})
    assert snapshots.lazy_layers() == []


def test_unreadable_labels_fall_back(snapshots: Snapshots, caplog: pytest.LogCaptureFixture) -> None:
    labels = layer_labels("t", A) | {f"{STARGZ}digest": "md5:1"}
    assert snapshots.prepare("key", "", labels)[0].type == "bind"
    assert "md5:1" in caplog.text
    assert snapshots.counters() == Counters(fallback=1)


@pytest.mark.parametrize(
    "key, labels, told",
    [
        ("key", {TARGET: "t"}, "no image labels"),
        ("ns/3/extract-1-x sha256:c", {}, "unpacks by itself"),
        ("ns/3/extract-1-x sha256:c", layer_labels("", A), "unpacks by itself"),
    ],
)
def test_what_is_missing_is_told(
    snapshots: Snapshots, key: str, labels: dict[str, str], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert snapshots.prepare(key, "", labels)[0].type == "bind"
    assert told in caplog.text
    assert snapshots.counters() == Counters(ordinary=1)


def test_a_target_that_is_there_needs_no_provider(snapshots: Snapshots, provider: FakeProvider) -> None:
    """Two namespaces, or a crash after our commit and before containerd's."""
    provider.add(A, {})
    _lazy(snapshots, "sha256:c1", "a")
    _lazy(snapshots, "sha256:c1", "a", key="other/9/extract-2-y sha256:c1")
    assert provider.ensured[A] == 1
    assert len(snapshots.select()) == 1
    assert snapshots.counters() == Counters(lazy=1, reused=1)


def test_a_target_that_another_namespace_unpacked(snapshots: Snapshots, provider: FakeProvider) -> None:
    snapshots.prepare("a/1/extract-1-x sha256:c1", "", {TARGET: "sha256:c1"})
    snapshots.commit("a/2/sha256:c1", "a/1/extract-1-x sha256:c1", {TARGET: "sha256:c1"})
    _lazy(snapshots, "sha256:c1", "a")
    assert not provider.refs


def test_one_target_on_different_parents(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    provider.add(B, {})
    _committed(snapshots, "a/2/sha256:c1")
    _lazy(snapshots, "sha256:c1", "a")
    for parent in ("sha256:c1", "a/2/sha256:c1"):
        _lazy(snapshots, "sha256:c2", "b", parent)
        query = f'labels."containerd.io/snapshot.ref"==sha256:c2,parent=="{parent}"'
        (found,) = snapshots.select([query])
        assert found.kind is Kind.COMMITTED


def test_a_lazy_layer_needs_a_committed_parent_before_it_is_fetched(
    snapshots: Snapshots, provider: FakeProvider
) -> None:
    provider.add(A, {})
    snapshots.prepare("active", "", {})
    with pytest.raises(NotFound):
        snapshots.prepare("key", "absent", layer_labels("t", A))
    with pytest.raises(InvalidArgument):
        snapshots.prepare("key", "active", layer_labels("t", A))
    with pytest.raises(AlreadyExists, match=r'^snapshot "active"'):
        snapshots.prepare("active", "", layer_labels("t", A))
    assert not provider.refs


def test_parent_removed_while_a_layer_is_fetched(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    _committed(snapshots, "base")
    provider.holding.clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(snapshots.prepare, "key", "base", layer_labels("t", A))
        assert provider.entered.acquire(timeout=10)
        snapshots.remove("base")
        provider.holding.set()
        with pytest.raises(NotFound, match="base"):
            call.result(10)
    assert provider.released == [A]
    assert snapshots.select() == []


def test_the_last_user_releases_the_layer(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    _committed(snapshots, "base")
    _lazy(snapshots, "1", "a")
    _lazy(snapshots, "2", "a", "base")
    snapshots.prepare("container", "1", {})
    snapshots.remove("2")
    snapshots.remove("container")
    assert provider.released == []
    snapshots.remove("1")
    assert provider.released == [A]
    _lazy(snapshots, "1", "a")
    assert provider.mount_point(A).exists()


def test_crash_between_ensure_and_commit(tmp_path: Path, provider: FakeProvider) -> None:
    """The layer is mounted, no row knows it: the next Prepare is an ordinary one."""
    provider.add(A, {})
    provider.ensure(LayerRef("registry.test/app:1", A, (A,)))
    snapshots = Snapshots(tmp_path / "root", provider)
    _lazy(snapshots, "1", "a")
    assert len(snapshots.select()) == 1
    snapshots.close()


# --- restart


@pytest.fixture
def restarted(tmp_path: Path, provider: FakeProvider) -> Snapshots:
    """A snapshotter after a reboot: two lazy layers and a container, and nothing mounted."""
    provider.add(A, {"f": b"a"})
    provider.add(B, {"f": b"b"})
    first = Snapshots(tmp_path / "root", provider)
    _lazy(first, "1", "a")
    _lazy(first, "2", "b", "1")
    first.prepare("container", "2", {})
    first.close()
    shutil.rmtree(provider.mount_point(A).parent)
    provider.ensured.clear()
    return Snapshots(tmp_path / "root", provider)


def test_mounts_bring_layers_back(restarted: Snapshots, provider: FakeProvider) -> None:
    assert [path.joinpath("f").read_bytes() for path in _lowers(restarted, "container")] == [b"b", b"a"]
    restarted.mounts("container")
    assert provider.ensured == {A: 1, B: 1}
    restarted.close()


def test_prepare_brings_layers_back(restarted: Snapshots, provider: FakeProvider) -> None:
    restarted.prepare("another", "1", {})
    assert provider.ensured == {A: 1}
    restarted.close()


def test_restore(restarted: Snapshots, provider: FakeProvider, caplog: pytest.LogCaptureFixture) -> None:
    assert [layer.ref.digest for layer in restarted.lazy_layers()] == [A, B]
    del provider.sources[B]
    assert restarted.restore() == [B]
    assert provider.mount_point(A).exists()
    assert f"layer.restore.failed layer={B}" in caplog.text
    with pytest.raises(NotFound, match="is not here"):
        restarted.mounts("container")
    provider.add(digest("e"), {})
    provider.sources[B] = provider.sources[digest("e")]
    assert len(_lowers(restarted, "container")) == 2
    restarted.close()


def test_after_a_restart_layers_that_no_snapshot_needs_are_given_back(
    restarted: Snapshots, provider: FakeProvider
) -> None:
    orphan = digest("f")
    restarted.release_unused([A, orphan])
    assert provider.released == [orphan]
    restarted.close()


def test_a_layer_that_was_not_restored_is_released_all_the_same(restarted: Snapshots, provider: FakeProvider) -> None:
    """Its mount may have outlived the process before."""
    for key in ("container", "2", "1"):
        restarted.remove(key)
    assert provider.released == [B, A]
    restarted.close()


# --- at once


def test_one_slow_layer_holds_nobody_up(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    _committed(snapshots, "base")
    provider.holding.clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(snapshots.prepare, "slow", "", layer_labels("t", A))
        assert provider.entered.acquire(timeout=10)
        snapshots.prepare("container", "base", {})
        snapshots.mounts("container")
        snapshots.remove("container")
        snapshots.cleanup()
        assert [found.key for found in snapshots.select()] == ["base"]
        provider.holding.set()
        with pytest.raises(AlreadyExists):
            call.result(10)


def test_one_target_prepared_by_many(snapshots: Snapshots, provider: FakeProvider) -> None:
    provider.add(A, {})
    provider.holding.clear()

    def prepare(number: int) -> bool:
        try:
            snapshots.prepare(f"{number}", "", layer_labels("t", A))
        except AlreadyExists:
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        calls = [pool.submit(prepare, number) for number in range(16)]
        for _ in calls:
            assert provider.entered.acquire(timeout=10)
        provider.holding.set()
        assert all(call.result(10) for call in calls)
    assert [found.key for found in snapshots.select()] == ["t"]
    assert snapshots.counters() == Counters(lazy=1, reused=15)
    assert provider.mount_point(A).exists()


def test_images_come_and_go_at_once(snapshots: Snapshots, provider: FakeProvider) -> None:
    """Whatever the order: a layer that a snapshot stands on is mounted, one that none does is not."""
    provider.add(A, {"f": b"a"})
    failures: list[BaseException] = []
    barrier = threading.Barrier(6)

    def come_and_go(number: int) -> None:
        try:
            barrier.wait(10)
            _committed(snapshots, f"base {number}")
            for turn in range(5):
                _lazy(snapshots, f"t{number}", "a", f"base {number}", key=f"extract {number} {turn}")
                snapshots.prepare(f"c{number}", f"t{number}", {})
                assert (_lowers(snapshots, f"c{number}")[0] / "f").read_bytes() == b"a"
                snapshots.remove(f"c{number}")
                snapshots.remove(f"t{number}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not provider.mount_point(A).exists()
    assert snapshots.lazy_layers() == []
