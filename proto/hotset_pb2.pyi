from proto import layerindex_pb2 as _layerindex_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_NONE: _ClassVar[Codec]
    CODEC_ZSTD: _ClassVar[Codec]
    CODEC_LZ4: _ClassVar[Codec]
CODEC_UNSPECIFIED: Codec
CODEC_NONE: Codec
CODEC_ZSTD: Codec
CODEC_LZ4: Codec

class HotSetHead(_message.Message):
    __slots__ = ("image_key", "manifest", "workload", "records", "layer_digests", "layer_layouts", "layer_blocks", "extents", "codec", "frame_extents", "frame_sizes", "frame_digests", "carried_from", "argv_digests")
    IMAGE_KEY_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    LAYER_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FRAME_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    FRAME_SIZES_FIELD_NUMBER: _ClassVar[int]
    FRAME_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FROM_FIELD_NUMBER: _ClassVar[int]
    ARGV_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    image_key: bytes
    manifest: bytes
    workload: str
    records: int
    layer_digests: bytes
    layer_layouts: bytes
    layer_blocks: _containers.RepeatedScalarFieldContainer[int]
    extents: _layerindex_pb2.Columns
    codec: Codec
    frame_extents: _containers.RepeatedScalarFieldContainer[int]
    frame_sizes: _containers.RepeatedScalarFieldContainer[int]
    frame_digests: bytes
    carried_from: bytes
    argv_digests: bytes
    def __init__(self, image_key: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., workload: _Optional[str] = ..., records: _Optional[int] = ..., layer_digests: _Optional[bytes] = ..., layer_layouts: _Optional[bytes] = ..., layer_blocks: _Optional[_Iterable[int]] = ..., extents: _Optional[_Union[_layerindex_pb2.Columns, _Mapping]] = ..., codec: _Optional[_Union[Codec, str]] = ..., frame_extents: _Optional[_Iterable[int]] = ..., frame_sizes: _Optional[_Iterable[int]] = ..., frame_digests: _Optional[bytes] = ..., carried_from: _Optional[bytes] = ..., argv_digests: _Optional[bytes] = ...) -> None: ...
