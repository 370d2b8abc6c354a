"""The GPUs of one host, and which of them each process of a run may see."""

from __future__ import annotations

import os
from collections.abc import Sequence

from omnifleet.config.cluster import ClusterConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.port import Handle, ProcessSpec

VISIBLE = "CUDA_VISIBLE_DEVICES"
TRAINER = "trainer"


class HostGpus:
    """A single node's GPUs: the trainer sees the policy's, each engine its own, other services none.

    A worker's GPUs are free again once its process has ended. visible: what CUDA_VISIBLE_DEVICES named, in its order.
    """

    def __init__(self, cluster: ClusterConfig, visible: Sequence[str] = ()) -> None:
        total, engines = cluster.gpus_per_node, cluster.engine_gpus_per_node
        if visible and len(visible) < total:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"{VISIBLE} names {len(visible)} GPUs and cluster.gpus_per_node is {total}: lower it, or name more",
                knob="cluster.gpus_per_node",
            )
        self._names = list(visible) or [str(number) for number in range(total)]
        self._policy = tuple(range(cluster.policy_gpus))
        self._engines = tuple(range(total - engines, total))
        self._held: list[tuple[tuple[int, ...], Handle]] = []

    @staticmethod
    def of(cluster: ClusterConfig | None) -> HostGpus | None:
        """Of this host, where the run is laid out over one node; None where nothing is laid out."""
        if cluster is None or cluster.nodes > 1:
            return None
        return HostGpus(cluster, [name for name in os.environ.get(VISIBLE, "").split(",") if name])

    def choose(self, spec: ProcessSpec) -> tuple[int, ...]:
        """Numbers of the GPUs for a process. Raises UNAVAILABLE (retryable) while too few are free."""
        if spec.name == TRAINER:
            return self._policy
        size = int(spec.resources.get("GPU", 0))
        self._held = [(gpus, handle) for gpus, handle in self._held if handle.poll() is None]
        taken = {number for gpus, _ in self._held for number in gpus}
        for start in range(0, len(self._engines) - size + 1, max(size, 1)):
            block = self._engines[start : start + size]
            if not taken.intersection(block):
                return block
        raise OmnifleetError(
            Reason.UNAVAILABLE,
            f"no {size} free GPU(s) for {spec.name}: {len(taken)} of the engines' {len(self._engines)} are held",
            retryable=True,
            knob="cluster.gpus_per_node",
        )

    def hold(self, spec: ProcessSpec, gpus: tuple[int, ...], handle: Handle) -> None:
        """A worker lives on these until its process ends."""
        if gpus and spec.name != TRAINER:
            self._held.append((gpus, handle))

    def environment(self, gpus: tuple[int, ...]) -> dict[str, str]:
        """What makes CUDA show these alone."""
        return {VISIBLE: ",".join(self._names[number] for number in gpus)}
