"""Push reader of a layer's tar stream: chunks in, extents of file bytes and the layer's tree out.

Sans-IO, one pass. Payload is skipped by arithmetic; only headers, PAX records, GNU long names and sparse maps are ever
held (each at most 1 MiB). Data offsets are allocated here, in archive order: every file of the layer with a size gets
the next run of whole blocks, also when a later entry replaces it. Whiteouts and other entries that become no file of
the layer get none.

The model for what an entry means is Go's archive/tar under containerd; additions (never contradictions) to it are named
where they are made. After an error the reader must be dropped.
"""

import stat
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from blockindex.errors import Corrupt, Unsupported
from blockindex.layerpath import MAX_PATH, Role, clean_path, role_of
from blockindex.model import BLOCK, Extent, block_ceil
from blockindex.pax import Pax, global_path, parse_pax
from blockindex.sparse import (
    MAX_MAP_BYTES,
    MapText,
    Segments,
    checked,
    extension_segments,
    header_segments,
    pax_segments,
    pax_version,
    sparse_name,
)
from blockindex.tarheader import RECORD, Header, device_numbers, has_valid_checksum, parse_header
from blockindex.tree import Attributes, Tree

__all__ = ["TarReader"]

_ZEROS: Final = bytes(RECORD)
_MAX_RECORDS_BYTES: Final = 1 << 20
_MAX_DATA: Final = BLOCK << 32
_FILES: Final = frozenset((b"0", b"\0", b"7", b"S"))
_OTHERS: Final = frozenset((b"1", b"2", b"3", b"4", b"5", b"6"))
_DEVICES: Final = {b"3": stat.S_IFCHR, b"4": stat.S_IFBLK}
_RECORDS: Final = {b"x": "PAX header", b"g": "global PAX header", b"L": "long name", b"K": "long link name"}
_NS: Final = 10**9
_ENTRY: Final = Role.ENTRY  # Python 3.11 takes 0.3 us to find an enum's member, three times an entry


