"""Doctor: other kernels' answers, other nodes' disks, containerd's files; and one whole run over a real daemon."""

import errno
import importlib
import json
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.codec import index_name
from blockindex.hotset import image_key
from proto import snapshots_pb2
from snapshotter.artifacts.finder import Found
from snapshotter.cli import main
from snapshotter.config import RegistryConfig
from snapshotter.containerd.client import Containerd, Plugin
from snapshotter.doctor.containerdconfig import check_config, read_config
from snapshotter.doctor.directories import check_directory
from snapshotter.doctor.examine import check_containerd
from snapshotter.doctor.image import check_image
from snapshotter.doctor.kernel import FuseFacts, KernelFacts, check_kernel
from snapshotter.doctor.model import Check, State
from snapshotter.doctor.node import RootFacts, check_cri, check_daemon, check_ordinary, check_root
from snapshotter.errors import InvalidArgument, NotFound, Transient, UserError
from snapshotter.fetch.arrival import FoundIndex
from snapshotter.fetch.lookup import Judged
from snapshotter.registry import Registry
from snapshotter.registry.reference import parse_repository
from snapshotter.rpc import Unanswered
from snapshotter.trust.policy import Verdict
from tests.snapshotter.artifacts.making import digest, hot_set, layer_index
from tests.snapshotter.daemon import Daemon, make_layer, origin
from tests.snapshotter.images import gzip_layer, write_layout
from tests.snapshotter.rangeserver import Behaviour, RangeServer, Status

SOCKET = Path("/run/bootseer/bootseer.sock")
Out = pytest.CaptureFixture[str]

GOOD = KernelFacts(
    release="6.18.44-amd64",
    filesystems=frozenset({"ext4", "erofs", "overlay", "fuse"}),
    modules=frozenset(),
    loop_control=True,
    fuse_device=True,
    fuse=FuseFacts(45, True),
    timeouts={"default_request_timeout": 0, "max_request_timeout": 0},
    loops={"loop0": True},
)


def bad(checks: list[Check]) -> dict[str, Check]:
    """Those that are not ok; each must say why and what to do."""
    found = {check.name: check for check in checks if check.state is not State.OK}
    assert all(check.why and check.fix for check in found.values())
    return found


# --- kernel


def test_a_good_kernel() -> None:
    assert bad(check_kernel(GOOD, "loop")) == {}
    assert len(check_kernel(GOOD, "loop")) == 7


@pytest.mark.parametrize(
    ("change", "attach", "name", "state", "words"),
    [
        ({"release": "5.4.0-26-generic"}, "loop", "kernel", State.FAIL, "5.8"),
        ({"release": "6.12.43"}, "file", "kernel", State.WARN, "CVE-2026-23224"),
        ({"filesystems": frozenset({"overlay"})}, "loop", "erofs", State.FAIL, "modprobe erofs"),
        ({"filesystems": frozenset({"erofs"})}, "loop", "overlay", State.FAIL, "modprobe overlay"),
        ({"loop_control": False}, "loop", "loop", State.FAIL, "CONFIG_BLK_DEV_LOOP"),
        ({"loop_control": False, "modules": frozenset({"loop"})}, "loop", "loop", State.FAIL, "modprobe loop"),
        ({"loops": {"loop0": True, "loop7": False}}, "loop", "loop-direct-io", State.WARN, "/dev/loop7"),
        ({"fuse_device": False}, "loop", "fuse", State.FAIL, "modprobe fuse"),
        ({"fuse": FuseFacts(problem="Operation not permitted")}, "loop", "fuse", State.FAIL, "not permitted"),
        ({"fuse": FuseFacts(27, True)}, "loop", "fuse", State.FAIL, "7.31"),
        ({"fuse": FuseFacts(45, False)}, "loop", "fuse", State.FAIL, "FUSE_ASYNC_DIO"),
        ({"timeouts": {"max_request_timeout": 60}}, "loop", "fuse-time-outs", State.FAIL,
         "sysctl -w fs.fuse.max_request_timeout=0"),
    ],
)  # fmt: skip
def test_other_kernels(change: dict[str, object], attach: str, name: str, state: State, words: str) -> None:
    found = bad(check_kernel(replace(GOOD, **change), attach))  # type: ignore[arg-type]  # a table of changes
    assert list(found) == [name] and found[name].state is state and words in found[name].line


