"""Plain files as a place: whole or not there, told apart by their first bytes, on disk and at a URL."""

from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec  # type: ignore[import-untyped]  # it has no types
import pytest

from blockindex.hotset import hotset_name
from snapshotter.artifacts.directory import DirectoryPlace, Files, LocalFiles, UrlFiles
from snapshotter.artifacts.made import hot_artifact
from snapshotter.artifacts.model import Artifact, Blob
from snapshotter.errors import InvalidArgument, SnapshotterError, Transient
from snapshotter.hotstore import read_head
from snapshotter.imagesource import PlatformImage
from tests.snapshotter.imagesource.layouts import LayoutWriter
from tests.snapshotter.test_publish import BASE, NEW, images, record

Make = Callable[[], Files]


@pytest.fixture(params=["disk", "URL"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """The same files each time."""
    if request.param == "disk":
        return lambda: LocalFiles(tmp_path / "files")
    return lambda: UrlFiles(f"memory://{tmp_path}/files")


@pytest.fixture
def image(tmp_path: Path) -> PlatformImage:
    writer = LayoutWriter(tmp_path / "layout")
    writer.index([writer.image([BASE, NEW])])
    return images(writer.directory, "")[0]


def hot(image: PlatformImage, directory: Path, packed: bool) -> tuple[Artifact, bytes]:
    """A hot set as an artifact, and its file."""
    record(image, [BASE, NEW], "default", directory, packed)
    path = directory / hotset_name(image.image_key, "default")
    return hot_artifact(path, read_head(path), None), path.read_bytes()


def opener(data: bytes, asked: list[int]) -> Callable[[Blob], Iterator[bytes]]:
    def read(blob: Blob) -> Iterator[bytes]:
        asked.append(blob.size)
        yield data[: blob.size]

    return read


def test_a_hot_set(make: Make, image: PlatformImage, tmp_path: Path) -> None:
    """What is there is left alone; another one, also of the same size, takes its place."""
    place, name = DirectoryPlace("here", make()), hotset_name(image.image_key, "default")
    for packed in (False, True):
        artifact, data = hot(image, tmp_path / f"{packed}", packed)
        first = place.put(artifact, opener(data, []))
        assert (first.existed, first.digest) == (False, "") and first.names == (make().locate(name),)
        assert make().read(name) == data and make().size(name) == len(data) and make().read(name, 5) == data[:5]
        assert place.put(artifact, opener(data, [])).existed
    make().write(name, [b"x" * len(data)])
    assert not place.put(artifact, opener(data, [])).existed
    assert make().read(name) == data


def test_what_breaks_off_leaves_what_was_there(make: Make) -> None:
    def broken() -> Iterator[bytes]:
        yield b"new"
        raise Transient("gone")

    make().write("a/b", [b"old"])
    for name in ("a/b", "a/c"):
        with pytest.raises(Transient):
            make().write(name, broken())
    assert make().read("a/b") == b"old" and make().read("a/c") is None and make().size("a/c") == -1


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    files = LocalFiles(tmp_path / "file")
    for act in (files.prepare, lambda: files.write("a", [b""])):
        with pytest.raises(SnapshotterError, match=f"{tmp_path}/file"):
            act()
    assert files.read("a") is None and files.size("a") == -1


def test_a_storage_that_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it raises is its own; it becomes one line that names the file."""

    def refuse(*args: object, **more: object) -> None:
        raise PermissionError("no\nentry")

    files = UrlFiles(f"memory://{tmp_path}")
    for name in ("makedirs", "cat_file", "info", "open"):
        monkeypatch.setattr(type(fsspec.filesystem("memory")), name, refuse)
    for act in (files.prepare, lambda: files.write("a", [b""]), lambda: files.read("a"), lambda: files.size("a")):
        with pytest.raises(SnapshotterError, match=rf"memory://{tmp_path}(/a)?: no entry"):
            act()


def test_an_unknown_storage() -> None:
    with pytest.raises(InvalidArgument, match="nonsense://a"):
        UrlFiles("nonsense://a")


def test_a_password_is_not_told() -> None:
    files = UrlFiles("ftp://me:secret@127.0.0.1:1/a")
    with pytest.raises(SnapshotterError, match=r"^ftp://me:\*\*\*@127\.0\.0\.1:1/a: [^\n]+$"):
        files.prepare()
    assert files.locate("b") == "ftp://me:***@127.0.0.1:1/a/b"


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1/a", "reference://a"])
def test_a_storage_that_does_not_even_open(url: str) -> None:
    """Nobody listens at port 1, and the others need more than a URL. They are asked with the first question only."""
    files = UrlFiles(url)
    for act in (files.prepare, lambda: files.write("b", [b""]), lambda: files.read("b"), lambda: files.size("b")):
        with pytest.raises(SnapshotterError, match=f"^{url}(/b)?: [^\n]+$"):
            act()
