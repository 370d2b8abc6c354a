"""Checkpoints: complete or absent, never half.

The room knows folders, renames and fsync. It must not know what a policy writes into its folder.
"""

from omnifleet_trainer.checkpoint.retention import Retention
from omnifleet_trainer.checkpoint.store import (
    CheckpointState,
    latest_checkpoint,
    oldest_step,
    prune,
    write_checkpoint,
)

__all__ = ["CheckpointState", "Retention", "latest_checkpoint", "oldest_step", "prune", "write_checkpoint"]
