from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    JOINING: _ClassVar[WorkerState]
    CATCHING_UP: _ClassVar[WorkerState]
    READY: _ClassVar[WorkerState]
    DRAINING: _ClassVar[WorkerState]
    CORDONED: _ClassVar[WorkerState]
    STALE: _ClassVar[WorkerState]
    SUSPECT: _ClassVar[WorkerState]
    DEAD: _ClassVar[WorkerState]
    RETIRED: _ClassVar[WorkerState]

class Verb(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERB_UNSPECIFIED: _ClassVar[Verb]
    DRAIN: _ClassVar[Verb]
    CORDON: _ClassVar[Verb]
    UNCORDON: _ClassVar[Verb]
    PIN: _ClassVar[Verb]
    UNPIN: _ClassVar[Verb]
    RETIRE: _ClassVar[Verb]
WORKER_STATE_UNSPECIFIED: WorkerState
JOINING: WorkerState
CATCHING_UP: WorkerState
READY: WorkerState
DRAINING: WorkerState
CORDONED: WorkerState
STALE: WorkerState
SUSPECT: WorkerState
DEAD: WorkerState
RETIRED: WorkerState
VERB_UNSPECIFIED: Verb
DRAIN: Verb
CORDON: Verb
UNCORDON: Verb
PIN: Verb
UNPIN: Verb
RETIRE: Verb

class WorkerInfo(_message.Message):
    __slots__ = ("id", "instance", "pool", "host", "grpc_address", "model", "engine", "state", "version", "running", "waiting", "kv_usage", "tokens_per_s", "heartbeat_unix_ms", "note", "pinned", "counters", "max_running", "pid")
    ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    id: str
    instance: str
    pool: str
    host: str
    grpc_address: str
    model: str
    engine: str
    state: WorkerState
    version: _common_pb2.WeightVersion
    running: int
    waiting: int
    kv_usage: float
    tokens_per_s: float
    heartbeat_unix_ms: int
    note: str
    pinned: bool
    counters: _containers.RepeatedCompositeFieldContainer[_common_pb2.Counter]
    max_running: int
    pid: int
    def __init__(self, id: _Optional[str] = ..., instance: _Optional[str] = ..., pool: _Optional[str] = ..., host: _Optional[str] = ..., grpc_address: _Optional[str] = ..., model: _Optional[str] = ..., engine: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_usage: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., heartbeat_unix_ms: _Optional[int] = ..., note: _Optional[str] = ..., pinned: _Optional[bool] = ..., counters: _Optional[_Iterable[_Union[_common_pb2.Counter, _Mapping]]] = ..., max_running: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("lease_id", "heartbeat_ms", "target_version")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    heartbeat_ms: int
    target_version: _common_pb2.WeightVersion
    def __init__(self, lease_id: _Optional[str] = ..., heartbeat_ms: _Optional[int] = ..., target_version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("lease_id", "worker")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    worker: WorkerInfo
    def __init__(self, lease_id: _Optional[str] = ..., worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class HeartbeatReply(_message.Message):
    __slots__ = ("wanted", "target_version", "rejoin", "note")
    WANTED_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    REJOIN_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    wanted: WorkerState
    target_version: _common_pb2.WeightVersion
    rejoin: bool
    note: str
    def __init__(self, wanted: _Optional[_Union[WorkerState, str]] = ..., target_version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., rejoin: _Optional[bool] = ..., note: _Optional[str] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    reason: str
    def __init__(self, lease_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaveReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("pool", "include_gone")
    POOL_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_GONE_FIELD_NUMBER: _ClassVar[int]
    pool: str
    include_gone: bool
    def __init__(self, pool: _Optional[str] = ..., include_gone: _Optional[bool] = ...) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("workers", "desired", "target_version", "revision")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    TARGET_VERSION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    desired: int
    target_version: _common_pb2.WeightVersion
    revision: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., desired: _Optional[int] = ..., target_version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., revision: _Optional[int] = ...) -> None: ...

class ActRequest(_message.Message):
    __slots__ = ("verb", "worker", "reason", "deadline_ms")
    VERB_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    verb: Verb
    worker: str
    reason: str
    deadline_ms: int
    def __init__(self, verb: _Optional[_Union[Verb, str]] = ..., worker: _Optional[str] = ..., reason: _Optional[str] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class ActReply(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "desired", "reason")
    POOL_FIELD_NUMBER: _ClassVar[int]
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    pool: str
    desired: int
    reason: str
    def __init__(self, pool: _Optional[str] = ..., desired: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ScaleReply(_message.Message):
    __slots__ = ("desired", "draining")
    DESIRED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    desired: int
    draining: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, desired: _Optional[int] = ..., draining: _Optional[_Iterable[str]] = ...) -> None: ...

class AssignRequest(_message.Message):
    __slots__ = ("pool", "run", "quota", "priority")
    POOL_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    pool: str
    run: str
    quota: int
    priority: int
    def __init__(self, pool: _Optional[str] = ..., run: _Optional[str] = ..., quota: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class AssignReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AnnounceVersionRequest(_message.Message):
    __slots__ = ("pool", "version", "max_lag")
    POOL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MAX_LAG_FIELD_NUMBER: _ClassVar[int]
    pool: str
    version: _common_pb2.WeightVersion
    max_lag: int
    def __init__(self, pool: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., max_lag: _Optional[int] = ...) -> None: ...

class AnnounceVersionReply(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: int
    def __init__(self, revision: _Optional[int] = ...) -> None: ...
