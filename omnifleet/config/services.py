"""Settings of each service. Listen addresses default to loopback and port 0: the system picks, the launcher records."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from omnifleet.config.base import StrictModel
from omnifleet.types import InFlight, LogprobsMode


class MediaLimits(StrictModel):
    """Checked before anything is allocated."""

    source_bytes: int = Field(64 << 20, gt=0)
    """Largest upload, bytes."""
    uploads_bytes: int = Field(1 << 30, gt=0)
    """Bytes of all uploads in memory at once; more are refused with retry advice."""
    pixels: int = Field(178_956_970, gt=0)
    """Largest width x height of one picture or frame."""
    frames: int = Field(2048, gt=0)
    """Most frames taken from one clip."""
    seconds: float = Field(3600.0, gt=0)
    """Longest audio track, clip or animation, however few of its frames are wanted."""
    decode_seconds: float = Field(20.0, gt=0)
    """Longest decode of one source; its process is then replaced."""
    decode_memory_bytes: int = Field(2 << 30, gt=0)
    """Address space that one decoder process may add."""


class MediaSources(StrictModel):
    """Where the service may read by itself when a caller names a URL or a path. Default: nowhere."""

    roots: tuple[Path, ...] = ()
    """Folders whose files may be named by path; links are resolved before the check."""
    hosts: tuple[str, ...] = ()
    """Hosts of http(s) URLs: `images.example.org`, `*.example.org`, `*` for every public one; other ports than 80 and 443
    are named too, as in `HOST:8080`."""
    networks: tuple[str, ...] = ()
    """Networks in CIDR form that may be connected to although they are not public, e.g. 10.1.0.0/16."""
    redirects: int = Field(3, ge=0)
    """Most redirects that are followed; each is checked like the first URL."""
    fetch_seconds: float = Field(20.0, gt=0)
    """Longest download of one URL, from name resolution to the last byte."""
    fetches: int = Field(8, ge=1)
    """Downloads at once; four times as many may wait."""

    @field_validator("networks")
    @classmethod
    def _are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            ip_network(network)
        return networks


class MediaQuota(StrictModel):
    """What the leases of one run may hold. None: as much as there is."""

    bytes: int | None = Field(None, ge=0)
    """Canonical bytes of the leased objects, segments and sources; each counted once."""
    objects: int | None = Field(None, ge=0)
    """How many objects, segments and sources."""


class MediaConfig(StrictModel):
    """The content-addressed store of pictures, clips and model-ready tensors."""

    listen: str = "127.0.0.1:0"
    """gRPC address."""
    http_listen: str = "127.0.0.1:0"
    """HTTP address for uploads, previews, health and metrics."""
    store: Path | None = None
    """Folder of the disk tier and the embedded index; default: the run's folder. Services of one host may share it."""
    memory_bytes: int = Field(64 << 20, gt=0)
    """Maps of blobs that the service keeps open for streaming."""
    shared_memory: Path = Path("/dev/shm")
    """Where same-host readers map objects from; one sub-folder a service."""
    shared_memory_bytes: int = Field(1 << 30, gt=0)
    """Size of the shared-memory tier."""
    shared_memory_readers: Literal["user", "everyone"] = "user"
    """Who may map objects: processes of the service's own user, or every user of the host. Only the service writes."""
    shared_memory_when: Literal["auto", "put", "read"] = "auto"
    """When content enters shared memory: as it is stored (`put`), or when a reader of this host first asks for it (`read`).

    `auto`: a clip's frames when asked for, so that what nobody reads is copied once; all else, whose first reader would
    pay more for the call than for the copy, as it is stored."""
    disk_bytes: int = Field(20 << 30, gt=0)
    """Size of the disk tier; unleased, least recently used content goes first."""
    object_store: str = ""
    """A URL that fsspec opens, e.g. s3://BUCKET/media or file:///mnt/media, below the disk; default: none.

    Content that leaves the disk then stays there; its size is left to the store's own rules."""
    object_store_options: dict[str, str | int | bool] = Field(default_factory=dict)
    """Arguments of the fsspec file system."""
    object_store_when: Literal["put", "durable"] = "put"
    """When content is uploaded: before any put is acknowledged, or for `durable` acknowledgements and before eviction."""
    index: str = Field("sqlite", pattern=r"^(sqlite|(redis|rediss|unix)://.+)$")
    """`sqlite`, or a Redis address redis://HOST:PORT/DB (rediss:// for TLS, unix:// for a socket)."""
    decoders: int = Field(1, ge=1)
    """Decoder processes."""
    processors: tuple[str, ...] = (
        "Qwen2VLImageProcessor",
        "Qwen2VLImageProcessorPil",
        "Qwen2VLVideoProcessor",
        "NemotronH_Omni_Reasoning_V3ImageProcessor",
        "NemotronH_Omni_Reasoning_V3VideoProcessor",
        "ParakeetFeatureExtractor",
    )
    """Processor classes that segments may be made with."""
    limits: MediaLimits = MediaLimits()
    sources: MediaSources = MediaSources()
    """URLs and paths that callers may name."""
    quota: MediaQuota = MediaQuota()
    """For each run that has none of its own in `quotas`."""
    quotas: dict[str, MediaQuota] = Field(default_factory=dict)
    """By run."""


