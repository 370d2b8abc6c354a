"""From a Hugging Face folder to one rank's part of an AutoModel model, by FSDP2 and a tensor plan where there are other ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from omnifleet.config.recipe import TrainerConfig
from omnifleet_trainer.compat import automodel as compat
from omnifleet_trainer.policy.expert_parallel import experts_mesh
from omnifleet_trainer.policy.lora import adapters_of
from omnifleet_trainer.policy.tensor_plan import tensor_plan


def build(source: Path, trainer: TrainerConfig, *, empty: bool) -> tuple[Any, Any, Any]:
    """The model, in eval mode, with float32 weights; its mesh; that of its experts, None where ranks do not share them.

    empty: weights are still to come.
    """
    compat.install()
    from nemo_automodel import NeMoAutoModelForImageTextToText
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes
    from torch.distributed.fsdp import MixedPrecisionPolicy

    # AutoModel's own default computes in bfloat16 whatever is asked for.
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, trainer.dtype), reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    parallel, tp = trainer.parallel, trainer.parallel.tp
    setup = DistributedSetup.build(
        strategy=FSDP2Config(mp_policy=precision, tp_plan=tensor_plan(source) if tp > 1 else None),
        parallelism_sizes=ParallelismSizes(tp_size=tp),
    )
    make = (
        NeMoAutoModelForImageTextToText.from_config
        if empty
        else NeMoAutoModelForImageTextToText.from_pretrained
    )
    experts = experts_mesh(parallel.dp, parallel.ep) if parallel.ep > 1 else None
    with _dividing(experts, precision):
        model = make(
            str(source),
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_liger_kernel=False,
            force_hf=True,
            distributed_setup=setup,
            peft_config=None if trainer.lora is None else adapters_of(trainer.lora),
        )
    if empty:
        model._weight_conversions = _conversions(source)
    return model.eval(), setup.mesh_context.device_mesh, experts


def _dividing(experts: Any, precision: Any) -> AbstractContextManager[None]:
    if experts is None:
        return nullcontext()
    from omnifleet_trainer.policy.parallelizer import dividing

    return dividing(experts, precision)


def _conversions(source: Path) -> Any:
    """How transformers would load the checkpoint: it finds out by the name of the class, which FSDP2 changes."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.conversion_mapping import get_model_conversion_mapping

    with torch.device("meta"):
        plain = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(source))
    return get_model_conversion_mapping(plain, add_legacy=False)
