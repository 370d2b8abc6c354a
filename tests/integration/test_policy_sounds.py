"""Nemotron 3 Nano Omni with its encoder of sounds, in AutoModel: against plain transformers, and frozen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.prompt import expand_placeholders
from omnifleet.sounds import read_sound_config, sound_brackets, sound_token_id, sound_tokens
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.integration.family_world import close_to
from tests.integration.hearing_world import FROZEN, SOUNDS, batch_for, plain_logprobs
from tests.integration.nemotron_world import TEMPERATURE, both_ways, close_gradients

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing") / "model"
    write_hybrid(folder, hidden=64, sound=True)
    return folder


def opened(source: Path, *, freeze: tuple[str, ...] = (), **changes: Any) -> AutoModelPolicy:
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2)
    trainer = TrainerConfig(optimizer=optimizer, threads=1, micro_batch_tokens=300, **changes)
    return AutoModelPolicy(Job(source, trainer, ObjectiveConfig(), temperature=TEMPERATURE, freeze=freeze))


@pytest.fixture(scope="module")
def policy(source: Path) -> Iterator[AutoModelPolicy]:
    policy = opened(source)
    yield policy
    policy.close()


def weights_of(policy: AutoModelPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.export()}


def test_a_checkpoint_with_sounds_comes_back_bit_for_bit(policy: AutoModelPolicy, source: Path) -> None:
    """Statistics of its norms too, which no step moves."""
    stored, exported = load_file(source / "model.safetensors"), weights_of(policy)
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    still = set(stored) - policy.trainable_names()
    assert {n.rpartition(".")[2] for n in still if "sound" in n} == {
        "running_mean",
        "running_var",
        "fb",
        "window",
    }
    assert policy.encoder_trains and "sound_projection.linear1.weight" in policy.trainable_names()


def test_logprobs_of_sounds_equal_plain_transformers(policy: AutoModelPolicy, source: Path) -> None:
    batch = batch_for(source)
    with torch.no_grad():
        expected = [plain_logprobs(policy._model, sample, batch) for sample in batch.samples]
    policy._vision.references = policy._vision.encoded = 0
    close_to(policy.logprobs(batch), expected, rtol=1e-5)
    assert policy._vision.references == 9 and 4 <= policy._vision.encoded < 9


def test_one_run_gives_the_naive_path_s_values_and_gradients(policy: AutoModelPolicy, source: Path) -> None:
    """In float64, against every reference by itself."""
    batch = batch_for(source)
    found = list(both_ways(policy, batch, plain_logprobs))
    assert sum(name.startswith(("audio_tower.", "embed_audio.")) for name, _, _ in found) > 50
    for name, gradient, expected in found:
        if expected is None:  # the projection of clips, of which there are none
            assert not gradient.any() and "video_patch_projection" in name
        else:
            close_gradients(gradient, expected)


def test_prompts_are_those_of_transformers_processor(source: Path) -> None:
    """Two sounds and a question: its words around each, and its own count of their tokens."""
    from transformers import AutoTokenizer, NemotronH_Omni_Reasoning_V3Processor

    tokenizer = AutoTokenizer.from_pretrained(source)
    theirs = object.__new__(NemotronH_Omni_Reasoning_V3Processor)
    for name, value in {
        "tokenizer": tokenizer,
        "image_token": "<image>",
        "video_token": "<video>",
        "audio_token": tokenizer.audio_token,
        "audio_start_token": "<so_start>",
        "audio_end_token": "<so_end>",
        "audio_hop_length": 160,
        "audio_subsampling_factor": 8,
    }.items():
        setattr(theirs, name, value)
    lengths = list(SOUNDS.values())
    parts = [*({"type": "audio"} for _ in lengths), {"type": "text", "text": "what is it?"}]
    talk = [{"role": "user", "content": parts}]
    counts = [theirs._estimate_audio_num_embeddings(samples) for samples in lengths]
    words = [theirs.replace_audio_token({"num_tokens": counts}, i) for i in range(len(counts))]
    (text,), _ = theirs.get_text_with_replacements(
        [tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)],
        images_replacements=[],
        videos_replacements=[],
        audio_replacements=words,
    )
    unexpanded = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    config = read_sound_config(source)
    ours = expand_placeholders(
        unexpanded,
        sound_token_id(source),
        [sound_tokens(config, samples) for samples in lengths],
        sound_brackets(source),
    )
    assert ours == tokenizer(text)["input_ids"]


def test_a_frozen_encoder_of_sounds_hears_each_once_while_the_tower_trains(source: Path) -> None:
    policy = opened(source, freeze=FROZEN)
    try:
        before, batch = weights_of(policy), batch_for(source)
        first = policy.logprobs(batch)
        again = policy.logprobs(batch)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
        metrics = policy.train(batch)
        assert policy.encoder_trains and metrics["media_cached"] > 0 < metrics["media_encoded"]
        after = weights_of(policy)
        moved = {name for name in after if not torch.equal(after[name], before[name])}
        assert not any(name.startswith("sound_") for name in moved)
        assert any(name.startswith("vision_model.") for name in moved)
    finally:
        policy.close()


def test_places_that_are_not_a_sound_s_are_refused(policy: AutoModelPolicy, source: Path) -> None:
    """As transformers would count: a token too many."""
    batch = batch_for(source)
    sample, token = batch.samples[0], sound_token_id(source)
    sample.prompt_token_ids.insert(sample.prompt_token_ids.index(token), token)
    with pytest.raises(OmnifleetError, match="14 sound tokens for 13") as caught:
        policy._collate(batch, [0])
    assert caught.value.reason is Reason.INVALID_REQUEST


def test_saved_sounds_are_resumed(source: Path, tmp_path: Path) -> None:
    batch = batch_for(source)
    policy = opened(source)
    try:
        policy.train(batch)
        policy.save(tmp_path / "saved")
        expected, after = policy.train(batch), weights_of(policy)
    finally:
        policy.close()
    resumed = opened(source)
    try:
        resumed.load(tmp_path / "saved")
        assert resumed.train(batch)["loss"] == expected["loss"]
        assert all(torch.equal(t, after[name]) for name, t in weights_of(resumed).items())
    finally:
        resumed.close()
