"""What a recipe says to the parts of the loop: what is refused at once, and what follows from several settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omnifleet.config.recipe import Recipe, ScorerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import (
    ProcessorSpec,
    image_token_id,
    read_image_processor,
    read_sound_processor,
    read_video_processor,
)
from omnifleet.types import Sampling
from omnifleet_trainer.batch.extras import Replay
from omnifleet_trainer.loop.buffer import check_buffer
from omnifleet_trainer.loop.signal import SignalFilter
from omnifleet_trainer.rendering import ChatTemplate

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow


def check_recipe(recipe: Recipe) -> None:
    """What can be known before anything is opened or waited for. Raises MODEL_MISSING, INVALID_CONFIG, UNSUPPORTED."""
    model = Path(recipe.model.path)
    if not model.is_dir():
        raise OmnifleetError(
            Reason.MODEL_MISSING,
            f"model.path {recipe.model.path!r} is not a folder; `omnifleet tiny-model --print-path` makes the tiny one",
            knob="model.path",
        )
    read_image_processor(model)
    image_token_id(model)
    check_buffer(room(recipe), recipe.trainer.prompts_per_step)
    if Replay.of(recipe).experts:
        from omnifleet_trainer.policy.replay import check_replayable

        check_replayable(model, recipe.trainer.backend)


def clips_of(model: Path, changes: Mapping[str, bool | int | float]) -> ProcessorSpec | None:
    """The model's processor of clips with the run's changes, None if it takes none."""
    try:
        return read_video_processor(model, changes)
    except OmnifleetError as error:
        if error.reason is not Reason.UNSUPPORTED:
            raise
        return None


def sounds_of(model: Path) -> ProcessorSpec | None:
    """The model's processor of sounds, None if it takes none."""
    try:
        return read_sound_processor(model)
    except OmnifleetError as error:
        if error.reason is not Reason.UNSUPPORTED:
            raise
        return None


def load_data(recipe: Recipe) -> tuple[Sequence[PromptRow], Sequence[PromptRow]]:
    """Rows to train on, and held-out ones."""
    from omnifleet_trainer.data import load_mixture

    seed, data = recipe.run.seed, recipe.data
    return load_mixture(data.train_sets, seed=seed), load_mixture(
        data.heldout_sets, seed=seed, size=recipe.evaluation.size
    )


def own_scorers(recipe: Recipe) -> dict[str, tuple[ScorerConfig, ...]]:
    """Tasks that are not judged by the recipe's own reward."""
    sets = (*recipe.data.train_sets, *recipe.data.heldout_sets)
    return {split.task_name: split.reward for split in sets if split.reward}


def room(recipe: Recipe) -> int:
    """Groups that may be ready and not trained yet."""
    trainer = recipe.trainer
    return trainer.buffer_groups or (trainer.max_staleness + 1) * trainer.prompts_per_step


def dynamic_sampling(recipe: Recipe) -> dict[str, SignalFilter]:
    """What decides on groups by their rewards, as an argument of whoever asks; empty if all are kept."""
    if not recipe.objective.dynamic_sampling:
        return {}
    limit = recipe.objective.dynamic_sampling_limit
    return {"keeps": SignalFilter(prompts_per_step=recipe.trainer.prompts_per_step, limit=limit)}


def sampling_of(recipe: Recipe, template: ChatTemplate) -> Sampling:
    """As the recipe says; the worker itself ends a reply at the end of the context."""
    drawn = recipe.sampling.model_dump(exclude={"cap_to_context", "bad_words"})
    banned = tuple(template.token(word) for word in recipe.sampling.bad_words)
    return Sampling(n=recipe.trainer.generations_per_prompt, banned_token_ids=banned, **drawn)
