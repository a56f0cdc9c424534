"""The one error of the test bench: it says what failed, where, and what to do; the command line prints it alone."""

__all__ = ["RigError"]


class RigError(Exception):
    """The bench cannot do what it was asked to; nothing that it measured so far is affected."""
