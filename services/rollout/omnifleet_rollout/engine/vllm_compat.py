"""Which vLLM releases we drive, and what differs between them: looked up at start, compared with what was checked.

| release | weight labels | retryable miss | routed experts  | sampling mask |
| ------- | ------------- | -------------- | --------------- | ------------- |
| 0.25.1  | no            | no             | yes, MoE on GPU | no            |
| 0.32.0  | yes           | yes            | yes, MoE on GPU | yes, on GPU   |

Releases between these two are told by the same look; none of them was ever run. Outside of them nothing is tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason

OLDEST, BEYOND = Version("0.25.1"), Version("0.33")
REFITTED = ("fp8",)
"""`quantization` of engines that refits were seen to reach, byte for byte what a fresh engine quantises."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What a release has.

    labels: it tracks weight versions itself, a span of tokens each. retryable_miss: a picture that its engine process lost
    is reported in a way that a second request with the pixels mends, so pixels need not be sent each time.
    routed_experts, sampling_mask: it can return them.
    """

    labels: bool
    retryable_miss: bool
    routed_experts: bool
    sampling_mask: bool


CHECKED = {
    "0.25.1": Compatibility(labels=False, retryable_miss=False, routed_experts=True, sampling_mask=False),
    "0.32.0": Compatibility(labels=True, retryable_miss=True, routed_experts=True, sampling_mask=True),
}


def check(release: str, found: Compatibility) -> Compatibility:
    """`found`, if we drive `release` and it has what a checked release must have. Raises UNSUPPORTED."""
    try:
        number = Version(Version(release).base_version)
    except InvalidVersion:
        number = Version("0")
    if not OLDEST <= number < BEYOND:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"vllm {release} is installed; this adapter drives {OLDEST} up to, not including, {BEYOND}",
            knob="the installed vllm version",
        )
    expected = CHECKED.get(str(number), found)
    if found != expected:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"this vllm {release} is not the release that was checked: it has {found}, the release has {expected}",
            knob="the installed vllm version",
        )
    return found


def look() -> Compatibility:
    """What the installed vLLM has, by its public names."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options = AsyncEngineArgs.__dataclass_fields__
    return Compatibility(
        labels=hasattr(AsyncLLM, "get_weight_version"),
        retryable_miss=_has_miss_signal(),
        routed_experts="enable_return_routed_experts" in options,
        sampling_mask="return_sampling_mask" in options,
    )


def extra_outputs(
    engine: EngineConfig, compatibility: Compatibility, model: Mapping[str, Any], *, cpu: bool
) -> dict[str, bool]:
    """vLLM's arguments for what a recipe wants returned beside tokens; `model` is the checkpoint's config.json.

    Raises UNSUPPORTED with the setting if this release, this build or this model has none of it.
    """
    wishes = {
        "return_routed_experts": (engine.return_routed_experts, compatibility.routed_experts),
        "return_sampling_mask": (engine.return_sampling_mask, compatibility.sampling_mask),
    }
    for name, (wanted, there) in wishes.items():
        if wanted and not there:
            raise _cannot(name, "this vLLM release has no such output")
        if wanted and cpu:
            raise _cannot(name, "the CPU build cannot run the model runner that makes it")
    if engine.return_routed_experts and not is_mixture(model):
        raise _cannot("return_routed_experts", "the model has no experts")
    if engine.return_routed_experts and not engine.enable_prefix_caching:
        raise _cannot("return_routed_experts", "it needs rollout.engine.enable_prefix_caching")
    arguments = {}
    if engine.return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    if engine.return_sampling_mask:
        arguments["return_sampling_mask"] = True
    return arguments


def check_quantisation(quantization: str | None, model: Mapping[str, Any], *, cpu: bool) -> None:
    """Whether refits reach an engine with this `quantization`, vLLM's resolved one; `model` is the checkpoint's config.json.

    A trainer sends whole tensors in the checkpoint's dtypes, and the engine's loader makes them small as at its start. Raises
    UNSUPPORTED where it does not, or where nobody has seen it do so.
    """
    if quantization is None:
        return
    knob = "rollout.engine.arguments.quantization"
    if any(part.get("quantization_config") for part in _parts(model)):
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"the checkpoint holds weights that are quantised already ({quantization}), which no trainer sends: "
            f"start from the one that is not, with {knob} = {' or '.join(REFITTED)}",
            knob="model.path",
        )
    if cpu:
        raise OmnifleetError(
            Reason.UNSUPPORTED, f"{knob} = {quantization}: engines on a CPU are not quantised", knob=knob
        )
    if quantization not in REFITTED:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"{knob} = {quantization}: refits were seen to reach engines with {' or '.join(REFITTED)} only",
            knob=knob,
        )


def is_mixture(config: Mapping[str, Any]) -> bool:
    """Whether a config.json, or the part of its language model, names experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any(int(part.get(name) or 0) > 1 for part in _parts(config) for name in names)


def _parts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A config.json, and the part of its language model under any of its names."""
    return [config, *(config.get(name) or {} for name in ("text_config", "llm_config", "language_config"))]


def _has_miss_signal() -> bool:
    try:
        from vllm.multimodal.cache import MultiModalCacheMissError
    except ImportError:
        return False
    return isinstance(MultiModalCacheMissError, type)


def _cannot(name: str, why: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.UNSUPPORTED, f"rollout.engine.{name} is set, but {why}", knob=f"rollout.engine.{name}"
    )
