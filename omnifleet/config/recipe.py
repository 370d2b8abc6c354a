"""A recipe: everything about one training run, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationInfo, model_validator

from omnifleet.config.base import StrictModel
from omnifleet.config.cluster import ClusterConfig, Split, filled, not_there, problems
from omnifleet.config.metrics import MetricsConfig
from omnifleet.config.objective import ObjectiveConfig as ObjectiveConfig
from omnifleet.config.parallel import ParallelConfig
from omnifleet.config.services import (
    EnvironmentsConfig,
    GatewayConfig,
    MediaConfig,
    RewardConfig,
    RolloutConfig,
)
from omnifleet.types import InFlight, LogprobsMode

PLAN = "plan"
"""Key of a validation context: the recipe is to be looked at and laid out, so what no backend can run is no error."""


def is_plan(info: ValidationInfo) -> bool:
    """Whether this validation is of a plan."""
    return bool((info.context or {}).get(PLAN))


class RunConfig(StrictModel):
    """Who the run is and where its files are."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Name of the run; its folder is `root/name`."""
    root: Path = Path("runs")
    """Folder of all runs."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and initialisation."""


UNTAUGHT = ("nemotron_omni", "nemotron_omni_moe")
"""Families of tiny models that no lesson exists for."""


class ModelConfig(StrictModel):
    """The policy's checkpoint."""

    path: str
    """Hugging Face folder, or `tiny`: the small model that `omnifleet tiny-model` makes."""
    family: Literal["qwen2_vl", "qwen2_5_vl", "nemotron_omni", "nemotron_omni_moe"] | None = None
    """Of the tiny model; default: qwen2_vl, and qwen2_5_vl for the megatron backend, which has no Qwen2-VL. The last two have
    random weights: no lessons exist for them. A folder says its own."""
    freeze: tuple[str, ...] = ()
    """Glob patterns over parameter names that stay fixed; a pattern that matches nothing is an error."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""


class ScorerConfig(StrictModel):
    """One scorer of the reward."""

    name: str
    """Registered name, or `module:function`."""
    version: str = ""
    """Version; default: newest."""
    weight: float = Field(1.0, gt=0)
    """Relative weight; weights are normalised to sum 1."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the scorer."""


