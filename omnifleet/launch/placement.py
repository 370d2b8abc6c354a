"""Which process holds which GPU of a recipe's cluster: worked out from the recipe alone, nothing is started.

The policy's ranks fill the first nodes, engines the last ones; colocated, both fill all of them and take turns. Ranks
of one tensor-parallel group are neighbours on a node, and an engine is whole on one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omnifleet.config.cluster import ClusterConfig
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.plan import worker_spec


@dataclass(frozen=True, slots=True)
class Place:
    """A process and its GPUs. name: `policy-RANK`, or the worker's name. gpus: numbers on the node."""

    name: str
    node: int
    gpus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """All places of a run's GPU processes."""

    recipe: Recipe
    cluster: ClusterConfig
    policy: tuple[Place, ...]
    engines: tuple[Place, ...]

    def as_json(self) -> str:
        """All places, as JSON on several lines."""
        body = {
            "cluster": self.cluster.model_dump(),
            "colocated": self.cluster.colocated,
            "policy": [_body(place) for place in self.policy],
            "engines": [_body(place) for place in self.engines],
        }
        return json.dumps(body, indent=1)

    def describe(self) -> str:
        """A few lines for people."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        cluster, sizes = self.cluster, self.recipe.trainer.parallel
        shared = "engines and policy share them in turn" if cluster.colocated else "apart"
        yield f"{cluster.nodes} node(s) x {cluster.gpus_per_node} GPUs, {shared}"
        yield (
            f"policy   {len(self.policy):4} ranks   dp {sizes.dp}, tp {sizes.tp}, pp {sizes.pp}, ep {sizes.ep}, cp {sizes.cp}   "
            f"{self.recipe.trainer.backend}"
        )
        yield f"engines  {len(self.engines):4} x tensor_parallel_size {len(self.engines[0].gpus)}"
        for node in range(cluster.nodes):
            ranks = [place for place in self.policy if place.node == node]
            engines = [place for place in self.engines if place.node == node]
            held = [f"{ranks[0].name} to {ranks[-1].name.rpartition('-')[2]}"] if ranks else []
            held += [f"{place.name} on GPU {_span(place.gpus)}" for place in engines]
            yield f"node {node:3}  {', '.join(held)}"


def place(recipe: Recipe) -> Placement:
    """Where every GPU process of the recipe goes. Raises OmnifleetError(INVALID_CONFIG) for a recipe without a cluster."""
    cluster = recipe.cluster
    if cluster is None:
        raise OmnifleetError(
            Reason.INVALID_CONFIG,
            "the recipe names no cluster to lay it out over: set cluster.nodes and cluster.gpus_per_node",
            knob="cluster",
        )
    gpus = cluster.gpus_per_node
    policy = tuple(
        Place(f"policy-{rank}", rank // gpus, (rank % gpus,)) for rank in range(recipe.trainer.parallel.world)
    )
    return Placement(recipe, cluster, policy, tuple(_engines(recipe, cluster)))


def _engines(recipe: Recipe, cluster: ClusterConfig) -> Iterator[Place]:
    first, free = cluster.nodes - cluster.engine_nodes, cluster.engine_gpus_per_node
    for number in range(recipe.rollout.workers):
        spec = worker_spec(Path("run"), recipe, f"worker-{number}")
        size = int(spec.resources["GPU"])
        here, at = divmod(number, free // size)
        start = cluster.gpus_per_node - free + at * size
        yield Place(spec.name, first + here, tuple(range(start, start + size)))


def _body(place: Place) -> dict[str, object]:
    return {"name": place.name, "node": place.node, "gpus": list(place.gpus)}


def _span(gpus: tuple[int, ...]) -> str:
    return str(gpus[0]) if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"
