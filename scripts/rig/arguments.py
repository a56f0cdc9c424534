"""Values on command lines of the bench."""

import argparse

__all__ = ["count"]


def count(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value
