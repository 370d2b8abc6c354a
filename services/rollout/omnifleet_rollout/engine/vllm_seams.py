"""Every place where we touch vLLM below its public API. Run on 0.32.0 (CPU build); on 0.25.1 compared with its source.

| seam                                         | why                                             | without it            |
| -------------------------------------------- | ----------------------------------------------- | --------------------- |
| mm_processor._get_mm_fields_config           | model-ready tensors -> engine input             | no pictures           |
| renderer.mm_processor_cache (0.32 only)      | pixels cross to the engine process once         | they cross each time  |
| parakeet.ParakeetExtractor                   | samples -> what the encoder of sounds takes     | no sounds             |
| output_processor.request_states              | tokens that nobody waits for come in bulk       | each comes alone      |
| layerwise_info of the reload module          | find layers that a load did not reach           | silent old weights    |
|                                              | forget a load that broke half-way               | silent wrong weights  |
| model.embed_multimodal (wrapped)             | count encoded items                             | no counter            |
| quant_method.process_weights_after_loading   | CPU: tied heads keep their packed copy          | silent old weights    |
| model_runner.sample_tokens (wrapped on CPU)  | CPU generators cannot be rewound                | the engine dies       |

`check_front` and `check_worker` look for them at start and raise UNSUPPORTED with the name that is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omnifleet.errors import OmnifleetError, Reason

CHECKED = ("0.25.1", "0.32.0")

LANGUAGE_IN_ENCODER = frozenset(
    {
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3",
    }
)
"""What vLLM keeps as the encoder's output of a clip holds, in these, rows of the language model's embedding: it is stale after
every refit, also where the vision tower is frozen."""

SOUND_INPUTS = ("input_audio_features", "feature_attention_mask", "audio_num_clips")
"""What the encoder of sounds takes: float32 [pieces, frames, mels], bool [pieces, frames], pieces of each sound."""

BYPASSED = {
    # load_weights of these models calls default_weight_loader directly, which the layerwise reload does not see.
    "NemotronH_Nano_VL_V2": {
        "mlp1.": "mlp1.",
        "vision_projector.vision_final_layernorm.": "vision_final_layernorm.",
    },
}
"""Model -> what such checkpoint names begin with -> what their layers begin with."""

UNLOADED = {"NemotronH_Nano_VL_V2": frozenset({"ls1", "ls2"})}
"""Model -> parameters that its loader never writes: the scales of RADIO's layers stay 1, whatever a checkpoint says."""


def check_front(engine: Any, *, media: bool, sounds: bool = False) -> None:
    """Seams of the front-end process. Raises UNSUPPORTED."""
    if media:
        _need(engine.renderer.get_mm_processor(), "_get_mm_fields_config")
        _need(engine.renderer, "mm_processor_cache")
    if sounds:
        from vllm.model_executor.models import parakeet

        _need(parakeet, "ParakeetExtractor")
    from vllm.v1.engine.output_processor import RequestState

    for name in ("request_states", "external_req_ids"):
        _need(engine.output_processor, name)
    _need(RequestState, "make_request_output")
    if "sent_tokens_offset" not in RequestState.make_request_output.__code__.co_names:
        raise _gone("RequestState.sent_tokens_offset")


def media_item(engine: Any, tensors: Mapping[str, torch.Tensor], modality: str) -> Any:
    """Model-ready tensors of one media item as vLLM's MultiModalKwargsItem."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalKwargsItems

    inputs = BatchFeature(dict(tensors))
    fields = engine.renderer.get_mm_processor()._get_mm_fields_config(inputs, {})
    return MultiModalKwargsItems.from_hf_inputs(inputs, fields)[modality][0]


def sound_extractor(config: Mapping[str, Any]) -> Any:
    """vLLM's maker of features of sounds, for an encoder of these settings."""
    from transformers import PreTrainedConfig
    from vllm.model_executor.models.parakeet import ParakeetExtractor

    return ParakeetExtractor(PreTrainedConfig(**config))


