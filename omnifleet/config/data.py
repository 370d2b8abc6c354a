"""Prompts of a recipe: the sets to train on and to hold out, and the scorers that judge them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from omnifleet.config.base import StrictModel


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
