"""Generated layers: the same bytes each time, as the recipe says, and no tree on the way."""

import gzip
import hashlib
import io
import tarfile
import zlib
from pathlib import Path

import pytest

from scripts.rig.image import Generated
from scripts.rig.image.generated import CHUNK, content, write_files, write_generated

LAYER = Generated("data", (("a/b/one", 3 * CHUNK + 5), ("a/two", 10), ("a/none", 0)), bits=4)


def _blob(layer: Generated) -> tuple[bytes, str, str, int]:
    out = io.BytesIO()
    blob = write_generated(layer, out)
    return out.getvalue(), blob.digest, blob.diff_id, blob.size


def test_a_blob_is_what_its_digests_say_and_the_same_each_time() -> None:
    data, digest, diff_id, size = _blob(LAYER)
    assert (data, digest) == _blob(LAYER)[:2]
    assert digest == f"sha256:{hashlib.sha256(data).hexdigest()}" and size == len(data)
    assert diff_id == f"sha256:{hashlib.sha256(gzip.decompress(data)).hexdigest()}"


def test_the_tar_holds_the_files_below_their_directories() -> None:
    data = _blob(LAYER)[0]
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as archive:
        entries = [(entry.name, entry.isdir(), entry.size) for entry in archive]
        assert entries == [
            ("a", True, 0), ("a/b", True, 0),
            ("a/b/one", False, 3 * CHUNK + 5), ("a/two", False, 10), ("a/none", False, 0),
        ]  # fmt: skip
        member = archive.extractfile("a/b/one")
        assert member is not None
        assert member.read() == content("a/b/one", 3 * CHUNK + 5, 4).read()


@pytest.mark.parametrize(("bits", "low", "high"), [(8, 1.0, 1.001), (4, 0.5, 0.6)])
def test_how_far_it_shrinks(bits: int, low: float, high: float) -> None:
    data = content("x", 4 * CHUNK, bits).read()
    assert len(data) == 4 * CHUNK
    assert low <= len(zlib.compress(data, 6)) / len(data) <= high


def test_no_block_is_there_twice() -> None:
    blocks = [content(name, 8 * CHUNK, 8).read() for name in ("x", "y")]
    digests = {data[at : at + 4096] for data in blocks for at in range(0, len(data), 4096)}
    assert len(digests) == 2 * 8 * CHUNK // 4096


def test_only_wanted_files_are_written(tmp_path: Path) -> None:
    write_files(LAYER, tmp_path, {"a/b/one"})
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "a/b/one"]
    assert (tmp_path / "a/b/one").read_bytes() == content("a/b/one", 3 * CHUNK + 5, 4).read()


def test_any_way_of_reading_gives_the_same() -> None:
    whole = content("x", CHUNK + 100, 8).read()
    with content("x", CHUNK + 100, 8) as file:
        parts = b""
        while chunk := file.read(999_983):
            parts += chunk
    assert parts == whole
