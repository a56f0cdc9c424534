"""The body of an answer to a range request: the bytes that were asked for, as they arrive."""

from collections.abc import Iterator

from snapshotter.errors import Transient
from snapshotter.registry.answers import BodyPlan
from snapshotter.registry.transport import Reply

__all__ = ["read_body"]


def read_body(reply: Reply, plan: BodyPlan) -> Iterator[bytes]:
    """The chunks of the body that `plan` wants; Transient where they stop before the end."""
    skip, left, given = plan.skip, plan.length, 0
    while left is None or left > 0:
        chunk = reply.read1()
        if not chunk:
            break
        if skip:
            dropped = min(skip, len(chunk))
            skip -= dropped
            chunk = chunk[dropped:]
        if left is not None:
            chunk = chunk[:left]
            left -= len(chunk)
        if chunk:
            given += len(chunk)
            yield chunk
    if left or skip:
        raise Transient(f"{reply.what}: short body after {given} bytes (HTTP status {reply.status}), {left} missing")
