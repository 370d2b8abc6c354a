"""Whether the parts of a recipe fit one another. Each check raises ValueError that names the settings and what would help."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from omnifleet.types import InFlight, LogprobsMode

if TYPE_CHECKING:
    from omnifleet.config.recipe import Recipe


SETS_WITH_SOUNDS = ("avqa",)


def check_backend(recipe: Recipe) -> None:
    """What the megatron backend can run; a plan is not asked."""
    if recipe.trainer.backend != "megatron":
        return
    if recipe.model.family == "qwen2_vl":
        raise ValueError("trainer.backend = megatron has no Qwen2-VL: set model.family = qwen2_5_vl")
    for name in ("pp", "cp"):
        if getattr(recipe.trainer.parallel, name) > 1 and "nemotron" in _kind(recipe):
            raise ValueError(
                f"trainer.parallel.{name}: the megatron backend divides Nemotron Omni by dp, tp, sp and ep alone; set {name} = 1"
            )


def _kind(recipe: Recipe) -> str:
    """Type of the model, where it is known: of the tiny one by its family, of a folder that is here by its config."""
    config = Path(recipe.model.path) / "config.json"
    if not config.is_file():
        return recipe.model.family or ""
    try:
        body = json.loads(config.read_text())
    except (OSError, ValueError):  # who loads it says what is wrong
        return ""
    return str(body.get("model_type", "")).lower() if isinstance(body, dict) else ""


def check_turns(recipe: Recipe) -> None:
    """Engines and trainer that take turns on the same devices."""
    level, refit = recipe.rollout.sleep_level, recipe.refit
    if level is None:
        return
    if refit.transport == "nccl":
        raise ValueError(
            "rollout.sleep_level: two ranks of one NCCL group cannot share a device; set refit.transport = cuda_ipc or shm"
        )
    if refit.canary is not None:
        raise ValueError(
            "rollout.sleep_level: a canary needs trainer and engine on the device at once; leave refit.canary out"
        )
    if refit.without_shadow == "refuse":
        raise ValueError(
            "rollout.sleep_level: a sleeping engine serves nothing, so it gains nothing by refusing weights that it has no "
            "second place for; set refit.without_shadow = fence"
        )
    if recipe.rollout.kv_after_refit is InFlight.DRAIN:
        raise ValueError(
            "rollout.sleep_level: sleeping requests finish nothing; set kv_after_refit = recompute"
        )
    if level > 0 and recipe.rollout.kv_after_refit is InFlight.KEEP:
        raise ValueError(
            f"rollout.sleep_level {level} drops KV, so it cannot be kept: set kv_after_refit = recompute or sleep_level = 0"
        )
    if level == 2 and recipe.trainer.refit_every > 1:
        raise ValueError(
            "rollout.sleep_level 2 drops weights: set trainer.refit_every = 1, or sleep_level = 1"
        )


def check_replay(recipe: Recipe) -> None:
    """What engines return for the trainer to do over."""
    engine, sampling = recipe.rollout.engine, recipe.sampling
    if engine.return_sampling_mask and recipe.rollout.logprobs_mode is not LogprobsMode.PROCESSED:
        raise ValueError(
            "rollout.engine.return_sampling_mask is of the distribution after filters: set rollout.logprobs_mode = processed"
        )
    if engine.return_sampling_mask and sampling.top_p == 1 and sampling.top_k <= 0:
        raise ValueError(
            "rollout.engine.return_sampling_mask: sampling.top_p = 1 and top_k = -1 filter nothing; leave it out"
        )


def check_quantised(recipe: Recipe) -> None:
    """An engine with quantised weights samples from another policy than the trainer's: the loss has to know."""
    quantization, objective = recipe.rollout.engine.arguments.get("quantization"), recipe.objective
    if quantization and not objective.corrects_for_the_sampler:
        raise ValueError(
            f"rollout.engine.arguments.quantization {quantization}: replies are not sampled from the policy that trains, and "
            "nothing in the objective corrects for that; set objective.importance_correction = true"
        )


def check_adapters(recipe: Recipe) -> None:
    """Adapters train alone."""
    if recipe.trainer.lora is not None and recipe.model.freeze:
        raise ValueError("trainer.lora fixes every weight of the model: leave model.freeze out")


