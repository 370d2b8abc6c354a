from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Mark(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MARK_UNSPECIFIED: _ClassVar[Mark]
    MARK_SCORED: _ClassVar[Mark]
    MARK_UNPARSEABLE: _ClassVar[Mark]
    MARK_TIMEOUT: _ClassVar[Mark]
    MARK_CRASHED: _ClassVar[Mark]
MARK_UNSPECIFIED: Mark
MARK_SCORED: Mark
MARK_UNPARSEABLE: Mark
MARK_TIMEOUT: Mark
MARK_CRASHED: Mark

class ScorerSpec(_message.Message):
    __slots__ = ("name", "version", "weight", "params_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    weight: float
    params_json: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., weight: _Optional[float] = ..., params_json: _Optional[str] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("id", "identity", "response", "ground_truth", "prompt", "media", "extra_json", "prompt_suffix")
    ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    id: str
    identity: _common_pb2.Identity
    response: str
    ground_truth: str
    prompt: str
    media: _containers.RepeatedCompositeFieldContainer[_common_pb2.MediaRef]
    extra_json: str
    prompt_suffix: str
    def __init__(self, id: _Optional[str] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., response: _Optional[str] = ..., ground_truth: _Optional[str] = ..., prompt: _Optional[str] = ..., media: _Optional[_Iterable[_Union[_common_pb2.MediaRef, _Mapping]]] = ..., extra_json: _Optional[str] = ..., prompt_suffix: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("scorers", "items", "item_timeout_ms")
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ITEM_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ScorerSpec]
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    item_timeout_ms: int
    def __init__(self, scorers: _Optional[_Iterable[_Union[ScorerSpec, _Mapping]]] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ..., item_timeout_ms: _Optional[int] = ...) -> None: ...

class ComponentScore(_message.Message):
    __slots__ = ("scorer", "score", "correct", "mark")
    SCORER_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    scorer: str
    score: float
    correct: bool
    mark: Mark
    def __init__(self, scorer: _Optional[str] = ..., score: _Optional[float] = ..., correct: _Optional[bool] = ..., mark: _Optional[_Union[Mark, str]] = ...) -> None: ...

class ItemScore(_message.Message):
    __slots__ = ("id", "score", "correct", "components", "error", "mark")
    ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    CORRECT_FIELD_NUMBER: _ClassVar[int]
    COMPONENTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    id: str
    score: float
    correct: bool
    components: _containers.RepeatedCompositeFieldContainer[ComponentScore]
    error: _common_pb2.ErrorDetail
    mark: Mark
    def __init__(self, id: _Optional[str] = ..., score: _Optional[float] = ..., correct: _Optional[bool] = ..., components: _Optional[_Iterable[_Union[ComponentScore, _Mapping]]] = ..., error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ..., mark: _Optional[_Union[Mark, str]] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("scores", "reward_version")
    SCORES_FIELD_NUMBER: _ClassVar[int]
    REWARD_VERSION_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[ItemScore]
    reward_version: str
    def __init__(self, scores: _Optional[_Iterable[_Union[ItemScore, _Mapping]]] = ..., reward_version: _Optional[str] = ...) -> None: ...

class ListScorersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScorerInfo(_message.Message):
    __slots__ = ("name", "version", "doc", "params_schema_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DOC_FIELD_NUMBER: _ClassVar[int]
    PARAMS_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    doc: str
    params_schema_json: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., doc: _Optional[str] = ..., params_schema_json: _Optional[str] = ...) -> None: ...

class ListScorersReply(_message.Message):
    __slots__ = ("scorers",)
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ScorerInfo]
    def __init__(self, scorers: _Optional[_Iterable[_Union[ScorerInfo, _Mapping]]] = ...) -> None: ...

class ReachableMaximumRequest(_message.Message):
    __slots__ = ("scorers", "prompt_suffix")
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SUFFIX_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[ScorerSpec]
    prompt_suffix: str
    def __init__(self, scorers: _Optional[_Iterable[_Union[ScorerSpec, _Mapping]]] = ..., prompt_suffix: _Optional[str] = ...) -> None: ...

class ReachableMaximumReply(_message.Message):
    __slots__ = ("maximum", "example", "reward_version")
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    EXAMPLE_FIELD_NUMBER: _ClassVar[int]
    REWARD_VERSION_FIELD_NUMBER: _ClassVar[int]
    maximum: float
    example: str
    reward_version: str
    def __init__(self, maximum: _Optional[float] = ..., example: _Optional[str] = ..., reward_version: _Optional[str] = ...) -> None: ...
