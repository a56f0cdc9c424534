"""Images in registries as sources; streams that go on where they broke off, and are whole or nothing."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from snapshotter.config import RegistryConfig
from snapshotter.errors import InvalidArgument, NotFound, Transient
from snapshotter.imagesource import PlatformImage, Refused, RegistryImage, platform_images
from snapshotter.imagesource.steady import steady
from snapshotter.model import Digest
from snapshotter.registry import Registry, parse_reference
from tests.snapshotter.imagesource.layouts import OCI
from tests.snapshotter.rangeserver import RangeServer


def digest_of(data: bytes) -> Digest:
    return Digest(f"sha256:{hashlib.sha256(data).hexdigest()}")


def test_platforms_of_a_registry() -> None:
    """An image with a foreign layer is a document like any other; that it cannot be lazy is told."""
    config = json.dumps({"os": "linux", "architecture": "arm64"}).encode()
    layer = {"mediaType": "x", "digest": digest_of(b"x"), "size": 1}
    described = {"mediaType": f"{OCI}.config.v1+json", "digest": digest_of(config), "size": len(config)}
    images = [
        json.dumps({"schemaVersion": 2, "config": described, "layers": [{**layer, **more}]}).encode()
        for more in ({}, {"urls": ["https://far.example/x"]})
    ]
    platforms = [{"os": "linux", "architecture": arch} for arch in ("arm64", "amd64")]
    entries = [
        {"mediaType": f"{OCI}.manifest.v1+json", "digest": digest_of(body), "size": len(body), "platform": platform}
        for body, platform in zip(images, platforms, strict=True)
    ]
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    files = {f"/v2/app/manifests/{digest_of(body)}": body for body in images}
    files |= {"/v2/app/manifests/1": index, f"/v2/app/blobs/{digest_of(config)}": config}
    with RangeServer(files) as server, closing(Registry(RegistryConfig())) as registry:
        source = RegistryImage(registry, parse_reference(f"{server.host}/app:1"))
        good, foreign = platform_images(source)
        assert isinstance(good, PlatformImage) and str(good.platform) == "linux/arm64"
        assert good.document.body == images[0] and source.document().body == index
        assert isinstance(foreign, Refused) and foreign.meant and "foreign layer" in foreign.reason
        assert sum(request.path.endswith("/manifests/1") for request in server.requests) == 1
        alone = RegistryImage(registry, parse_reference(f"{server.host}/app@{digest_of(images[0])}"))
        (image,) = platform_images(alone)
        assert isinstance(image, PlatformImage) and image.image_key == good.image_key
        with pytest.raises(NotFound):
            RegistryImage(registry, parse_reference(f"{server.host}/app:2")).document()


def test_a_document_that_is_none() -> None:
    files = {"/v2/app/manifests/1": b"[]", "/v2/app/manifests/2": b"{"}
    with RangeServer(files) as server, closing(Registry(RegistryConfig())) as registry:
        for tag in "12":
            with pytest.raises(InvalidArgument, match="neither a manifest nor an image index"):
                registry.document(f"{server.host}/app:{tag}")


class Chunks(Iterator[bytes]):
    """A stream of the parts given; Transient in place of a None."""

    def __init__(self, parts: list[bytes | Transient | None]) -> None:
        self._parts = parts
        self.closed = False

    def __next__(self) -> bytes:
        if not self._parts:
            raise StopIteration
        part = self._parts.pop(0)
        if isinstance(part, Transient):
            raise part
        if part is None:
            raise Transient("reset", retry_after_s=3.0 if not self._parts else None)
        return part

    def close(self) -> None:
        self.closed = True


class Blob:
    """A BlobSource that gives `streams`, one after the other."""

    def __init__(self, *streams: list[bytes | Transient | None]) -> None:
        self._streams = list(streams)
        self.asked: list[int] = []
        self.given: list[Chunks] = []

    def size(self) -> int:
        return 6

    def stream(self, start: int, end: int | None) -> Chunks:
        assert end == 6
        self.asked.append(start)
        self.given.append(Chunks(self._streams.pop(0)))
        return self.given[-1]


DATA = b"abcdef"


def read(blob: Blob, waits: list[float]) -> bytes:
    return b"".join(steady(blob, digest_of(DATA), 6, "here", waits.append))


def test_a_stream_goes_on_where_it_broke_off() -> None:
    waits: list[float] = []
    blob = Blob([b"ab", None, b"x"], [None], [b"cd", None, b"x"], [b"ef"])
    assert read(blob, waits) == DATA
    assert (
        blob.asked == [0, 2, 2, 4]
        and waits == [pytest.approx(0.5, rel=0.3), 3.0, pytest.approx(0.5, rel=0.3)]
        and all(one.closed for one in blob.given)
    )


def test_a_stream_that_stays_broken() -> None:
    blob = Blob([b"ab", None, b"x"], *[[None, b"x"] for _ in range(9)])
    waits: list[float] = []
    with pytest.raises(Transient):
        read(blob, waits)
    assert waits == [pytest.approx(0.5 * 2**turn, rel=0.3) for turn in range(6)] and blob.asked == [0, *[2] * 6]


def test_a_stream_that_is_to_wait_for_long() -> None:
    """Whoever asks for an hour gets half a minute, and is asked again."""
    waits: list[float] = []
    assert read(Blob([b"ab", Transient("later", 3600.0)], [b"cdef"]), waits) == DATA and waits == [30.0]


@pytest.mark.parametrize("parts", [[b"abc", b"dex"], [b"abcde"], [b"abcdefg"], []])
def test_a_damaged_blob_is_never_whole(parts: list[bytes | Transient | None]) -> None:
    seen = []
    with pytest.raises(InvalidArgument, match=r"here: blob sha256:[0-9a-f]{64} is damaged there"):
        for chunk in steady(Blob(parts), digest_of(DATA), 6, "here"):
            seen.append(chunk)
    assert b"".join(seen) != DATA and len(seen) < 2


def test_an_empty_blob() -> None:
    assert list(steady(Blob(), digest_of(b""), 0, "here")) == []
