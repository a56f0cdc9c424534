"""Fuzz targets: everything in snapshotter that reads bytes of strangers. `tests.fuzzing` runs them.

`artifact` (an artifact's manifest), `referrers` (lists of referrers and tags), `manifest` (image manifests and
indexes), `answer` (headers and token answers), `hosts` (hosts.toml), `layout` (an OCI layout), `archive` (a docker
archive), `fuse` (requests of the kernel), `snapshots` (containerd's calls), `pull` (the kubelet's PullImage), `call`
(lines between our processes), `handover` (descriptors that a service manager kept). Whatever the input: a
SnapshotterError, or a result that agrees with itself; of the servers an answer that is one, and never a traceback.
"""

import contextlib
import io
import json
import logging
import os
import random
import re
import socket
import struct
import tarfile
import tempfile
from base64 import b64encode
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
import pytest
from google.protobuf.message import DecodeError

from proto import cri_pb2, snapshots_pb2
from snapshotter.artifacts import manifest as artifact_manifest
from snapshotter.artifacts import referrers
from snapshotter.artifacts.manifest import digest_of
from snapshotter.artifacts.model import Signature
from snapshotter.blockstore import BlockStore, node_id
from snapshotter.containerd.service import SnapshotsService
from snapshotter.containerd.snapshots import Snapshots
from snapshotter.cri.requests import parse_pull
from snapshotter.errors import NotFound, SnapshotterError, Transient
from snapshotter.fetch.arrival import Arrivals, FoundIndex
from snapshotter.fuse.abi import IN_HEADER, OUT_HEADER, Opcode
from snapshotter.fuse.ring import Ring
from snapshotter.fuse.server import BlockServer
from snapshotter.imagesource.dockerarchive import open_archive
from snapshotter.imagesource.layout import Layout, tag_of
from snapshotter.imagesource.platforms import platform_images
from snapshotter.imagesource.sources import LayoutImage
from snapshotter.model import Digest
from snapshotter.record.log import Notes
from snapshotter.registry import Platform, Registry, tokens
from snapshotter.registry.answers import next_page, plan_body, status_error
from snapshotter.registry.challenge import parse_challenges
from snapshotter.registry.hostsfile import HostsFileError, parse_hosts
from snapshotter.registry.manifest import Manifest, choose, document_type, parse_manifest
from snapshotter.rpc import Server
from snapshotter.supervise.kept import Resources
from snapshotter.trust.statement import statement
from tests.fuzzing import NUMBERS, Target, blind
from tests.snapshotter.artifacts.making import digest, hot_set, layer_index
from tests.snapshotter.containerd.fake_provider import FakeProvider
from tests.snapshotter.daemon import Layer, make_layer

__all__ = ["TARGETS"]

HERE = Path(__file__).parent
_SHM = "/dev/shm"
_JSON_WORDS: tuple[object, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 2**64, 1e308, 0.5, [], {}, [[]], [{}], {"digest": 1}),
    *("", "\0", "\n", "../../etc/passwd", "/", "a" * 5000, "sha256:" + "0" * 64, "sha256:" + "0" * 63, "\ud800", "é"),
    *("9" * 400, "Infinity", "http://[", "$(id)", "%s", "application/vnd.oci.image.index.v1+json"),
)


def _damaged(document: object, rng: random.Random) -> object:
    """The document with one part of it replaced, doubled or left out."""
    if isinstance(document, dict) and document and rng.random() < 0.85:
        key = rng.choice(list(document))
        match rng.randrange(8):
            case 0:
                return {other: value for other, value in document.items() if other != key}
            case 1:
                return {**document, rng.choice(("", "x" * 300, "mediaType", "annotations")): document[key]}
            case _:
                return {**document, key: _damaged(document[key], rng)}
    if isinstance(document, list) and document and rng.random() < 0.85:
        place = rng.randrange(len(document))
        match rng.randrange(8):
            case 0:
                return document * rng.choice((0, 2, 50))
            case 1:
                return document[:place]
            case _:
                return [*document[:place], _damaged(document[place], rng), *document[place + 1 :]]
    if isinstance(document, str) and document and rng.random() < 0.4:
        return blind(document.encode("utf-8", "surrogatepass"), rng).decode("utf-8", "replace")
    return rng.choice(_JSON_WORDS)