def extract_sound(extractor: Any, samples: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """What it makes of one track. Its three steps would compile themselves at the first, for seconds and with a C++ compiler."""
    with torch.compiler.set_stance("force_eager"):
        made = extractor([samples.copy()])
    return {name: np.asarray(made[name]) for name in SOUND_INPUTS}


def send_once(engine: Any, key: str, make_item: Callable[[], Any]) -> Any:
    """The item, or None if the engine process has it: vLLM's sender cache mirrors the receiver's, entry by entry."""
    cache = engine.renderer.mm_processor_cache
    if cache is None:
        return make_item()
    item = None if cache.is_cached_item(key) else make_item()
    return cache.get_and_update_item((item, []), key)[0]


def hold_back(engine: Any, request_id: str, tokens: int) -> None:
    """From now on hand the tokens of a request over `tokens` at a time; the rest comes at its end.

    vLLM's own stream interval, set for one request: 0.25.1 has it for a whole engine only.
    """
    processor = engine.output_processor
    for internal in processor.external_req_ids.get(request_id, ()):
        state = processor.request_states[internal]
        state.sent_tokens_offset = state.detokenizer.num_output_tokens()
        state.stream_interval = tokens


def hand_over(engine: Any) -> None:
    """Give each request's reader the tokens that are held back now."""
    for state in list(engine.output_processor.request_states.values()):
        if state.stream_interval <= 1:
            continue
        held = state.detokenizer.output_token_ids[state.sent_tokens_offset :]
        if not held:
            continue
        interval, state.stream_interval = state.stream_interval, 1
        state.sent_tokens_offset += len(held)
        try:
            state.queue.put(state.make_request_output(held, None, None, None))
        finally:
            state.stream_interval = interval


def check_worker(model: torch.nn.Module) -> None:
    """Seams of the process that holds the model. Raises UNSUPPORTED."""
    from vllm.model_executor.model_loader.reload import layerwise

    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info"):
        _need(layerwise, name)
    if hasattr(model, "get_language_model"):
        _need(model, "embed_multimodal")


def count_encoded(model: torch.nn.Module, counter: Callable[[int], None]) -> None:
    """Call `counter` with the number of media items of each encoder run."""
    original = getattr(model, "embed_multimodal", None)
    if original is None:
        return

    def embed_multimodal(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        counter(len(outputs))
        return outputs

    model.embed_multimodal = embed_multimodal  # type: ignore[assignment]


def keep_generators(runner: Any) -> None:
    """CPU: seeded requests survive a prefill in pieces.

    After a step that ended inside a prompt, vLLM throws the sampled token away and moves the request's generator back by what
    it used; CPU generators cannot move, so the engine dies: under load, or when a refit has many prompts computed again.
    Here such a request is sampled without its generator, whose stream then is as if that token had never been drawn.
    """
    original = runner.sample_tokens

    def sample_tokens(*args: Any, **kwargs: Any) -> Any:
        batch = runner.input_batch
        thrown_away = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        held = {int(i): batch.generators.pop(int(i)) for i in thrown_away if int(i) in batch.generators}
        try:
            return original(*args, **kwargs)
        finally:
            batch.generators.update(held)

    runner.sample_tokens = sample_tokens


def unreached_layers(model: torch.nn.Module, *, tied: bool) -> list[str]:
    """Between load and finalize: layers with weights of their own that no tensor reached; they would keep the old ones.

    Left out: attention (vLLM finalizes it on its own; where an engine is quantised it has scales, which no checkpoint needs to
    hold), with tied embeddings the head, and layers of UNLOADED alone.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    names, constant = [], UNLOADED.get(type(model).__name__, frozenset())
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        waiting = info.can_load() and info.load_numel <= 0 and (info.load_numel_total or 0) > 0
        own = {own for own, _ in layer.named_parameters(recurse=False)} - constant
        excused = isinstance(layer, (Attention, MLAAttention)) or (tied and isinstance(layer, ParallelLMHead))
        if waiting and own and not excused:
            names.append(name)
    return names


def end_broken_load(model: torch.nn.Module, model_config: Any) -> None:
    """After a load that raised: no layer stays on the meta device, and none counts what it was sent towards the next load.

    Layers that were not complete get their old tensors back. Left alone, vLLM would go on counting at the next load, where a
    fused layer seems full before its last part came, and keeps memory that nobody wrote.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.loaded_weights.clear()
            info.load_numel = 0
    finalize_layerwise_reload(model, model_config)


def repack_tied_heads(model: torch.nn.Module) -> int:
    """CPU: a head tied to the embedding receives no load of its own, so its packed GEMM keeps old weights. Pack again."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return 0
    packed = 0
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod) and hasattr(layer, "cpu_linear"):
            method.process_weights_after_loading(layer)
            packed += 1
    return packed


def bypassed(model: torch.nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint names that the layerwise reload of this model misses, and their layers; load them again, directly."""
    prefixes = BYPASSED.get(type(model).__name__, {})
    return {
        name: (layer + name.removeprefix(prefix)).rpartition(".")[0]
        for name in names
        for prefix, layer in prefixes.items()
        if name.startswith(prefix)
    }


def _need(owner: Any, name: str) -> None:
    if not hasattr(owner, name):
        raise _gone(f"{getattr(owner, '__name__', type(owner).__name__)}.{name}")


def _gone(name: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.UNSUPPORTED,
        f"this vLLM has no {name}; checked releases: {', '.join(CHECKED)}",
        knob="the installed vllm version",
    )
