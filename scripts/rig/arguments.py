"""Values on command lines of the bench."""

import argparse

__all__ = ["count", "positive"]

_MOST = 1e6  # megabits a second, milliseconds, seconds: a slip of the hand, not a wish


def count(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive(text: str) -> float:
    """A number above 0, and below a million of whatever it is."""
    value = float(text)
    if not 0 < value < _MOST:
        raise argparse.ArgumentTypeError(f"must be above 0, and below {_MOST:.0f}")
    return value
