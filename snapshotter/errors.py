"""Errors of the daemon, by what the caller can do about them.

They are translated once per border: HTTP and OSError into these in `registry/`, these into gRPC status in `service.py`,
into errno in the FUSE server, into one line and an exit code in `cli`. Each message says what, where, and what to do.
"""

__all__ = [
    "AlreadyExists",
    "Damaged",
    "Denied",
    "InvalidArgument",
    "NotFound",
    "Precondition",
    "SnapshotterError",
    "Transient",
    "UserError",
]


class SnapshotterError(Exception):
    """Root of every error the daemon raises on purpose."""


class NotFound(SnapshotterError):
    """What was asked for does not exist."""


class AlreadyExists(SnapshotterError):
    """The name or key is taken."""


class InvalidArgument(SnapshotterError):
    """The request contradicts itself or the contract; the same request will never work."""


class Precondition(SnapshotterError):
    """Sound request, wrong state: it may work once something else has changed."""


class Damaged(SnapshotterError):
    """What is stored is not what was written: it must not be used, and has to be fetched again."""


class Denied(SnapshotterError):
    """The other side refuses us (401/403 after a fresh token): credentials or rights are missing."""


class Transient(SnapshotterError):
    """Worth a retry: network, 429, 5xx, a short body. `retry_after_s` is what the other side asked for, or None."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UserError(SnapshotterError):
    """A mistake of the person at the keyboard: one line, no traceback, exit code `exit_code`."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
