"""The command line as a user meets it: results, one-line mistakes, exit codes; and the documents that describe it."""

import fcntl
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from blockindex.builder import LayerBuilder
from blockindex.codec import decode_index, encode_index, index_name
from blockindex.layerindex import LayerIndex
from blockindex.spantable import SpanTable
from snapshotter.cli import main
from snapshotter.cli.arguments import build_parser, walk
from snapshotter.cli.progress import Progress
from snapshotter.cli.reference import pages, refreshed
from snapshotter.cli.status import render
from snapshotter.cli.table import table
from snapshotter.errors import UserError
from snapshotter.rpc import Server
from tests.snapshotter.images import gzip_layer, write_layout
from tests.snapshotter.rangeserver import Hold, RangeServer, Status, Truncate, in_order

DOCS = Path(__file__).parents[2] / "docs"
LAYERS = [
    gzip_layer({"a/text": b"hello\n" * 1000, "a/noise": random.Random(1).randbytes(300_000)}),
    gzip_layer({"b": b"other"}),
]
Out = pytest.CaptureFixture[str]


def mistake(capsys: Out, *argv: str) -> tuple[int, str]:
    """The exit code and the only line on stderr."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bootseer: ") and err.count("\n") == 1, (out, err)
    return code, err


# --- documents


def test_docs_hold_the_help_of_every_command() -> None:
    document = (DOCS / "commands.md").read_text()
    assert refreshed(document) == document, "run: python -m snapshotter.cli.reference docs/commands.md"


def test_a_command_that_the_docs_do_not_name_fails() -> None:
    document = (DOCS / "commands.md").read_text()
    for command in pages():
        if command != "bootseer":
            with pytest.raises(UserError, match=f"no page for: {command}$"):
                refreshed(document.replace(f"<!-- help: {command} -->", "<!-- gone -->"))
            assert f"`{command}" in document or f"    {command} " in document or command.count(" ") == 1
    with pytest.raises(UserError, match="unknown commands: bootseer fly"):
        refreshed(document + "<!-- help: bootseer fly -->\n```text\n```\n")


def test_every_command_has_help_and_a_function() -> None:
    for parser in walk(build_parser()):
        assert parser.description and parser.description.endswith(".")
        leaf = not any("COMMAND" in str(action.metavar) for action in parser._actions)
        assert leaf == (parser.get_default("run") is not None), parser.prog


# --- general


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["index"], "required: COMMAND (see `bootseer index --help`)"),
        (["index", "build", "x"], "required: --out"),
        (["status", "--jsno"], "unrecognized arguments: --jsno"),
        (["config", "show", "--config", "/nowhere/c.toml"], "/nowhere/c.toml: cannot read"),
        (["serve", "--config", "/nowhere/c.toml"], "/nowhere/c.toml: cannot read"),
    ],
)
def test_mistake_in_the_call(argv: list[str], words: str, capsys: Out) -> None:
    code, line = mistake(capsys, *argv)
    assert code == 2 and words in line


def test_version_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-c", _ENTRY, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("bootseer 0.")


_ENTRY = "from snapshotter.cli import entry; entry()"


def test_closed_pipe_is_quiet() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run([sys.executable, "-c", _ENTRY, "config", "show"], stdout=pipe, stderr=subprocess.PIPE)
    assert done.returncode == 141 and done.stderr == b""


def test_interrupt(monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    def interrupt(path: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("snapshotter.cli.config.load_config", interrupt)
    assert main(["config", "show"]) == 130
    assert capsys.readouterr() == ("", "")


def test_config_show_is_a_valid_configuration(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "c.toml"
    path.write_text('resend = "never"\n[registry]\nplain_http = ["a"]\n')
    assert main(["config", "show", "--config", str(path)]) == 0
    shown = capsys.readouterr().out
    path.write_text(shown)
    assert main(["config", "show", "--config", str(path)]) == 0
    assert capsys.readouterr().out == shown and 'resend = "never"' in shown and "# " in shown


# --- status and unmount


@contextmanager
def daemon(tmp_path: Path, answer: object) -> Iterator[list[str]]:
    """A control socket that answers `status`; yields the arguments that lead to it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}/run"\n')
    server = Server(tmp_path / "run" / "control.sock", {"status": lambda request: answer})
    try:
        yield ["--config", str(tmp_path / "c.toml")]
    finally:
        server.close()


