"""Artifacts in an OCI layout: several publishers at once, damage, signatures."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from snapshotter.artifacts.displacement import Displacement
from snapshotter.artifacts.manifest import HEAD_TYPE, digest_of
from snapshotter.artifacts.model import Artifact, Blob, Kind, Subject
from snapshotter.artifacts.ocilayout import LayoutPlace
from snapshotter.artifacts.place import ImageName
from snapshotter.imagesource import Layout
from snapshotter.trust.keys import SecretKey, sign

KEY = digest_of(b"key")
SUBJECT = Subject(digest_of(b"subject"), "application/vnd.oci.image.manifest.v1+json", 7)
IMAGE = ImageName(KEY, (), SUBJECT)


def artifact(workload: str, data: bytes) -> Artifact:
    head = Blob(digest_of(data), len(data), HEAD_TYPE, data=data)
    return Artifact(Kind.HOT_SET, KEY, workload, SUBJECT, (head,), created=1)


def opened(blob: Blob) -> Iterator[bytes]:
    yield blob.data


def test_twenty_publishers_at_once(tmp_path: Path) -> None:
    """Ten workloads, each in two versions that share a blob with others: whichever stays is whole."""
    Layout.create(tmp_path / "l")
    start = threading.Barrier(20)

    def put(number: int) -> None:
        start.wait()
        LayoutPlace(Layout(tmp_path / "l")).put(artifact(f"w{number % 10}", b"%d" % (number // 10)), opened)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = LayoutPlace(Layout(tmp_path / "l")).held(IMAGE)
    assert sorted(one.artifact.workload for one in held) == [f"w{number}" for number in range(10)]
    assert all(b"".join(one.open(blob)) == blob.data for one in held for blob in one.artifact.blobs)
    blobs = {path.name for path in (tmp_path / "l/blobs/sha256").iterdir()}
    wanted = {one.digest for one in held} | {blob.digest for one in held for blob in one.artifact.blobs}
    assert blobs == {digest.removeprefix("sha256:") for digest in (*wanted, digest_of(b"{}"))}


def test_signatures(tmp_path: Path) -> None:
    """More signatures than ours do no harm; ours that is missing is a reason to write."""
    place = LayoutPlace(Layout.create(tmp_path / "l"))
    plain = artifact("default", b"data")
    first, second = (sign(plain, SecretKey.generate()) for _ in range(2))
    assert not place.put(first, opened).existed
    assert place.put(replace(plain, created=9), opened).existed
    for other in (second, artifact("default", b"not signed")):
        with pytest.raises(Displacement, match="is signed by"):
            place.put(other, opened)
    assert [it.artifact for it in place.held(IMAGE)] == [first]
    with pytest.raises(Displacement, match="is not signed: sign it"):
        place.put(artifact("default", b"not signed"), opened, replace=True)
    assert not place.put(second, opened, replace=True).existed
    (held,) = place.held(IMAGE)
    assert held.artifact.signatures == second.signatures


def test_another_image_s_are_not_found(tmp_path: Path) -> None:
    place = LayoutPlace(Layout.create(tmp_path / "l"))
    place.put(artifact("default", b"data"), opened)
    assert place.held(replace(IMAGE, key=digest_of(b"other"))) == []
    assert place.held(replace(IMAGE, subject=replace(SUBJECT, digest=digest_of(b"other")))) == []
    assert len(place.held(replace(IMAGE, subject=None))) == 1


def test_damage_counts_as_missing(tmp_path: Path) -> None:
    layout = Layout.create(tmp_path / "l")
    place = LayoutPlace(layout)
    done = place.put(artifact("default", b"data"), opened)
    layout.path(digest_of(b"data")).unlink()
    assert place.held(IMAGE) == []
    assert not place.put(artifact("default", b"data"), opened).existed
    layout.path(done.digest).write_bytes(b"{}")
    assert place.held(IMAGE) == []
    assert not place.put(artifact("default", b"newer"), opened).existed
    assert [one.artifact.blobs[0].data for one in place.held(IMAGE)] == [b"newer"]
