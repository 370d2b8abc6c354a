"""What stands in for Mamba's kernels in megatron-core: the mixer of transformers, in Megatron's order of things."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from omnifleet_trainer.compat.mamba import GroupedNorm, split_conv_scan, stand_ins
from omnifleet_trainer.compat.megatron import kernels_absent

pytestmark = pytest.mark.heavy
HEADS, WIDTH, GROUPS, STATE = 4, 8, 2, 16


@pytest.fixture(scope="module")
def mixer() -> Any:
    config = NemotronHConfig(
        hidden_size=32,
        layers_block_type=["linear_attention"],
        mamba_num_heads=HEADS,
        mamba_head_dim=WIDTH,
        n_groups=GROUPS,
        ssm_state_size=STATE,
        chunk_size=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = NemotronHMamba2Mixer(config, 0).eval()
        with torch.no_grad():
            made.norm.weight.normal_()
    made.time_step_limit = (0.0, float("inf"))
    return made


def by_parts(mixer: Any, hidden: torch.Tensor, seq_idx: torch.Tensor | None = None) -> torch.Tensor:
    """As megatron-core's mixer does it: projection, our function, norm, projection."""
    norm = GroupedNorm(HEADS * WIDTH, eps=mixer.norm.variance_epsilon, group_size=HEADS * WIDTH // GROUPS)
    norm.weight = mixer.norm.weight
    scanned = split_conv_scan(
        mixer.in_proj(hidden),
        mixer.conv1d.weight.squeeze(1),
        mixer.conv1d.bias,
        mixer.dt_bias,
        -torch.exp(mixer.A_log),
        mixer.D,
        mixer.chunk_size,
        seq_idx=seq_idx,
        headdim=WIDTH,
        ngroups=GROUPS,
        norm_before_gate=False,
    )
    out: torch.Tensor = mixer.out_proj(norm(scanned))
    return out


def hidden(length: int) -> torch.Tensor:
    return torch.randn(1, length, 32, generator=torch.Generator().manual_seed(length))


def test_a_layer_is_that_of_transformers(mixer: Any) -> None:
    x = hidden(37)
    torch.testing.assert_close(by_parts(mixer, x), mixer(x), rtol=1e-5, atol=1e-6)


def test_no_state_goes_from_one_sequence_of_a_pack_to_the_next(mixer: Any) -> None:
    parts = [hidden(length) for length in (5, 1, 20)]
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor([5, 1, 20]))[None]
    packed = by_parts(mixer, torch.cat(parts, dim=1), numbers)
    torch.testing.assert_close(packed, torch.cat([by_parts(mixer, part) for part in parts], dim=1))
    assert not torch.allclose(packed, by_parts(mixer, torch.cat(parts, dim=1)))


def test_the_names_are_not_left_behind() -> None:
    """Others would take them for kernels."""
    made = stand_ins()
    assert not made or {"mamba_ssm", "causal_conv1d"} <= made.keys()
    assert not [name for name in made if name in sys.modules]


def test_mamba_s_kernels_may_be_absent_where_triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on most machines with a GPU."""
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *_: None if name == "mamba_ssm" else object()
    )
    assert kernels_absent().keys() == stand_ins().keys() != set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: object())
    assert not kernels_absent()
