"""`omnifleet.wire.sparse` on the device of the weights: the same form, byte for byte; a test holds it to the definition."""

from __future__ import annotations

from collections.abc import Iterable

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MANY = 1 << 32


def sparse_sizes(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[int, int]]:
    """(elements that differ, bytes of the sparse form) of each (old, new), of equal shape and dtype. Waits for the device once."""
    tensors = list(pairs)
    counts = [(_bits(old) != _bits(new)).sum() for old, new in tensors]
    found = torch.stack(counts).tolist() if counts else []
    return [(count, count * _entry(new)) for count, (_, new) in zip(found, tensors, strict=True)]


def encode(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """What turns `old` into `new`, of equal shape and dtype: uint8, on their device. Waits for it."""
    after = _bits(new)
    places = (_bits(old) != after).nonzero().view(-1)
    index = places if after.numel() > _MANY else places.to(torch.int32)  # modulo 2^32: the bits of a uint32
    return torch.cat([index.view(torch.uint8), after[places].view(torch.uint8)])


def decode(payload: torch.Tensor, into: torch.Tensor) -> None:
    """Turn the old tensor in `into`, contiguous, into the new one. Waits for the device.

    Raises ValueError, nothing changed, for a payload that `encode` never makes.
    """
    places, values = _parsed(payload, into)
    ascend = (places[1:] > places[:-1]).all()
    if not bool(ascend & (places[:1] >= 0).all() & (places[-1:] < into.numel()).all()):
        raise ValueError("the indices do not ascend within the tensor")
    _bits(into).index_copy_(0, places, values)


def _parsed(payload: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    entry = _entry(tensor)
    count, rest = divmod(payload.numel(), entry)
    if rest:
        raise ValueError(f"{payload.numel()} bytes are no whole number of indices and elements")
    cut = count * (entry - tensor.element_size())
    index, values = (
        payload[:cut].clone(),
        payload[cut:].clone(),
    )  # views of wider elements start at a storage's start
    if tensor.numel() > _MANY:
        return index.view(torch.int64), values.view(_BITS[tensor.element_size()])
    places = index.view(torch.int32).to(torch.int64) & (_MANY - 1)
    return places, values.view(_BITS[tensor.element_size()])


def _entry(tensor: torch.Tensor) -> int:
    """Bytes of an index and an element."""
    return (8 if tensor.numel() > _MANY else 4) + tensor.element_size()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as integers, so that NaNs and signed zeros are like any other bits."""
    return tensor.contiguous().view(-1).view(_BITS[tensor.element_size()])
