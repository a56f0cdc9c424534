"""What a disk does to files while nobody looks: found, repaired where that can be, fetched again where not."""

import io
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from blockindex.codec import decode_index
from blockindex.hotpack import Codec, write_pack
from blockindex.model import BLOCK
from snapshotter.blockstore import PRESENT, UNVERIFIED, BlockStore, LayerFiles, LayerRecord, node_name
from snapshotter.cli import main
from snapshotter.containerd.metadata import Metadata
from snapshotter.errors import Damaged
from snapshotter.hotstore import HotStore
from snapshotter.integrity import check_hotset, check_layer, restore_seal
from tests.blockindex.hotsets import hotset, read_blocks
from tests.snapshotter.daemon import Layer, encoded_index, make_layer

Out = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return make_layer(files=6, size=300_000)


@pytest.fixture
def directory(tmp_path: Path, layer: Layer) -> Path:
    """The layer, complete, in a store."""
    encoded = encoded_index(layer)
    index = decode_index(encoded)
    record = LayerRecord(
        layer.digest, index.blob_size, len(index.metadata), index.data_size, ("h/a:1",), (), index.layout()
    )
    staging = BlockStore(tmp_path / "root").stage(layer.digest)
    staging.write(0, b"".join(data + bytes(-len(data) % BLOCK) for data in layer.contents.values()))
    return staging.publish(record, index.metadata, encoded, ())


def encoded_pack() -> bytes:
    stream = io.BytesIO()
    write_pack(hotset((400, 300), (0, 0, 100, 1), (1, 50, 250, 2)), read_blocks, Codec.ZSTD, stream)
    return stream.getvalue()


def flip(file: Path, offset: int, bit: int = 3) -> None:
    with file.open("r+b") as stream:
        stream.seek(offset)
        [byte] = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte ^ 1 << bit]))


def test_a_sound_layer(directory: Path, layer: Layer) -> None:
    read: list[int] = []
    check = check_layer(directory, read.append)
    assert check.is_sound and check.digest == layer.digest
    with closing(LayerFiles(directory)) as files:
        assert check.checked_blocks == files.record.blocks == sum(read) // BLOCK
    assert not restore_seal(directory)


@pytest.mark.parametrize("offset", [0, 300_000, 1_000_000, -BLOCK])
def test_a_flipped_bit_of_a_block_is_found_where_it_is(directory: Path, offset: int) -> None:
    size = (directory / "data").stat().st_size
    flip(directory / "data", offset % size)
    [(start, end)] = check_layer(directory).damaged
    assert start <= offset % size // BLOCK < end <= start + 32


def test_a_flip_in_what_is_not_there_is_none(directory: Path) -> None:
    """Nobody may read it, and it is fetched before anybody does."""
    flip(directory / "data", 0)
    with (directory / "present").open("r+b") as present:
        present.write(b"\0")
    with closing(LayerFiles(directory)) as files:
        check = check_layer(directory)
        assert check.is_sound and 0 < check.checked_blocks < files.record.blocks


def test_damaged_metadata_come_back_out_of_the_index(directory: Path) -> None:
    good = (directory / "meta").read_bytes()
    with closing(LayerFiles(directory)) as files:  # as the block server has it open
        flip(directory / "meta", 2000)
        assert check_layer(directory).metadata
        assert restore_seal(directory)
        assert os.pread(files.meta_fd, len(good), 0) == good
    assert check_layer(directory).is_sound
    os.truncate(directory / "meta", 100)
    assert restore_seal(directory) and (directory / "meta").read_bytes() == good


@pytest.mark.parametrize("place", [0.0, 0.01, 0.5, 0.99])
def test_a_damaged_index_is_never_used(directory: Path, place: float) -> None:
    index = directory / "index"
    flip(index, int(place * index.stat().st_size))
    [problem] = check_layer(directory).problems
    assert "fetched again" in problem
    with pytest.raises(Damaged, match="index is not what was written"):
        restore_seal(directory)


