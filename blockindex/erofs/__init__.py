"""EROFS images that hold metadata only: written from a tree, checked before a kernel sees them, read back.

The byte layout is described in `docs/format-erofs.md`, its structs are in `ondisk`; `writer`, `validator`, `reader`
and `places` know only that module. What the writer makes, the validator accepts; what the validator accepts, the reader
reads.
"""

from blockindex.erofs.places import FilePart, FilePlaces
from blockindex.erofs.reader import Entry, validate_directories, walk
from blockindex.erofs.validator import validate_metadata
from blockindex.erofs.writer import build_metadata

__all__ = ["Entry", "FilePart", "FilePlaces", "build_metadata", "validate_directories", "validate_metadata", "walk"]
