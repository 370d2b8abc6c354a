"""A micro-batch packed and padded again, features kept by digest, and what other ranks are sent."""

from __future__ import annotations

import torch

from omnifleet.config.parallel import ParallelConfig
from omnifleet.types import Digest
from omnifleet_trainer.batch.collate import collate, idle
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.wire import decode
from omnifleet_trainer.policy.packing import Packing
from omnifleet_trainer.policy.recompute import recompute_layers
from omnifleet_trainer.policy.vision import FeatureCache
from omnifleet_trainer.policy.world import payloads
from tests.unit.test_batch_shares import sample


def test_rows_lie_one_after_the_other_and_each_token_is_predicted_by_the_one_before() -> None:
    batch = StepBatch([sample("a", "g", prompt=3, reply=4), sample("b", "g", prompt=5, reply=1)], 0)
    (micro,) = collate(batch, [0, 1], micro_batch_tokens=64, contract=None, packed=True)
    packing = Packing(micro)
    assert packing.bounds.tolist() == [0, 7, 13] and packing.longest == 7
    flat = packing.packed(micro.input_ids)
    assert flat.shape == (1, 13)
    assert flat[0].tolist() == [*range(3), *range(4), *range(5), *range(1)]
    targets = packing.wanted(micro.input_ids[:, micro.first :])
    assert flat[0, packing.predictions + 1].tolist() == targets[0].tolist()
    assert not set((packing.predictions + 1).tolist()) & set(packing.bounds.tolist())  # never across rows
    values = torch.arange(1.0, targets.shape[1] + 1)[None].requires_grad_()
    padded = packing.padded(values)
    assert padded.shape == micro.input_ids[:, micro.first :].shape
    torch.testing.assert_close(packing.wanted(padded), values)
    padded.sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None and values.grad.tolist() == [[1.0] * targets.shape[1]]


def test_an_idle_micro_batch_packs() -> None:
    packing = Packing(idle(torch.device("cpu")))
    assert packing.bounds.tolist() == [0, 2] and packing.predictions.tolist() == [0]


def test_cached_features_are_exact_bounded_and_drop_the_oldest() -> None:
    cache = FeatureCache(3 * 8 * 2)
    whole = torch.randn(4, 8).to(torch.bfloat16)
    for i in range(4):
        cache.put(Digest(f"{i}"), whole[i])
        cache.get(Digest("0"))
    assert cache.get(Digest("1")) is None  # the least recently used
    kept = cache.get(Digest("0"))
    assert kept is not None and kept.dtype == torch.bfloat16 and torch.equal(kept, whole[0])
    assert kept.untyped_storage().nbytes() == 16  # not a view that keeps the rest alive
    cache.put(Digest("5"), torch.zeros(1000))
    assert cache.get(Digest("5")) is None  # larger than the whole bound


def test_tensor_parallel_ranks_are_sent_the_same_step() -> None:
    batch = StepBatch([sample(f"{i}", f"g{i}", prompt=3 + i) for i in range(4)], 3)
    first, second, third = payloads(batch, [[0, 3], [1, 2]], ParallelConfig(dp=2, tp=2))
    assert second == third and len(decode(first).samples) == 4
    (only,) = payloads(batch, [[0, 3], [1, 2]], ParallelConfig(dp=2))
    assert only == second


def test_layers_that_recompute_give_the_same_gradients_and_keep_less() -> None:
    def gradients(recompute: bool) -> tuple[list[torch.Tensor], int]:
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
            for _ in range(3)
        )
        model = torch.nn.ModuleDict({"layers": layers}).eval()
        if recompute:
            assert recompute_layers(model) == 3
        values, kept = torch.ones(16, 8), 0

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            for layer in layers:
                values = layer(values)
        values.square().sum().backward()  # type: ignore[no-untyped-call]
        return [p.grad for p in model.parameters() if p.grad is not None], kept

    (plain, all_of_it), (again, less) = gradients(False), gradients(True)
    for one, other in zip(plain, again, strict=True):
        torch.testing.assert_close(one, other)
    assert less < all_of_it / 2
