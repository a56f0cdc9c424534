"""What is understood of a PullImage request, and what containerd would understand of its credentials."""

from base64 import b64encode

import pytest

from proto import cri_pb2
from snapshotter.cri.requests import parse_pull
from snapshotter.registry.credentials import Credential
from snapshotter.registry.passed import Passed

SECRET = "s3cr:t"


def _passed(image: str = "r.io/app:1", **auth: str) -> Passed | None:
    request = cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image=image), auth=cri_pb2.AuthConfig(**auth))
    parsed = parse_pull(request.SerializeToString())
    assert parsed is not None and SECRET not in repr(parsed)
    return parsed.passed


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("auth", "credential"),
    [
        ({}, None),
        ({"password": SECRET}, None),
        ({"username": "me", "password": SECRET}, Credential("me", SECRET)),
        ({"auth": _encoded(f"me:{SECRET}")}, Credential("me", SECRET)),
        ({"auth": _encoded(f"me:{SECRET}\0\0")}, Credential("me", SECRET)),
        ({"auth": _encoded("no colon")}, None),
        ({"auth": "not base64!"}, None),
        ({"auth": b64encode(b"\xff\xfe:x").decode()}, None),
        ({"identity_token": SECRET}, Credential(identity_token=SECRET)),
        ({"registry_token": SECRET}, Credential(registry_token=SECRET)),
        ({"identity_token": SECRET, "auth": _encoded("me:x")}, Credential(identity_token=SECRET)),
        ({"username": "me", "password": "x", "identity_token": SECRET}, Credential("me", "x")),
        ({"auth": _encoded("me:x"), "registry_token": SECRET}, Credential("me", "x")),
    ],
)
def test_the_kind_that_counts(auth: dict[str, str], credential: Credential | None) -> None:
    passed = _passed(**auth)
    assert (None if passed is None else passed.credential) == credential


@pytest.mark.parametrize(
    ("address", "server"),
    [
        ("", ""),
        ("r.io", "r.io"),
        ("r.io:5000", "r.io:5000"),
        ("https://r.io:5000/v1/", "r.io:5000"),
        ("https://user@r.io", "r.io"),
        ("https://[", "https://["),
    ],
)
def test_the_server_that_it_is_for(address: str, server: str) -> None:
    passed = _passed(username="me", password=SECRET, server_address=address)
    assert passed is not None and passed.server == server


def test_the_image() -> None:
    request = cri_pb2.PullImageRequest(image=cri_pb2.ImageSpec(image="nginx:1"))
    parsed = parse_pull(request.SerializeToString())
    assert parsed is not None
    assert (parsed.text, str(parsed.image), parsed.passed) == ("nginx:1", "docker.io/library/nginx:1", None)


@pytest.mark.parametrize(
    "request_", [b"\xff\xff", b"", cri_pb2.PullImageRequest(image={"image": "A B"}).SerializeToString()]
)
def test_what_is_not_understood(request_: bytes) -> None:
    assert parse_pull(request_) is None
