"""Chain IDs: the names that containerd gives the snapshots of an image. Sans-IO."""

import hashlib
import json

from snapshotter.errors import InvalidArgument

__all__ = ["chain_ids"]


def chain_ids(config: bytes, layers: int) -> list[str]:
    """containerd's snapshot names of an image's layers, from the lowest up."""
    try:
        diff_ids = json.loads(config)["rootfs"]["diff_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgument("the image's configuration has no list of diff IDs") from error
    if not isinstance(diff_ids, list) or len(diff_ids) != layers:
        raise InvalidArgument(f"the image's configuration does not list its {layers} layers")
    chain: list[str] = []
    for diff_id in diff_ids:
        both = f"{chain[-1]} {diff_id}" if chain else ""
        chain.append(f"sha256:{hashlib.sha256(both.encode()).hexdigest()}" if both else str(diff_id))
    return chain
