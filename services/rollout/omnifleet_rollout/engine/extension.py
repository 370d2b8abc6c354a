"""What we add to vLLM's worker (`worker_extension_cls`): stage and commit of weights, counters.

Runs where the model is. Everything crosses as strings; answers are JSON, so that a refusal keeps its words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire.manifest import json_digest
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.checkpoint import read_table
from omnifleet_rollout.refit.shadow import ShadowTensor, check_table, read_transfer, rejected

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _Weights:
    """Source tensors on the host: the shadow of a refit, and the last committed ones.

    The committed ones are kept (one model's worth of host memory) because a layer is always loaded whole: a refit that
    changes one half of a fused layer needs the other half too. What was never sent is still in the checkpoint.
    """

    def __init__(self, model: Path) -> None:
        self.table = {spec.name: (spec.dtype, list(spec.shape)) for spec in read_table(model)}
        self._model = model
        self._committed: dict[str, torch.Tensor] = {}
        self.shadow: dict[str, torch.Tensor] = {}
        self.digest = ""
        self.encoded_items = 0

    def everything(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the next version, in the checkpoint's order of names."""
        on_disk = self._files()
        for name in self.table:
            tensor = self.shadow.get(name, self._committed.get(name))
            yield name, tensor if tensor is not None else _read(on_disk[name], name)

    def commit(self) -> None:
        """The shadow is loaded."""
        self._committed.update(self.shadow)
        self.drop()

    def drop(self) -> None:
        """Forget the shadow."""
        self.shadow, self.digest = {}, ""

    def _files(self) -> Mapping[str, Path]:
        missing = self.table.keys() - self.shadow.keys() - self._committed.keys()
        if not missing:
            return {}
        from safetensors import safe_open

        places = {}
        for file in sorted(self._model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as source:
                places.update(dict.fromkeys(source.keys(), file))
        return places


class OmnifleetExtension:
    """Mixed into vLLM's worker class; every name starts with `omni_` because vLLM refuses clashes."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    _omni: _Weights

    def omni_ready(self) -> str:
        """Look for the seams and start counting. Call once, before any request."""
        return _answer(self._omni_ready)

    def omni_stage(self, manifest_json: str, path: str) -> str:
        """Verify a transfer against its manifest and our table, and copy it into the shadow."""
        return _answer(lambda: self._omni_stage(manifest_json, path))

    def omni_commit(self, manifest_digest: str) -> str:
        """Load the shadow. One call, so no engine step sees half of it."""
        return _answer(lambda: self._omni_commit(manifest_digest))

    def omni_drop(self) -> str:
        """Forget the shadow."""
        return _answer(self._omni_drop)

    def omni_counters(self) -> str:
        """Counters of this process."""
        return _answer(lambda: {"encoder_items": self._omni.encoded_items})

    def _omni_ready(self) -> dict[str, Any]:
        model = self.model_runner.get_model()
        seams.check_worker(model)
        self._omni = _Weights(Path(self.model_config.model))
        seams.count_encoded(model, self._omni_count)
        return {"tensors": len(self._omni.table)}

    def _omni_count(self, items: int) -> None:
        self._omni.encoded_items += items

    def _omni_stage(self, manifest_json: str, path: str) -> dict[str, Any]:
        self._omni.drop()
        body = json.loads(manifest_json)
        check_table(body, self._omni.table)
        tensors = read_transfer(body, Path(path))
        self._omni.shadow = {tensor.name: _tensor(tensor) for tensor in tensors}
        self._omni.digest = json_digest(manifest_json.encode())
        return {"bytes": sum(len(tensor.data) for tensor in tensors)}

    def _omni_commit(self, manifest_digest: str) -> dict[str, Any]:
        from vllm.config import set_current_vllm_config

        weights = self._omni
        if not manifest_digest or weights.digest != manifest_digest:
            raise rejected(f"refit {manifest_digest[:12]} is not in the shadow")
        loaded = len(weights.shadow)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self._omni_load(self.model_runner.get_model())
        weights.commit()
        return {"tensors": loaded}

    def _omni_load(self, model: torch.nn.Module) -> None:
        """Layerwise reload: the CPU build packs its weights, so plain load_weights cannot write into them."""
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        direct = seams.bypassed(model, self._omni.table)
        initialize_layerwise_reload(model)
        model.load_weights(self._omni.everything())  # type: ignore[operator]
        tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        unreached = seams.unreached_layers(model, tied=tied)
        finalize_layerwise_reload(model, self.model_config)
        if direct:
            model.load_weights((n, t) for n, t in self._omni.everything() if n in set(direct))  # type: ignore[operator]
        elif unreached:
            raise OmnifleetError(
                Reason.ENGINE_ERROR, f"the loader of this model did not reach {', '.join(unreached[:5])}"
            )
        seams.repack_tied_heads(model)

    def _omni_drop(self) -> dict[str, Any]:
        self._omni.drop()
        return {}


def _answer(step: Any) -> str:
    """Run `step`; its result, or its refusal, as JSON. Other errors go the way vLLM's own do."""
    try:
        return json.dumps({"ok": step()})
    except OmnifleetError as error:
        return json.dumps({"reason": str(error.reason), "message": error.message, "knob": error.knob})


def _tensor(source: ShadowTensor) -> torch.Tensor:
    return torch.frombuffer(source.data, dtype=DTYPES[source.dtype]).view(source.shape)


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        tensor: torch.Tensor = source.get_tensor(name)
        return tensor
