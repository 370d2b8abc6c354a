"""Writes what a resume needs: weights, optimiser, random state, a copy of the ledger, and where the run stood.

A periodic checkpoint costs the loop one copy to host memory; files are written, synced and renamed beside the next step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError
from omnifleet_trainer.checkpoint import CheckpointState, Retention, oldest_step, prune, write_checkpoint
from omnifleet_trainer.ledger import SqliteLedger
from omnifleet_trainer.loop.changes import keep_recipe, recipe_digest
from omnifleet_trainer.loop.start import LEDGER
from omnifleet_trainer.loop.weights import Weights

log = logging.getLogger("omnifleet.trainer")


class Checkpoints:
    """One writer a run; at most one checkpoint is on its way. `metric`: of the step that was recorded last."""

    def __init__(
        self,
        recipe: Recipe,
        root: Path,
        ledger: SqliteLedger,
        weights: Weights,
        metric: Callable[[str], float | None],
    ) -> None:
        trainer = recipe.trainer
        self._root = root
        self._ledger = ledger
        self._weights = weights
        self._metric = metric
        self._retention = Retention(
            trainer.checkpoints_kept, trainer.checkpoints_best, trainer.checkpoint_metric_higher
        )
        self._recipe = recipe
        self._writing: asyncio.Task[Path] | None = None

    async def write(self, step: int) -> Path:
        """Write the checkpoint of `step`; complete and durable on return. Raises DISK_FULL."""
        await self.begin(step)
        return await self.done()

    async def begin(self, step: int) -> None:
        """Copy what the checkpoint of `step` needs and write it beside what follows, if the recipe lets us.

        Raises what the one before failed with (DISK_FULL).
        """
        if self._writing is not None:
            await self.done()
        version = self._weights.version
        state = CheckpointState(
            step=step,
            version=version.number,
            lineage=version.lineage,
            ledger_position=self._ledger.consumed(),
            config_digest=recipe_digest(self._recipe),
            seeds={"run": self._recipe.run.seed},
            extra={"metric": self._metric(self._recipe.trainer.checkpoint_metric)},
        )
        policy = self._weights.policy
        if self._recipe.trainer.checkpoint_in_background:
            save = await self._weights.on_thread(policy.snapshot)
            writing = asyncio.to_thread(self._write, step, state, save)
        else:
            writing = self._weights.on_thread(partial(self._write, step, state, policy.save))
        self._writing = asyncio.create_task(writing, name=f"checkpoint {step}")
        if not self._recipe.trainer.checkpoint_in_background:
            await asyncio.shield(self._writing)

    async def done(self) -> Path:
        """Wait for the checkpoint that is on its way; its folder. Raises what it failed with."""
        assert self._writing is not None, "no checkpoint was begun"
        path = await asyncio.shield(self._writing)
        self._writing = None
        self._forget()
        return path

    async def close(self) -> None:
        """Let a checkpoint that is on its way end; what it failed with is logged: nobody is left to be told."""
        if self._writing is not None:
            try:
                await self.done()
            except (OmnifleetError, OSError) as error:
                log.error("the last checkpoint failed: %s", error)

    def _write(self, step: int, state: CheckpointState, save: Callable[[Path], None]) -> Path:
        def fill(folder: Path) -> None:
            save(folder)
            self._ledger.backup_to(folder / LEDGER)
            keep_recipe(self._recipe, folder)

        path = write_checkpoint(self._root, step, save_policy=fill, state=state)
        log.info("checkpoint of step %d is complete: %s", step, path)
        prune(self._root, self._retention)
        return path

    def _forget(self) -> None:
        """Retention in the ledger: payloads that neither the recipe nor a kept checkpoint asks for."""
        keep, oldest = self._recipe.trainer.ledger_payload_steps, oldest_step(self._root)
        if keep is not None and oldest is not None:
            self._ledger.forget_payloads(min(oldest, self._weights.step - keep) + 1)