def test_a_module_on_disk_is_enough() -> None:
    facts = replace(GOOD, filesystems=frozenset({"overlay"}), modules=frozenset({"erofs"}))
    assert bad(check_kernel(facts, "loop")) == {}


@pytest.mark.system
def test_this_kernel() -> None:
    assert bad(check_kernel(KernelFacts.probe(), "loop")) == {}


# --- node


ROOT = RootFacts(Path("/var/lib/bootseer"), True, "ext4", 80 << 30, 100 << 30, 0, 0o711, {"m": 0o700})


@pytest.mark.parametrize(
    ("change", "name", "state", "words"),
    [
        ({"fstype": "nfs4"}, "root", State.FAIL, "local disk"),
        ({"fstype": "overlay"}, "root", State.FAIL, "local disk"),
        ({"fstype": "tmpfs"}, "root", State.WARN, "memory"),
        ({"free_bytes": 3 << 30}, "root-space", State.WARN, "cache gc"),
        ({"free_bytes": 1 << 20}, "root-space", State.FAIL, "cache gc"),
        ({"uid": 1000}, "root-modes", State.FAIL, "chown root:root /var/lib/bootseer"),
        ({"mode": 0o777}, "root-modes", State.FAIL, "chmod 0711 /var/lib/bootseer"),
        ({"modes": {"m": 0o755, "s": 0o700}}, "root-modes", State.FAIL, "chmod 0700 /var/lib/bootseer/m"),
    ],
)
def test_other_roots(change: dict[str, object], name: str, state: State, words: str) -> None:
    assert bad(check_root(ROOT)) == {}
    found = bad(check_root(replace(ROOT, **change)))  # type: ignore[arg-type]  # a table of changes
    assert list(found) == [name] and found[name].state is state and words in found[name].line


def test_a_root_that_is_not_there_yet(tmp_path: Path) -> None:
    facts = RootFacts.probe(tmp_path / "a" / "b")
    assert not facts.exists and facts.size_bytes > 0 and facts.fstype not in ("", "unknown")
    assert "root-modes" not in bad(check_root(facts))


STATUS = {
    "version": "1", "pid": 7, "ordinary": [], "layers": [],
    "processes": [{"name": "block", "pid": 8, "restarts": 0}],
}  # fmt: skip


def test_the_daemon() -> None:
    assert bad(check_daemon(STATUS, "", "1")) == {}
    assert list(bad(check_daemon(None, "no daemon answers", "1"))) == ["daemon"]
    assert "bootseer reload" in bad(check_daemon(STATUS, "", "2"))["daemon"].fix
    assert bad(check_daemon(None, "it is mute", "1", "ask it"))["daemon"].fix == "ask it"
    restarted = {**STATUS, "processes": [{"name": "block", "pid": 8, "restarts": 3}]}
    assert "block 3 times" in bad(check_daemon(restarted, "", "1"))["workers"].what
    broken = {**STATUS, "problem": "it is dead", "layers": [{"name": "ab", "state": "broken"}]}
    assert {"fetch", "layers"} == set(bad(check_daemon(broken, "", "1")))


