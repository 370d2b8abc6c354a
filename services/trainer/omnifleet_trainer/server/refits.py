"""The refit sender as the loop sees it: versions in, metrics out."""

from __future__ import annotations

import logging
from typing import Any

from omnifleet.errors import OmnifleetError
from omnifleet.types import WeightVersion
from omnifleet_trainer.loop.weights import Weights
from omnifleet_trainer.refit.sender import RefitSender

log = logging.getLogger("omnifleet.trainer")


class FleetRefits:
    """Publishes the policy's weights; see `omnifleet_trainer.loop.controller.Refits`."""

    def __init__(self, sender: RefitSender, weights: Weights) -> None:
        self._sender = sender
        self._weights = weights

    async def publish(self, version: WeightVersion) -> dict[str, float]:
        """Send `version`. While the registry is away the weights wait for it: `keep_up` sends them when it is back.

        Raises OmnifleetError for what waiting does not mend: DISK_FULL, FORBIDDEN.
        """
        policy: Any = self._weights.policy
        trains = policy.trainable_names()
        kept = self._sender.share(
            getattr(policy, "others", None), trains
        )  # others: of a policy of several ranks
        try:
            report = await self._sender.publish(
                version.number,
                policy.export(kept) if kept else policy.export(),
                trains,
                encoder_changed=policy.encoder_trains,
                executor=self._weights.thread,
            )
        except OmnifleetError as error:
            if not error.retryable or self._sender.version != version:
                raise
            log.warning("%s waits for the fleet: %s", version, error)
            return {"refit_failed": 1.0}
        return {
            "refit_ms": report.seconds * 1000,
            "refit_pack_ms": report.pack_seconds * 1000,
            "gate_ms": report.gate_seconds * 1000,
            "refit_in_flight": float(report.in_flight),
            "refit_bytes": float(report.bytes),
            "refit_workers": float(len(report.ok)),
            "refit_failed": float(len(report.failed)),
        }

    async def keep_up(self) -> None:
        """Bring late workers to the newest version, until cancelled."""
        await self._sender.keep_up()
