from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MediaKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEDIA_KIND_UNSPECIFIED: _ClassVar[MediaKind]
    MEDIA_KIND_IMAGE: _ClassVar[MediaKind]
    MEDIA_KIND_VIDEO: _ClassVar[MediaKind]
    MEDIA_KIND_AUDIO: _ClassVar[MediaKind]
MEDIA_KIND_UNSPECIFIED: MediaKind
MEDIA_KIND_IMAGE: MediaKind
MEDIA_KIND_VIDEO: MediaKind
MEDIA_KIND_AUDIO: MediaKind

class HandshakeRequest(_message.Message):
    __slots__ = ("contract", "client", "features")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    contract: str
    client: str
    features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, contract: _Optional[str] = ..., client: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("contract", "service", "version", "features", "instance", "shared_folder")
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    SHARED_FOLDER_FIELD_NUMBER: _ClassVar[int]
    contract: str
    service: str
    version: str
    features: _containers.RepeatedScalarFieldContainer[str]
    instance: str
    shared_folder: str
    def __init__(self, contract: _Optional[str] = ..., service: _Optional[str] = ..., version: _Optional[str] = ..., features: _Optional[_Iterable[str]] = ..., instance: _Optional[str] = ..., shared_folder: _Optional[str] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "message", "retryable", "knob", "retry_after_ms", "current_version")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    KNOB_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    CURRENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    retryable: bool
    knob: str
    retry_after_ms: int
    current_version: WeightVersion
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., knob: _Optional[str] = ..., retry_after_ms: _Optional[int] = ..., current_version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class WeightVersion(_message.Message):
    __slots__ = ("run", "lineage", "number", "manifest_digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    lineage: str
    number: int
    manifest_digest: str
    def __init__(self, run: _Optional[str] = ..., lineage: _Optional[str] = ..., number: _Optional[int] = ..., manifest_digest: _Optional[str] = ...) -> None: ...

class VersionBound(_message.Message):
    __slots__ = ("min", "exact")
    MIN_FIELD_NUMBER: _ClassVar[int]
    EXACT_FIELD_NUMBER: _ClassVar[int]
    min: WeightVersion
    exact: WeightVersion
    def __init__(self, min: _Optional[_Union[WeightVersion, _Mapping]] = ..., exact: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end", "worker")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    start: int
    end: int
    worker: str
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., worker: _Optional[str] = ...) -> None: ...

class MediaRef(_message.Message):
    __slots__ = ("kind", "digest")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    kind: MediaKind
    digest: str
    def __init__(self, kind: _Optional[_Union[MediaKind, str]] = ..., digest: _Optional[str] = ...) -> None: ...

class Identity(_message.Message):
    __slots__ = ("run", "environment", "session", "episode", "turn", "prompt_id", "group_id", "sample", "attempt")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run: str
    environment: str
    session: str
    episode: str
    turn: int
    prompt_id: str
    group_id: str
    sample: int
    attempt: str
    def __init__(self, run: _Optional[str] = ..., environment: _Optional[str] = ..., session: _Optional[str] = ..., episode: _Optional[str] = ..., turn: _Optional[int] = ..., prompt_id: _Optional[str] = ..., group_id: _Optional[str] = ..., sample: _Optional[int] = ..., attempt: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("id", "owner", "run", "expires_unix_ms")
    ID_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    id: str
    owner: str
    run: str
    expires_unix_ms: int
    def __init__(self, id: _Optional[str] = ..., owner: _Optional[str] = ..., run: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ...) -> None: ...

class Chunk(_message.Message):
    __slots__ = ("data", "offset", "last")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offset: int
    last: bool
    def __init__(self, data: _Optional[bytes] = ..., offset: _Optional[int] = ..., last: _Optional[bool] = ...) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: float
    def __init__(self, name: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ServiceStatus(_message.Message):
    __slots__ = ("service", "version", "instance", "uptime_s", "state", "counters", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    service: str
    version: str
    instance: str
    uptime_s: float
    state: str
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    facts: _containers.ScalarMap[str, str]
    def __init__(self, service: _Optional[str] = ..., version: _Optional[str] = ..., instance: _Optional[str] = ..., uptime_s: _Optional[float] = ..., state: _Optional[str] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