def _json_mutate(data: bytearray, rng: random.Random) -> bytes:
    """Documents that are still JSON are damaged as such."""
    if rng.random() < 0.02:
        return b"[" * 100_000
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return bytes(data)
    for _ in range(rng.randint(1, 3)):
        document = _damaged(document, rng)
    return json.dumps(document).encode()


# --- registries: artifacts, manifests, answers


def _artifact_seeds() -> Iterator[bytes]:
    signed = Signature("key", bytes(64))
    for artifact, _ in (layer_index(), layer_index(layers=1, subject=None, created=5), hot_set(), hot_set("train")):
        yield artifact_manifest.encode(artifact)
        yield artifact_manifest.encode(replace(artifact, signatures=(signed, signed)))


def _artifact_run(data: bytes) -> object:
    artifact = artifact_manifest.decode(data)
    again = artifact_manifest.encode(artifact)
    assert artifact_manifest.decode(again) == artifact
    statement(artifact)
    tags = artifact_manifest.place_tags(artifact)
    assert all(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}", tag) for tag in tags), tags
    return artifact.kind, len(artifact.blobs), len(artifact.signatures), artifact.subject is None, len(tags)


def _referrers_seeds() -> Iterator[bytes]:
    for artifact, _ in (layer_index(), hot_set()):
        body = artifact_manifest.encode(artifact)
        yield referrers.rewritten(None, referrers.referrer_of(artifact, body, digest("r")), ()) or b""
    yield json.dumps({"name": "app", "tags": ["1", "sha256-ab"]}).encode()


def _referrers_run(data: bytes) -> object:
    tags = referrers.parse_tags(data)
    assert all(isinstance(tag, str) for tag in tags)
    found = referrers.parse_referrers(data)
    told = referrers.digests(data)
    rewritten = referrers.rewritten(data, {"digest": "sha256:" + "1" * 64, "size": 1}, told[:1])
    if rewritten is not None:
        assert "sha256:" + "1" * 64 in referrers.digests(rewritten)
    assert referrers.digests(referrers.without(data, told)) == []
    return len(tags).bit_length(), len(found).bit_length(), len(told).bit_length()


def _image(layers: int = 2) -> tuple[bytes, bytes]:
    """A manifest and its configuration."""
    rootfs = {"type": "layers", "diff_ids": [digest(f"diff {number}") for number in range(layers)]}
    config = json.dumps({"os": "linux", "architecture": "amd64", "rootfs": rootfs, "history": []}).encode()
    made = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": "c", "digest": digest_of(config), "size": len(config)},
        "layers": [{"mediaType": "m", "digest": digest(f"layer {number}"), "size": 9} for number in range(layers)],
    }
    return json.dumps(made).encode(), config


def _index(*manifests: bytes, **notes: str) -> bytes:
    entries = [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": digest_of(body),
            "size": len(body),
            "platform": {"os": "linux", "architecture": ("amd64", "arm64")[number % 2]},
            "annotations": {key.replace("_", "."): text for key, text in notes.items()},
        }
        for number, body in enumerate(manifests)
    ]
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


def _manifest_seeds() -> Iterator[bytes]:
    yield _image()[0]
    yield _index(_image(1)[0], _image(3)[0])


def _manifest_run(data: bytes) -> object:
    parsed = parse_manifest(data, digest_of(data), "what")
    document_type(data)
    if isinstance(parsed, Manifest):
        return "manifest", len(parsed.layers).bit_length()
    chosen = choose(parsed, Platform("linux", "amd64"), "what")
    return "index", len(parsed).bit_length(), chosen.platform is None


_ANSWERS = (
    'HTTP 206\nContent-Range: bytes 10-19/30\nContent-Length: 10\n\n{"token": "t", "expires_in": 300}',
    'HTTP 401\nWWW-Authenticate: Bearer realm="https://t/x",service="a \\"b",scope="repository:a:pull", Basic x="1"'
    "\n\n",
    "HTTP 429\nRetry-After: Wed, 21 Oct 2065 07:28:00 GMT\n\n",
    'HTTP 200\nLink: </v2/a/tags/list?last=b&n=2>; rel="next"\nContent-Length: 30'
    '\n\n{"access_token": "t", "refresh_token": "r"}',
)


