"""The version of the code that is loaded, whatever is on disk by now.

Read once, when the module is imported: a running daemon must not name the version that was installed beside it since.
"""

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as _installed

__all__ = ["VERSION"]


def _loaded() -> str:
    try:
        return _installed("bootseer")
    except PackageNotFoundError:  # sources on a path, never installed
        return "unknown"


VERSION = _loaded()