class EndpointConfig(StrictModel):
    """A service that scorers may ask: an OpenAI chat completions address for `judge`, any other for `remote`."""

    url: str = Field(pattern=r"^https?://")
    """Address that is posted to, e.g. https://HOST/v1/chat/completions."""
    model: str = ""
    """Name of the model, for `judge`."""
    key_env: str = ""
    """Environment variable that holds the bearer key; empty = none is sent."""
    concurrency: int = Field(8, ge=1)
    """Requests at once."""
    timeout_s: float = Field(60.0, gt=0)
    """Longest wait for one answer."""
    attempts: int = Field(4, ge=1)
    """Requests for one score before its item is unscorable."""
    budget_calls: int = Field(100_000, ge=0)
    """Requests that the run may make in all, over restarts; then items are unscorable."""
    budget_tokens: int | None = Field(None, ge=0)
    """Tokens that the run may use in all, as the endpoint counts them; default: no limit."""
    cached: bool = True
    """Ask the same thing once only."""


class RewardConfig(StrictModel):
    """Versioned scorers in a process pool."""

    listen: str = "127.0.0.1:0"
    """gRPC address."""
    http_listen: str = "127.0.0.1:0"
    """HTTP address: health and metrics."""
    processes: int = Field(1, ge=1)
    """Scorer processes."""
    item_timeout_s: float = Field(5.0, gt=0)
    """Longest scoring of one item; its process is then replaced and the item is unscorable."""
    item_memory_bytes: int = Field(1 << 30, gt=0)
    """Address space that one scorer process may add."""
    queue_items: int = Field(4096, gt=0)
    """Items that may wait; more are refused with retry advice."""
    modules: tuple[str, ...] = ()
    """Modules whose functions may be used as `module:function` scorers."""
    endpoints: dict[str, EndpointConfig] = Field(default_factory=dict)
    """Services that the scorers `judge` and `remote` may ask, by name; no other address is ever called."""
    answers: Path | None = None
    """File with their answers and what was spent; default: answers.sqlite in the run's folder."""
    answers_kept: int = Field(100_000, gt=0)
    """Answers that stay in it; the oldest go first."""


class EnvironmentsConfig(StrictModel):
    """Processes in which the trainer plays episodes of `data.*.environment`."""

    processes: int = Field(1, ge=1)
    """Processes of environments."""
    episodes: int = Field(256, ge=1)
    """Episodes at once in one process; more wait."""
    timeout_s: float = Field(120.0, gt=0)
    """Longest life of one episode, waits for a busy gateway included."""
    hang_s: float = Field(30.0, gt=2)
    """Silence after which a process counts as blocked and is replaced."""
    gateway: str = ""
    """HTTP address of the gateway, e.g. http://HOST:PORT; default: found in the run's folder."""


