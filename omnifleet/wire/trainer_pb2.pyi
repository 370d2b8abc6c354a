from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PauseRequest(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class CheckpointRequest(_message.Message):
    __slots__ = ("deadline_ms",)
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    deadline_ms: int
    def __init__(self, deadline_ms: _Optional[int] = ...) -> None: ...

class CheckpointReply(_message.Message):
    __slots__ = ("path", "step")
    PATH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    path: str
    step: int
    def __init__(self, path: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class StopRequest(_message.Message):
    __slots__ = ("checkpoint", "reason")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    checkpoint: bool
    reason: str
    def __init__(self, checkpoint: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...

class StopReply(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("after_step", "follow")
    AFTER_STEP_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    after_step: int
    follow: bool
    def __init__(self, after_step: _Optional[int] = ..., follow: _Optional[bool] = ...) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "version", "metrics", "unix_ms")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    step: int
    version: _common_pb2.WeightVersion
    metrics: _containers.ScalarMap[str, float]
    unix_ms: int
    def __init__(self, step: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., unix_ms: _Optional[int] = ...) -> None: ...

class QueryLedgerRequest(_message.Message):
    __slots__ = ("lineage", "limit", "state")
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    lineage: str
    limit: int
    state: str
    def __init__(self, lineage: _Optional[str] = ..., limit: _Optional[int] = ..., state: _Optional[str] = ...) -> None: ...

class LedgerCounts(_message.Message):
    __slots__ = ("prompts_leased", "attempts", "trajectories", "consumed", "consumed_twice", "expired", "failed", "in_flight", "ready", "steps")
    PROMPTS_LEASED_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_FIELD_NUMBER: _ClassVar[int]
    CONSUMED_TWICE_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    prompts_leased: int
    attempts: int
    trajectories: int
    consumed: int
    consumed_twice: int
    expired: int
    failed: int
    in_flight: int
    ready: int
    steps: int
    def __init__(self, prompts_leased: _Optional[int] = ..., attempts: _Optional[int] = ..., trajectories: _Optional[int] = ..., consumed: _Optional[int] = ..., consumed_twice: _Optional[int] = ..., expired: _Optional[int] = ..., failed: _Optional[int] = ..., in_flight: _Optional[int] = ..., ready: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class LedgerRow(_message.Message):
    __slots__ = ("trajectory", "identity", "state", "reward", "step", "outcome", "spans")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    trajectory: str
    identity: _common_pb2.Identity
    state: str
    reward: float
    step: int
    outcome: str
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    def __init__(self, trajectory: _Optional[str] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., state: _Optional[str] = ..., reward: _Optional[float] = ..., step: _Optional[int] = ..., outcome: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ...) -> None: ...

class QueryLedgerReply(_message.Message):
    __slots__ = ("counts", "rows")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    counts: LedgerCounts
    rows: _containers.RepeatedCompositeFieldContainer[LedgerRow]
    def __init__(self, counts: _Optional[_Union[LedgerCounts, _Mapping]] = ..., rows: _Optional[_Iterable[_Union[LedgerRow, _Mapping]]] = ...) -> None: ...
