"""Chain IDs."""

import hashlib
import json

import pytest

from snapshotter.containerd.chain import chain_ids
from snapshotter.errors import InvalidArgument


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def test_chain_ids() -> None:
    """By the rule of the OCI image specification."""
    diff_ids = [_digest(name) for name in (b"a", b"b", b"c")]
    second = _digest(f"{diff_ids[0]} {diff_ids[1]}".encode())
    third = _digest(f"{second} {diff_ids[2]}".encode())
    config = json.dumps({"rootfs": {"diff_ids": diff_ids}}).encode()
    assert chain_ids(config, 3) == [diff_ids[0], second, third]


@pytest.mark.parametrize("config", [b"", b"[]", b"{}", b'{"rootfs": {"diff_ids": ["sha256:a"]}}', b'{"rootfs": 3}'])
def test_a_configuration_that_lists_other_layers(config: bytes) -> None:
    with pytest.raises(InvalidArgument, match="configuration"):
        chain_ids(config, 2)