def _answer_mutate(data: bytearray, rng: random.Random) -> bytes:
    head, blank, body = bytes(data).partition(b"\n\n")
    if rng.random() < 0.3:
        head = re.sub(rb"\d+", lambda found: str(rng.choice((*NUMBERS, int(found[0][:30])))).encode(), head)
    return head + blank + (_json_mutate(bytearray(body), rng) if rng.random() < 0.5 else body)


def _answer_run(data: bytes) -> object:
    head, _, body = data.decode("latin-1").partition("\n\n")
    first, *lines = head.split("\n")
    headers = dict(line.partition(": ")[::2] for line in lines)
    status = int(number[0]) if (number := re.search(r"\d{3}", first)) else 500
    error = status_error(status, headers, "what")
    assert not isinstance(error, Transient) or error.retry_after_s is None or 0 <= error.retry_after_s <= 3600
    page = next_page("https://r/v2/", "https://r/v2/a/tags/list", headers)
    schemes = [challenge.scheme for challenge in parse_challenges(headers.get("WWW-Authenticate", ""))]
    with contextlib.suppress(SnapshotterError):
        plan = plan_body(status, headers, 10, 20, "what")
        assert plan.length == 10 and plan.skip in (0, 10)
    token = tokens._parse(body.encode("latin-1"), "what")
    assert token.header.isprintable() and token.life_s >= 0
    return type(error), page is None, tuple(schemes[:3]), bool(token.refresh)


def _hosts_seeds() -> Iterator[bytes]:
    yield (
        b'server = "https://r.example:5000"\nca = ["a.crt", "b.crt"]\n[header]\nx-a = ["1", "2"]\n'
        b'[host."https://mirror.example/v2"]\ncapabilities = ["pull", "resolve"]\nclient = [["c", "k"]]\n'
        b'dial_timeout = "1m30s"\noverride_path = true\n[host."http://b"]\nskip_verify = true\n'
    )
    yield b'[host."https://mirror.example"]\nclient = "c.pem"\n'


def _hosts_run(data: bytes) -> object:
    endpoints = parse_hosts(data.decode("utf-8", "replace"), Path("/etc/certs.d/r.example"))
    for endpoint in endpoints:
        assert endpoint.url == "" or endpoint.url.startswith(("http://", "https://")), endpoint
        assert endpoint.url.isprintable()
    return len(endpoints).bit_length(), tuple((one.pulls, one.resolves, one.pushes) for one in endpoints[:3])


# --- images on disk


def _layout_seeds() -> Iterator[bytes]:
    manifest, config = _image()
    layout = {"documents": [manifest.decode(), config.decode()], "index": json.loads(_index(manifest))}
    yield json.dumps(layout).encode()
    nested = _index(manifest, org_opencontainers_image_ref_name="1")
    yield json.dumps({**layout, "documents": [*layout["documents"], nested.decode()]}).encode()


def _layout_run(data: bytes) -> object:
    """`index` becomes index.json, and each of `documents` a blob under its digest."""
    try:
        found = json.loads(data)
        documents = [str(one).encode("utf-8", "replace") for one in found["documents"]]
        index = json.dumps(found["index"]).encode()
    except (ValueError, KeyError, TypeError, RecursionError):
        documents, index = [], data
    with tempfile.TemporaryDirectory(dir=_SHM) as home:
        layout = Layout.create(Path(home) / "layout")
        for document in documents:
            layout.write(digest_of(document), len(document), [document])
        (layout.directory / "index.json").write_bytes(index)
        tags = [tag_of(entry) for entry in layout.entries()]
        images = platform_images(LayoutImage(layout))
        assert os.listdir(home) == ["layout"]
        return len(tags).bit_length(), tuple(type(image).__name__ for image in images[:4])


