"""The GPUs of a run, and what follows from their number: ranks of the policy, engines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError, model_validator

from omnifleet.config.base import StrictModel


class ClusterConfig(StrictModel):
    """Nodes and GPUs that the run is laid out over. Without this section nothing is derived from anything."""

    nodes: int = Field(1, ge=1)
    """Nodes of the run."""
    gpus_per_node: int = Field(8, ge=1)
    """GPUs of each node."""
    generation_nodes: int = Field(0, ge=0)
    """Nodes that hold engines alone; the others hold the policy. 0: engines and policy share all GPUs in turn."""
    generation_gpus: int = Field(0, ge=0)
    """Of a single node: its last GPUs, which hold engines alone; the others hold the policy."""

    @property
    def colocated(self) -> bool:
        """Whether engines and policy share GPUs."""
        return self.generation_nodes == self.generation_gpus == 0

    @property
    def policy_nodes(self) -> int:
        """Nodes that hold the policy; they come first."""
        return self.nodes - self.generation_nodes

    @property
    def policy_gpus(self) -> int:
        """GPUs of the policy, one a rank."""
        return self.policy_nodes * self.gpus_per_node - self.generation_gpus

    @property
    def engine_nodes(self) -> int:
        """Nodes that hold engines; they come last."""
        return self.generation_nodes or self.nodes

    @property
    def engine_gpus_per_node(self) -> int:
        """GPUs for engines on each of those; they come last."""
        return self.generation_gpus or self.gpus_per_node

    @model_validator(mode="after")
    def _something_trains(self) -> ClusterConfig:
        if self.generation_nodes >= self.nodes:
            raise ValueError(
                f"cluster.generation_nodes {self.generation_nodes} leaves none of cluster.nodes {self.nodes} to train: "
                "lower it, or raise cluster.nodes"
            )
        if self.generation_gpus and self.nodes > 1:
            raise ValueError(
                f"cluster.generation_gpus {self.generation_gpus} divides a single node, and there are {self.nodes}: set "
                "cluster.generation_nodes instead"
            )
        if self.generation_gpus >= self.gpus_per_node:
            raise ValueError(
                f"cluster.generation_gpus {self.generation_gpus} leaves none of cluster.gpus_per_node {self.gpus_per_node} "
                "to train: lower it"
            )
        return self


@dataclass(frozen=True, slots=True)
class Split:
    """How a recipe divides its cluster. ranks: of the policy, without dp: tp x pp x cp. experts: ep. engine: GPUs of one.

    samples: of one optimiser update.
    """

    ranks: int
    tp: int
    experts: int
    engine: int
    samples: int


def derived(cluster: ClusterConfig, split: Split) -> tuple[int, int]:
    """(dp, engines) that fill the cluster, rounded down and at least 1; `problems` says where they leave a rest."""
    engines = cluster.engine_nodes * (cluster.engine_gpus_per_node // split.engine)
    return max(cluster.policy_gpus // split.ranks, 1), max(engines, 1)


def problems(cluster: ClusterConfig, split: Split, *, dp: int, engines: int, turns: bool) -> Iterator[str]:
    """What does not fit, each with the knob. Nothing of it can be mended by placing processes elsewhere.

    turns: engines sleep while the policy trains.
    """
    gpus, for_engines = cluster.gpus_per_node, cluster.engine_gpus_per_node
    if turns != cluster.colocated:
        yield (
            "cluster.generation_nodes = 0 puts engines and policy on the same GPUs, so they take turns: set "
            "rollout.sleep_level = 1, or cluster.generation_gpus"
            if cluster.colocated
            else "engines have GPUs of their own and need no rollout.sleep_level: leave it out"
        )
    if split.tp > gpus:
        yield (
            f"trainer.parallel.tp {split.tp} > cluster.gpus_per_node {gpus}: tensor parallelism crosses no node; "
            "lower trainer.parallel.tp"
        )
    if cluster.policy_gpus % split.ranks:
        yield (
            f"trainer.parallel tp x pp x cp = {split.ranks} does not divide the {cluster.policy_gpus} GPUs of the policy "
            f"{_these(cluster)}: change cluster.nodes, cluster.gpus_per_node or the sizes"
        )
    elif dp * split.ranks != cluster.policy_gpus:
        yield (
            f"trainer.parallel.dp {dp} x {split.ranks} ranks are not the {cluster.policy_gpus} GPUs of the policy "
            f"{_these(cluster)}: leave dp out and it is derived"
        )
    elif (dp * split.ranks) % split.experts:
        yield (
            f"trainer.parallel.ep {split.experts} does not divide the policy's {dp * split.ranks} ranks: lower it"
        )
    elif split.samples % dp:
        yield (
            f"{split.samples} samples of an update cannot be dealt to {dp} data-parallel ranks alike: set "
            "trainer.batch_samples, or change cluster.nodes"
        )
    if for_engines % split.engine:
        knob = "generation_gpus" if cluster.generation_gpus else "gpus_per_node"
        yield (
            f"rollout.engine.tensor_parallel_size {split.engine} does not divide cluster.{knob} {for_engines}: an engine "
            "crosses no node; lower it"
        )
    else:
        room = cluster.engine_nodes * for_engines // split.engine
        if engines != room:
            yield (
                f"rollout.workers {engines} engines of {split.engine} GPUs do not fill {cluster.engine_nodes} x {for_engines} "
                f"GPUs, which hold {room}: leave rollout.workers out and it is derived"
            )


def _these(cluster: ClusterConfig) -> str:
    kept = f" - {cluster.generation_gpus}" if cluster.generation_gpus else ""
    return f"({cluster.policy_nodes} x {cluster.gpus_per_node}{kept})"


def unsaid(cluster: ClusterConfig, nodes: int) -> Iterator[str]:
    """What a run on this cluster is to say itself, and a plan need not. nodes: `trainer.parallel.nodes`."""
    if cluster.policy_nodes != nodes:
        yield (
            f"the cluster gives the policy {cluster.policy_nodes} node(s), trainer.parallel.nodes says {nodes}: set it so, or "
            "change cluster.nodes or cluster.generation_nodes"
        )


def filled(body: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe with trainer.parallel.dp, rollout.workers and rollout.max_workers where it has a cluster and leaves them out.

    What is malformed is left as it is: the schema says so better.
    """
    result = dict(body)
    try:
        cluster = ClusterConfig.model_validate(body.get("cluster") or {})
        split = _split(body)
    except (ValidationError, TypeError, ValueError, AttributeError):
        return result
    if body.get("cluster") is None:
        return result
    dp, engines = derived(cluster, split)
    trainer, rollout = dict(body.get("trainer") or {}), dict(body.get("rollout") or {})
    parallel = dict(trainer.get("parallel") or {})
    parallel.setdefault("dp", dp)
    rollout.setdefault("workers", engines)
    rollout.setdefault("max_workers", max(int(rollout["workers"]), engines))
    return result | {"trainer": trainer | {"parallel": parallel}, "rollout": rollout}


def _split(body: Mapping[str, Any]) -> Split:
    trainer, rollout = body.get("trainer") or {}, body.get("rollout") or {}
    sizes, engine = trainer.get("parallel") or {}, rollout.get("engine") or {}
    tp, pp, cp = (int(sizes.get(name, 1)) for name in ("tp", "pp", "cp"))
    if min(tp, pp, cp) < 1:
        raise ValueError("sizes are positive")
    return Split(
        ranks=tp * pp * cp,
        tp=tp,
        experts=int(sizes.get("ep", 1)),
        engine=max(int(engine.get("tensor_parallel_size", 1)), 1),
        samples=0,
    )