@pytest.mark.parametrize(
    ("cause", "what", "fix"),
    [
        (TimeoutError(), "does not answer", "bootseer reload"),
        (PermissionError(errno.EACCES, "x"), "only root", "sudo bootseer doctor"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "no daemon answers", "start `bootseer serve`"),
    ],
)
def test_a_silent_daemon(
    cause: OSError, what: str, fix: str, tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is least disturbing: a daemon that runs is not started again."""

    def silent(path: Path, method: str) -> None:
        raise Unanswered("no answer") from cause

    monkeypatch.setattr(importlib.import_module("snapshotter.doctor.examine"), "call", silent)
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}"\n')
    _, rows = run(capsys, "--config", str(tmp_path / "c.toml"), "--containerd-address", str(tmp_path / "x"))
    assert rows["daemon"]["state"] == "fail" and what in rows["daemon"]["what"] and fix in rows["daemon"]["fix"]


def test_the_image_service(tmp_path: Path) -> None:
    path = tmp_path / "cri.sock"
    assert check_cri(path).state is State.FAIL and "No such file" in check_cri(path).what
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        assert check_cri(path).state is State.FAIL and "refused" in check_cri(path).what
        server.listen()
        assert check_cri(path).state is State.OK and f"unix://{path}" in check_cri(path).what


@pytest.mark.parametrize(
    ("raised", "state"),
    [
        (None, State.OK),
        (NotFound("no such file"), State.OK),
        (Transient("x: no answer"), State.WARN),
        (InvalidArgument("Install s3fs"), State.FAIL),
    ],
)
def test_directories_of_indexes_and_hot_sets(raised: Exception | None, state: State) -> None:
    def ask() -> None:
        if raised is not None:
            raise raised

    check = check_directory("index", "s3://b", ask)
    assert (check.name, check.state) == ("index-url", state) and "s3://b" in check.what
    assert state is State.OK or "url in [index]" in bad([check])["index-url"].fix


def test_full_pulls_and_the_switch() -> None:
    assert [check.state for check in check_ordinary(STATUS)] == [State.OK]
    row = {"reason": "no-target", "layers": 5, "image": "", "detail": "the client unpacks by itself"}
    found = bad(check_ordinary({"ordinary": [row], "lazy_off_since": "noon"}))
    assert "5 layers" in found["full-pulls"].what and "rpull" in found["full-pulls"].fix
    assert found["lazy"].fix == "bootseer lazy on"
    assert check_ordinary({"lazy_off_since": None}) == []


# --- containerd


PROXY = f'[proxy_plugins.bs]\ntype = "snapshot"\naddress = "{SOCKET}"\n'
CRI1 = '[plugins.cri.containerd]\nsnapshotter = "bs"\n'
CRI2 = '[plugins."io.containerd.grpc.v1.cri".containerd]\nsnapshotter = "bs"\n'
CRI3 = '[plugins."io.containerd.cri.v1.images"]\nsnapshotter = "bs"\ndisable_snapshot_annotations = false\n'
CRI3_PLAIN = '[plugins."io.containerd.cri.v1.images"]\nsnapshotter = "bs"\n'
EXPORTS = '[proxy_plugins.bs.exports]\nroot = "/data"\n'
TRANSFER = (
    '[[plugins."io.containerd.transfer.v1.local".unpack_config]]\nplatform = "linux/amd64"\nsnapshotter = "bs"\n'
    f'{EXPORTS}enable_remote_snapshot_annotations = "true"\n'
)


@pytest.mark.parametrize(
    ("toml", "running", "expected"),
    [
        ("version = 2\n", "1.6.20", {"containerd-config": f'address = "{SOCKET}"'}),
        (f"version = 2\n{PROXY}", "1.6.20", {}),
        (f"version = 2\n{PROXY.replace('snapshot', 'content')}", "1.6.20", {"containerd-config": "type = "}),
        (f"version = 2\n{PROXY}{CRI2}{EXPORTS}", "1.7.2", {"labels-cri": "disable_snapshot_annotations = false"}),
        (f"version = 2\n{PROXY}{CRI2}disable_snapshot_annotations = false\n{EXPORTS}", "1.7.2", {}),
        (f"version = 2\n{PROXY}{CRI2}disable_snapshot_annotations = false\n", "1.7.2", {"cri-exports-root": "/data"}),
        (f"version = 2\n{PROXY}{CRI1}{EXPORTS}", "1.5.0", {"labels-cri": '"cri"'}),
        (f"version = 2\ndisabled_plugins = ['io.containerd.grpc.v1.cri']\n{PROXY}{CRI2}", "1.7.2", {}),
        (f"version = 3\n{PROXY}{CRI3}discard_unpacked_layers = true\n{TRANSFER}", "v2.1.0", {"cri-discard": "= false"}),
        (f"version = 3\n{PROXY}{CRI3}", "2.1.0", {"labels-transfer": '"overlayfs"', "cri-exports-root": "/data"}),
        (f"version = 3\n{PROXY}{CRI3}{EXPORTS}", "", {"labels-transfer": "enable_remote_snapshot_annotations"}),
        (f"version = 3\n{PROXY}{CRI3}{TRANSFER}", "2.1.0", {}),
        (f"version = 3\n{PROXY}{CRI3_PLAIN}{TRANSFER}", "v2.4.2", {}),
        (f"version = 3\n{PROXY}{CRI3_PLAIN}{TRANSFER}", "", {}),
        (f"version = 3\n{PROXY}{CRI3_PLAIN}{TRANSFER}", "2.0.5", {"labels-cri": "annotations = false"}),
        (f"version = 3\n{PROXY}{CRI3_PLAIN}use_local_image_pull = true\n{TRANSFER}", "2.4.2",
         {"labels-cri": "= false"}),
        (f"version = 3\n{PROXY}{CRI3_PLAIN}max_concurrent_downloads = 9\n{TRANSFER}", "2.4.2",
         {"labels-cri": "= false"}),
        (f"version = 3\n{PROXY}{CRI3_PLAIN}{EXPORTS}", "2.4.2",
         {"labels-cri": "see labels-transfer", "labels-transfer": "enable_remote_snapshot_annotations"}),
    ],
)  # fmt: skip
def test_containerd_files(tmp_path: Path, toml: str, running: str, expected: dict[str, str]) -> None:
    (tmp_path / "c.toml").write_text(toml)
    found = bad(check_config(read_config(tmp_path / "c.toml", SOCKET), SOCKET, Path("/data"), running))
    assert set(found) == set(expected)
    assert all(words in found[name].fix for name, words in expected.items())


@pytest.mark.parametrize("toml", ["version = 3\n", f"version = 3\n{PROXY}", f"version = 3\n{PROXY}{CRI3}"])
def test_following_the_advice_on_a_file_is_enough(tmp_path: Path, toml: str) -> None:
    """Each round appends the lines of the fixes; what comes after them must be TOML and leave nothing to say."""
    path = tmp_path / "c.toml"
    path.write_text(toml)
    for _ in range(3):
        for fix in (check.fix for check in check_config(read_config(path, SOCKET), SOCKET, Path("/data"), "2.1.0")):
            head, _, lines = fix.partition("\n")
            if lines:
                assert str(path) in head
                _append(path, lines)
    assert bad(check_config(read_config(path, SOCKET), SOCKET, Path("/data"), "2.1.0")) == {}


def _append(path: Path, lines: str) -> None:
    """As a person does: keys of a table that is there already go below its head."""
    for table in re.split(r"(?m)^(?=\[)", f"{lines}\n")[1:]:
        head, keys = table.split("\n", 1)
        text = path.read_text()
        known = f"{head}\n" in text and not head.startswith("[[")
        path.write_text(text.replace(f"{head}\n", table) if known else f"{text}{table}")
        assert keys.strip()


def test_imports_replace_sections(tmp_path: Path) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "c.toml").write_text(f'version = 2\nimports = ["conf.d/*.toml", "{tmp_path}/c.toml"]\n{CRI2}')
    (tmp_path / "conf.d" / "a.toml").write_text(PROXY)
    config = read_config(tmp_path / "c.toml", SOCKET)
    assert config.proxy is not None and config.proxy[0] == "bs" and config.cri["snapshotter"] == "bs"
    (tmp_path / "conf.d" / "b.toml").write_text('[plugins."io.containerd.grpc.v1.cri"]\nsandbox_image = "x"\n')
    assert read_config(tmp_path / "c.toml", SOCKET).cri == {}
    (tmp_path / "conf.d" / "b.toml").write_text("version = ")
    with pytest.raises(UserError, match=r"b\.toml"):
        read_config(tmp_path / "c.toml", SOCKET)


def test_the_running_containerd() -> None:
    ours = Plugin("bs", {"address": f"unix://{SOCKET}"}, (), "")
    overlay = Plugin("overlayfs", {"root": "/x"}, (), "")
    assert check_containerd([overlay, ours], SOCKET).state is State.OK
    assert "it has overlayfs" in check_containerd([overlay], SOCKET).what
    assert check_containerd([replace(ours, problem="dead")], SOCKET).why == "dead"
    assert "rebase" in check_containerd([replace(ours, capabilities=("rebase",))], SOCKET).what


def test_no_containerd(tmp_path: Path) -> None:
    with pytest.raises(Transient, match="no such socket"):
        Containerd(tmp_path / "c.sock").version()
    (tmp_path / "c.sock").touch()
    with pytest.raises(Transient, match=r"c\.sock"):
        Containerd(tmp_path / "c.sock", timeout_s=1.0).version()


# --- an image


@contextmanager
def served(tmp_path: Path, behaviour: Behaviour | None = None) -> Iterator[tuple[Registry, str, list[str]]]:
    digests = write_layout(tmp_path / "image", [gzip_layer({"a": b"a" * 9000}), gzip_layer({"b": b"b"})])
    manifest = json.loads((tmp_path / "image" / "index.json").read_bytes())["manifests"][0]["digest"]
    blobs = {f"/v2/app/blobs/sha256:{p.name}": p.read_bytes() for p in (tmp_path / "image/blobs/sha256").iterdir()}
    body = blobs[f"/v2/app/blobs/{manifest}"]
    with RangeServer({**blobs, "/v2/app/manifests/1": body}, behaviour) as server:
        registry = Registry(RegistryConfig(hosts_dir=""))
        try:
            yield registry, f"{server.host}/app:1", digests
        finally:
            registry.close()


def test_an_image(tmp_path: Path) -> None:
    with served(tmp_path) as (registry, image, digests):
        without = check_image(image, registry, NOWHERE)
        assert list(bad(without)) == ["artifacts"] and f"index publish {image}" in bad(without)["artifacts"].fix
        assert "2 layers" in without[0].what and "first byte" in without[1].what
        out = tmp_path / "indexes"
        assert main(["index", "build", str(tmp_path / "image"), "--out", str(out), "--json"]) == 0
        found = {digest: (out / index_name(digest)).read_bytes() for digest in digests}
        assert bad(check_image(image, registry, Elsewhere(indexes=found))) == {}
        swapped = {digests[0]: found[digests[1]], digests[1]: b"nonsense"}
        wrong = bad(check_image(image, registry, Elsewhere(indexes=swapped)))
        assert wrong["layer-0-index"].state is State.FAIL and wrong["layer-1-index"].what == "the index is damaged"
        some = bad(check_image(image, registry, Elsewhere(indexes={digests[0]: found[digests[0]]})))
        assert list(some) == ["layer-1-index"] and some["layer-1-index"].state is State.WARN


def test_what_registries_have_of_an_image(tmp_path: Path) -> None:
    with served(tmp_path) as (registry, image, digests):
        key = image_key(digests)
        mine = parse_repository("registry.test/app")
        good, bad_one = Verdict(True, "is signed by the trusted key k", "k"), Verdict(False, "is not signed")
        index = replace(layer_index(key=key)[0], subject=None)
        train = hot_set("train", key=key)[0]
        places = [
            ("registry.test/app", [Judged(Found(index, mine, digest("a")), good)]),
            ("other.test/artifacts", [Judged(Found(train, mine, digest("b")), bad_one)]),
            ("third.test/artifacts", []),
        ]
        checks = {
            it.what: it for it in check_image(image, registry, Elsewhere(places=places)) if it.name == "artifacts"
        }
        found, refused, nothing = checks.values()
        assert found.state is State.OK and found.what.startswith("registry.test/app: layer-index ")
        assert "is signed by the trusted key k" in found.what
        assert refused.state is State.WARN and "hot-set train" in refused.what and "is not signed" in refused.why
        assert "[trust]" in refused.fix and "bootseer artifact sign" in refused.fix
        assert nothing.state is State.OK and nothing.what == "third.test/artifacts: none"


class Elsewhere:
    """What a node finds: indexes by layer, artifacts by place."""

    def __init__(
        self, indexes: dict[str, bytes] | None = None, places: list[tuple[str, list[Judged]]] | None = None
    ) -> None:
        self._indexes, self._places = indexes or {}, places or []

    def index(self, image: str, layers: Sequence[str], layer: str) -> FoundIndex | None:
        return FoundIndex(self._indexes[layer], "somewhere") if layer in self._indexes else None

    def survey(self, image: str, layers: Sequence[str], manifest: str) -> list[tuple[str, list[Judged]]]:
        return self._places


NOWHERE = Elsewhere()


def test_a_registry_that_refuses(tmp_path: Path) -> None:
    with served(tmp_path, lambda request: Status(403)) as (registry, image, _):
        (check,) = check_image(image, registry, NOWHERE)
        assert check.state is State.FAIL and "credentials" in check.fix


# --- the whole


def run(capsys: Out, *argv: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = main(["doctor", "--json", *argv])
    return code, {row["name"]: row for row in json.loads(capsys.readouterr().out)["checks"]}


def test_without_a_daemon(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}"\n')
    where = ["--config", str(tmp_path / "c.toml"), "--containerd-address", str(tmp_path / "x")]
    code, rows = run(capsys, *where, "--containerd-config", str(tmp_path / "none.toml"))
    assert code == 1 and rows["daemon"]["state"] == rows["containerd"]["state"] == "fail"
    assert rows["containerd-config"]["state"] == "warn" and "full-pulls" not in rows
    assert "index-url" not in rows
    with (tmp_path / "c.toml").open("a") as file:
        file.write(f'[index]\nurl = "ftp://127.0.0.1:1/a"\n[hotset]\nurl = "{tmp_path}"\n')
    _, rows = run(capsys, *where)
    assert (rows["index-url"]["state"], rows["hotset-url"]["state"]) == ("warn", "ok")
    assert main(["doctor", *where]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("ok", "warn", "fail") for line in lines) and len(lines) >= 12


_CONTAINERD = """
version = 2
root = "{home}/c/root"
state = "{home}/c/state"
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
address = "{home}/c.sock"
[proxy_plugins.lazy]
type = "snapshot"
address = "{home}/run/bootseer.sock"
"""


@pytest.mark.system
@pytest.mark.skipif(shutil.which("containerd") is None, reason="needs containerd: run scripts/setup")
def test_a_healthy_node_and_a_silent_full_pull(capsys: Out) -> None:
    """Every check ok with a real daemon and a real containerd; then an unpack without labels, and the kill switch."""
    layer = make_layer(files=2, size=5000)
    with tempfile.TemporaryDirectory(prefix="bs", dir="/tmp") as directory, origin(layer) as registry:
        home = Path(directory)
        (home / "c.toml").write_text(_CONTAINERD.format(home=home))
        process = subprocess.Popen(
            ["containerd", "--config", f"{home}/c.toml"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with Daemon(home, registry) as daemon:
                where = ["--config", str(home / "config.toml")]
                told = ["--containerd-config", f"{home}/c.toml", "--containerd-address", f"{home}/c.sock"]
                _until_containerd_answers(home / "c.sock")
                daemon.prepare(layer)
                code, rows = run(capsys, *where, *told)
                assert code == 0 and {row["state"] for row in rows.values()} <= {"ok", "warn"}, rows
                assert {name for name, row in rows.items() if row["state"] == "warn"} <= {"root-space"}
                assert rows["containerd-plugin"]["what"] == "containerd runs it as lazy"
                assert rows["loop-direct-io"]["what"].startswith("on for all")
                with daemon.snapshots() as stub:
                    key = "default/9/extract-1-x sha256:c"
                    stub.Prepare(snapshots_pb2.PrepareSnapshotRequest(snapshotter="b", key=key))
                assert main(["lazy", "off", *where]) == 0
                capsys.readouterr()
                code, rows = run(capsys, *where, *told)
                assert code == 0 and "no-target" in rows["full-pulls"]["what"]
                assert rows["lazy"]["fix"] == "bootseer lazy on"
        finally:
            process.terminate()
            process.wait(30)


def _until_containerd_answers(socket: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            Containerd(socket).version()
            return
        except Transient:
            assert time.monotonic() < deadline
            time.sleep(0.1)
