from omnifleet.wire import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "n", "seed", "stop", "stop_token_ids", "banned_token_ids", "min_tokens", "ignore_eos")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BANNED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    n: int
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    banned_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_tokens: int
    ignore_eos: bool
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., n: _Optional[int] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., banned_token_ids: _Optional[_Iterable[int]] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ...) -> None: ...

class TokenPrompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages_json", "tools_json", "template_kwargs_json", "required_prefix_token_ids")
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    REQUIRED_PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    messages_json: str
    tools_json: str
    template_kwargs_json: str
    required_prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, messages_json: _Optional[str] = ..., tools_json: _Optional[str] = ..., template_kwargs_json: _Optional[str] = ..., required_prefix_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "identity", "tokens", "chat", "media", "sampling", "weight_version", "priority", "return_prompt_token_ids", "return_text", "continuation", "expected_logprobs_mode", "whole_samples", "batched", "extras")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    RETURN_TEXT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    WHOLE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BATCHED_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    identity: _common_pb2.Identity
    tokens: TokenPrompt
    chat: ChatPrompt
    media: _containers.RepeatedCompositeFieldContainer[_common_pb2.MediaRef]
    sampling: Sampling
    weight_version: _common_pb2.VersionBound
    priority: int
    return_prompt_token_ids: bool
    return_text: bool
    continuation: Continuation
    expected_logprobs_mode: str
    whole_samples: bool
    batched: bool
    extras: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ..., tokens: _Optional[_Union[TokenPrompt, _Mapping]] = ..., chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., media: _Optional[_Iterable[_Union[_common_pb2.MediaRef, _Mapping]]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., weight_version: _Optional[_Union[_common_pb2.VersionBound, _Mapping]] = ..., priority: _Optional[int] = ..., return_prompt_token_ids: _Optional[bool] = ..., return_text: _Optional[bool] = ..., continuation: _Optional[_Union[Continuation, _Mapping]] = ..., expected_logprobs_mode: _Optional[str] = ..., whole_samples: _Optional[bool] = ..., batched: _Optional[bool] = ..., extras: _Optional[_Iterable[str]] = ...) -> None: ...

class Continuation(_message.Message):
    __slots__ = ("token_ids", "logprobs", "spans")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("sample", "prompt", "chunk", "finished", "failed", "batch")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    sample: int
    prompt: PromptEcho
    chunk: TokenChunk
    finished: Finished
    failed: SampleFailed
    batch: EventBatch
    def __init__(self, sample: _Optional[int] = ..., prompt: _Optional[_Union[PromptEcho, _Mapping]] = ..., chunk: _Optional[_Union[TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., failed: _Optional[_Union[SampleFailed, _Mapping]] = ..., batch: _Optional[_Union[EventBatch, _Mapping]] = ...) -> None: ...

class EventBatch(_message.Message):
    __slots__ = ("events",)
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    events: _containers.RepeatedCompositeFieldContainer[GenerateEvent]
    def __init__(self, events: _Optional[_Iterable[_Union[GenerateEvent, _Mapping]]] = ...) -> None: ...

class PromptEcho(_message.Message):
    __slots__ = ("prompt_hash", "token_ids", "prompt_tokens", "worker", "logprobs_mode", "media", "engine", "processor_fingerprints", "max_tokens", "extras")
    PROMPT_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    PROCESSOR_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRAS_FIELD_NUMBER: _ClassVar[int]
    prompt_hash: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    worker: str
    logprobs_mode: str
    media: _containers.RepeatedCompositeFieldContainer[_common_pb2.MediaRef]
    engine: str
    processor_fingerprints: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    extras: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prompt_hash: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., worker: _Optional[str] = ..., logprobs_mode: _Optional[str] = ..., media: _Optional[_Iterable[_Union[_common_pb2.MediaRef, _Mapping]]] = ..., engine: _Optional[str] = ..., processor_fingerprints: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., extras: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("token_ids", "logprobs", "text", "spans")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    text: str
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., text: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("finish_reason", "stop_reason", "spans", "tokens", "cached_prompt_tokens", "routed_experts", "sampling_mask")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_MASK_FIELD_NUMBER: _ClassVar[int]
    finish_reason: str
    stop_reason: str
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.VersionSpan]
    tokens: int
    cached_prompt_tokens: int
    routed_experts: bytes
    sampling_mask: bytes
    def __init__(self, finish_reason: _Optional[str] = ..., stop_reason: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.VersionSpan, _Mapping]]] = ..., tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., routed_experts: _Optional[bytes] = ..., sampling_mask: _Optional[bytes] = ...) -> None: ...

class SampleFailed(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: _common_pb2.ErrorDetail
    def __init__(self, error: _Optional[_Union[_common_pb2.ErrorDetail, _Mapping]] = ...) -> None: ...

class AbortRequestsRequest(_message.Message):
    __slots__ = ("request_ids",)
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class AbortRequestsReply(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: int
    def __init__(self, aborted: _Optional[int] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("chat", "identity")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    chat: ChatPrompt
    identity: _common_pb2.Identity
    def __init__(self, chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., identity: _Optional[_Union[_common_pb2.Identity, _Mapping]] = ...) -> None: ...

class RenderReply(_message.Message):
    __slots__ = ("token_ids", "media", "text")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    media: _containers.RepeatedCompositeFieldContainer[_common_pb2.MediaRef]
    text: str
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., media: _Optional[_Iterable[_Union[_common_pb2.MediaRef, _Mapping]]] = ..., text: _Optional[str] = ...) -> None: ...

class ScoreTokensRequest(_message.Message):
    __slots__ = ("prompt_token_ids", "token_ids", "media")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MEDIA_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    media: _containers.RepeatedCompositeFieldContainer[_common_pb2.MediaRef]
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., media: _Optional[_Iterable[_Union[_common_pb2.MediaRef, _Mapping]]] = ...) -> None: ...

class ScoreTokensReply(_message.Message):
    __slots__ = ("logprobs", "version")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    version: _common_pb2.WeightVersion
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class SetBudgetRequest(_message.Message):
    __slots__ = ("run", "samples", "version")
    RUN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run: str
    samples: int
    version: _common_pb2.WeightVersion
    def __init__(self, run: _Optional[str] = ..., samples: _Optional[int] = ..., version: _Optional[_Union[_common_pb2.WeightVersion, _Mapping]] = ...) -> None: ...

class SetBudgetReply(_message.Message):
    __slots__ = ("unused",)
    UNUSED_FIELD_NUMBER: _ClassVar[int]
    unused: int
    def __init__(self, unused: _Optional[int] = ...) -> None: ...
