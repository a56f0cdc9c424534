"""The server of made-up layers: every range of a blob of parts, and what a client asks before it."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.rig.blobserver import Catalogue, catalogue_of, make_server, pieces
from scripts.rig.synthetic import Part, SyntheticLayer


@pytest.fixture
def parts(tmp_path: Path) -> list[Part]:
    (tmp_path / "a").write_bytes(b"abc")
    (tmp_path / "b").write_bytes(b"0123456")
    return [Part(tmp_path / "a", 2), Part(tmp_path / "b", 3), Part(tmp_path / "a", 1)]


def test_every_range_of_a_blob_of_parts(parts: list[Part]) -> None:
    whole = b"".join(part.path.read_bytes() * part.count for part in parts)
    for start in range(len(whole) + 1):
        for stop in range(start, len(whole) + 1):
            found = b"".join(path.read_bytes()[first:last] for path, first, last in pieces(parts, start, stop))
            assert found == whole[start:stop]


@pytest.fixture
def url(tmp_path: Path, parts: list[Part]) -> Iterator[str]:
    layer = SyntheticLayer("sha256:" + "ab" * 32, 30, 0, tuple(parts))
    (tmp_path / "catalogue.json").write_text(json.dumps(catalogue_of(tmp_path, {"made/up": [layer]})))
    server = make_server(Catalogue.load(tmp_path / "catalogue.json"), "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v2/"
    server.shutdown()
    thread.join()
    server.server_close()


def _get(url: str, asked: str = "") -> tuple[int, bytes, str]:
    request = urllib.request.Request(url, headers={"Range": asked} if asked else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.status, answer.read(), answer.headers.get("Content-Range", "")


def test_an_image_is_found_by_its_tag_and_its_layer_by_ranges(url: str) -> None:
    assert _get(url)[0] == 200
    manifest = json.loads(_get(f"{url}made/up/manifests/1")[1])
    (layer,) = manifest["layers"]
    blob = f"{url}made/up/blobs/{layer['digest']}"
    assert _get(blob) == (200, b"abcabc" + b"0123456" * 3 + b"abc", "")
    assert _get(blob, "bytes=4-7") == (206, b"bc01", "bytes 4-7/30")
    assert _get(blob, "bytes=25-") == (206, b"56abc"[0:5], "bytes 25-29/30")
    assert _get(blob, "bytes=28-99") == (206, b"bc", "bytes 28-29/30")
    assert json.loads(_get(f"{url}made/up/blobs/{manifest['config']['digest']}")[1])["os"] == "linux"


@pytest.mark.parametrize("path", ["made/up/manifests/2", "made/up/blobs/sha256:00", "other/manifests/1"])
def test_what_is_not_there_is_404(url: str, path: str) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        _get(url + path)
    assert refused.value.code == 404
    refused.value.close()