ANSWER = {
    "version": "9.9",
    "pid": 77,
    "processes": [{"name": "fetch", "pid": 78, "restarts": 2, "rss_bytes": 41_000_000}],
    "prepares": {"lazy": 3, "fallback": 1},
    "surprise": {"deep": [1]},
    "layers": [
        {
            "digest": "sha256:" + "ab" * 32, "name": "x", "state": "partial", "image": "r.io/a:1", "mount": "/m/x",
            "size_bytes": 200_000_000, "present_bytes": 50_000_000, "blocks": 4, "blocks_present": 1,
            "demand_fetches": 12, "demand_bytes": 3_000_000, "background_bytes": 40_000_000, "waiting_readers": 5,
            "failures": 6, "nothing": 0,
        },
        {"name": "broken-one", "state": "broken", "reason": "bad head"},
    ],
}  # fmt: skip


def test_status_for_people_and_as_json(tmp_path: Path, capsys: Out) -> None:
    with daemon(tmp_path, ANSWER) as where:
        assert main(["status", "--json", *where]) == 0
        assert json.loads(capsys.readouterr().out) == ANSWER
        assert main(["status", *where]) == 0
    text = capsys.readouterr().out
    for expected in ("bootseer 9.9, pid 77", "41.0 MB", "3 lazy, 1 fallback", 'surprise: {"deep": [1]}'):
        assert expected in text
    layer = next(line for line in text.splitlines() if line.startswith("abababababab "))
    assert layer.split()[1:3] == ["partial", "25"] and "12, 3.0 MB" in layer and layer.endswith("r.io/a:1  failures=6")
    assert "not-mounted reason=bad head" in text and "nothing" not in text
    assert "no layers" in render({"version": "1"})


def test_status_without_a_daemon(tmp_path: Path, capsys: Out) -> None:
    (tmp_path / "c.toml").write_text(f'run = "{tmp_path}"\n')
    argv = ["status", "--config", str(tmp_path / "c.toml")]
    code, line = mistake(capsys, *argv)
    assert code == 1 and "no daemon answers" in line and "bootseer serve" in line
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / "control.sock"))
    code, line = mistake(capsys, *argv)
    assert code == 1 and "no daemon answers" in line