def _tar(members: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        end = tar.offset + 1024
    return stream.getvalue()[:end]  # without the padding of tapes


def _archive_seeds() -> Iterator[bytes]:
    manifest, config = _image(1)
    blobs = {f"blobs/sha256/{digest_of(data)[7:]}": data for data in (manifest, config)}
    blobs[f"blobs/sha256/{digest('layer 0')[7:]}"] = b"\x1f\x8b\x08\0 layer"
    saved = [{"Config": "config.json", "RepoTags": ["r.example/app:1"], "Layers": ["0/layer.tar"]}]
    yield _tar({"index.json": _index(manifest, io_containerd_image_name="r.example/app:1"), **blobs})
    yield _tar({"manifest.json": json.dumps(saved).encode(), "config.json": config, "0/layer.tar": bytes(1024)})


def _archive_mutate(data: bytearray, rng: random.Random) -> bytes:
    """One document of the archive is damaged; or the archive itself, mostly with right checksums."""
    if rng.random() < 0.6:
        with contextlib.suppress(tarfile.TarError, OSError, ValueError), tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = {one.name: (tar.extractfile(one) or io.BytesIO()).read() for one in tar if one.isreg()}
            name = rng.choice([name for name in members if name.endswith("json")] or [""])
            members[name] = _json_mutate(bytearray(members.get(name, b"")), rng)
            return _tar(members)
    if rng.random() < 0.9:
        for start in range(0, len(data) - 511, 512):
            if data[start + 257 : start + 262] == b"ustar":
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    return bytes(data)


class _NoRegistry:
    """Has no image."""

    def document(self, ref: str, digest: object = None) -> NoReturn:
        raise NotFound(f"{ref} is not here")


def _archive_run(data: bytes) -> object:
    with tempfile.TemporaryDirectory(dir=_SHM) as home:
        path = Path(home) / "image.tar"
        path.write_bytes(data)
        source = open_archive(path, "", cast(Registry, _NoRegistry()))
        images = platform_images(source)
        assert os.listdir(home) == ["image.tar"]
        return tuple(type(image).__name__ for image in images[:4])


# --- the kernel's requests


@cache
def _layers() -> tuple[tempfile.TemporaryDirectory[str], int]:
    """A store with one small layer that is complete, and its node id."""
    home = tempfile.TemporaryDirectory(dir=_SHM)
    layer = make_layer(files=2, size=20_000)
    with contextlib.closing(
        Arrivals(BlockStore(Path(home.name)), _NoIndexes(), lambda image, digest: _Blob(layer))
    ) as it:
        name = it.ensure("r.example/app", layer.digest, ()).name
    return home, node_id(name)


class _NoIndexes:
    def find(self, image: str, layers: Sequence[Digest], digest: Digest) -> Iterator[FoundIndex]:
        return iter(())


class _Blob:
    def __init__(self, layer: Layer) -> None:
        self._blob = layer.blob

    def size(self) -> int:
        return len(self._blob)

    def stream(self, start: int, end: int | None) -> Generator[bytes]:
        yield self._blob[start:end]


def _request(opcode: int, node: int, body: bytes) -> bytes:
    size = IN_HEADER.size + len(body)
    return struct.pack("=H", size) + IN_HEADER.pack(size, opcode, 7, node, 0, 0, 0, 0, 0) + body


def _fuse_seeds() -> Iterator[bytes]:
    node = _layers()[1]
    name = f"{node >> 8:014x}".encode()
    read = struct.pack("=QQIIQII", 0, 4096, 8192, 0, 0, 0, 0)
    init = struct.pack("=IIIII", 7, 38, 1 << 17, 0xFFFFFFFF, 0xFF)
    forget = struct.pack("=II", 2, 0) + struct.pack("=QQQQ", node, 1, node + 1, 1)
    yield _request(Opcode.INIT, 0, init) + _request(Opcode.LOOKUP, 1, name + b"\0") + _request(Opcode.READ, node, read)
    yield _request(Opcode.LOOKUP, 1, name + b".07\0") + _request(Opcode.READ, node + 7, read)
    yield _request(Opcode.READ, node, read) + _request(Opcode.BATCH_FORGET, 0, forget)
    yield (
        _request(Opcode.READDIR, 1, read) + _request(Opcode.STATFS, 1, b"") + _request(Opcode.GETATTR, node, bytes(16))
    )
    yield _request(Opcode.OPEN, node, bytes(8)) + _request(Opcode.FORGET, node, bytes(8)) + _request(99, node, bytes(8))


class _Notes:
    def note(self, node: int, start: int, end: int) -> None:
        assert node & 0xFF and start < end

    def forget(self, node: int) -> None:
        """Any node may be forgotten."""


def _fuse_run(data: bytes) -> object:
    """A device that is a socket: whatever is asked, one answer at most, and one that the kernel would take."""
    ends: list[tuple[int, int]] = []
    ring_fd = Ring.create()
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    doorbell = os.eventfd(0)
    ring = Ring(ring_fd)
    layers = Path(_layers()[0].name) / "layers"
    server = BlockServer(ring, device.fileno(), doorbell, layers, cast(Notes, _Notes()))
    try:
        kernel.setblocking(False)
        while len(data) > 2 and len(ends) < 8:
            (size,) = struct.unpack_from("=H", data)
            request, data = data[2 : 2 + size], data[2 + size :]
            ends.append(_served(server, ring, kernel, request))
    finally:
        for files in server._layers.values():
            files.close()
        ring.close()
        os.close(ring_fd)
        os.close(doorbell)
        kernel.close()
        device.close()
    return frozenset(ends[-2:])


def _served(server: BlockServer, ring: Ring, kernel: socket.socket, request: bytes) -> tuple[int, int]:
    slot = ring.claim()
    head, rest = ring.buffers(slot)
    request = request[: len(head) + len(rest)]
    head[: len(request[: len(head)])] = request[: len(head)]
    rest[: len(request[len(head) :])] = request[len(head) :]
    head.release()  # a logged traceback would keep it, and so the ring's memory
    fields = ring.request(slot)
    if server._serve(slot):
        ring.free(slot)
    else:
        assert list(ring.take()) == [slot], "handed on"
        ring.free(slot)
    try:
        answer = kernel.recv(1 << 22)
    except BlockingIOError:
        return fields[1] if fields[1] < 64 else 64, 1
    size, error, unique = OUT_HEADER.unpack_from(answer)
    assert size == len(answer) and unique == fields[2] and -4096 < error <= 0, answer[:32]
    assert not error or size == OUT_HEADER.size, "an error has no body"
    with pytest.raises(BlockingIOError):
        kernel.recv(1)
    return fields[1] if fields[1] < 64 else 64, error


# --- containerd, the kubelet, our own processes

_METHODS: dict[str, Any] = {  # generated classes have no types
    "Prepare": snapshots_pb2.PrepareSnapshotRequest,
    "View": snapshots_pb2.ViewSnapshotRequest,
    "Mounts": snapshots_pb2.MountsRequest,
    "Commit": snapshots_pb2.CommitSnapshotRequest,
    "Remove": snapshots_pb2.RemoveSnapshotRequest,
    "Stat": snapshots_pb2.StatSnapshotRequest,
    "Update": snapshots_pb2.UpdateSnapshotRequest,
    "List": snapshots_pb2.ListSnapshotsRequest,
    "Usage": snapshots_pb2.UsageRequest,
    "Cleanup": snapshots_pb2.CleanupRequest,
}
_KEYS = (
    "k",
    "n",
    "c",
    "",
    "../../x",
    "/",
    "\0",
    "a" * 300,
    "default/1/extract-1 sha256:ab",
    "é\n",
    "sha256:" + "c" * 64,
)
_LABELS = (
    *("containerd.io/snapshot.ref", "containerd.io/snapshot/cri.image-ref", "containerd.io/snapshot/cri.layer-digest"),
    *("containerd.io/snapshot/cri.image-layers", "containerd.io/snapshot/remote/stargz.digest", "a", "", "\0"),
)
_VALUES = (
    *("", "n", "../../x", "r.example/app:1", "sha256:" + "a" * 64, "sha256:" + "A" * 64, "x" * 5000, "\0", "é", "/"),
    *("sha256:" + "a" * 64 + ",,sha256:" + "b" * 64, "http://x/y", "[::1]:5000/a@sha256:0", "a b/c"),
)
_FILTERS = ("name==k", 'labels."a"~=/(a+)+$/', "kind!=view,parent==", "name~=[", '"', "labels.", "a" * 300, "name~=|(|")


def _call(method: str, request: bytes) -> bytes:
    return struct.pack("=BH", list(_METHODS).index(method), len(request)) + request


def _session(rng: random.Random) -> bytes:
    """Some calls, of a client that stops at nothing."""
    calls = b""
    for _ in range(rng.randint(1, 6)):
        method = rng.choice(list(_METHODS))
        message: Any = _METHODS[method]()
        for name in ("key", "parent", "name"):
            if hasattr(message, name) and rng.random() < 0.8:
                setattr(message, name, rng.choice(_KEYS))
        labels = message.info.labels if method == "Update" else getattr(message, "labels", {})
        for _ in range(rng.randint(0, 5)):
            labels[rng.choice(_LABELS)] = rng.choice(_VALUES)
        if method == "Update":
            message.info.name = rng.choice(_KEYS)
            message.update_mask.paths.extend(
                rng.sample(("labels", "labels.a", "labels.", "kind", ""), rng.randint(0, 2))
            )
        if method == "List":
            message.filters.extend(rng.sample(_FILTERS, rng.randint(0, 2)))
        calls += _call(method, message.SerializeToString())
    return calls


def _snapshots_seeds() -> Iterator[bytes]:
    yield from (_session(random.Random(seed)) for seed in range(20))


def _snapshots_mutate(data: bytearray, rng: random.Random) -> bytes:
    return _session(rng) if rng.random() < 0.6 else bytes(data)


class _AbortedError(Exception):
    """How grpc ends a call."""


class _Context:
    """Of one call; `code` is what it ended with."""

    code = grpc.StatusCode.OK

    def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        self.code = code
        raise _AbortedError(text)


def _snapshots_run(data: bytes) -> object:
    """No call ends as a bug of ours, and nothing appears on disk but what we have named."""
    codes: list[tuple[int, str]] = []
    with tempfile.TemporaryDirectory(dir=_SHM) as home:
        root = Path(home) / "root"
        snapshots = Snapshots(root, FakeProvider(Path(home) / "provider"))
        service: Any = SnapshotsService(snapshots)
        try:
            while len(data) > 3 and len(codes) < 8:
                number, size = struct.unpack_from("=BH", data)
                method, request, data = list(_METHODS)[number % len(_METHODS)], data[3 : 3 + size], data[3 + size :]
                context = _Context()
                with contextlib.suppress(DecodeError, _AbortedError):  # grpc itself refuses what is no message
                    answer = getattr(service, method)(_METHODS[method].FromString(request), context)
                    if method == "List":
                        list(answer)
                assert context.code is not grpc.StatusCode.INTERNAL, (method, request)
                codes.append((number % len(_METHODS), context.code.name))
        finally:
            snapshots.close()
        assert {path.name for path in Path(home).iterdir()} <= {"root", "provider"}
        assert all(re.fullmatch(r"s|metadata\.db.*", path.name) for path in root.iterdir()), os.listdir(root)
        assert all(re.fullmatch(r"\d+|(new|rm)-.*", path.name) for path in (root / "s").iterdir())
    return frozenset(codes[-1:])


def _pull_seeds() -> Iterator[bytes]:
    for auth in (
        cri_pb2.AuthConfig(username="me", password=_SECRET, server_address="https://r.example"),
        cri_pb2.AuthConfig(auth=b64encode(f"me:{_SECRET}".encode()).decode()),
        cri_pb2.AuthConfig(identity_token=_SECRET),
        cri_pb2.AuthConfig(registry_token=_SECRET, server_address="//["),
    ):
        yield cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image="r.example/app:1"), auth=auth).SerializeToString()


