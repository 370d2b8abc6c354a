"""From a Hugging Face folder to one rank's part of a Megatron model, with some of its weights frozen."""

from __future__ import annotations

import dataclasses
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnifleet.config.parallel import ParallelConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.compat import megatron as compat
from omnifleet_trainer.policy.megatron_nemotron import HYBRID, building, check_hybrid, constants, sizes

_SHOWN = 6
# Kernels that need CUDA, and habits of pre-training: parts frozen by default, losses of its own, vocabularies padded.
_SETTINGS: dict[str, Any] = {
    "context_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_fusion": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "persist_layer_norm": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "freeze_language_model": False,
    "freeze_vision_model": False,
    "freeze_vision_projection": False,
    "should_pad_vocab": False,
}


@dataclass(frozen=True, slots=True)
class Built:
    """bridge: between names and weights of both sides. model: wrapped for gradients; core: within. tasks: one for each
    weight of all stages. float_tasks: the same for float32 tensors of those shapes. read_tasks: for what is read into this
    rank's weights, copies among them that the last stage holds too, under its own name. Each with mappings of its own: one
    remembers the dtype of what other stages sent, and does not ask them what it found out alone. config: of transformers.
    passive: tensors of the checkpoint that no model holds. experts: of a layer, on each rank."""

    bridge: Any
    model: Any
    core: Any
    tasks: Sequence[Any]
    float_tasks: Sequence[Any]
    read_tasks: Sequence[Any]
    config: Any
    passive: Sequence[str]
    experts: int

    def exported_by(self, task: Any) -> tuple[str, ...]:
        """See `exported_by`."""
        return exported_by(task, self.experts)

    @property
    def half(self) -> bool:
        """Whether weights are bfloat16."""
        return bool(getattr(self.model.config, "bf16", False))


def build(
    source: Path, shapes: Mapping[str, Any], frozen: set[str], parallel: ParallelConfig, dtype: torch.dtype
) -> Built:
    """Load `source`; its weights in `frozen` do not train. Call inside `compat.on_cpu()`, with a process group.

    dtype: of weights and compute; gradients add up in float32.

    Raises OmnifleetError: UNSUPPORTED if model and checkpoint hold different tensors, INVALID_CONFIG if `frozen` splits
    a fused weight or `parallel` does not divide the model.
    """
    with warnings.catch_warnings():  # a score of them say that Transformer Engine and Apex are not here
        warnings.simplefilter("ignore")
        compat.install()
        return _build(source, shapes, frozen, parallel, dtype)


def _build(
    source: Path, shapes: Mapping[str, Any], frozen: set[str], parallel: ParallelConfig, dtype: torch.dtype
) -> Built:
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig

    from omnifleet_trainer.compat import megatron_layers as layers

    layers.use_in_qwen3()
    layers.use_in_blocks()
    bridge = AutoBridge.from_hf_pretrained(str(source))
    config = bridge.hf_pretrained.config
    hybrid = config.model_type == HYBRID
    passive = constants(shapes) if hybrid else []
    held = {name: shape for name, shape in shapes.items() if name not in passive}
    if hybrid:
        check_hybrid(config, parallel)
        _check_mixture("moe" in config.text_config.layers_block_type, parallel)
        for part, name, size, fields in sizes(config, parallel):
            _check_divides(part, parallel, ((name, size, fields),))
        config.llm_config = config.text_config  # Bridge knows it by the name that published configs have
        config.sound_config, config.sound_context_token_id = config.audio_config, config.audio_token_id
    else:
        _check_mixture(getattr(config.text_config, "num_experts", 0) > 0, parallel)
        _check_divides(config.text_config, parallel)
        if config.model_type != "qwen2_5_vl":  # whose tower is not divided
            _check_divides(config.vision_config, parallel, (("tp", parallel.tp, ("num_heads",)),))
        _check_inner(config, parallel)
    provider = bridge.to_megatron_provider(load_weights=True)
    cpu = not torch.cuda.is_available()
    if cpu:
        compat.no_random_streams()
    settings = _SETTINGS | {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "variable_seq_lengths": parallel.pp > 1,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "expert_model_parallel_size": parallel.ep,
        "use_cpu_initialization": cpu,
        "moe_shared_expert_overlap": False,
    }
    if hybrid:
        from omnifleet_trainer.compat.megatron_hybrid import squared_relu

        settings["activation_func"] = squared_relu
    else:
        settings["transformer_layer_spec"] = layers.language_spec
        # Bridge leaves the section of the published sizes, whatever the config says.
        settings["mrope_section"] = config.text_config.rope_parameters["mrope_section"]
    known = {name: value for name, value in settings.items() if hasattr(provider, name)}
    provider.apply_overrides_and_finalize(dtype=dtype, overrides=known)
    provider.sequence_parallel = parallel.sp  # some providers want it wherever tensors are divided
    minutes = math.ceil(parallel.timeout_s / 60)
    provider.initialize_model_parallel(seed=None if cpu else 0, distributed_timeout_minutes=minutes)

    experts = (provider.num_moe_experts or 0) // parallel.ep

    def prepare(chunks: list[Any]) -> list[Any]:
        tasks = _tasks(bridge, chunks)
        _freeze(chunks[0], [*tasks, *_copies(chunks[0], tasks)], held, frozen, experts)
        for weight in chunks[0].parameters():  # buffers (the tower's frequencies) stay as wide as they are
            weight.data = weight.data.to(dtype)
        return chunks

    provider.register_pre_wrap_hook(prepare)
    with building(config):
        (model,) = provider.provide_distributed_model(
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=parallel.distributed_optimizer,
                overlap_grad_reduce=False,
            ),
            wrap_with_ddp=True,
            use_cpu_initialization=cpu,
            fp16=False,
            bf16=dtype == torch.bfloat16,
            mixed_precision_wrapper=None,  # it would round buffers too
            data_parallel_random_init=False,
        )
    layers.use_exact_gelu(model)
    model.eval()  # no dropout separates the logprobs of two passes
    tasks, float_tasks, read_tasks = (_tasks(bridge, [model]) for _ in range(3))
    read_tasks = [*read_tasks, *_copies(model.module, read_tasks)]
    return Built(bridge, model, model.module, tasks, float_tasks, read_tasks, config, passive, experts)


