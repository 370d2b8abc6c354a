"""From command-line options to a running worker: settings, tokens, logs, the chosen engine."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
import yaml

from omnifleet.auth import Scope, Tokens
from omnifleet.client.media import MediaClient
from omnifleet.config.load import apply_overrides
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import (
    image_token_id,
    read_image_processor,
    read_video_processor,
    video_token_id,
)
from omnifleet.service import PASSING_EXIT, load_section, load_tokens, peer, run_to_exit
from omnifleet.sounds import read_sound_config, sound_token_id, sound_tokens
from omnifleet.telemetry.logs import set_up_logs
from omnifleet.types import MediaKind, MediaRef
from omnifleet_rollout.engine.checkpoint import read_table
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.worker.command import run_worker

log = logging.getLogger("omnifleet.rollout.worker")


@dataclass(frozen=True, slots=True)
class Options:
    """What `omnifleet rollout serve` was given."""

    run_dir: Path
    name: str
    model: Path | None
    engine: str
    listen: str
    http_listen: str
    gateway: str
    media: str
    fake_token_s: float
    overrides: tuple[str, ...]
    log_json: bool


def start(options: Options) -> None:
    """Run one worker to its end; an OmnifleetError is one clear line and exit status 2, or 75 if another may live."""
    set_up_logs(options.name, as_json=options.log_json)
    run_to_exit(_run(options), passing_exit=PASSING_EXIT, loop_factory=uvloop.new_event_loop)


async def _run(options: Options) -> None:
    config = load_section(options.run_dir, "rollout", RolloutConfig, options.overrides)
    tokens = load_tokens(options.run_dir)
    await run_worker(
        _make_engine(options, config, tokens),
        options.name,
        config,
        tokens,
        options.run_dir,
        listen=options.listen or config.listen,
        http_listen=options.http_listen,
        gateway=options.gateway,
    )


def _make_engine(options: Options, config: RolloutConfig, tokens: Tokens) -> Engine:
    if options.engine == "fake":
        return _fake_engine(options, config, tokens)
    model = model_folder(options)  # before anything heavy is imported
    from omnifleet_rollout.engine.vllm_launch import set_environment

    set_environment(config.engine)  # torch reads its part as it is loaded
    from omnifleet_rollout.engine.vllm_engine import VllmEngine

    return VllmEngine(
        model,
        config,
        find_media=lambda: peer(options.run_dir, "media", given=options.media),
        secret=tokens.secret(Scope.SERVICE),
    )


def _fake_engine(options: Options, config: RolloutConfig, tokens: Tokens) -> Engine:
    """A fake that takes the place of the recipe's model, if there is one: its tensor table, its pictures' sizes."""
    from omnifleet_rollout.engine.fake import FakeEngine

    facts: dict[str, Any] = {
        "token_s": options.fake_token_s,
        "logprobs_mode": config.logprobs_mode,
        "max_model_len": config.engine.max_model_len,
        "max_num_seqs": config.engine.max_num_seqs,
        "experts": 4 * config.engine.return_routed_experts,
        "masks": config.engine.return_sampling_mask,
    }
    model = options.model or _model_of_recipe(options.run_dir, options.overrides)
    if model is None or not (model / "config.json").is_file():
        return FakeEngine(**facts)
    processors = {MediaKind.IMAGE: read_image_processor(model)}
    try:
        processors[MediaKind.VIDEO] = read_video_processor(model, config.engine.clips)
    except OmnifleetError:
        log.info("%s takes no clips", model)

    hears = config.engine.sounds_per_prompt > 0

    async def count_features(ref: MediaRef, run: str) -> int:
        processor = processors.get(ref.kind)
        if processor is None and ref.kind is not MediaKind.AUDIO:
            raise OmnifleetError(Reason.UNSUPPORTED, f"{model} takes no {ref.kind}")
        address = await peer(options.run_dir, "media", given=options.media)
        async with MediaClient.open(address, tokens.secret(Scope.SERVICE)) as media:
            if processor is None:
                return sound_tokens(read_sound_config(model), (await media.info(ref)).samples)
            return (await media.segment(ref, processor, run)).token_count

    return FakeEngine(
        **facts,
        table=read_table(model),
        image_token=image_token_id(model),
        video_token=video_token_id(model),
        audio_token=sound_token_id(model) if hears else None,
        count_features=count_features,
    )


def model_folder(options: Options) -> Path:
    """The checkpoint to serve. Raises MODEL_MISSING with the setting to turn, before anything heavy is imported."""
    path = options.model or _model_of_recipe(options.run_dir, options.overrides)
    if path is None:
        raise OmnifleetError(
            Reason.MODEL_MISSING,
            f"no model: {options.run_dir}/recipe.yaml names none",
            knob="--model or model.path",
        )
    if not (path / "config.json").is_file():
        raise OmnifleetError(
            Reason.MODEL_MISSING,
            f"{path} is not a checkpoint folder (no config.json)",
            knob="--model or model.path",
        )
    return path.resolve()


def _model_of_recipe(run_dir: Path, overrides: tuple[str, ...]) -> Path | None:
    recipe = run_dir / "recipe.yaml"
    body: dict[str, Any] = yaml.safe_load(recipe.read_text()) if recipe.exists() else {}
    path = (apply_overrides(body or {}, overrides).get("model") or {}).get("path")
    return Path(path) if path else None
