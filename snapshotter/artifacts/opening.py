"""What the text of `--to`, and of `to` in [publish], means: the one place that tells repositories from directories."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from snapshotter.artifacts.directory import DirectoryPlace, LocalFiles, UrlFiles
from snapshotter.artifacts.ocilayout import LayoutPlace
from snapshotter.artifacts.place import Place
from snapshotter.artifacts.registryplace import RegistryPlace
from snapshotter.errors import InvalidArgument
from snapshotter.imagesource import Layout, parse_layout
from snapshotter.imagesource.sources import LAYOUT_PREFIX
from snapshotter.registry import ImageRef, Registry, parse_reference
from snapshotter.registry.storage import check_location, shown

__all__ = ["open_place"]


def open_place(text: str, registry: Registry) -> Place:
    """The place that is `HOST/REPOSITORY`, `oci-layout:DIR`, a directory or a URL. Does no I/O, except that a layout is
    made where none is. InvalidArgument for what is none of these, or needs what is not installed."""
    if text.startswith(LAYOUT_PREFIX):
        directory, tag = parse_layout(text)
        if tag:
            raise InvalidArgument(f"{text}: artifacts have tags of their own: leave :{tag} out")
        return LayoutPlace(Layout.create(directory))
    if "://" in text:
        return _at_url(text)
    if text.startswith((".", "/", "~")) or Path(text).is_dir():
        return DirectoryPlace(text, LocalFiles(Path(text).expanduser()))
    return RegistryPlace(registry, _repository(text))


def _at_url(text: str) -> Place:
    check_location(text)
    parts = urlsplit(text)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return DirectoryPlace(text, LocalFiles(Path(unquote(parts.path))))
    if parts.scheme in ("http", "https"):
        raise InvalidArgument(
            f"{shown(text)}: cannot write to a web server: name the directory it serves, or its storage"
        )
    return DirectoryPlace(shown(text), UrlFiles(text))


def _repository(text: str) -> ImageRef:
    """A repository is named with its host, so that a directory that is misspelt does not go to some registry."""
    first, slash, _ = text.partition("/")
    ref = parse_reference(text)
    if not slash or (ref.host != first and first != "index.docker.io"):
        raise InvalidArgument(f"{text}: neither HOST/REPOSITORY, nor a directory: write ./{text} for a new directory")
    if ref.tag or ref.digest:
        raise InvalidArgument(f"{text}: a repository has neither tag nor digest; artifacts have tags of their own")
    return ref