def check_lengths(recipe: Recipe) -> None:
    """Prompt and reply within the engine's context and the trainer's micro-batch."""
    context = recipe.rollout.engine.max_model_len
    if recipe.data.min_generation_tokens >= context:
        raise ValueError(
            f"data.min_generation_tokens {recipe.data.min_generation_tokens} leaves no prompt room in "
            f"rollout.engine.max_model_len {context}: lower it"
        )
    if recipe.data.min_generation_tokens > recipe.sampling.max_tokens:
        raise ValueError(
            f"data.min_generation_tokens {recipe.data.min_generation_tokens} > sampling.max_tokens "
            f"{recipe.sampling.max_tokens}: no reply is that long"
        )
    longest = recipe.data.max_prompt_tokens + recipe.sampling.max_tokens
    if recipe.sampling.cap_to_context:
        longest = min(longest, context)
    if longest > context:
        raise ValueError(
            f"data.max_prompt_tokens {recipe.data.max_prompt_tokens} + sampling.max_tokens {recipe.sampling.max_tokens} "
            f"= {longest} > rollout.engine.max_model_len {recipe.rollout.engine.max_model_len}: "
            "raise the last, lower the others, or set sampling.cap_to_context = true"
        )
    if longest > recipe.trainer.micro_batch_tokens:
        raise ValueError(
            f"trainer.micro_batch_tokens {recipe.trainer.micro_batch_tokens} cannot hold one sequence of {longest} tokens "
            "(data.max_prompt_tokens + sampling.max_tokens)"
        )
    overlong = recipe.objective.reward_shaping.overlong
    if overlong is not None and overlong.max_tokens > recipe.sampling.max_tokens:
        raise ValueError(
            f"objective.reward_shaping.overlong.max_tokens {overlong.max_tokens} > sampling.max_tokens "
            f"{recipe.sampling.max_tokens}: no reply is that long"
        )


def check_tasks(recipe: Recipe) -> None:
    """The held-out score speaks of what is trained."""
    trained = {split.task_name for split in recipe.data.train_sets}
    others = {split.task_name for split in recipe.data.heldout_sets} - trained
    if others and not recipe.evaluation.other_tasks:
        raise ValueError(
            f"data.heldout is of task {', '.join(sorted(others))}, data.train of {', '.join(sorted(trained))}: the score "
            "would not speak of what is trained; set data.heldout, or evaluation.other_tasks = true if it is meant"
        )


def check_sounds(recipe: Recipe) -> None:
    """Rows with sounds, engines that take them."""
    heard = [
        split
        for split in (*recipe.data.train_sets, *recipe.data.heldout_sets)
        if split.dataset in SETS_WITH_SOUNDS
    ]
    if heard and not recipe.rollout.engine.sounds_per_prompt:
        raise ValueError(
            f"data: {heard[0].dataset} asks about sounds, rollout.engine.sounds_per_prompt is 0: set it to 1"
        )


def check_filters(recipe: Recipe) -> None:
    """What is sampled is what the trainer computes."""
    filtered = recipe.sampling.top_p < 1 or recipe.sampling.top_k > 0
    masked = recipe.rollout.engine.return_sampling_mask
    if filtered and recipe.rollout.logprobs_mode is LogprobsMode.PROCESSED and not masked:
        raise ValueError(
            "sampling.top_p/top_k filter the distribution: processed logprobs would not match the trainer's; "
            "set rollout.logprobs_mode = raw, or rollout.engine.return_sampling_mask, or top_p = 1 and top_k = -1"
        )
    if recipe.sampling.bad_words and recipe.rollout.logprobs_mode is LogprobsMode.PROCESSED:
        raise ValueError(
            f"sampling.bad_words {list(recipe.sampling.bad_words)} change the distribution that is sampled, and processed "
            "logprobs with it, which the trainer does not compute: set rollout.logprobs_mode = raw"
        )
    played = [s.task_name for s in (*recipe.data.train_sets, *recipe.data.heldout_sets) if s.environment]
    if recipe.sampling.bad_words and played:
        raise ValueError(
            f"sampling.bad_words cannot be kept from {played[0]}: episodes ask over OpenAI routes, which take no bans; "
            "set rollout.engine.media_tokens = ban for media tokens, or leave them out"
        )


def check_loop(recipe: Recipe) -> None:
    """Advantages have something to compare, and the gateway has room for the staleness budget."""
    if recipe.trainer.generations_per_prompt < 2 and recipe.objective.baseline == "leave_one_out":
        raise ValueError(
            "objective.baseline = leave_one_out needs trainer.generations_per_prompt >= 2: every advantage would be 0"
        )
    per_run = (
        recipe.trainer.prompts_per_step
        * recipe.trainer.generations_per_prompt
        * (recipe.trainer.max_staleness + 1)
    )
    if per_run > recipe.gateway.queue_per_run:
        raise ValueError(
            f"the staleness budget admits {per_run} samples at once, gateway.queue_per_run is "
            f"{recipe.gateway.queue_per_run}: raise it or lower trainer.max_staleness"
        )


CHECKS = (
    check_turns,
    check_replay,
    check_quantised,
    check_adapters,
    check_lengths,
    check_tasks,
    check_sounds,
    check_filters,
    check_loop,
)
"""Of every recipe, in this order."""
