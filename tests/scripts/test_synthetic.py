"""Made-up layers are true gzip tars with the digest that they claim, whatever their parts."""

import gzip
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from scripts.rig.synthetic import SyntheticLayer, contents, layer_of_contents, layer_of_files


def _blob(layer: SyntheticLayer) -> bytes:
    return b"".join(part.path.read_bytes() * part.count for part in layer.parts)


def _tar(layer: SyntheticLayer) -> tarfile.TarFile:
    blob = _blob(layer)
    assert len(blob) == layer.size
    assert f"sha256:{hashlib.sha256(blob).hexdigest()}" == layer.digest
    raw = gzip.decompress(blob)  # checks CRC and length
    assert len(raw) == layer.tar_size
    return tarfile.open(fileobj=io.BytesIO(raw))


def test_files_repeat_a_piece(tmp_path: Path) -> None:
    piece = contents(tmp_path, "piece", 20480, noise=0.4)
    layer = layer_of_contents(tmp_path, "layer", piece, files=3, repeats=5, small=2)
    with _tar(layer) as tar:
        assert tar.getnames() == ["layer", "layer/d0000", "layer/d0000/f00", "layer/d0000/f01", *_numbered(3)]
        for name in _numbered(3):
            file = tar.extractfile(name)
            assert file is not None and file.read() == piece.data * 5


def _numbered(count: int) -> list[str]:
    return [f"layer/{number}" for number in range(count)]


@pytest.mark.parametrize("count", [1, 101, 5000])
def test_as_many_small_files_as_asked_for(tmp_path: Path, count: int) -> None:
    with _tar(layer_of_files(tmp_path, "small", count)) as tar:
        files = [entry for entry in tar if entry.isfile()]
        assert len(files) == len({entry.name for entry in files}) == count
        assert {entry.size for entry in files} == {600}
    with _tar(layer_of_files(tmp_path, "small", count)) as tar:
        directories = {entry.name for entry in tar if entry.isdir()}
        assert {str(Path(entry.name).parent) for entry in files} <= directories, "a directory is only implied"


def test_layers_differ_by_name_and_are_the_same_each_time(tmp_path: Path) -> None:
    piece = contents(tmp_path, "piece", 4096, noise=0.4)
    one, other, again = (layer_of_contents(tmp_path, name, piece, 1, 2) for name in ("a", "b", "a"))
    assert one.digest == again.digest != other.digest


def test_noise_decides_how_far_it_compresses(tmp_path: Path) -> None:
    ratios = [len(contents(tmp_path, "piece", 1 << 18, noise).deflated) / (1 << 18) for noise in (0.1, 0.5, 0.95)]
    assert 0.1 < ratios[0] < 0.3 < ratios[1] < 0.7 < 0.9 < ratios[2] < 1.02
