"""Memory that is freed under tensors, and comes back: what hangs on them stays."""

from __future__ import annotations

import torch

from omnifleet_trainer.policy.parked import Parked, tensors_of


def test_tensors_come_back_with_their_values_views_and_hooks() -> None:
    buffer = torch.arange(6.0)
    weight = torch.nn.Parameter(torch.empty(0))
    weight.data = buffer[2:5]
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    seen: list[int] = []
    node.register_hook(lambda *_: seen.append(1))
    parked = Parked([weight, buffer, torch.zeros(0)])
    assert buffer.untyped_storage().size() == 0
    parked.restore()
    assert weight.tolist() == [2.0, 3.0, 4.0] and weight.data_ptr() == buffer[2:].data_ptr()
    weight.sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [1]


def test_a_weight_that_moves_would_lose_what_hangs_on_it() -> None:
    """Why this is done at all; when it fails, torch has changed and `Parked` can go."""
    weight = torch.nn.Parameter(torch.zeros(2))
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    seen: list[int] = []
    node.register_hook(lambda *_: seen.append(1))
    weight.data = weight.data.double()
    weight.data = weight.data.float()
    weight.sum().backward()  # type: ignore[no-untyped-call]
    assert not seen


def test_a_wrapper_may_name_a_list_as_torch_names_a_method() -> None:
    """Megatron's data-parallel wrapper does."""
    model = torch.nn.BatchNorm1d(3)
    wrapper = torch.nn.Sequential(model)
    wrapper.buffers = []  # type: ignore[method-assign,assignment]
    assert {id(t) for t in tensors_of(wrapper)} == {id(t) for t in (*model.parameters(), *model.buffers())}
