"""Which vLLM releases are driven, and what is refused before an engine starts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine.vllm_compat import CHECKED, check, check_quantisation, extra_outputs, is_mixture

OLD, NEW = CHECKED["0.25.1"], CHECKED["0.32.0"]
MOE, DENSE = {"text_config": {"num_experts": 128}}, {"text_config": {"hidden_size": 64}}


@pytest.mark.parametrize("release", ["0.25.1", "0.25.1+cu130", "0.28.0", "0.32.0", "0.32.1rc1"])
def test_releases_in_the_range_are_driven_as_they_look(release: str) -> None:
    found = OLD if release.startswith("0.25") else NEW
    assert check(release, found) == found


@pytest.mark.parametrize("release", ["0.25.0", "0.24.3", "0.33.0", "1.0", "unknown"])
def test_releases_outside_the_range_are_refused_by_name(release: str) -> None:
    with pytest.raises(OmnifleetError) as refused:
        check(release, NEW)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert release in refused.value.message and "0.25.1 up to, not including, 0.33" in refused.value.message


def test_a_release_that_is_not_what_it_says_is_refused() -> None:
    with pytest.raises(OmnifleetError) as refused:
        check("0.32.0", replace(NEW, labels=False))
    assert refused.value.reason is Reason.UNSUPPORTED and "labels=False" in refused.value.message


def test_router_replay_and_masks_are_asked_for_where_they_are() -> None:
    both = EngineConfig(return_routed_experts=True, return_sampling_mask=True)
    assert extra_outputs(both, NEW, MOE, cpu=False) == {
        "enable_return_routed_experts": True,
        "return_sampling_mask": True,
    }
    experts = EngineConfig(return_routed_experts=True)
    assert extra_outputs(experts, OLD, MOE, cpu=False) == {"enable_return_routed_experts": True}
    assert extra_outputs(EngineConfig(), OLD, DENSE, cpu=True) == {}


def test_router_replay_and_masks_are_refused_where_they_are_not() -> None:
    cases = [
        (EngineConfig(return_sampling_mask=True), OLD, MOE, False, "no such output"),
        (EngineConfig(return_sampling_mask=True), NEW, MOE, True, "CPU build"),
        (EngineConfig(return_routed_experts=True), NEW, MOE, True, "CPU build"),
        (EngineConfig(return_routed_experts=True), NEW, DENSE, False, "no experts"),
        (
            EngineConfig(return_routed_experts=True, enable_prefix_caching=False),
            NEW,
            MOE,
            False,
            "enable_prefix_caching",
        ),
    ]
    for config, release, model, cpu, words in cases:
        with pytest.raises(OmnifleetError) as refused:
            extra_outputs(config, release, model, cpu=cpu)
        assert refused.value.reason is Reason.UNSUPPORTED and words in refused.value.message
        assert refused.value.knob.startswith("rollout.engine.return_")


def test_only_quantised_engines_that_refits_reach_start() -> None:
    check_quantisation(None, DENSE, cpu=True)
    check_quantisation("fp8", DENSE, cpu=False)
    shipped = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    cases = [
        ("fp8", DENSE, True, "on a CPU"),
        ("awq", DENSE, False, "with fp8 only"),
        ("fp8", shipped, False, "quantised already"),
        ("fp8", shipped["text_config"], False, "quantised already"),
    ]
    for quantization, model, cpu, words in cases:
        with pytest.raises(OmnifleetError, match=words) as refused:
            check_quantisation(quantization, model, cpu=cpu)
        assert refused.value.reason is Reason.UNSUPPORTED and refused.value.knob


def test_a_mixture_is_told_by_its_experts() -> None:
    assert (
        is_mixture(MOE)
        and is_mixture({"n_routed_experts": 8})
        and is_mixture({"llm_config": {"num_local_experts": 8}})
    )
    assert (
        not is_mixture(DENSE) and not is_mixture({"num_experts": 1}) and not is_mixture({"text_config": None})
    )