class SplitConfig(StrictModel):
    """One set of prompts."""

    dataset: str = "synthetic-clevr"
    """Name of a dataset, see `omnifleet_trainer.data`; `custom` reads a table of your own at `path`."""
    split: str = "train"
    """Split of the dataset."""
    size: int | None = Field(None, gt=0)
    """Rows to take; default: all."""
    path: Path | None = None
    """Of `custom`: a .jsonl or .parquet file, or a folder of Parquet, JSON lines or Arrow files (`save_to_disk`). Of
    `avqa`, `geometry3k`, `gym-video`, `mmpr-tiny`, `refcoco` and a local `clevr-cogent`: the folder with the set's files."""
    columns: dict[str, str] = Field(default_factory=lambda: {"text": "question", "answer": "answer"})
    """Of `custom`: which columns are `text`, `answer`, `images` and `id`."""
    revision: str = ""
    """Of a set with a `path`: branch, tag or commit on the Hugging Face hub that is downloaded to it on first use; default:
    nothing is downloaded."""
    prompt: Path | None = None
    """Template file with {} for the text; default: the set's own, for `custom` the text alone."""
    task: str = ""
    """What the rows ask for; default: the dataset's name. Training and held-out rows must be of the same tasks."""
    weight: float | None = Field(None, gt=0)
    """Share of this set in a mixture; default: every epoch shows every row once. All sets have one, or none."""
    reward: tuple[ScorerConfig, ...] = ()
    """Scorers of this set's task; default: the recipe's."""
    environment: str = ""
    """`module:Class` of an `omnifleet.environments.Environment` that plays the rows. Without a `dataset` the rows are its own
    tasks. Sets with clips or sounds are played by `omnifleet.environments.ask_once:AskOnce` if none is named."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's class."""

    @property
    def task_name(self) -> str:
        """The task of the rows."""
        return self.task or (self.environment if self.dataset == "environment" else self.dataset)

    @model_validator(mode="before")
    @classmethod
    def _own_tasks(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if body.get("environment") and "dataset" not in body:
            return {**body, "dataset": "environment"}
        if body.get("dataset") in ("avqa", "gym-video") and not body.get("environment"):
            return {**body, "environment": "omnifleet.environments.ask_once:AskOnce"}
        return body

    @model_validator(mode="after")
    def _environment_is_named(self) -> SplitConfig:
        if self.dataset == "environment" and not self.environment:
            raise ValueError("dataset = environment needs environment: module:Class")
        if self.params and not self.environment:
            raise ValueError("params are those of an environment: none is named")
        return self

    @model_validator(mode="after")
    def _custom_has_a_path(self) -> SplitConfig:
        if self.dataset == "custom" and self.path is None:
            raise ValueError("dataset = custom needs a path")
        return self


class DataConfig(StrictModel):
    """Prompts to train on and to hold out."""

    train: SplitConfig | tuple[SplitConfig, ...] = SplitConfig()
    """One set, or a list of sets that are mixed."""
    heldout: SplitConfig | tuple[SplitConfig, ...] = SplitConfig(split="val")
    """One set, or a list of sets, each of `evaluation.size` rows."""
    max_prompt_tokens: int = Field(4096, gt=0)
    """Longest expanded prompt; a longer one is dropped whole and counted, media is never cut."""
    min_generation_tokens: int = Field(1, ge=1)
    """Room that a prompt must leave for its reply within `rollout.engine.max_model_len`; one that leaves less is too long."""
    max_epochs: int = Field(1_000, ge=1)
    """Passes over the training set."""

    @property
    def train_sets(self) -> tuple[SplitConfig, ...]:
        """The sets that are trained on."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def heldout_sets(self) -> tuple[SplitConfig, ...]:
        """The sets that are held out."""
        return self.heldout if isinstance(self.heldout, tuple) else (self.heldout,)

    @model_validator(mode="after")
    def _weights_and_rewards_fit(self) -> DataConfig:
        weights = [split.weight for split in self.train_sets]
        if any(weights) and not all(weights):
            raise ValueError(f"weights of data.train are {weights}: give every set one, or none")
        played: dict[str, tuple[str, dict[str, Any]]] = {}
        for split in (*self.train_sets, *self.heldout_sets):
            if played.setdefault(split.task_name, (split.environment, split.params)) != (
                split.environment,
                split.params,
            ):
                raise ValueError(
                    f"task {split.task_name} has two environments: sets of one task are played alike"
                )
        rewards: dict[str, tuple[ScorerConfig, ...]] = {}
        for split in (*self.train_sets, *self.heldout_sets):
            if rewards.setdefault(split.task_name, split.reward) != split.reward:
                raise ValueError(f"task {split.task_name} has two rewards: sets of one task are judged alike")
        return self


class SamplingConfig(StrictModel):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; the trainer divides its logits by the same value."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; 1 = off."""
    top_k: int = Field(-1, ge=-1)
    """Best-k; -1 = off."""
    max_tokens: int = Field(1024, gt=0)
    """Longest reply, tokens."""
    cap_to_context: bool = False
    """Replies end where `rollout.engine.max_model_len` does, also before `max_tokens`; off: every prompt leaves all of it."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    bad_words: tuple[str, ...] = ()
    """Words of one token each that are never sampled. Only with raw logprobs, which are those without the ban."""


class OptimizerConfig(StrictModel):
    """AdamW with linear warm-up, then constant."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 = control run, weights never move."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Steps from warmup_start to the peak."""
    warmup_start: float = Field(0.1, gt=0, le=1)
    """First learning rate, as a share of the peak."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""


class LoraConfig(StrictModel):
    """Adapters beside fixed weights: W + alpha / rank x B A. automodel only."""

    targets: tuple[str, ...] = Field(("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"), min_length=1)
    """Glob patterns over the names of linear layers; a pattern that matches nothing is an error."""
    rank: int = Field(16, ge=1)
    """Width of an adapter."""
    alpha: int = Field(32, ge=1)
    """Scale, times 1 / rank."""


class TrainerConfig(StrictModel):
    """The loop, the policy and the ledger."""

    listen: str = "127.0.0.1:0"
    """gRPC address."""
    http_listen: str = "127.0.0.1:0"
    """HTTP address: health and metrics."""
    backend: Literal["automodel", "megatron", "fake"] = "automodel"
    """Library that updates the policy; `fake` computes nothing, for tests of everything around it."""
    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and optimiser are float32."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank of the policy; default: all of one, shares of several."""
    steps: int = Field(100, ge=1)
    """Training steps of the run."""
    prompts_per_step: int = Field(32, ge=1)
    """Groups that one step trains on."""
    generations_per_prompt: int = Field(16, ge=1)
    """Samples of one group (G)."""
    batch_samples: int | None = Field(None, ge=1)
    """Samples of one optimiser update; default: all of the step. Must divide them."""
    micro_batch_tokens: int = Field(16384, gt=0)
    """Padded tokens of one forward pass; must hold the longest sequence."""
    packing: bool | None = None
    """Sequences of a micro-batch one after the other, so that none is padded. Default: on with megatron; automodel pads
    sequences of like length and has no other way."""
    recompute: bool = False
    """Keep each layer's input alone, and compute the layer again in the backward pass: less memory, more time."""
    lora: LoraConfig | None = None
    """Set ({} suffices): adapters train, and no other weight. Engines get the sums."""
    logprob_chunk: int | None = Field(None, gt=0)
    """Positions whose logits exist at once; each is computed again in the backward pass. Default: all, once."""
    max_staleness: int = Field(1, ge=0)
    """Steps that a sample's oldest token may lag behind the weights it trains; 0 = synchronous."""
    buffer_groups: int | None = Field(None, ge=1)
    """Groups that may be running or ready at once; default: (max_staleness + 1) x prompts_per_step."""
    groups_at_once: int | None = Field(None, ge=1)
    """Groups that are generated at once; default: as many as the staleness budget admits. Fewer spread generation over
    the step: engines that are quicker than the trainer then stay busy beside it, and samples are fresher."""
    sampler: Literal["fifo", "freshest", "in_order"] = "fifo"
    """Which ready groups a step takes."""
    attempts_per_prompt: int = Field(5, ge=1)
    """Tries of a prompt that fails for reasons of its own before it is given up, with a typed outcome."""
    rollout_timeout_s: float = Field(300.0, gt=0)
    """Longest life of one group's rollout."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for the groups of one step."""
    refit_every: int = Field(1, ge=1)
    """Steps between refits."""
    refit_timeout_s: float = Field(60.0, gt=0)
    """Deadline of each phase of a refit, for each worker."""
    turn_timeout_s: float = Field(300.0, gt=0)
    """With rollout.sleep_level: longest time in which the devices change hands, engines and policy each."""
    peak_tflops: float | None = Field(None, gt=0)
    """Dense peak of the policy's devices in its dtype, 10^12 operations a second (one H200, bfloat16: 989); absent = no
    `mfu` metric."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    checkpoints_kept: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    checkpoints_best: int = Field(0, ge=0)
    """Best checkpoints by `checkpoint_metric` that stay beside the newest."""
    checkpoint_metric: str = "heldout_reward"
    """Metric of a step's record that ranks checkpoints; one without it ranks last."""
    checkpoint_metric_higher: bool = True
    """Whether more of it is better."""
    checkpoint_in_background: bool = True
    """Copy to host memory, then write beside the next step; off: the loop waits, without the copy."""
    save_by_s: float | None = Field(None, gt=0)
    """Seconds after which the process must have saved: it ends with a checkpoint before a step that might not fit, and
    the same command resumes. For job time limits."""
    ledger_payload_steps: int | None = Field(None, ge=1)
    """Steps whose tokens and texts the ledger keeps; older ones keep their rows (reward, versions, digests) only.
    Default: all. What a kept checkpoint may need stays."""
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainerConfig:
        samples = self.prompts_per_step * self.generations_per_prompt
        if self.batch_samples is not None and samples % self.batch_samples:
            raise ValueError(
                f"batch_samples {self.batch_samples} does not divide prompts_per_step x generations_per_prompt = {samples}"
            )
        return self

    @model_validator(mode="after")
    def _backend_has_the_ranks(self, info: ValidationInfo) -> TrainerConfig:
        if is_plan(info):
            return self
        if (refused := self.parallel.refused(self.backend)) is not None:
            raise ValueError(f"parallel.{refused[0]}: {refused[1]}")
        if self.lora is not None and self.backend != "automodel":
            raise ValueError(f"trainer.lora needs backend = automodel: {self.backend} has no adapters")
        if self.packing and self.backend != "megatron":
            raise ValueError(f"trainer.packing needs backend = megatron: {self.backend} pads")
        return self

    @model_validator(mode="after")
    def _loop_can_turn(self) -> TrainerConfig:
        if self.buffer_groups is not None and self.buffer_groups < self.prompts_per_step:
            raise ValueError(
                f"buffer_groups {self.buffer_groups} < prompts_per_step {self.prompts_per_step}: a step could never fill"
            )
        if self.refit_every > self.max_staleness + 1:
            raise ValueError(
                f"refit_every {self.refit_every} > max_staleness {self.max_staleness} + 1: samples would be too old to "
                "train before newer weights serve; raise max_staleness or lower refit_every"
            )
        return self


class CanaryConfig(StrictModel):
    """Logprobs of fixed tokens, compared between trainer and engine after each refit."""

    prompt: tuple[int, ...] = tuple(range(10, 26))
    """Token ids of the prompt, text only."""
    reply: tuple[int, ...] = tuple(range(26, 34))
    """Token ids that are scored after it."""
    tolerance: float = Field(0.25, gt=0)
    """Largest difference of one token's logprob, nats. In float32 1e-3 is met; bfloat16 needs some 0.1."""


class RefitConfig(StrictModel):
    """How weights travel from the trainer to the engines; see docs/refit.md."""

    transport: Literal["shm", "nccl", "cuda_ipc"] = "shm"
    """shm: files in shared memory of one host. nccl: broadcast between GPUs (gloo without GPUs). cuda_ipc: same GPU."""
    rolling: bool = False
    """Commit worker after worker, so that the fleet never pauses as a whole."""
    host: str = ""
    """nccl: the trainer's address as workers reach it; default: that of its host's name."""
    bucket_bytes: int = Field(1 << 30, ge=4096)
    """nccl and cuda_ipc: size of a bucket; a larger tensor has one for itself."""
    sparse: bool = True
    """Where few values changed since the version before, send these alone, if that is smaller."""
    canary: CanaryConfig | None = None
    """Set ({} suffices): a worker beyond the tolerance is quarantined and put back to the version before, which costs the
    trainer the memory of one more version (of what changed in it, where transport is shm)."""


class EvaluationConfig(StrictModel):
    """Held-out score: greedy replies through the same services."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 = at start and end only."""
    size: int = Field(128, ge=1)
    """Held-out prompts."""
    controls: bool = False
    """At the end also score without pictures and with shuffled pictures."""
    generations: int = Field(1, ge=1)
    """Replies to a held-out prompt: 1 is greedy, more are sampled as in training and their rewards averaged."""
    pass_at: tuple[int, ...] = ()
    """k of pass@k, at most `generations` each: chance that the best of k replies earns `pass_reward`."""
    pass_reward: float = 1.0
    """Reward from which a reply counts as passed."""
    other_tasks: bool = False
    """Held-out rows may be of tasks that are not trained."""
    patience: int | None = Field(None, ge=1)
    """End the run after so many evaluations in a row that did not beat the best one by `min_gain`."""
    min_gain: float = Field(0.0, ge=0)
    """Gain in held-out reward that counts."""

    @model_validator(mode="after")
    def _k_is_drawn(self) -> EvaluationConfig:
        if any(not 1 <= k <= self.generations for k in self.pass_at):
            raise ValueError(
                f"pass_at {list(self.pass_at)} needs 1 <= k <= evaluation.generations = {self.generations}"
            )
        if self.patience is not None and self.every == 0:
            raise ValueError("evaluation.patience needs evaluation.every > 0: nothing would be compared")
        return self


class AuthConfig(StrictModel):
    """Who may call."""

    tokens_file: Path | None = None
    """File of scope -> secret; default: generated in the run's folder."""


class Recipe(StrictModel):
    """One training run. Unknown keys are errors; `omnifleet config check` says what is wrong before anything starts."""

    run: RunConfig
    model: ModelConfig
    cluster: ClusterConfig | None = None
    data: DataConfig = DataConfig()
    reward: tuple[ScorerConfig, ...] = Field(min_length=1)
    """Scorers whose weighted sum is the reward."""
    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    trainer: TrainerConfig = TrainerConfig()
    refit: RefitConfig = RefitConfig()
    rollout: RolloutConfig = RolloutConfig()
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    reward_service: RewardConfig = RewardConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    auth: AuthConfig = AuthConfig()

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.run.root / self.run.name

    @property
    def longest_prompt(self) -> int:
        """Tokens that an expanded prompt may have: `data.max_prompt_tokens`, and what the context leaves before a reply."""
        room = self.rollout.engine.max_model_len - self.data.min_generation_tokens
        return min(self.data.max_prompt_tokens, room)

    @model_validator(mode="after")
    def _megatron_can(self, info: ValidationInfo) -> Recipe:
        if self.trainer.backend != "megatron" or is_plan(info):
            return self
        if self.trainer.dtype != "float32":
            raise ValueError("trainer.backend = megatron computes in float32: set trainer.dtype = float32")
        if self.trainer.logprob_chunk is not None:
            raise ValueError("trainer.backend = megatron has no trainer.logprob_chunk: leave it out")
        if self.model.family == "qwen2_vl":
            raise ValueError("trainer.backend = megatron has no Qwen2-VL: set model.family = qwen2_5_vl")
        if self.model.family in UNTAUGHT:
            raise ValueError(
                "trainer.backend = megatron has no Nemotron Omni: set trainer.backend = automodel, or model.family = qwen2_5_vl"
            )
        return self

    @property
    def colocated(self) -> bool:
        """True if trainer and engines take turns on the same devices."""
        return self.rollout.sleep_level is not None

    @model_validator(mode="after")
    def _turns_can(self) -> Recipe:
        level, refit = self.rollout.sleep_level, self.refit
        if level is None:
            return self
        if refit.transport == "nccl":
            raise ValueError(
                "rollout.sleep_level: two ranks of one NCCL group cannot share a device; set refit.transport = cuda_ipc or shm"
            )
        if refit.canary is not None:
            raise ValueError(
                "rollout.sleep_level: a canary needs trainer and engine on the device at once; leave refit.canary out"
            )
        if self.rollout.kv_after_refit is InFlight.DRAIN:
            raise ValueError(
                "rollout.sleep_level: sleeping requests finish nothing; set kv_after_refit = recompute"
            )
        if level > 0 and self.rollout.kv_after_refit is InFlight.KEEP:
            raise ValueError(
                f"rollout.sleep_level {level} drops KV, so it cannot be kept: set kv_after_refit = recompute or sleep_level = 0"
            )
        if level == 2 and self.trainer.refit_every > 1:
            raise ValueError(
                "rollout.sleep_level 2 drops weights: set trainer.refit_every = 1, or sleep_level = 1"
            )
        return self

    @model_validator(mode="after")
    def _replay_can(self) -> Recipe:
        engine, sampling = self.rollout.engine, self.sampling
        wanted = [n for n in ("return_routed_experts", "return_sampling_mask") if getattr(engine, n)]
        if not wanted:
            return self
        if engine.return_sampling_mask and self.rollout.logprobs_mode is not LogprobsMode.PROCESSED:
            raise ValueError(
                "rollout.engine.return_sampling_mask is of the distribution after filters: set rollout.logprobs_mode = processed"
            )
        if engine.return_sampling_mask and sampling.top_p == 1 and sampling.top_k <= 0:
            raise ValueError(
                "rollout.engine.return_sampling_mask: sampling.top_p = 1 and top_k = -1 filter nothing; leave it out"
            )
        if engine.return_routed_experts and self.trainer.recompute:
            raise ValueError(
                "trainer.recompute would route anew: set rollout.engine.return_routed_experts = false"
            )
        if engine.return_routed_experts and self.trainer.backend == "megatron":
            raise ValueError(
                "trainer.backend = megatron replays no routing: set rollout.engine.return_routed_experts = false"
            )
        sets = (*self.data.train_sets, *self.data.heldout_sets)
        played = [split.task_name for split in sets if split.environment]
        if played:
            raise ValueError(
                f"rollout.engine.{wanted[0]}: task {played[0]} is played by an environment, and episodes of several turns "
                "are not replayed; leave it out"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _follows_from_the_cluster(cls, body: Any) -> Any:
        return filled(body) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _fits_the_cluster(self, info: ValidationInfo) -> Recipe:
        if self.cluster is None:
            return self
        dp, engines = self.trainer.parallel.dp, self.rollout.workers
        found = list(problems(self.cluster, self._split(), dp=dp, engines=engines, turns=self.colocated))
        found += [] if is_plan(info) else not_there(self.cluster)
        if found:
            raise ValueError("; ".join(found))
        return self

    def _split(self) -> Split:
        trainer, sizes = self.trainer, self.trainer.parallel
        return Split(
            ranks=sizes.tp * sizes.pp * sizes.cp,
            tp=sizes.tp,
            experts=sizes.ep,
            engine=self.rollout.engine.tensor_parallel_size,
            samples=trainer.batch_samples or trainer.prompts_per_step * trainer.generations_per_prompt,
        )

    @model_validator(mode="after")
    def _adapters_train_alone(self) -> Recipe:
        if self.trainer.lora is not None and self.model.freeze:
            raise ValueError("trainer.lora fixes every weight of the model: leave model.freeze out")
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        context = self.rollout.engine.max_model_len
        if self.data.min_generation_tokens >= context:
            raise ValueError(
                f"data.min_generation_tokens {self.data.min_generation_tokens} leaves no prompt room in "
                f"rollout.engine.max_model_len {context}: lower it"
            )
        if self.data.min_generation_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"data.min_generation_tokens {self.data.min_generation_tokens} > sampling.max_tokens "
                f"{self.sampling.max_tokens}: no reply is that long"
            )
        longest = self.data.max_prompt_tokens + self.sampling.max_tokens
        if self.sampling.cap_to_context:
            longest = min(longest, context)
        if longest > context:
            raise ValueError(
                f"data.max_prompt_tokens {self.data.max_prompt_tokens} + sampling.max_tokens {self.sampling.max_tokens} "
                f"= {longest} > rollout.engine.max_model_len {self.rollout.engine.max_model_len}: "
                "raise the last, lower the others, or set sampling.cap_to_context = true"
            )
        if longest > self.trainer.micro_batch_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens {self.trainer.micro_batch_tokens} cannot hold one sequence of {longest} tokens "
                "(data.max_prompt_tokens + sampling.max_tokens)"
            )
        trained = {split.task_name for split in self.data.train_sets}
        others = {split.task_name for split in self.data.heldout_sets} - trained
        if others and not self.evaluation.other_tasks:
            raise ValueError(
                f"data.heldout is of task {', '.join(sorted(others))}, data.train of {', '.join(sorted(trained))}: the score "
                "would not speak of what is trained; set data.heldout, or evaluation.other_tasks = true if it is meant"
            )
        filtered = self.sampling.top_p < 1 or self.sampling.top_k > 0
        masked = self.rollout.engine.return_sampling_mask
        if filtered and self.rollout.logprobs_mode is LogprobsMode.PROCESSED and not masked:
            raise ValueError(
                "sampling.top_p/top_k filter the distribution: processed logprobs would not match the trainer's; "
                "set rollout.logprobs_mode = raw, or rollout.engine.return_sampling_mask, or top_p = 1 and top_k = -1"
            )
        if self.sampling.bad_words and self.rollout.logprobs_mode is LogprobsMode.PROCESSED:
            raise ValueError(
                f"sampling.bad_words {list(self.sampling.bad_words)} change the distribution that is sampled, and processed "
                "logprobs with it, which the trainer does not compute: set rollout.logprobs_mode = raw"
            )
        played = [s.task_name for s in (*self.data.train_sets, *self.data.heldout_sets) if s.environment]
        if self.sampling.bad_words and played:
            raise ValueError(
                f"sampling.bad_words cannot be kept from {played[0]}: episodes ask over OpenAI routes, which take no bans; "
                "set rollout.engine.media_tokens = ban for media tokens, or leave them out"
            )
        if self.trainer.generations_per_prompt < 2 and self.objective.baseline == "leave_one_out":
            raise ValueError(
                "objective.baseline = leave_one_out needs trainer.generations_per_prompt >= 2: every advantage would be 0"
            )
        overlong = self.objective.reward_shaping.overlong
        if overlong is not None and overlong.max_tokens > self.sampling.max_tokens:
            raise ValueError(
                f"objective.reward_shaping.overlong.max_tokens {overlong.max_tokens} > sampling.max_tokens "
                f"{self.sampling.max_tokens}: no reply is that long"
            )
        per_run = (
            self.trainer.prompts_per_step
            * self.trainer.generations_per_prompt
            * (self.trainer.max_staleness + 1)
        )
        if per_run > self.gateway.queue_per_run:
            raise ValueError(
                f"the staleness budget admits {per_run} samples at once, gateway.queue_per_run is "
                f"{self.gateway.queue_per_run}: raise it or lower trainer.max_staleness"
            )
        return self