def _tasks(bridge: Any, chunks: list[Any]) -> list[Any]:
    """Of all weights, and of buffers that checkpoints hold: they hold no counters of batches."""
    tasks = bridge.get_conversion_tasks(chunks)
    return [task for task in tasks if not task.param_name.endswith(".num_batches_tracked")]


def fused_names(tasks: Sequence[Any]) -> dict[str, tuple[str, ...]]:
    """Megatron name -> names of the checkpoint's weights that it holds; of this rank's weights."""
    return {task.param_name: held_by(task) for task in tasks if task.megatron_module is not None}


def held_by(task: Any) -> tuple[str, ...]:
    """Names of the checkpoint's weights that one weight of Megatron, of whichever rank, holds (a part of)."""
    held = task.mapping.hf_param
    return (held,) if isinstance(held, str) else tuple(held.values())


def exported_by(task: Any, experts: int) -> tuple[str, ...]:
    """Names of the checkpoint's weights that an export of the task gives: of an expert, where a rank has `experts` of a layer,
    also those that stand in its place on the other ranks."""
    names = held_by(task)
    if not task.mapping.is_expert or task.mapping.ep_size == 1:
        return names

    def on(rank: int, name: str) -> str:
        return re.sub(
            r"experts\.(\d+)", lambda found: f"experts.{int(found[1]) % experts + rank * experts}", name
        )

    ranks = range(task.mapping.ep_size)
    return tuple(dict.fromkeys(on(rank, name) for name in names for rank in ranks))


def _copies(core: Any, tasks: Sequence[Any]) -> list[Any]:
    """The head of a last stage, where it is the embedding of the first: Bridge has no task for it."""
    name = "language_model.output_layer.weight"
    weight = dict(core.named_parameters()).get(name)
    if weight is None or name in fused_names(tasks):
        return []
    (embedding,) = [task for task in tasks if task.global_param_name.endswith("word_embeddings.weight")]
    head = core.language_model.output_layer
    return [dataclasses.replace(embedding, param_name=name, param_weight=weight, megatron_module=head)]


def _check_divides(
    config: Any, parallel: ParallelConfig, sizes: Sequence[tuple[str, int, Sequence[str]]] = ()
) -> None:
    sizes = sizes or (
        (
            "tp",
            parallel.tp,
            ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"),
        ),
        ("ep", parallel.ep, ("num_experts",)),
        ("pp", parallel.pp, ("num_hidden_layers",)),
    )
    for name, size, fields in sizes:
        for field in fields if size > 1 else ():
            held = getattr(config, field, 0)
            if held == 0 or held % size:
                raise invalid(
                    f"{name} = {size} does not divide the model's {field} = {held}",
                    knob=f"trainer.parallel.{name}",
                    reason=Reason.INVALID_CONFIG,
                )


def _check_mixture(mixture: bool, parallel: ParallelConfig) -> None:
    """Without sequence parallelism every rank of a tensor-parallel group would give the experts the same tokens."""
    if mixture and parallel.tp > 1 and not parallel.sp:
        raise invalid(
            "a mixture of experts with tp > 1 needs sequence parallelism: set sp = true",
            knob="trainer.parallel.sp",
            reason=Reason.INVALID_CONFIG,
        )


def _check_inner(config: Any, parallel: ParallelConfig) -> None:
    """Features of the tower's inner layers are added on the first stage, each after a layer of its own."""
    fed = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    held = config.text_config.num_hidden_layers // parallel.pp
    if fed > held:
        raise invalid(
            f"the tower feeds the first {fed} language layers, the first of {parallel.pp} stages holds {held}",
            knob="trainer.parallel.pp",
            reason=Reason.INVALID_CONFIG,
        )


def _freeze(
    core: Any, tasks: Sequence[Any], shapes: Mapping[str, Any], frozen: set[str], experts: int
) -> None:
    names = {
        task.param_name: exported_by(task, experts) for task in tasks if task.megatron_module is not None
    }
    held = {name for task in tasks for name in exported_by(task, experts)}
    tied = {"lm_head.weight"} - set(shapes)
    missing, extra = sorted(set(shapes) - held), sorted(held - set(shapes) - tied)
    if missing or extra:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"{type(core).__name__} and its checkpoint hold different tensors: only in the checkpoint "
            f"{missing[:_SHOWN]}, only in the model {extra[:_SHOWN]}",
            knob="model.path",
        )
    for name, parameter in core.named_parameters():
        fixed = [source in frozen for source in names[name]]
        if any(fixed) != all(fixed):
            raise invalid(
                f"model.freeze fixes a part of {', '.join(names[name])}, which are one weight to Megatron or ep: name all or none",
                knob="model.freeze",
                reason=Reason.INVALID_CONFIG,
            )
        parameter.requires_grad_(not all(fixed))
