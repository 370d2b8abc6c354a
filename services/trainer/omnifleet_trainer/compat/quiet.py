"""Libraries that talk while they are imported or loaded: said once here, so that our own lines stand alone."""

from __future__ import annotations

import logging

_LOGGERS = ("torchao", "torch.utils._pytree", "transformers", "nemo_automodel", "megatron")


def quiet_libraries() -> None:
    """Silence import-time warnings about kernels of other devices, and progress bars that are not ours.

    Call before torch and transformers are imported for the first time. Errors still come through.
    """
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
