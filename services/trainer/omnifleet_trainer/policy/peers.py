"""What the ranks of one policy tell one another about a step: counts, what they found, whether one of them refuses.

Values travel as JSON or as raw floats through the host's process group, never pickled; a rank alone talks to nobody.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from omnifleet.errors import OmnifleetError, Reason

Value = TypeVar("Value")


class Agreed(OmnifleetError):
    """An error that every rank raises at the same place: the world goes on."""


class Peers:
    """The ranks that hold other samples of a step.

    index, size: this rank's among them. stride: of ranks that hold the same samples (tensor parallel), one speaks.
    stages: of a pipeline, one after the other all ranks of it; the first speaks.
    Every call is collective: all ranks of the world make it, in the same order.
    """

    def __init__(self, *, index: int = 0, size: int = 1, stride: int = 1, stages: int = 1) -> None:
        self.index, self.size, self._stride, self._stages = index, size, stride, stages

    @property
    def alone(self) -> bool:
        """True if there is no other rank at all."""
        return self.size * self._stride * self._stages == 1

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over the peers."""
        return [sum(column) for column in zip(*self.gathered(list(values)), strict=True)]

    def any(self, flag: bool) -> bool:
        """Whether it is true anywhere."""
        return flag if self.alone else any(self._all(bytes([flag])))

    def most(self, value: int) -> int:
        """The largest."""
        return max(self.gathered(value))

    def gathered(self, value: Value) -> list[Value]:
        """`value` (JSON; may hold infinities) of each peer, in their order."""
        if self.alone:
            return [value]
        return [json.loads(body) for body in self._speakers(self._bytes(json.dumps(value).encode()))]

    def everyone(self, value: Value) -> list[Value]:
        """`value` (JSON) of every rank of the world, in their order."""
        return (
            [value] if self.alone else [json.loads(body) for body in self._bytes(json.dumps(value).encode())]
        )

    def arrays(self, values: npt.NDArray[np.float32]) -> list[npt.NDArray[np.float32]]:
        """Flat float32 arrays of each peer, in their order."""
        if self.alone:
            return [values]
        return [
            np.frombuffer(body, "<f4") for body in self._speakers(self._bytes(values.astype("<f4").tobytes()))
        ]

    def joined(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The same, one after the other."""
        return np.concatenate(self.arrays(values))

    def together(self, work: Callable[[], Value]) -> Value:
        """What `work` gives. If it refuses on any rank (OmnifleetError), every rank raises that, as `Agreed`."""
        result: list[Value] = []
        refusal: list[Any] | None = None
        try:
            result.append(work())
        except OmnifleetError as error:
            if self.alone:
                raise
            refusal = [error.reason, error.message, error.retryable, error.knob]
        if not self.alone:
            found = [json.loads(body) for body in self._bytes(json.dumps(refusal).encode())]
            for one in found:
                if one is not None:
                    raise Agreed(Reason(one[0]), one[1], one[2], one[3])
        return result[0]

    def _speakers(self, every: list[bytes]) -> list[bytes]:
        return every[: self.size * self._stride : self._stride]

    def _bytes(self, body: bytes) -> list[bytes]:
        """Of every rank of the world."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor([len(body)]))
        widest = max(int(size) for size in sizes)
        padded = self._all(body.ljust(widest, b"\0"))
        return [bytes(padded[i * widest : i * widest + int(size)]) for i, size in enumerate(sizes)]

    def _all(self, body: bytes) -> bytes:
        """Bytes of all ranks, one after the other; each as long as `body`."""
        own = torch.frombuffer(bytearray(body or b"\0"), dtype=torch.uint8)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        return b"".join(part.numpy().tobytes()[: len(body)] for part in parts)


ALONE = Peers()
"""The only rank."""
