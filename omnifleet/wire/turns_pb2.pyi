from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SleepRequest(_message.Message):
    __slots__ = ("level", "deadline_ms")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    level: int
    deadline_ms: int
    def __init__(self, level: _Optional[int] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class SleepReply(_message.Message):
    __slots__ = ("version", "in_flight", "level")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    in_flight: int
    level: int
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ..., in_flight: _Optional[int] = ..., level: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("weights_only", "deadline_ms")
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    weights_only: bool
    deadline_ms: int
    def __init__(self, weights_only: _Optional[bool] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class WakeReply(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.WeightVersion
    def __init__(self, version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...
