"""`scripts/bench index`: real commands on small layers, and its table."""

import gzip
import hashlib
import io
import json
import random
import tarfile
from pathlib import Path

import pytest

from scripts.rig.indexbench import IndexFigures, layers_of, main, table
from scripts.rig.indexstream import StreamedLayer
from tests.snapshotter.images import gzip_layer, write_layout

FIGURES = IndexFigures(
    layer="ab" * 32,
    blob_bytes=100_000_000,
    tar_bytes=250_000_000,
    index_bytes=500_000,
    inodes=10_000,
    extents=9000,
    build_s=2.0,
    build_cpu_s=1.9,
    build_rss_bytes=80_000_000,
    decode_s=0.5,
    threads=2,
    gunzip_s=1.0,
)


def test_table_is_markdown_with_rates() -> None:
    head, rule, row = table([FIGURES]).splitlines()
    assert head.count("|") == rule.count("|") == row.count("|")
    for cell in (
        "250.0 MB",
        "0.50 MB, 0.50 %",
        "2.00 s, 125 MB/s | 1.90 s |",
        "| 5000 |",
        "| 80 MB |",
        "500 MB/s",
        "250 MB/s |",
    ):
        assert cell in row


def test_only_the_demos_layers_of_some_size_are_measured(tmp_path: Path) -> None:
    noise = random.Random(1).randbytes(1_100_000)
    layers = [gzip_layer({"small": b"x"}), gzip_layer({"a": noise}), gzip_layer({"b": noise * 2})]
    digests = write_layout(tmp_path / "numpy-1", layers)
    write_layout(tmp_path / "numpy-2", layers)  # the same layers again
    write_layout(tmp_path / "other-1", [gzip_layer({"c": noise * 3})])
    (tmp_path / "numpy-1/blobs/sha256" / "00").write_bytes(noise)
    assert [path.name for path in layers_of(tmp_path)] == [digests[2][7:], digests[1][7:]]


def test_measures_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tar = gzip.decompress(gzip_layer({f"d/{number}": b"text" * 3000 for number in range(50)}))
    (tmp_path / "gzip").write_bytes(gzip.compress(tar, mtime=0))
    (tmp_path / "tar").write_bytes(tar)
    assert main([str(tmp_path / "gzip"), str(tmp_path / "tar"), "--json", str(tmp_path / "figures")]) == 0
    zipped, plain = json.loads((tmp_path / "figures").read_text())
    assert zipped["inodes"] == plain["inodes"] == 52 and zipped["tar_bytes"] == plain["blob_bytes"] == len(tar)
    assert zipped["gunzip_s"] > 0 and plain["gunzip_s"] is None
    assert zipped["build_rss_bytes"] > 10_000_000 and zipped["decode_s"] > 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_made_up_layer_is_a_layer() -> None:
    layer = StreamedLayer(2_500_000)
    blob = b"".join(layer.chunks())
    assert (len(blob), "sha256:" + hashlib.sha256(blob).hexdigest()) == (layer.size, layer.digest)
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob))) as tar:
        members = tar.getmembers()
    assert sum(member.isfile() for member in members) == layer.files == 24
    assert len({member.name for member in members}) == 25
    assert 0.2 < layer.size / 2_500_000 < 0.6


def test_measures_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--stream-gb", "0.004", "--json", str(tmp_path / "figures")]) == 0
    (figures,) = json.loads((tmp_path / "figures").read_text())
    assert (figures["extents"], figures["inodes"]) == (39, 39 + 4)
    assert figures["build_rss_bytes"] > 10_000_000 and figures["decode_s"] is None
    assert capsys.readouterr().out.splitlines()[-1].endswith("| - | - |")


@pytest.mark.parametrize("words", [["--stream-gb", "0"], ["--stream-gb", "1", "layer"]])
def test_a_stream_of_nothing_or_beside_layers_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "junk").write_bytes(b"no layer" * 1000)
    for layer in ("junk", "nowhere"):
        assert main([str(tmp_path / layer)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("scripts/bench index: ") and err.count("\n") == 1