_SECRET = "s3cret-of-a-pod"


def _pull_run(data: bytes) -> object:
    found = parse_pull(data)
    if found is None:
        return None
    credential = found.passed.credential if found.passed else None
    if credential is not None:
        for secret in (credential.password, credential.identity_token, credential.registry_token):
            assert len(secret) < 8 or secret in credential.user or secret not in repr(credential)
    return found.passed is None, len(found.image.host).bit_length(), found.image.digest is None


def _call_seeds() -> Iterator[bytes]:
    yield b'{"op": "echo", "text": "x"}\n'
    yield b'{"op": "refuse"}\n'
    yield b'{"op": ["echo"], "text": {"a": [1, 2]}}\n'
    yield b"\n"


def _json_lines(data: bytearray, rng: random.Random) -> bytes:
    line, end, rest = bytes(data).partition(b"\n")
    return _json_mutate(bytearray(line), rng) + end + rest


def _refuse(request: object) -> NoReturn:
    raise NotFound("not here")


def _call_run(data: bytes) -> object:
    """One line with a value or an error for each connection that sends anything; a bad one is no traceback."""
    handlers = {"echo": lambda request: request.get("text"), "refuse": _refuse}
    with tempfile.TemporaryDirectory(dir=_SHM) as home, _tracebacks() as tracebacks:
        server = Server(Path(home) / "socket", handlers)
        try:
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(BrokenPipeError, ConnectionResetError):
                client.settimeout(10)
                client.connect(os.fspath(Path(home) / "socket"))
                client.sendall(data)
                client.shutdown(socket.SHUT_WR)
                with client.makefile("rb") as stream:
                    answer = stream.read()
        finally:
            server.close()
    assert not tracebacks, tracebacks
    if not data:
        assert not answer
        return None
    (kind, *_), *rest = [tuple(json.loads(line)) for line in answer.splitlines()]
    assert kind in ("ok", "error") and not rest
    return kind, json.loads(answer).get("kind")


