"""Two ranks in two threads, each with a share of the step: together they are one rank with all of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from omnifleet.config.objective import ObjectiveConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.collate import MicroBatch, idle
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.mismatch import Mismatch
from omnifleet_trainer.policy.passes import OneByOne
from omnifleet_trainer.policy.peers import ALONE, Agreed, Peers
from omnifleet_trainer.policy.step import train_step
from tests.unit.step_world import Bigrams, assign, batch_of, cut
from tests.unit.test_objective_loss import OBJECTIVES

RANKS = 2
REJECTING: dict[str, dict[str, Any]] = {
    "rejecting": {"sequence_error_threshold": 1.3},
    "kl_in_reward": {"kl_coefficient": 0.2, "kl_in": "reward"},
}


class Board:
    """What ranks in threads have written for one another, by the number of the exchange."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._notes: dict[int, bytes] = {}

    def exchange(self, rank: int, body: bytes) -> list[bytes]:
        self._notes[rank] = body
        self._barrier.wait()
        found = [self._notes[i] for i in sorted(self._notes)]
        self._barrier.wait()
        return found


class ThreadPeers(Peers):
    def __init__(self, board: Board, index: int) -> None:
        super().__init__(index=index, size=RANKS)
        self._board = board

    def _bytes(self, body: bytes) -> list[bytes]:
        return self._board.exchange(self.index, body)

    def _all(self, body: bytes) -> bytes:
        return b"".join(self._bytes(body))


def on_ranks(work: Callable[[Peers], Any]) -> list[Any]:
    board = Board(RANKS)
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(work, [ThreadPeers(board, i) for i in range(RANKS)]))


def step(
    policy: Bigrams, batch: StepBatch, micros: list[MicroBatch], objective: ObjectiveConfig, **more: Any
) -> Any:
    reference = policy.reference_logprobs if objective.kl_coefficient else None
    return train_step(
        batch,
        [micros],
        objective=objective,
        schedule=OneByOne(policy.forward),
        update=policy.update,
        reference=reference,
        **more,
    )


@pytest.mark.parametrize("name", [*sorted(OBJECTIVES), *REJECTING])
def test_two_ranks_take_the_step_of_one(name: str) -> None:
    """Gradient, averaged as backends do, and every metric; the second rank has fewer micro-batches and idles."""
    objective = ObjectiveConfig(**(OBJECTIVES | REJECTING)[name])
    batch = batch_of(3, 4, objective, policy=Bigrams())
    for sample in batch.samples[::5]:  # what the rules of rejection look for
        sample.generation_logprobs = [value - 1.5 for value in sample.generation_logprobs]
    assign(batch, objective)
    rows = list(range(len(batch.samples)))
    alone, told = Bigrams(), []
    whole = step(
        alone, batch, cut(batch, rows, clip=objective.advantage_clip), objective,
        on_mismatch=lambda *found: told.append(found),
    )  # fmt: skip
    if name == "rejecting":
        assert whole["num_masked_seqs_by_logprob_error"] > 0

    def train(peers: Peers) -> tuple[torch.Tensor, dict[str, float], list[Any]]:
        policy, heard = Bigrams(), []
        mine = [rows[:8], rows[8:]][peers.index]
        micros = cut(batch, mine, 40, objective.advantage_clip)
        micros += [idle(torch.device("cpu"))] * (peers.most(len(micros)) - len(micros))
        metrics = step(policy, batch, micros, objective, peers=peers, on_mismatch=lambda *f: heard.append(f))
        return policy.gradients[0], metrics, heard

    results = on_ranks(train)
    average = (results[0][0] + results[1][0]) / RANKS
    torch.testing.assert_close(average, alone.gradients[0], rtol=1e-5, atol=1e-8)
    for _, metrics, heard in results:
        assert metrics.keys() == whole.keys()
        for key, value in whole.items():
            if key != "grad_norm":  # of a rank's own gradient here
                assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-9), key
        assert len(heard) == len(told)
        for (_, sample, found), (_, expected, worst) in zip(heard, told, strict=True):
            assert sample is expected and isinstance(found, Mismatch)
            assert found.error == pytest.approx(worst.error)


def test_what_one_rank_refuses_all_refuse() -> None:
    def work(peers: Peers) -> str:
        def refuse() -> int:
            if peers.index == 1:
                raise invalid("too long", knob="trainer.micro_batch_tokens")
            return 5

        try:
            peers.together(refuse)
        except Agreed as error:
            return f"{error.reason} {error.message} {error.knob}"
        return "went on"

    assert set(on_ranks(work)) == {"invalid_request too long trainer.micro_batch_tokens"}


def test_ranks_tell_one_another_what_they_have() -> None:
    def work(peers: Peers) -> Any:
        values = np.arange(peers.index + 1, dtype=np.float32)
        return (
            peers.total([1.0, peers.index]),
            peers.most(peers.index),
            peers.any(peers.index == 1),
            peers.any(False),
            peers.gathered({"infinite": float("inf")}),
            peers.joined(values).tolist(),
        )

    first, second = on_ranks(work)
    assert first == second
    assert first[:4] == ([2.0, 1.0], 1, True, False)
    assert first[4] == [{"infinite": float("inf")}] * 2
    assert first[5] == [0.0, 0.0, 1.0]


def test_a_rank_alone_talks_to_nobody() -> None:
    assert ALONE.alone and ALONE.total([1.5]) == [1.5] and ALONE.gathered("x") == ["x"]
    assert not ALONE.any(False) and ALONE.together(lambda: 3) == 3
    with pytest.raises(OmnifleetError) as refused:
        ALONE.together(lambda: (_ for _ in ()).throw(invalid("no")))
    assert refused.value.reason is Reason.INVALID_REQUEST and not isinstance(refused.value, Agreed)
