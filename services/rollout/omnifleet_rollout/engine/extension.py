"""What we add to vLLM's worker (`worker_extension_cls`): stage and commit of weights, counters.

Runs where the model is. Everything crosses as strings; answers are JSON, so that a refusal keeps its words.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from omnifleet.address import digest_bytes
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.vllm_launch import vllm_version
from omnifleet_rollout.refit.buckets import DTYPES
from omnifleet_rollout.refit.door import Door
from omnifleet_rollout.refit.kept import KeptPlans, plans_folder
from omnifleet_rollout.refit.plan import NotPlannable, Plan, plan_key, record
from omnifleet_rollout.refit.proving import state_digests
from omnifleet_rollout.refit.stager import Stager
from omnifleet_rollout.refit.weights import Weights

log = logging.getLogger("omnifleet.rollout.engine")
PLAN_ENV = "OMNIFLEET_REFIT_PLAN"
"""Set to 0: every refit takes the loader path."""


class OmnifleetExtension:
    """Mixed into vLLM's worker class; every name starts with `omni_` because vLLM refuses clashes."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: torch.device
    _omni: Weights
    _omni_stager: Stager
    _omni_door: Door
    _omni_encoded = 0

    def omni_ready(self) -> str:
        """Look for the seams and start counting. Call once, before any request."""
        return _answer(self._omni_ready)

    def omni_commit(self, manifest_digest: str) -> str:
        """Load the shadow. One call, so no engine step sees half of it."""
        return _answer(lambda: asdict(self._omni_stager.commit(manifest_digest)))

    def omni_drop(self) -> str:
        """Forget the shadow."""
        return _answer(self._omni_stager.drop)

    def omni_needs(self) -> str:
        """What this rank reads of each source tensor; nothing if it needs them whole."""
        return _answer(lambda: self._omni_stager.needs)

    def omni_digests(self) -> str:
        """Checksums of all tensors of the model as they are now: what two engines must have in common."""
        return _answer(lambda: state_digests(self.model_runner.get_model()))

    def omni_counters(self) -> str:
        """Counters of this process."""
        return _answer(self._omni_counters)

    def _omni_ready(self) -> dict[str, Any]:
        model = self.model_runner.get_model()
        seams.check_worker(model)
        self._omni = Weights(Path(self.model_config.model))
        seams.count_encoded(model, self._omni_count)
        if torch.device(self.device).type == "cpu":
            seams.keep_generators(self.model_runner)
        parallel = self.vllm_config.parallel_config
        # A rank's place among all ranks of its engine, data parallel ones included.
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        kept = KeptPlans(plans_folder())
        plan, checked = self._omni_plan(model, rank, kept)
        self._omni_stager = Stager(
            model,
            self._omni,
            plan,
            lambda: self._omni_load(model),
            torch.device(self.device),
            rank,
            kept,
            checked,
        )
        transports = ["shm", "nccl"] + ["cuda_ipc"] * (torch.device(self.device).type == "cuda")
        self._omni_door = Door(self._omni_stager.begin, self._omni_stager.export)
        return {
            "transports": transports,
            "plan": plan.key if plan else "",
            "door": self._omni_door.name,
            "sparse": self._omni_stager.takes_sparse,
            "needs": self._omni_stager.needs_digest,
        }

    def _omni_plan(self, model: torch.nn.Module, rank: int, kept: KeptPlans) -> tuple[Plan | None, bool]:
        """Where source slices land, and whether that was checked: kept from an earlier start, else learnt now.

        None where the engine packs or quantises its weights, or the loader can't be followed.
        """
        if os.environ.get(PLAN_ENV) == "0" or torch.device(self.device).type != "cuda":
            return None, False
        if self.model_config.quantization:
            log.info(
                "refits take the loader path: weights are quantised (%s)", self.model_config.quantization
            )
            return None, False
        table = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in self._omni.table.items()}
        world = self.vllm_config.parallel_config.world_size
        build = (
            f"vllm {vllm_version()} torch {torch.__version__} {torch.cuda.get_device_name(self.device)} "
            f"{self.model_config.dtype} rank {rank} of {world} "
            f"{digest_bytes((Path(self.model_config.model) / 'config.json').read_bytes(), 'refit-model')}"
        )
        found = kept.find(plan_key(model, table, build), model)
        if found is not None:
            return found, True
        try:
            return record(model, model.load_weights, table, build), False  # type: ignore[arg-type]
        except NotPlannable as error:
            log.warning("refits take the loader path: %s", error)
            return None, False

    def _omni_counters(self) -> dict[str, float]:
        return {
            "encoder_items": self._omni_encoded,
            "refits_by_plan": self._omni_stager.refits_by_plan,
            "last_load_ms": self._omni_stager.last_load_s * 1000,
        }

    def _omni_count(self, items: int) -> None:
        self._omni_encoded += items

    def _omni_load(self, model: torch.nn.Module) -> None:
        """Layerwise reload: the CPU build packs its weights, so plain load_weights cannot write into them."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self._omni_reload(model)

    def _omni_reload(self, model: torch.nn.Module) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        direct = seams.bypassed(model, self._omni.table)
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        again: dict[str, torch.Tensor] = {}

        def everything() -> Iterator[tuple[str, torch.Tensor]]:
            """Each once: without a shadow they come by and are gone."""
            for name, tensor in self._omni.everything():
                if name in direct:
                    again[name] = tensor
                yield name, tensor

        initialize_layerwise_reload(model)
        try:
            model.load_weights(everything())  # type: ignore[operator]
            missed = seams.unreached_layers(model, tied=tied)
            finalize_layerwise_reload(model, self.model_config)
        except BaseException:
            seams.end_broken_load(model, self.model_config)
            raise
        unreached = [layer for layer in missed if layer not in direct.values()]
        if direct:
            model.load_weights(iter(again.items()))  # type: ignore[operator]
        if unreached:
            raise OmnifleetError(
                Reason.ENGINE_ERROR, f"the loader of this model did not reach {', '.join(unreached[:5])}"
            )
        seams.repack_tied_heads(model)


def _answer(step: Any) -> str:
    """Run `step`; its result, or its refusal, as JSON. Other errors go the way vLLM's own do."""
    try:
        return json.dumps({"ok": step()})
    except OmnifleetError as error:
        return json.dumps({"reason": str(error.reason), "message": error.message, "knob": error.knob})
