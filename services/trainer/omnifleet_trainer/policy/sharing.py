"""The followers of a world as senders of weights: each keeps, as the ranks export, the tensors that it is to send.

What goes wrong in sending is told, and breaks no world: the ranks are not out of step by it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.share import Order, Share

log = logging.getLogger("omnifleet.trainer")
_GRACE_S = 5.0


class SharingFollowers:
    """The first rank's side; see `omnifleet_trainer.refit.share.Others`. call: has every follower make a call, each with
    arguments of its own, and waits so many seconds for what they tell."""

    def __init__(
        self, count: int, call: Callable[[str, Sequence[Mapping[str, Any]], float], Sequence[str]]
    ) -> None:
        self.count, self._call = count, call

    def send(self, orders: Sequence[Order | None], deadline_s: float) -> None:
        """See `Others`."""
        told = self._call("send", [{"order": order} for order in orders], deadline_s + _GRACE_S)
        failed = [(rank, words) for rank, words in enumerate(told, 1) if words]
        if failed:
            rank, words = failed[0]
            raise retryable(Reason.UNAVAILABLE, f"rank {rank} of the trainer did not send its share: {words}")

    def stop(self) -> None:
        """See `Others`."""
        try:
            self._call("stop", [{}] * self.count, _GRACE_S)
        except OmnifleetError as error:
            log.warning("the other ranks may go on sending until their deadline: %s", error)


class SharingRank:
    """A follower's side. `send` is on a thread of its own, so that it can be told to stop."""

    def __init__(self) -> None:
        index = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._share = Share(torch.device("cpu") if index is None else torch.device("cuda", index))

    def export(self, tensors: Iterator[tuple[str, Tensor]], keep: Sequence[str]) -> None:
        """Make all tensors whole with the others, keep copies of those named."""
        self._share.pack(tensors, set(keep))

    def send(self, order: Order | None, tell: Callable[[str], None]) -> None:
        """Begin to do an order; tell: called in the end with why it failed, "" if it did not."""

        def work() -> None:
            try:
                if order is not None:
                    self._share.send(order)
            except (OmnifleetError, RuntimeError, AssertionError) as error:
                log.warning("this rank's share was not sent: %s", error)
                tell(str(error) or repr(error))
            else:
                tell("")

        threading.Thread(target=work, name="share", daemon=True).start()

    def stop(self) -> None:
        """Break off what is sent."""
        self._share.stop()
