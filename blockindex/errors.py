"""Errors of blockindex, by what the caller can do about them. Each message says what, where, and what to do."""

__all__ = ["BlockIndexError", "Corrupt", "Unsupported"]


class BlockIndexError(Exception):
    """Root of every error that blockindex raises for its input (never for a broken invariant: that is `assert`)."""


class Unsupported(BlockIndexError):
    """The input is sound, but holds something this version does not serve: use the ordinary path for this layer."""


class Corrupt(BlockIndexError):
    """The input contradicts itself or a digest: quarantine it. `field` names the part, `offset` where (byte, or -1)."""

    def __init__(self, field: str, problem: str, offset: int = -1) -> None:
        self.field = field
        self.problem = problem
        self.offset = offset
        where = f" at byte {offset}" if offset >= 0 else ""
        super().__init__(f"{field}{where}: {problem}")