def test_what_the_record_says_is_compared_with_the_index(directory: Path) -> None:
    record = json.loads((directory / "layer.json").read_bytes())
    (directory / "layer.json").write_text(json.dumps({**record, "blob_size": 7, "layout": "another"}))
    check = check_layer(directory)
    assert [problem.split()[3] for problem in check.problems] == ["blob_size", "layout"]


def test_a_hot_pack(tmp_path: Path) -> None:
    path = tmp_path / "pack"
    good = encoded_pack()
    for place in (0.0, 0.3, 0.6, 0.99):
        path.write_bytes(good)
        assert check_hotset(path) == ""
        flip(path, int(place * len(good)))
        assert check_hotset(path)


# -- the command, without a daemon


@pytest.fixture
def where(tmp_path: Path, directory: Path) -> list[str]:
    (tmp_path / "c.toml").write_text(f'root = "{tmp_path}/root"\nrun = "{tmp_path}/run"\n')
    return ["--config", str(tmp_path / "c.toml")]


def test_nothing_is_damaged(where: list[str], capsys: Out) -> None:
    assert main(["verify", *where]) == 0
    assert "nothing is damaged" in capsys.readouterr().out
    assert main(["verify", "--all", "--json", *where]) == 0
    assert json.loads(capsys.readouterr().out)["sound"]


def test_damaged_blocks_are_found_and_doubted(where: list[str], directory: Path, layer: Layer, capsys: Out) -> None:
    flip(directory / "data", 40 * BLOCK)
    assert main(["verify", layer.digest[:20], *where]) == 1
    said = capsys.readouterr().out
    assert "do not match their digest: 32-64" in said and "--repair" in said
    assert main(["verify", "--repair", "--json", *where]) == 0
    [finding] = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["what"], finding["repaired"]) == (layer.digest, "fetched again")
    with closing(LayerFiles(directory)) as files:
        assert set(files.present[32:64]) == {UNVERIFIED} and files.present[31] == files.present[64] == PRESENT
    assert main(["verify", *where]) == 0


def test_a_layer_that_cannot_be_checked_is_removed_by_repair(where: list[str], directory: Path, capsys: Out) -> None:
    flip(directory / "index", 100)
    flip(directory / "meta", 0)
    assert main(["verify", *where]) == 1
    assert main(["verify", "--repair", *where]) == 0
    assert "(removed)" in capsys.readouterr().out and not directory.exists()


def test_metadata_are_repaired(where: list[str], directory: Path, capsys: Out) -> None:
    flip(directory / "meta", 1200)
    assert main(["verify", "--repair", *where]) == 0
    assert "(written again)" in capsys.readouterr().out and check_layer(directory).is_sound


def test_hot_sets_and_the_database_are_looked_at(where: list[str], directory: Path, capsys: Out) -> None:
    root = directory.parent.parent
    path = HotStore(root).put(hotset((400, 300)).image_key, "default", lambda file: file.write(encoded_pack()))
    Metadata(root / "metadata.db").close()
    assert main(["verify", *where]) == 0
    flip(path, path.stat().st_size - 10)
    with closing(sqlite3.connect(root / "metadata.db")) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    os.truncate(root / "metadata.db", 5000)
    assert main(["verify", node_name(check_layer(directory).digest)[:8], *where]) == 0, "only what was asked for"
    capsys.readouterr()
    assert main(["verify", "--repair", "--json", *where]) == 1
    by_file = {Path(it["what"]).name: it["repaired"] for it in json.loads(capsys.readouterr().out)["findings"]}
    assert by_file == {"default.bsh": "removed", "metadata.db": ""} and not path.exists()
    assert main(["gc", *where]) == 0
    assert "nothing to remove" in capsys.readouterr().out, "who knows which layers are in use?"


def test_all_and_some_contradict_each_other(where: list[str], capsys: Out) -> None:
    assert main(["verify", "--all", "abcdef", *where]) == 2
    assert main(["verify", "abcdef", *where]) == 1
    assert "no layer" in capsys.readouterr().err