@contextlib.contextmanager
def _tracebacks() -> Iterator[list[str]]:
    """What is logged with a traceback meanwhile."""
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage()) if record.exc_info else None  # type: ignore[method-assign]
    logging.getLogger("snapshotter").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("snapshotter").removeHandler(handler)


def _handover_seeds() -> Iterator[bytes]:
    yield b"device.1a:mount.1a:ring.1a:doorbell.1a"
    yield b"device.1a:mount.1a:ring.1a:ring.2b:doorbell.2b"
    yield b"stored:.1:device:ring.:device.:mount.:doorbell."


def _handover_run(data: bytes) -> object:
    """Whatever the service manager kept and how it is named: a set that is whole, or none."""
    ring, other = Ring.create(), os.open("/dev/null", os.O_RDONLY)
    try:
        names = data.decode("utf-8", "replace").split(":")
        found = Resources.taken_from({name: ring if name.startswith("ring") else other for name in names})
    finally:
        os.close(ring)
        os.close(other)
    assert found is None or {f"{what}.{found.tag}" for what in ("device", "mount", "ring", "doorbell")} <= set(names)
    return found is None, len(names).bit_length()


def _as_it_is(data: bytearray, rng: random.Random) -> bytes:
    return bytes(data)


TARGETS = {
    "artifact": Target(HERE, SnapshotterError, _artifact_seeds, _json_mutate, _artifact_run),
    "referrers": Target(HERE, SnapshotterError, _referrers_seeds, _json_mutate, _referrers_run),
    "manifest": Target(HERE, SnapshotterError, _manifest_seeds, _json_mutate, _manifest_run),
    "answer": Target(HERE, SnapshotterError, lambda: map(str.encode, _ANSWERS), _answer_mutate, _answer_run),
    "hosts": Target(HERE, HostsFileError, _hosts_seeds, _as_it_is, _hosts_run),
    "layout": Target(HERE, SnapshotterError, _layout_seeds, _json_mutate, _layout_run),
    "archive": Target(HERE, SnapshotterError, _archive_seeds, _archive_mutate, _archive_run),
    "fuse": Target(HERE, SnapshotterError, _fuse_seeds, _as_it_is, _fuse_run),
    "snapshots": Target(HERE, SnapshotterError, _snapshots_seeds, _snapshots_mutate, _snapshots_run),
    "pull": Target(HERE, SnapshotterError, _pull_seeds, _as_it_is, _pull_run),
    "call": Target(HERE, SnapshotterError, _call_seeds, _json_lines, _call_run),
    "handover": Target(HERE, SnapshotterError, _handover_seeds, _as_it_is, _handover_run),
}