class TarReader:
    """Feed it the tar stream in any chunks, then call `finish`."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._position = 0
        self._skip = 0
        self._padding = 0  # how much of the skip is padding, which may be missing at the end of the stream
        self._need = RECORD
        self._partial = bytearray()
        self._next: Callable[[bytes], None] | None = self._on_header
        self._extents: list[Extent] = []
        self._data_size = 0
        self._pax: Pax | None = None
        self._long_name: bytes | None = None
        self._long_link: bytes | None = None
        self._doubtful_size = 0

    def __repr__(self) -> str:
        state = "ended" if self._next is None else "open"
        return f"<TarReader {state} at byte {self._position}, {self._data_size} bytes of data region>"

    @property
    def data_size(self) -> int:
        """Bytes of the data region allocated so far, a multiple of BLOCK."""
        return self._data_size

    @property
    def ended(self) -> bool:
        """Whether the end of the archive has been seen; what follows is ignored."""
        return self._next is None

    def feed(self, chunk: bytes | memoryview) -> list[Extent]:
        """Consume `chunk`; returns the extents of the files whose headers (and sparse maps) it completed, in archive
        order. Raises Corrupt or Unsupported."""
        view = memoryview(chunk)
        position, end = 0, len(view)
        while position < end:
            if self._skip:
                step = min(self._skip, end - position)
                self._skip -= step
                self._position += step
            elif self._next is None:
                step = end - position
                self._position += step
            elif end - position >= self._need and not self._partial:
                step = self._need
                self._position += step
                self._next(bytes(view[position : position + step]))
            else:
                step = self._gather(view[position:], self._next)
            position += step
        extents, self._extents = self._extents, []
        return extents

    def finish(self) -> Tree:
        """The tree, once the whole stream was fed; Corrupt if the stream is cut. An archive that ends at a header's
        place without its end mark is whole, as for GNU tar and containerd, and so is one without its last padding, as
        for containerd: umoci 0.4.7 writes such."""
        whole = self._next in (None, self._on_header, self._on_link_payload, self._on_second_zero)
        if not whole or self._partial or self._skip > self._padding:
            raise Corrupt("tar stream", "ends inside an entry: truncated", self._position)
        if self._pax or self._long_name is not None or self._long_link is not None:
            raise Corrupt("tar stream", "ends after an extended header: truncated", self._position)
        self._tree.finish()
        return self._tree

    def _gather(self, view: memoryview, handler: Callable[[bytes], None]) -> int:
        """Put what is still needed of `view` to what is there; hand it on if that is all. Returns how much it was."""
        part = view[: self._need - len(self._partial)]
        self._position += len(part)
        self._partial += part
        if len(self._partial) == self._need:
            whole = bytes(self._partial)
            self._partial.clear()
            handler(whole)
        return len(part)

    def _expect(self, handler: Callable[[bytes], None], need: int = RECORD) -> None:
        self._next, self._need = handler, need

    def _pass_over(self, size: int) -> None:
        """Skip the rest of a payload, `size` bytes and padding."""
        self._padding = -size % RECORD
        self._skip = size + self._padding

    def _on_header(self, block: bytes) -> None:
        """A header, or the first half of the end mark. Another one is expected next, unless this one says otherwise."""
        if block == _ZEROS:
            self._expect(self._on_second_zero)
            return
        offset = self._position - RECORD
        header = parse_header(block, offset)
        if header.size >= 1 << 63:
            raise Corrupt("tar header", f"size {header.size} does not fit 63 bits", offset)
        if header.typeflag in _RECORDS:
            self._begin_records(header, offset)
        else:
            self._on_entry(header, block, offset)

    def _on_second_zero(self, block: bytes) -> None:
        if block != _ZEROS:
            raise Corrupt("tar stream", "a lone zero record is followed by something else", self._position - RECORD)
        self._next = None

    def _begin_records(self, header: Header, offset: int) -> None:
        if header.size > _MAX_RECORDS_BYTES:
            what = _RECORDS[header.typeflag]
            raise Unsupported(f"{what} at byte {offset} has {header.size} bytes; at most {_MAX_RECORDS_BYTES}")
        padded = header.size + -header.size % RECORD

        def on_records(data: bytes) -> None:
            self._on_records(header, data[: header.size], offset + RECORD)
            self._expect(self._on_header)

        if padded:
            self._expect(on_records, padded)
        else:
            on_records(b"")

    def _on_records(self, header: Header, data: bytes, offset: int) -> None:
        match header.typeflag:
            case b"x":
                self._pax = parse_pax(data, offset)
            case b"g":
                self._on_global(global_path(data, offset) or header.name, offset)
            case b"L":
                self._long_name = data.partition(b"\0")[0]
            case _:
                self._long_link = data.partition(b"\0")[0]

    def _on_global(self, name: bytes, offset: int) -> None:
        """A global PAX header. POSIX applies its records to all entries that follow; for containerd it is an entry that
        becomes no file: it has a name, so parents appear and what has the name goes, it ends what an extended header
        before it began, and its records have no effect. Images are what containerd makes of them."""
        self._pax = self._long_name = self._long_link = None
        parts, role = _place_of(name, offset)
        if role is _ENTRY:
            self._tree.remove(parts)
        elif role is not Role.ROOT:
            self._on_special(role, b"g", parts, Attributes(0, 0, 0, 0))

    def _on_entry(self, header: Header, block: bytes, offset: int) -> None:
        pax, name, link, size = self._pax, header.name, header.linkname, header.size
        if pax is None and self._long_name is None and self._long_link is None:
            attributes = Attributes(header.mode, header.uid, header.gid, _in_ns(header.mtime))
        else:
            pax = pax or Pax()
            name = sparse_name(pax) or self._long_name or pax.path or name
            link = self._long_link or pax.linkpath or link
            size = size if pax.size is None else pax.size
            attributes = _merged(header, pax)
            self._pax = self._long_name = self._long_link = None
        typeflag = header.typeflag
        if typeflag == b"\0" and name.endswith(b"/"):
            typeflag = b"5"  # how V7 tars mark directories
        if typeflag not in _FILES and typeflag not in _OTHERS:
            raise Unsupported(f"tar entry at byte {offset} has the type {typeflag!r}, which is not served")
        parts, role = _place_of(name, offset)
        if typeflag in _FILES:
            self._begin_file(typeflag, header, block, parts if role is _ENTRY else None, attributes, size, pax)
        elif typeflag == b"1" and size:
            self._doubtful_size = size
            self._expect(self._on_link_payload)
        if role is not _ENTRY:
            self._on_special(role, typeflag, parts, attributes)
        elif typeflag not in _FILES:
            self._place(typeflag, block, parts, attributes, link, offset)

    def _on_special(self, role: Role, typeflag: bytes, parts: list[bytes], attributes: Attributes) -> None:
        """An entry whose name says what it is, whatever its type."""
        match role:
            case Role.WHITEOUT:
                self._tree.add_whiteout(parts, attributes)
            case Role.OPAQUE:
                self._tree.add_opaque(parts)
            case Role.ROOT if typeflag == b"5":
                self._tree.add_dir(parts, attributes)
            case _:
                pass  # a root that is no directory

    def _place(
        self, typeflag: bytes, block: bytes, parts: list[bytes], attributes: Attributes, link: bytes, offset: int
    ) -> None:
        match typeflag:
            case b"5":
                self._tree.add_dir(parts, attributes)
            case b"1":
                self._tree.add_hardlink(parts, attributes, clean_path(link))
            case b"2":
                self._tree.add_symlink(parts, attributes, link)
            case b"3" | b"4":
                major, minor = device_numbers(block, offset)
                self._tree.add_device(parts, attributes, _DEVICES[typeflag], major, minor)
            case _:
                self._tree.add_device(parts, attributes, stat.S_IFIFO)

    def _on_link_payload(self, block: bytes) -> None:
        """The record after a hard link that claims a size. GNU tar and Go take links to have no payload whatever they
        claim, PAX allows one: it is there if what follows is no header."""
        self._expect(self._on_header)
        if block == _ZEROS or has_valid_checksum(block):
            self._on_header(block)
            return
        rest = self._doubtful_size - RECORD
        if rest > 0:
            self._pass_over(rest)

    def _begin_file(
        self,
        typeflag: bytes,
        header: Header,
        block: bytes,
        parts: list[bytes] | None,
        attributes: Attributes,
        size: int,
        pax: Pax | None,
    ) -> None:
        """A regular file's header is complete: find its segments, now or after more records. `parts` is None for one
        that becomes no file of the layer."""
        if typeflag == b"S":
            if not header.is_gnu:
                raise Corrupt("tar header", "type S without GNU's magic", self._position - RECORD)
            self._begin_old_sparse(block, parts, attributes, size)
            return
        version = pax_version(pax) if pax and (pax.sparse or pax.sparse_list) else None
        if version is None or pax is None:
            self._pass_over(size)
            if parts is not None:
                self._add_file(parts, attributes, size, None)
            return
        real_size = _pax_real_size(pax, size, self._position)
        if version == "1" and parts is not None:
            self._begin_map_text(parts, attributes, size, real_size)
            return
        self._pass_over(size)
        if parts is not None:
            segments = checked(pax_segments(pax, self._position), real_size, size, self._position)
            self._add_file(parts, attributes, real_size, segments)

    def _begin_old_sparse(self, block: bytes, parts: list[bytes] | None, attributes: Attributes, size: int) -> None:
        """Old GNU format: a map in the header and in extension records after it, then the payload."""
        start = self._position
        segments, real_size, more = header_segments(block, start - RECORD)

        def complete() -> None:
            self._expect(self._on_header)
            self._pass_over(size)
            if parts is not None:
                self._add_file(parts, attributes, real_size, checked(segments, real_size, size, start))

        def on_extension(record: bytes) -> None:
            found, more = extension_segments(record, self._position - RECORD)
            segments.extend(found)
            if self._position - start > MAX_MAP_BYTES:
                raise Unsupported(f"sparse map at byte {start} is larger than {MAX_MAP_BYTES} bytes")
            if not more:
                complete()

        if more:
            self._expect(on_extension)
        else:
            complete()

    def _begin_map_text(self, parts: list[bytes], attributes: Attributes, size: int, real_size: int) -> None:
        """PAX sparse format 1.0: the map is the first part of the payload."""
        start = self._position
        text = MapText(start)

        def on_map(record: bytes) -> None:
            segments = text.feed(record)
            rest = size - text.size
            if rest < 0:
                raise Corrupt("sparse map", "is longer than its payload", start)
            if segments is not None:
                self._expect(self._on_header)
                self._pass_over(rest)
                self._add_file(parts, attributes, real_size, checked(segments, real_size, rest, start))

        self._expect(on_map)

    def _add_file(self, parts: list[bytes], attributes: Attributes, size: int, segments: Segments | None) -> None:
        """Allocate the file's run of blocks and note its extents; its payload starts at the stream's position."""
        start = self._data_size if size else 0
        if start + size > _MAX_DATA:
            raise Unsupported(f"the layer's files need more than {_MAX_DATA} bytes")
        self._data_size += block_ceil(size)
        self._tree.add_file(parts, attributes, size, start)
        if segments is None:
            if size:
                self._extents.append(Extent(self._position, start, size))
            return
        tar_offset = self._position
        for offset, length in segments:
            self._extents.append(Extent(tar_offset, start + offset, length))
            tar_offset += length


def _place_of(name: bytes, offset: int) -> tuple[list[bytes], Role]:
    """Where the entry at `offset` belongs."""
    if len(name) > MAX_PATH:
        raise Unsupported(f"tar entry at byte {offset} has a name of {len(name)} bytes; at most {MAX_PATH} are served")
    parts = clean_path(name)
    return parts, role_of(parts) if b".wh." in name or not parts else _ENTRY


@lru_cache(maxsize=4096)
def _in_ns(seconds: int) -> int:
    """One int object for all entries of a second: 36 bytes each less in the tree."""
    return seconds * _NS


def _merged(header: Header, pax: Pax) -> Attributes:
    return Attributes(
        header.mode,
        header.uid if pax.uid is None else pax.uid,
        header.gid if pax.gid is None else pax.gid,
        _in_ns(header.mtime) if pax.mtime_ns is None else pax.mtime_ns,
        pax.xattrs,
    )


def _pax_real_size(pax: Pax, stored_size: int, offset: int) -> int:
    """A sparse file's size with its holes; the stored size where no record gives another."""
    text = pax.sparse.get(b"size") or pax.sparse.get(b"realsize")
    if not text:
        return stored_size
    if not text.isdigit() or len(text) > 20:
        raise Corrupt("PAX record", f"sparse size {text[:40]!r} is not a decimal number", offset)
    return int(text)
