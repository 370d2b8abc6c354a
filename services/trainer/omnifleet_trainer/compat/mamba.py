"""Mamba-2 by transformers' torch code: its scan under autocast, and megatron-core where `mamba_ssm` and `causal_conv1d` are not
installed, as on a CPU.

Checked with transformers 5.18 and megatron-core 0.19.2. Megatron's mixer takes three names of theirs when it is imported, and can
do nothing without. While that one import runs, modules with these names are there; after it they are gone, so nobody else
takes them for kernels. What they compute is transformers' code for the same layers, one call a sequence where sequences are
packed.
"""

from __future__ import annotations

import importlib.util
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def stand_ins() -> dict[str, types.ModuleType]:
    """Modules by name, to be in sys.modules while `megatron.core.ssm.mamba_mixer` loads; none where the real ones are."""
    if importlib.util.find_spec("mamba_ssm") is not None:
        return {}
    names: dict[str, dict[str, Any]] = {
        "mamba_ssm": {},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GroupedNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            "mamba_split_conv1d_scan_combined": split_conv_scan,
            "mamba_chunk_scan_combined": None,  # of inference
        },
        "causal_conv1d": {"causal_conv1d_fn": None},
        "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": None},
    }
    made = {}
    for name, values in names.items():
        module = made[name] = types.ModuleType(name)
        module.__path__, module.__spec__ = [], ModuleSpec(name, None, is_package=True)
        module.__dict__.update(values)
    return made


def scan_in_float32() -> None:
    """Let transformers' scan be what it says: it widens its inputs to float32, but autocast would form its products in bfloat16,
    which engines do not. Idempotent."""
    from transformers.models.nemotron_h import modeling_nemotron_h as layers

    scan = layers.mamba2_chunk_scan
    if hasattr(scan, "without_autocast"):
        return

    def exact(hidden: Tensor, *args: Any, **more: Any) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return scan(hidden, *args, **more)

    exact.without_autocast = True  # type: ignore[attr-defined]
    layers.mamba2_chunk_scan = exact


class GroupedNorm(nn.Module):
    """RMS norm of each `group_size` values by themselves, in float32; the gate has been applied already."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """[..., hidden_size] -> the same."""
        assert z is None
        groups = x.float().reshape(*x.shape[:-1], -1, self.group_size)
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        scaled: Tensor = self.weight * normed.flatten(-2)
        return scaled.to(x.dtype)


def split_conv_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    **_: Any,
) -> Tensor:
    """Convolution, scan and gate of one mixer: [B, L, 2 d + 2 groups x state + heads] -> [B, L, d].

    seq_idx: [1, L], the number of the sequence that each position of a pack is of; no state goes from one to the next.
    """
    assert not norm_before_gate
    settings = (conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, activation, headdim, ngroups)
    if seq_idx is None:
        return _one(zxbcdt, *settings)
    lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    return torch.cat([_one(part, *settings) for part in torch.split(zxbcdt, lengths, dim=1)], dim=1)


def _one(
    zxbcdt: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    activation: str,
    headdim: int,
    ngroups: int,
) -> Tensor:
    from transformers.models.nemotron_h import modeling_nemotron_h as torch_mamba

    heads, shape = len(D), zxbcdt.shape[:2]
    inner = heads * headdim
    z, mixed, dt = torch.split(zxbcdt, [inner, zxbcdt.shape[-1] - inner - heads, heads], dim=-1)
    mixed = torch_mamba.causal_conv1d_fn(
        mixed.transpose(1, 2), weight, bias, activation=activation
    ).transpose(1, 2)
    state = (mixed.shape[-1] - inner) // 2
    x, b, c = torch.split(mixed, [inner, state, state], dim=-1)
    scanned = torch_mamba.mamba2_chunk_scan(
        x.reshape(*shape, heads, headdim),
        dt,
        A,
        b.reshape(*shape, ngroups, -1),
        c.reshape(*shape, ngroups, -1),
        chunk_size=chunk_size,
        D=D,
        dt_bias=dt_bias,
        dt_softplus=True,
    )
    gated: Tensor = scanned.flatten(-2).to(z.dtype) * F.silu(z)
    return gated