def test_unmount_refuses_while_the_daemon_lives(tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}"\n')
    argv = ["unmount", "--config", str(tmp_path / "c.toml")]
    roots: list[Path] = []

    def unmount_all(root: Path) -> list[str]:
        roots.append(root)
        return ["/m/1", "/m/2"]

    monkeypatch.setattr("snapshotter.attach.unmount_all", unmount_all)
    assert main(argv) == 0  # no lock file: none ever ran
    with (tmp_path / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        capsys.readouterr()
        code, line = mistake(capsys, *argv)
        assert code == 1 and "still runs" in line and len(roots) == 1
    assert main(argv) == 0
    assert capsys.readouterr().out == "/m/1\n/m/2\n" and roots == [tmp_path / "root"] * 2


# --- index build


@pytest.fixture
def layout(tmp_path: Path) -> tuple[Path, list[str]]:
    directory = tmp_path / "layout"
    return directory, write_layout(directory, [*LAYERS, LAYERS[0]])


def indexes(out: Path) -> dict[str, bytes]:
    return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_build_from_layout_then_keep(layout: tuple[Path, list[str]], tmp_path: Path, capsys: Out) -> None:
    directory, digests = layout
    out = tmp_path / "out"
    argv = ["index", "build", str(directory), "--out", str(out), "--platform", "linux/amd64"]
    assert main(argv) == 0
    first = indexes(out)
    assert set(first) == {index_name(digest) for digest in digests}, "one index a layer, nothing else"
    assert {index.blob_digest for index in map(decode_index, first.values())} == set(digests)
    assert capsys.readouterr().out.split("\n")[1].split()[:2] == [digests[0][7:19], "built"]
    damaged = out / index_name(digests[1])
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [layer["status"] for layer in result["layers"]] == ["kept", "built"]
    assert result["layers"][0]["blob_bytes"] == len(LAYERS[0]) and result["layers"][0]["index_bytes"] > 0
    assert indexes(out) == first, "the damaged one is as before"


def test_build_of_one_blob(tmp_path: Path, capsys: Out) -> None:
    blob = tmp_path / "layer.tar.gz"
    blob.write_bytes(LAYERS[1])
    umask = os.umask(0o022)
    try:
        assert main(["index", "build", str(blob), "--out", str(tmp_path / "out"), "--json"]) == 0
    finally:
        os.umask(umask)
    result = json.loads(capsys.readouterr().out)
    path = Path(result["layers"][0]["path"])
    assert path.stat().st_mode & 0o777 == 0o644, "a web server can read it"


def test_failed_layer_is_reported_and_stops_no_other(tmp_path: Path, capsys: Out) -> None:
    directory = tmp_path / "layout"
    digests = write_layout(directory, [LAYERS[0], b"not a layer at all" * 100])
    out = tmp_path / "out"
    assert main(["index", "build", str(directory), "--out", str(out), "--json", "--platform", "linux/amd64"]) == 1
    captured = capsys.readouterr()
    layers = json.loads(captured.out)["layers"]
    assert [layer["status"] for layer in layers] == ["built", "failed"] and layers[1]["reason"]
    assert f"layer {digests[1]} has no index: " in captured.err
    assert set(indexes(out)) == {index_name(digests[0])}


def test_blob_that_does_not_match_its_digest(layout: tuple[Path, list[str]], tmp_path: Path, capsys: Out) -> None:
    directory, digests = layout
    (directory / "blobs" / "sha256" / digests[1][7:]).write_bytes(gzip_layer({"b": b"forgd"}))
    assert main(["index", "build", str(directory), "--out", str(tmp_path / "o"), "--platform", "linux/amd64"]) == 1
    assert "digest" in capsys.readouterr().err
    assert index_name(digests[1]) not in indexes(tmp_path / "o")


@pytest.mark.parametrize(
    ("image", "more", "code", "words"),
    [
        ("UPPER/Case:1", [], 2, "not a repository name"),
        ("UPPER/Case:1", ["--plain-http"], 2, "not a repository name"),
        ("127.0.0.1:1/app:1", [], 1, "refused"),
        ("127.0.0.1:1/app:1", ["--config", "/nowhere.toml"], 2, "/nowhere.toml"),
        ("app", ["--platform", "linux"], 2, "'linux' is not a platform"),
        ("{tmp}", [], 2, "not an OCI layout"),
        ("app", ["--out", "/proc/nowhere"], 2, "--out /proc/nowhere: "),
    ],
)
def test_mistakes_of_build(image: str, more: list[str], code: int, words: str, tmp_path: Path, capsys: Out) -> None:
    argv = ["index", "build", image.format(tmp=tmp_path), "--out", str(tmp_path / "out"), *more]
    got, line = mistake(capsys, *argv)
    assert got == code and words in line


# --- index show and verify


@pytest.fixture
def built(layout: tuple[Path, list[str]], tmp_path: Path, capsys: Out) -> tuple[Path, Path, list[str]]:
    """An OCI layout, the directory of its indexes, and its digests."""
    directory, digests = layout
    assert main(["index", "build", str(directory), "--out", str(tmp_path / "out"), "--platform", "linux/amd64"]) == 0
    capsys.readouterr()
    return directory, tmp_path / "out", digests


@pytest.mark.parametrize(
    "argv",
    [
        ("index", "build", "x", "--out", "s3://b/x"),
        ("hotset", "build", "x", "--out", "s3://b/x"),
        ("hotset", "export", "x", "--to", "s3://b/x"),
        ("key", "generate", "--out", "s3://b/x"),
    ],
)
def test_a_url_is_no_path(argv: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = mistake(capsys, *argv)
    assert code == 2 and "s3://b/x is a URL" in line and not list(tmp_path.iterdir())


def test_show_an_index_file(built: tuple[Path, Path, list[str]], capsys: Out) -> None:
    _, out, digests = built
    path = out / index_name(digests[0])
    assert main(["index", "show", str(path), "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["layers"]
    assert shown["index_bytes"] == path.stat().st_size and shown["blob_bytes"] == len(LAYERS[0])
    counts = [shown[key] for key in ("files", "directories", "implied_directories", "symlinks", "links", "extents")]
    assert counts == [2, 2, 1, 0, 0, 2]
    assert shown["span_blob_bytes_max"] == shown["span_blob_bytes_median"] <= len(LAYERS[0])
    assert main(["index", "show", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"layer     {digests[0]}\n" in text and "2 files, 2 directories (1 implied)" in text


def test_show_an_image(built: tuple[Path, Path, list[str]], capsys: Out) -> None:
    directory, out, digests = built
    (out / index_name(digests[1])).unlink()
    with registry_of(directory) as server:
        for image in (str(directory), f"{server.host}/app:1"):
            argv = ["index", "show", image, "--indexes", str(out), "--platform", "linux/amd64"]
            assert main([*argv, "--json"]) == 0
            shown = json.loads(capsys.readouterr().out)["layers"]
            assert [layer["blob_digest"] for layer in shown] == list(dict.fromkeys(digests))
            assert [layer["index_bytes"] > 0 for layer in shown] == [True, False]
            assert main(argv) == 0
            assert f"layer     {digests[1]}\nindex     none\n" in capsys.readouterr().out


def test_show_what_a_read_costs(built: tuple[Path, Path, list[str]], capsys: Out) -> None:
    _, out, digests = built
    path = str(out / index_name(digests[0]))
    assert main(["index", "show", path, "--path", "/a/noise", "--bytes", "4096-8192", "--json"]) == 0
    (cost,) = json.loads(capsys.readouterr().out)["costs"]
    assert (cost["size"], cost["start"], cost["end"], cost["spans"]) == (300_000, 4096, 8192, 1)
    assert 0 == cost["blob_start"] < cost["blob_end"] <= len(LAYERS[0]) and cost["tar_bytes"] > 300_000
    assert main(["index", "show", path, "--path", "a/text"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == [digests[0][7:19], "6000", "bytes", "0-6000"]


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--path", "a/nothing"], 1, "no layer has a file a/nothing"),
        (["--path", "a"], 1, "no layer has a file a "),
        (["--path", "a/text", "--bytes", "5999-6001"], 2, "a/text has 6000 bytes"),
        (["--path", "a/text", "--bytes", "5"], 2, "'5' is not START-END"),
        (["--bytes", "0-5"], 2, "needs --path"),
    ],
)
def test_mistakes_of_show(
    more: list[str], code: int, words: str, built: tuple[Path, Path, list[str]], capsys: Out
) -> None:
    _, out, digests = built
    got, line = mistake(capsys, "index", "show", str(out / index_name(digests[0])), *more)
    assert got == code and words in line


def test_show_without_indexes(built: tuple[Path, Path, list[str]], tmp_path: Path, capsys: Out) -> None:
    directory, _, _ = built
    (tmp_path / "empty").mkdir()
    argv = ["index", "show", str(directory), "--platform", "linux/amd64", "--config", str(tmp_path / "c.toml")]
    (tmp_path / "c.toml").write_text("")
    code, line = mistake(capsys, *argv)
    assert code == 2 and "--indexes DIR|URL" in line
    (tmp_path / "c.toml").write_text(f'[index]\nurl = "{tmp_path}/empty"\n')
    code, line = mistake(capsys, *argv)
    assert code == 1 and "no index of any of the image's 2 layers" in line
    code, line = mistake(capsys, *argv, "--indexes", "ftp://127.0.0.1:1/a")
    assert code == 1 and "ftp://127.0.0.1:1/a/sha256/" in line and "index build" not in line


def test_verify(built: tuple[Path, Path, list[str]], tmp_path: Path, capsys: Out) -> None:
    directory, out, digests = built
    path = out / index_name(digests[0])
    blobs = directory / "blobs" / "sha256"
    assert main(["index", "verify", str(path)]) == 0
    assert "sound, 1 spans (its layer was not looked at" in capsys.readouterr().out
    assert main(["index", "verify", str(path), "--blob", str(blobs / digests[0][7:])]) == 0
    assert "pieces match the blob" in capsys.readouterr().out
    assert main(["index", "verify", str(path), "--blob", str(blobs / digests[0][7:]), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["spans"] == 1 and document["blob"]["threads"] == os.cpu_count()
    code, line = mistake(capsys, "index", "verify", str(path), "--blob", str(blobs / digests[1][7:]))
    assert code == 1 and "the index is of one of" in line
    forged = bytearray(LAYERS[0])
    forged[len(forged) // 2] ^= 1
    (tmp_path / "forged").write_bytes(forged)
    code, line = mistake(capsys, "index", "verify", str(path), "--blob", str(tmp_path / "forged"))
    assert code == 1 and str(path) in line
    path.write_bytes(path.read_bytes()[:-1])
    code, line = mistake(capsys, "index", "verify", str(path))
    assert code == 1 and "head" in line
    code, line = mistake(capsys, "index", "verify", str(tmp_path / "nowhere"))
    assert code == 2 and "No such file" in line


@pytest.mark.parametrize("lie", ["metadata", "piece_digests", "blob_ends"])
def test_verify_finds_lies_that_are_well_formed(lie: str, tmp_path: Path, capsys: Out) -> None:
    """Indexes that only the blob can refute: another file's metadata, a wrong digest, a span that starts elsewhere."""
    blob = tmp_path / "blob"
    blob.write_bytes(LAYERS[0])
    index = indexed(LAYERS[0])
    if lie == "metadata":
        renamed = gzip_layer({"a/text": b"hello\n" * 1000, "a/other": random.Random(1).randbytes(300_000)})
        index = replace(index, metadata=indexed(renamed).metadata)
    elif lie == "piece_digests":
        index = replace(index, piece_digests=bytes(32) + index.piece_digests[32:])
    else:
        columns = replace(index.spans.columns, blob_ends=array("Q", [len(LAYERS[0]) - 100_000]))
        spans = SpanTable(columns, index.files, index.tar_size, b"", index.spans.windows_digest)
        index = replace(index, spans=spans)
    path = tmp_path / "lying.bsi"
    path.write_bytes(encode_index(index))
    assert main(["index", "verify", str(path)]) == 0
    capsys.readouterr()
    code, line = mistake(capsys, "index", "verify", str(path), "--blob", str(blob))
    assert code == 1 and {"metadata": "metadata", "piece_digests": "digest", "blob_ends": "does not yield"}[lie] in line


def indexed(layer: bytes) -> LayerIndex:
    builder = LayerBuilder("sha256:" + hashlib.sha256(layer).hexdigest())
    for _ in builder.feed(layer):
        pass
    return builder.finish()


@contextmanager
def registry_of(layout: Path) -> Iterator[RangeServer]:
    """The layout's image as `app:1` of a server, blobs by digest."""
    manifest = json.loads((layout / "index.json").read_text())["manifests"][0]["digest"]
    paths = {f"/v2/app/blobs/sha256:{f.name}": f.read_bytes() for f in (layout / "blobs" / "sha256").iterdir()}
    paths["/v2/app/manifests/1"] = (layout / "blobs" / "sha256" / manifest[7:]).read_bytes()
    with RangeServer(paths) as server:
        yield server


def test_build_from_a_registry_goes_on_after_trouble(
    layout: tuple[Path, list[str]], tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotter.cli.building._BACKOFF_S", 0.001)
    directory, digests = layout
    first = f"/v2/app/blobs/{digests[0]}"
    with registry_of(directory) as server:
        trouble = in_order([Truncate(100_000), Status(503), Truncate(50_000)])
        server.behaviour = lambda request: trouble(request) if request.path == first else None
        out = tmp_path / "out"
        assert main(["index", "build", f"{server.host}/app:1", "--out", str(out), "--plain-http"]) == 0
        assert set(indexes(out)) == {index_name(digest) for digest in digests}
        starts = [r.range[0] for r in server.requests if r.path == first and r.range]
        assert len(starts) == 4 and starts[0] == 0 and starts[1] == starts[2] == 100_000 < starts[3]


def test_build_gives_up_on_a_dead_registry(
    layout: tuple[Path, list[str]], tmp_path: Path, capsys: Out, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshotter.cli.building._BACKOFF_S", 0.001)
    directory, _ = layout
    with registry_of(directory) as server:
        server.behaviour = lambda request: Status(503) if "/blobs/" in request.path else None
        assert main(["index", "build", f"{server.host}/app:1", "--out", str(tmp_path / "out"), "--json"]) == 1
        assert [layer["status"] for layer in json.loads(capsys.readouterr().out)["layers"]] == ["failed", "failed"]


def test_build_and_show_talk_to_the_registry_as_configured(
    layout: tuple[Path, list[str]], tmp_path: Path, capsys: Out
) -> None:
    """The hosts of a name that no DNS knows come from `hosts_dir` of --config."""
    directory, digests = layout
    hosts, config, out = tmp_path / "hosts", tmp_path / "c.toml", tmp_path / "out"
    (hosts / "registry.invalid").mkdir(parents=True)
    config.write_text(f'[registry]\nhosts_dir = "{hosts}"\n[index]\nurl = "{out}"\n')
    with registry_of(directory) as server:
        (hosts / "registry.invalid/hosts.toml").write_text(f'server = "http://{server.host}"\n')
        argv = ["registry.invalid/app:1", "--config", str(config), "--platform", "linux/amd64"]
        assert main(["index", "build", *argv, "--out", str(out)]) == 0
        assert set(indexes(out)) == {index_name(digest) for digest in digests}
        capsys.readouterr()
        assert main(["index", "show", *argv, "--json"]) == 0
        shown = [layer["blob_digest"] for layer in json.loads(capsys.readouterr().out)["layers"]]
        assert shown == list(dict.fromkeys(digests))


def test_interrupt_of_build_stops_its_workers(
    layout: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: Progress, done: int, label: str) -> None:
        if len([r for r in server.requests if "/blobs/" in r.path]) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "show", interrupt)
    directory, _ = layout
    with registry_of(directory) as server:
        server.behaviour = lambda request: Hold(20) if "/blobs/" in request.path else None
        started = time.monotonic()
        assert main(["index", "build", f"{server.host}/app:1", "--out", str(tmp_path / "out")]) == 130
        assert time.monotonic() - started < 8, "did not wait for the time-outs of the network"
    assert indexes(tmp_path / "out") == {}


# --- what people see


class Screen:
    def __init__(self, tty: bool) -> None:
        self.tty, self.text = tty, ""

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("tty", [False, True])
def test_progress(tty: bool) -> None:
    screen, now = Screen(tty), [0.0]
    progress = Progress(10_000_000, screen, lambda: now[0])  # type: ignore[arg-type]  # as much of a stream as it uses
    progress.show(1_000_000, "0 of 2 layers")
    assert screen.text == "", "nothing before the first interval is over"
    now[0] = 1.0
    progress.show(2_000_000, "0 of 2 layers")
    now[0] = 2.0
    progress.show(5_000_000, "1 of 2 layers")
    progress.end()
    assert "1 of 2 layers, 5.0 of 10.0 MB, 2.5 MB/s" in screen.text
    assert ("############............" in screen.text) == tty and screen.text.count("\n") == (0 if tty else 2)
    Progress(0, screen).show(0, "0 of 0 layers")  # type: ignore[arg-type]  # as above


def test_table_aligns() -> None:
    assert table(("A", "LONG"), [["x", "1"], ["yy", "22"]]) == "A   LONG\nx      1\nyy    22"
    assert table(("A",), []) == "A"
