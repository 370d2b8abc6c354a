"""Libraries that talk while they are imported or loaded, told once to be quiet. Their errors still come through."""

from __future__ import annotations

import logging
import os

_LOGGERS = ("torchao", "torch.utils._pytree", "torch._library.triton")
_SETTINGS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


def quiet_libraries() -> None:
    """Leave out what torch and vLLM say of other devices' kernels and of their own next versions.

    Call before they are imported: they read their settings then. Settings of the environment win.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
