from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InFlight(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IN_FLIGHT_UNSPECIFIED: _ClassVar[InFlight]
    KEEP: _ClassVar[InFlight]
    RECOMPUTE: _ClassVar[InFlight]
    DRAIN_FIRST: _ClassVar[InFlight]
IN_FLIGHT_UNSPECIFIED: InFlight
KEEP: InFlight
RECOMPUTE: InFlight
DRAIN_FIRST: InFlight

class TensorSpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "bucket", "offset", "bytes", "changed", "digest", "encoding", "stored")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    bucket: int
    offset: int
    bytes: int
    changed: bool
    digest: str
    encoding: str
    stored: int
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., changed: _Optional[bool] = ..., digest: _Optional[str] = ..., encoding: _Optional[str] = ..., stored: _Optional[int] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("index", "bytes", "checksum")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    index: int
    bytes: int
    checksum: str
    def __init__(self, index: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[str] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("offset", "shape", "stride")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    offset: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    stride: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offset: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., stride: _Optional[_Iterable[int]] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("name", "window", "bucket", "offset", "bytes", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    window: Window
    bucket: int
    offset: int
    bytes: int
    digest: str
    def __init__(self, name: _Optional[str] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("ranks", "pieces", "buckets")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    pieces: _containers.RepeatedCompositeFieldContainer[Piece]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., pieces: _Optional[_Iterable[_Union[Piece, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "parent", "tensors", "buckets", "checksum_algorithm", "encoder_changed", "parts")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    ENCODER_CHANGED_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    parent: _common_pb2.WeightVersion
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    checksum_algorithm: str
    encoder_changed: bool
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., parent: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ..., checksum_algorithm: _Optional[str] = ..., encoder_changed: _Optional[bool] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ...) -> None: ...

class ShmTransport(_message.Message):
    __slots__ = ("path", "bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    bytes: int
    def __init__(self, path: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class NcclTransport(_message.Message):
    __slots__ = ("master_address", "master_port", "unique_id", "world_size", "rank_offset")
    MASTER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASTER_PORT_FIELD_NUMBER: _ClassVar[int]
    UNIQUE_ID_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANK_OFFSET_FIELD_NUMBER: _ClassVar[int]
    master_address: str
    master_port: int
    unique_id: bytes
    world_size: int
    rank_offset: int
    def __init__(self, master_address: _Optional[str] = ..., master_port: _Optional[int] = ..., unique_id: _Optional[bytes] = ..., world_size: _Optional[int] = ..., rank_offset: _Optional[int] = ...) -> None: ...

class Place(_message.Message):
    __slots__ = ("name", "bucket", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    bucket: int
    offset: int
    def __init__(self, name: _Optional[str] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class CudaIpcTransport(_message.Message):
    __slots__ = ("handles", "places")
    class HandlesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    HANDLES_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    handles: _containers.ScalarMap[str, bytes]
    places: _containers.RepeatedCompositeFieldContainer[Place]
    def __init__(self, handles: _Optional[_Mapping[str, bytes]] = ..., places: _Optional[_Iterable[_Union[Place, _Mapping]]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("tensors", "transports", "shadow", "version", "engine", "ranks", "sparse", "needs")
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    NEEDS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    transports: _containers.RepeatedScalarFieldContainer[str]
    shadow: bool
    version: _common_pb2.WeightVersion
    engine: str
    ranks: int
    sparse: bool
    needs: str
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., transports: _Optional[_Iterable[str]] = ..., shadow: _Optional[bool] = ..., version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., engine: _Optional[str] = ..., ranks: _Optional[int] = ..., sparse: _Optional[bool] = ..., needs: _Optional[str] = ...) -> None: ...

class NeedsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TensorNeeds(_message.Message):
    __slots__ = ("name", "windows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    windows: _containers.RepeatedCompositeFieldContainer[Window]
    def __init__(self, name: _Optional[str] = ..., windows: _Optional[_Iterable[_Union[Window, _Mapping]]] = ...) -> None: ...

class RankNeeds(_message.Message):
    __slots__ = ("tensors",)
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    tensors: _containers.RepeatedCompositeFieldContainer[TensorNeeds]
    def __init__(self, tensors: _Optional[_Iterable[_Union[TensorNeeds, _Mapping]]] = ...) -> None: ...

class NeedsReply(_message.Message):
    __slots__ = ("digest", "ranks")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    digest: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankNeeds]
    def __init__(self, digest: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankNeeds, _Mapping]]] = ...) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("manifest", "shm", "nccl", "cuda_ipc", "deadline_ms", "in_place")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    NCCL_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    shm: ShmTransport
    nccl: NcclTransport
    cuda_ipc: CudaIpcTransport
    deadline_ms: int
    in_place: InFlight
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., shm: _Optional[_Union[ShmTransport, _Mapping]] = ..., nccl: _Optional[_Union[NcclTransport, _Mapping]] = ..., cuda_ipc: _Optional[_Union[CudaIpcTransport, _Mapping]] = ..., deadline_ms: _Optional[int] = ..., in_place: _Optional[_Union[InFlight, str]] = ...) -> None: ...

class StageReply(_message.Message):
    __slots__ = ("bytes", "seconds", "manifest_digest")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    seconds: float
    manifest_digest: str
    def __init__(self, bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("manifest_digest", "in_flight", "deadline_ms")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: str
    in_flight: InFlight
    deadline_ms: int
    def __init__(self, manifest_digest: _Optional[str] = ..., in_flight: _Optional[_Union[InFlight, str]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("version", "gate_seconds", "in_flight", "tensors_loaded")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GATE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    TENSORS_LOADED_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    gate_seconds: float
    in_flight: int
    tensors_loaded: int
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., gate_seconds: _Optional[float] = ..., in_flight: _Optional[int] = ..., tensors_loaded: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("manifest_digest", "reason")
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    manifest_digest: str
    reason: str
    def __init__(self, manifest_digest: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class QuarantineRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class QuarantineReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class FetchReply(_message.Message):
    __slots__ = ("manifest", "data")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    manifest: Manifest
    data: bytes
    def __init__(self, manifest: _Optional[_Union[Manifest, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...
