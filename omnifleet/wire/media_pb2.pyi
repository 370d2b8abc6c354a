from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABILITY_MEMORY: _ClassVar[Durability]
    DURABILITY_DURABLE: _ClassVar[Durability]

class ObjectPart(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OBJECT_PART_UNSPECIFIED: _ClassVar[ObjectPart]
    OBJECT_PART_FRAME: _ClassVar[ObjectPart]
    OBJECT_PART_MANIFEST: _ClassVar[ObjectPart]
    OBJECT_PART_SOURCE: _ClassVar[ObjectPart]
    OBJECT_PART_SEGMENT: _ClassVar[ObjectPart]
DURABILITY_UNSPECIFIED: Durability
DURABILITY_MEMORY: Durability
DURABILITY_DURABLE: Durability
OBJECT_PART_UNSPECIFIED: ObjectPart
OBJECT_PART_FRAME: ObjectPart
OBJECT_PART_MANIFEST: ObjectPart
OBJECT_PART_SOURCE: ObjectPart
OBJECT_PART_SEGMENT: ObjectPart

class DecodeContract(_message.Message):
    __slots__ = ("sampling", "num_frames", "fps", "temporal_patch", "background", "indices", "sample_rate")
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_FRAMES_FIELD_NUMBER: _ClassVar[int]
    FPS_FIELD_NUMBER: _ClassVar[int]
    TEMPORAL_PATCH_FIELD_NUMBER: _ClassVar[int]
    BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    sampling: str
    num_frames: int
    fps: float
    temporal_patch: int
    background: str
    indices: _containers.RepeatedScalarFieldContainer[int]
    sample_rate: int
    def __init__(self, sampling: _Optional[str] = ..., num_frames: _Optional[int] = ..., fps: _Optional[float] = ..., temporal_patch: _Optional[int] = ..., background: _Optional[str] = ..., indices: _Optional[_Iterable[int]] = ..., sample_rate: _Optional[int] = ...) -> None: ...

class PutHeader(_message.Message):
    __slots__ = ("kind", "run", "lease_owner", "lease_ttl_ms", "contract", "durability", "url", "bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    LEASE_OWNER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: _common_pb2.MediaKind
    run: str
    lease_owner: str
    lease_ttl_ms: int
    contract: DecodeContract
    durability: Durability
    url: str
    bytes: int
    def __init__(self, kind: _Optional[_Union[_common_pb2.MediaKind, str]] = ..., run: _Optional[str] = ..., lease_owner: _Optional[str] = ..., lease_ttl_ms: _Optional[int] = ..., contract: _Optional[_Union[DecodeContract, _Mapping]] = ..., durability: _Optional[_Union[Durability, str]] = ..., url: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    chunk: _common_pb2.Chunk
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., chunk: _Optional[_Union[_common_pb2.Chunk, _Mapping]] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ("ref", "source_digest", "decoded", "durability", "lease", "info")
    REF_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DECODED_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.MediaRef
    source_digest: str
    decoded: bool
    durability: Durability
    lease: _common_pb2.Lease
    info: ObjectInfo
    def __init__(self, ref: _Optional[_Union[_common_pb2.MediaRef, _Mapping]] = ..., source_digest: _Optional[str] = ..., decoded: _Optional[bool] = ..., durability: _Optional[_Union[Durability, str]] = ..., lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ..., info: _Optional[_Union[ObjectInfo, _Mapping]] = ...) -> None: ...

class PutManyRequest(_message.Message):
    __slots__ = ("header", "sources")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    header: PutHeader
    sources: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, header: _Optional[_Union[PutHeader, _Mapping]] = ..., sources: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PutOutcome(_message.Message):
    __slots__ = ("reply", "error")
    REPLY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    reply: PutReply
    error: _common_pb2.ErrorDetail
    def __init__(self, reply: _Optional[_Union[PutReply, _Mapping]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class PutManyReply(_message.Message):
    __slots__ = ("outcomes",)
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[PutOutcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[PutOutcome, _Mapping]]] = ...) -> None: ...

class ObjectInfo(_message.Message):
    __slots__ = ("ref", "frame_digests", "timestamps_s", "width", "height", "bytes", "facts", "sample_rate", "samples")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REF_FIELD_NUMBER: _ClassVar[int]
    FRAME_DIGESTS_FIELD_NUMBER: _ClassVar[int]
    TIMESTAMPS_S_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_RATE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.MediaRef
    frame_digests: _containers.RepeatedScalarFieldContainer[str]
    timestamps_s: _containers.RepeatedScalarFieldContainer[float]
    width: int
    height: int
    bytes: int
    facts: _containers.ScalarMap[str, str]
    sample_rate: int
    samples: int
    def __init__(self, ref: _Optional[_Union[_common_pb2.MediaRef, _Mapping]] = ..., frame_digests: _Optional[_Iterable[str]] = ..., timestamps_s: _Optional[_Iterable[float]] = ..., width: _Optional[int] = ..., height: _Optional[int] = ..., bytes: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ..., sample_rate: _Optional[int] = ..., samples: _Optional[int] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("part", "digest", "offset", "length", "run", "same_host")
    PART_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    part: ObjectPart
    digest: str
    offset: int
    length: int
    run: str
    same_host: bool
    def __init__(self, part: _Optional[_Union[ObjectPart, str]] = ..., digest: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., run: _Optional[str] = ..., same_host: _Optional[bool] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: GetHeader
    chunk: _common_pb2.Chunk
    def __init__(self, header: _Optional[_Union[GetHeader, _Mapping]] = ..., chunk: _Optional[_Union[_common_pb2.Chunk, _Mapping]] = ...) -> None: ...

class GetHeader(_message.Message):
    __slots__ = ("bytes", "shape", "dtype", "shm_path")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHM_PATH_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    shm_path: str
    def __init__(self, bytes: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., shm_path: _Optional[str] = ...) -> None: ...

class HasRequest(_message.Message):
    __slots__ = ("digests", "part")
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    part: ObjectPart
    def __init__(self, digests: _Optional[_Iterable[str]] = ..., part: _Optional[_Union[ObjectPart, str]] = ...) -> None: ...

class HasReply(_message.Message):
    __slots__ = ("present",)
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    present: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, present: _Optional[_Iterable[bool]] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("digest", "same_host")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    same_host: bool
    def __init__(self, digest: _Optional[str] = ..., same_host: _Optional[bool] = ...) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("info", "leases", "tiers", "shm_path")
    INFO_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SHM_PATH_FIELD_NUMBER: _ClassVar[int]
    info: ObjectInfo
    leases: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    shm_path: str
    def __init__(self, info: _Optional[_Union[ObjectInfo, _Mapping]] = ..., leases: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., shm_path: _Optional[str] = ...) -> None: ...

class TakeLeaseRequest(_message.Message):
    __slots__ = ("run", "owner", "ttl_ms", "digests")
    RUN_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    run: str
    owner: str
    ttl_ms: int
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., owner: _Optional[str] = ..., ttl_ms: _Optional[int] = ..., digests: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("id", "ttl_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    ttl_ms: int
    def __init__(self, id: _Optional[str] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ReleaseLeaseReply(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("source_digest", "kind", "contract", "run")
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    source_digest: str
    kind: _common_pb2.MediaKind
    contract: DecodeContract
    run: str
    def __init__(self, source_digest: _Optional[str] = ..., kind: _Optional[_Union[_common_pb2.MediaKind, str]] = ..., contract: _Optional[_Union[DecodeContract, _Mapping]] = ..., run: _Optional[str] = ...) -> None: ...

class ProcessorSpec(_message.Message):
    __slots__ = ("class_name", "config_json", "fingerprint")
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    class_name: str
    config_json: str
    fingerprint: str
    def __init__(self, class_name: _Optional[str] = ..., config_json: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class SegmentRequest(_message.Message):
    __slots__ = ("ref", "processor", "run", "same_host")
    REF_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    SAME_HOST_FIELD_NUMBER: _ClassVar[int]
    ref: _common_pb2.MediaRef
    processor: ProcessorSpec
    run: str
    same_host: bool
    def __init__(self, ref: _Optional[_Union[_common_pb2.MediaRef, _Mapping]] = ..., processor: _Optional[_Union[ProcessorSpec, _Mapping]] = ..., run: _Optional[str] = ..., same_host: _Optional[bool] = ...) -> None: ...

class SegmentReply(_message.Message):
    __slots__ = ("key", "bytes", "token_count", "grid", "shm_path", "computed", "fingerprint", "content_digest", "times_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    SHM_PATH_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TIMES_S_FIELD_NUMBER: _ClassVar[int]
    key: str
    bytes: int
    token_count: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    shm_path: str
    computed: bool
    fingerprint: str
    content_digest: str
    times_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, key: _Optional[str] = ..., bytes: _Optional[int] = ..., token_count: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ..., shm_path: _Optional[str] = ..., computed: _Optional[bool] = ..., fingerprint: _Optional[str] = ..., content_digest: _Optional[str] = ..., times_s: _Optional[_Iterable[float]] = ...) -> None: ...

class CollectRequest(_message.Message):
    __slots__ = ("target_bytes", "dry_run")
    TARGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    target_bytes: int
    dry_run: bool
    def __init__(self, target_bytes: _Optional[int] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class CollectReply(_message.Message):
    __slots__ = ("freed_bytes", "removed", "orphans")
    FREED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    ORPHANS_FIELD_NUMBER: _ClassVar[int]
    freed_bytes: int
    removed: int
    orphans: int
    def __init__(self, freed_bytes: _Optional[int] = ..., removed: _Optional[int] = ..., orphans: _Optional[int] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("digests",)
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, digests: _Optional[_Iterable[str]] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("checked", "corrupt")
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    checked: int
    corrupt: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, checked: _Optional[int] = ..., corrupt: _Optional[_Iterable[str]] = ...) -> None: ...
