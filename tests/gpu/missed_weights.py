"""For children that open a vLLM engine: which parameters the model's own loader leaves unwritten."""

from __future__ import annotations

MISSED = """
import sys


def missed(model):
    import torch
    from safetensors.torch import load_file

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
        model.load_weights(iter(load_file(sys.argv[1] + "/model.safetensors").items()))
    return [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


"""
"""Source of `missed(model)`, for `apply_model`; argv[1] of the child is the checkpoint's folder."""
