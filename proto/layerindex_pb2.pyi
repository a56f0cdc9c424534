from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Compression(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPRESSION_UNSPECIFIED: _ClassVar[Compression]
    COMPRESSION_TAR: _ClassVar[Compression]
    COMPRESSION_GZIP: _ClassVar[Compression]
    COMPRESSION_ZSTD: _ClassVar[Compression]
COMPRESSION_UNSPECIFIED: Compression
COMPRESSION_TAR: Compression
COMPRESSION_GZIP: Compression
COMPRESSION_ZSTD: Compression

class Columns(_message.Message):
    __slots__ = ("rows", "zstd")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ZSTD_FIELD_NUMBER: _ClassVar[int]
    rows: int
    zstd: bytes
    def __init__(self, rows: _Optional[int] = ..., zstd: _Optional[bytes] = ...) -> None: ...

class LayerIndexHead(_message.Message):
    __slots__ = ("blob_digest", "blob_size", "diff_id", "tar_size", "compression", "metadata_size", "metadata_zstd", "data_size", "files", "spans", "piece_digests", "windows_size", "windows_digest", "implied_dirs")
    BLOB_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DIFF_ID_FIELD_NUMBER: _ClassVar[int]
    TAR_SIZE_FIELD_NUMBER: _ClassVar[int]
    COMPRESSION_FIELD_NUMBER: _ClassVar[int]
    METADATA_SIZE_FIELD_NUMBER: _ClassVar[int]
    METADATA_ZSTD_FIELD_NUMBER: _ClassVar[int]
    DATA_SIZE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    PIECE_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_SIZE_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IMPLIED_DIRS_FIELD_NUMBER: _ClassVar[int]
    blob_digest: bytes
    blob_size: int
    diff_id: bytes
    tar_size: int
    compression: Compression
    metadata_size: int
    metadata_zstd: bytes
    data_size: int
    files: Columns
    spans: Columns
    piece_digests: bytes
    windows_size: int
    windows_digest: bytes
    implied_dirs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, blob_digest: _Optional[bytes] = ..., blob_size: _Optional[int] = ..., diff_id: _Optional[bytes] = ..., tar_size: _Optional[int] = ..., compression: _Optional[_Union[Compression, str]] = ..., metadata_size: _Optional[int] = ..., metadata_zstd: _Optional[bytes] = ..., data_size: _Optional[int] = ..., files: _Optional[_Union[Columns, _Mapping]] = ..., spans: _Optional[_Union[Columns, _Mapping]] = ..., piece_digests: _Optional[bytes] = ..., windows_size: _Optional[int] = ..., windows_digest: _Optional[bytes] = ..., implied_dirs: _Optional[_Iterable[bytes]] = ...) -> None: ...
