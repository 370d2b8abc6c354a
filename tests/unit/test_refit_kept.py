"""Kept plans: the next start begins with one that was checked; a damaged, foreign or misfit one is refused and made anew."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from omnifleet.address import canonical_json, digest_bytes
from omnifleet_refit.windows import View
from omnifleet_rollout.refit import stager as stager_module
from omnifleet_rollout.refit.kept import KeptPlans
from omnifleet_rollout.refit.plan import Plan, plan_key, record
from tests.refit_model import Small, tensors, write_checkpoint
from tests.refit_world import Sender, receiving


def table() -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors(0).items()}


def recorded(build: str = "b") -> tuple[Small, Plan]:
    model = Small()
    return model, record(model, model.load_weights, table(), build)


def test_a_kept_plan_comes_back_as_it_was_under_its_key_alone(tmp_path: Path) -> None:
    model, plan = recorded()
    kept = KeptPlans(tmp_path / "plans")
    assert kept.find(plan.key, model) is None
    kept.keep(plan)
    assert plan.key == plan_key(model, table(), "b")
    assert kept.find(plan.key, model) == plan
    assert kept.find(plan_key(model, table(), "other build"), model) is None
    (file,) = (tmp_path / "plans").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    kept.forget(plan.key)
    assert kept.find(plan.key, model) is None


def test_the_key_names_build_table_and_the_layout_of_memory() -> None:
    model, plan = recorded()
    fewer = {name: row for name, row in table().items() if name != "norm"}
    wider = Small()
    wider.qkv = torch.nn.Parameter(torch.zeros(3 * 8 // 2, 9)[:, :8], requires_grad=False)
    keys = {
        plan.key,
        plan_key(model, table(), "c"),
        plan_key(model, fewer, "b"),
        plan_key(wider, table(), "b"),
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    "fault", ["cut", "flipped", "foreign", "other format", "not json", "huge window", "stranger"]
)
def test_a_plan_that_is_damaged_foreign_or_does_not_fit_is_removed(tmp_path: Path, fault: str) -> None:
    model, plan = recorded()
    kept = KeptPlans(tmp_path)
    kept.keep(plan)
    path = tmp_path / f"{plan.key}.json"
    data = path.read_bytes()
    if fault == "cut":
        data = data[:-100]
    elif fault == "flipped":
        data = data.replace(b'"offset":0', b'"offset":1', 1)
    elif fault == "foreign":
        KeptPlans(tmp_path).keep(recorded("other")[1])
        data = (tmp_path / f"{recorded('other')[1].key}.json").read_bytes()
    elif fault == "other format":
        data = canonical_json({**json.loads(data), "format": 99})
    elif fault == "not json":
        data = b"\x80\x04pickle"
    else:
        first = plan.moves[0]
        bad = (
            replace(first, write=View(1 << 40, first.write.shape, first.write.stride))
            if fault == "huge window"
            else replace(first, target="stranger")
        )
        body = asdict(replace(plan, moves=(bad, *plan.moves[1:])))
        digest = digest_bytes(canonical_json(body), "refit-plan-file")
        data = canonical_json({"format": 1, "digest": digest, "plan": body})
    path.write_bytes(data)
    assert kept.find(plan.key, model) is None
    assert not path.exists(), "it is made anew, and kept again once it is checked"


def test_without_a_folder_nothing_is_kept_and_nothing_breaks(tmp_path: Path) -> None:
    model, plan = recorded()
    (tmp_path / "file").write_text("")
    kept = KeptPlans(tmp_path / "file" / "plans")
    kept.keep(plan)
    assert kept.find(plan.key, model) is None
    kept.forget(plan.key)


async def test_the_second_start_goes_by_plan_at_once_and_a_check_that_fails_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, plans = write_checkpoint(tmp_path / "c"), tmp_path / "plans"
    by_plan = []
    for start in range(2):
        async with receiving(checkpoint, 1, plans=plans) as (worker,):
            sender = Sender(f"start-{start}")
            for step in range(2):
                await sender.publish([worker], step)
                assert worker.holds(step)
            by_plan.append(worker.engine.by_plan)
            sender.courier.close()
    assert by_plan == [[False, True], [True, True]]
    monkeypatch.setattr(stager_module, "CHECK_EVERY", 1)
    async with receiving(checkpoint, 1, plans=plans) as (worker,):
        sender = Sender("third")
        await sender.publish([worker], 0)
        place = worker.engine.model.load_weights

        def otherwise(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
            place(weights)
            worker.engine.model.qkv.data.mul_(2)

        worker.engine.model.load_weights = otherwise  # type: ignore[method-assign]
        await sender.publish([worker], 1, whole=True)
        assert worker.engine.by_plan == [True, False], "the N-th refit is compared with the loader's"
        assert list(plans.iterdir()) == []
        sender.courier.close()