class GatewayConfig(StrictModel):
    """The front door of the rollout service and the fleet registry."""

    listen: str = "127.0.0.1:0"
    """gRPC address."""
    http_listen: str = "127.0.0.1:0"
    """HTTP address: OpenAI routes, health, metrics."""
    queue_per_worker: int = Field(64, gt=0)
    """Requests that may wait for one worker."""
    queue_per_run: int = Field(1024, gt=0)
    """Samples of one run that may be in the gateway at once; more are refused with Retry-After."""
    request_timeout_s: float = Field(300.0, gt=0)
    """Longest life of one request when the caller set no deadline."""
    attempts: int = Field(4, ge=1)
    """Workers tried for one sample, continuing from the tokens already produced."""
    tool_parser: str = ""
    """vLLM's parser of tool calls by name (`hermes`, `qwen3_coder`, ...); empty: requests with tools are refused."""
    reasoning_parser: str = ""
    """vLLM's parser of reasoning by name (`qwen3`, `nemotron_v3`, ...); empty: reasoning stays in the text."""
    sessions: int = Field(65_536, gt=0)
    """Sessions whose exact tokens and workers are kept; those unused for longest go first."""
    clip_sampling: str = "uniform@1"
    """Sampling contract of clips that come as a URL."""
    clip_frames: int = Field(16, ge=0)
    """Frames that are asked of such a clip; 0: all."""
    clip_fps: float = Field(0.0, ge=0)
    """Frames per second that are asked of such a clip; 0: not given."""
    heartbeat_s: float = Field(1.0, gt=0)
    """Interval at which workers report."""
    suspect_after_s: float = Field(4.0, gt=0)
    """Silence after which a worker takes nothing new."""
    dead_after_s: float = Field(12.0, gt=0)
    """Silence after which a worker is dead, unless its process still answers."""
    hung_after_s: float = Field(120.0, gt=0)
    """Silence after which a worker is dead even though its process answers."""

    @model_validator(mode="after")
    def _times_in_order(self) -> GatewayConfig:
        if not self.heartbeat_s < self.suspect_after_s < self.dead_after_s < self.hung_after_s:
            raise ValueError(
                f"heartbeat_s {self.heartbeat_s} < suspect_after_s {self.suspect_after_s} < "
                f"dead_after_s {self.dead_after_s} < hung_after_s {self.hung_after_s} must hold"
            )
        return self


_OWN_ARGUMENTS = frozenset(
    {
        "model",
        "tokenizer",
        "dtype",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "tensor_parallel_size",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "block_size",
        "enforce_eager",
        "enable_prefix_caching",
        "limit_mm_per_prompt",
        "mm_processor_cache_gb",
        "mm_processor_kwargs",
        "mm_device_do_normalize",
        "logprobs_mode",
        "scheduling_policy",
        "worker_extension_cls",
        "distributed_executor_backend",
        "enable_sleep_mode",
        "enable_return_routed_experts",
        "return_sampling_mask",
    }
)


class EngineConfig(StrictModel):
    """One vLLM engine. Names follow vLLM's own."""

    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """Weights and compute. float32 on CPU: logprobs then compare with the trainer's."""
    max_model_len: int = Field(8192, gt=0)
    """Longest prompt plus reply, tokens."""
    max_num_seqs: int = Field(64, gt=0)
    """Requests in one engine step."""
    max_num_batched_tokens: int | None = Field(None, gt=0)
    """Tokens in one engine step; default: vLLM's."""
    tensor_parallel_size: int = Field(1, ge=1)
    """GPUs of one engine."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory for weights and KV cache."""
    kv_cache_memory_bytes: int | None = Field(None, gt=0)
    """KV cache size; needed on CPU, where the default would claim most of the machine."""
    block_size: int | None = Field(None, gt=0)
    """Tokens of a KV block; a multiple of 32 on CPU."""
    enforce_eager: bool = True
    """No CUDA graphs."""
    enable_prefix_caching: bool = True
    """Share KV of equal prefixes; keyed by weight version, so old KV never serves new weights."""
    images_per_prompt: int = Field(2, ge=0)
    """Most pictures in one prompt."""
    videos_per_prompt: int = Field(0, ge=0)
    """Most clips in one prompt."""
    sounds_per_prompt: int = Field(0, ge=0)
    """Most sounds in one prompt, for models that take them."""
    video_frames: int | None = Field(None, gt=0)
    """Frames of the longest clip, for vLLM's estimate of memory; default: vLLM's."""
    clips: dict[str, bool | int | float] = Field(default_factory=dict)
    """Settings of the checkpoint's processor of clips that the run changes, e.g. {video_target_num_patches: 1024}. The trainer
    takes the same; they are part of a segment's fingerprint, so neither could differ from the other unseen."""
    processor_cache_gb: float = Field(1.0, ge=0)
    """vLLM's own cache of processed media, GiB."""
    media_tokens: Literal["stop", "ban"] = "stop"
    """A media placeholder that the model itself would write: `stop` ends the reply with it and leaves the distribution as the
    trainer computes it; `ban` makes it impossible, as conversations of several turns need."""
    return_routed_experts: bool = False
    """Return which experts each token went to (router replay). Mixture-of-experts models on GPU."""
    return_sampling_mask: bool = False
    """Return which tokens top-k and top-p left to choose from, at each token. vLLM 0.32 on GPU."""
    bulk_tokens: int = Field(16, ge=1)
    """Tokens that the engine hands over at once where nobody reads a reply before its end; so many more are made again, at most,
    when a worker is lost. 1: each alone."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of one engine; default: all."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More of vLLM's engine arguments, by its names (`mamba_ssm_cache_dtype`, `attention_backend`, ...); null: its default. An
    engine that does not know one does not start."""

    @field_validator("arguments")
    @classmethod
    def _are_not_ours(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        ours = sorted(set(arguments) & _OWN_ARGUMENTS)
        if ours:
            raise ValueError(f"{', '.join(ours)} cannot be set here: other settings of the recipe decide it")
        return arguments


class RolloutConfig(StrictModel):
    """Workers: one stock vLLM engine each."""

    workers: int = Field(1, ge=1)
    """Workers at start; `omnifleet fleet scale` changes it while a run goes on."""
    max_workers: int = Field(8, ge=1)
    """The launcher never starts more."""
    pool: str = "default"
    """Pool that the workers join."""
    listen: str = "127.0.0.1:0"
    """gRPC address of each worker."""
    engine: EngineConfig = EngineConfig()
    logprobs_mode: LogprobsMode = LogprobsMode.PROCESSED
    """What the logprobs mean; the trainer refuses samples of another mode."""
    kv_after_refit: InFlight = InFlight.RECOMPUTE
    """What a refit does with running requests."""
    peers_after_s: float = Field(5.0, gt=0)
    """Seconds behind the pool's weights after which a worker takes them from a READY peer, if the trainer has not come."""
    drain_timeout_s: float = Field(60.0, gt=0)
    """How long a draining worker may finish its requests."""
    sleep_level: Literal[0, 1, 2] | None = None
    """Set: engines and trainer have the same devices and take turns. While the policy trains, engines sleep: 0 = they only
    pause; 1 = their weights go to host memory, KV is dropped; 2 = both are dropped, and every refit is a complete one."""

    @model_validator(mode="after")
    def _start_within_limit(self) -> RolloutConfig:
        if self.workers > self.max_workers:
            raise ValueError(f"workers {self.workers} > max_workers {self.max_workers}: raise max_workers")
        return self
