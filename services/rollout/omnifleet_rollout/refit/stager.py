"""Stage and commit in the process that holds the model, whatever the engine: by plan or by the loader."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.wire.manifest import UNVERIFIED, json_digest
from omnifleet.wire.needs import NeedsBody, rank_digest
from omnifleet_refit.windows import needs_body
from omnifleet_rollout.refit.background import Background
from omnifleet_rollout.refit.buckets import DTYPES, Memory
from omnifleet_rollout.refit.kept import KeptPlans
from omnifleet_rollout.refit.placing import arriving, by_loader, by_plan
from omnifleet_rollout.refit.plan import Plan, replay
from omnifleet_rollout.refit.proving import Windows, agrees
from omnifleet_rollout.refit.reception import NOTHING, Received, Reception, as_bytes
from omnifleet_rollout.refit.restoring import Restoring, finder
from omnifleet_rollout.refit.shadow import check_table, check_whole, rejected
from omnifleet_rollout.refit.weights import Weights

log = logging.getLogger("omnifleet.rollout.refit")
UNVERIFIED_ENV = "OMNIFLEET_REFIT_UNVERIFIED"
CHECK_EVERY = 100
"""Every so many refits by plan, a complete one is compared with the loader's result again."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a commit did. tensors: how many changed; by_plan: copied straight into parameter memory.

    needs: see `Stager.needs_digest`, as of after it.
    """

    tensors: int
    by_plan: bool
    seconds: float
    needs: str


class Stager:
    """`load`: the engine's loader path: takes all tensors from `weights.everything()` into `model`."""

    def __init__(
        self,
        model: torch.nn.Module,
        weights: Weights,
        plan: Plan | None,
        load: Callable[[], None],
        device: torch.device,
        rank: int = 0,
        kept: KeptPlans | None = None,
        checked: bool = False,
    ) -> None:
        """kept: where plans are kept that were checked. checked: this one was, at an earlier start."""
        self._model, self._weights, self._plan, self._load = model, weights, plan, load
        self._device, self._reception = device, Reception(model, device, rank)
        self._stage: Background[Received] | None = None
        self._digest, self._received = "", NOTHING
        self._reads = {} if plan is None else needs_body(plan.needs())
        self._reads_digest = "" if plan is None else rank_digest(self._reads)
        self._kept, self._checked = kept, checked and plan is not None
        self._since_check = 0
        self.refits_by_plan, self.last_load_s = 0, 0.0

    @property
    def takes_sparse(self) -> bool:
        """True if the bytes of the version that serves are here: on the host, or whole in parameter memory."""
        table = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in self._weights.table.items()}
        return self._plan is None or Restoring(self._plan, self._model).all_of(table)

    @property
    def needs_digest(self) -> str:
        """Names `needs`; "" where tensors must come whole: there is no plan, or one that is still to be checked."""
        return "" if self._believed is None else self._reads_digest

    @property
    def needs(self) -> NeedsBody:
        """What this rank reads of each source tensor."""
        return {} if self._believed is None else self._reads

    @property
    def _believed(self) -> Plan | None:
        return self._plan if self._checked else None

    def begin(
        self,
        manifest_json: str,
        source: str,
        tell: Callable[[int | OmnifleetError], None] | None = None,
        in_place: bool = False,
    ) -> None:
        """Check the manifest and start to receive; `poll` tells when it is done. Raises REFIT_REJECTED, CONFLICT.

        tell: called in the end, by the thread that receives, with the bytes staged or why not.

        source: path of a file in shared memory, "group://..." or "cuda-ipc:...". The weights that serve are not touched.
        in_place: they are, and the engine must not step: there is no shadow, a commit only has to confirm. After an error
        they may be mixed.
        """
        self.drop()
        body = json.loads(manifest_json)
        check_table(body, self._weights.table)
        if body["checksum_algorithm"] == UNVERIFIED and UNVERIFIED_ENV not in os.environ:
            raise rejected("this worker takes nothing without checksums")
        plan, find = self._believed, finder(self._weights, self._plan, self._model)
        if in_place:
            check_whole(body)
        elif plan is None:
            self._weights.check_loadable([t["name"] for t in body["tensors"] if t["changed"]])
        legs = self._reception.legs(body, source, plan)
        whole = self._due and all(tensor["changed"] for tensor in body["tensors"])
        self._digest = json_digest(manifest_json.encode())
        self._stage = Background(
            lambda: (
                self._place(body, source)
                if in_place
                else self._reception.receive(body, source, legs, plan, find, whole=whole)
            ),
            self._reception.collective.cancel,
            lambda result: _report(result, tell),
        )

    def poll(self) -> int | None:
        """Bytes staged, or None while the stage runs. Raises what it raised; UNAVAILABLE if it was dropped meanwhile."""
        if self._stage is None:
            raise retryable(Reason.UNAVAILABLE, "the stage was dropped")
        if self._stage.running:
            return None
        try:
            self._received = self._stage.result()
            self._weights.shadow = self._received.sources
        except BaseException:
            self._digest = ""
            raise
        finally:
            self._stage = None
        return self._received.bytes

    def commit(self, manifest_digest: str) -> Loaded:
        """Load the shadow. Raises REFIT_REJECTED, nothing changed, if that is not what is staged; else weights may be mixed."""
        weights = self._weights
        if self._stage is not None and not self._stage.running:
            self.poll()
        if not manifest_digest or self._digest != manifest_digest or self._stage is not None:
            raise rejected(f"refit {manifest_digest[:12]} is not in the shadow")
        began, names = time.monotonic(), self._received.names
        placed = self._received.placed
        with torch.no_grad():
            planned = self._received.by_plan if placed else self._apply()
        self.refits_by_plan += planned
        weights.commit(names, by_plan=placed or self._believed is not None)
        self.drop()
        self.last_load_s = time.monotonic() - began
        return Loaded(len(names), planned, self.last_load_s, self.needs_digest)

    def export(self, path: str, tensors: Sequence[tuple[str, str]]) -> int:
        """Write source tensors of the committed weights (name, dtype) one after another into the file at `path`; bytes.

        For a thread of its own: nothing waits for the engine's steps. Raises UNSUPPORTED where a tensor is here no more as
        it was sent (cut, cast, or packed).
        """
        written, find = 0, finder(self._weights, self._plan, self._model)
        with open(path, "r+b", buffering=0) as file:
            for name, dtype in tensors:
                data = as_bytes(_as_sent(name, find(name), DTYPES[dtype]))
                while data.nbytes:
                    done = file.write(data)
                    data, written = data[done:], written + done
        return written

    def drop(self) -> None:
        """Forget the shadow, and end a stage that runs. Raises CONFLICT if it does not end."""
        stage, self._stage = self._stage, None
        self._digest, self._received, self._weights.shadow = "", NOTHING, {}
        if stage is not None and not stage.stop():
            self._stage = stage
            raise OmnifleetError(Reason.CONFLICT, "the last stage does not end", retryable=True)

    @property
    def _due(self) -> bool:
        """The next complete refit is compared with what the loader makes."""
        return self._plan is not None and (not self._checked or self._since_check >= CHECK_EVERY)

    def _apply(self) -> bool:
        if self._plan is None:
            self._load()
            return False
        if self._due and self._weights.complete:
            return self._check(self._plan)
        if not self._checked:
            self._load()
            return False
        self._since_check += 1
        replay(self._received.pairs)
        _wait(self._device)
        return True

    def _place(self, body: Mapping[str, Any], source: str) -> Received:
        """Take all tensors straight into parameter memory; by the loader where the plan is to be checked, as it happens."""
        self._reception.memory.release()
        _finish(self._device)  # steps of the engine, on streams of its own
        plan, check = self._believed, self._plan if self._due else None
        staging = Memory(self._device)
        arrival = arriving(body, source, self._reception.collective, staging)
        with torch.no_grad(), _on(self._device), closing(arrival) as coming:
            if plan is not None and check is None:
                names = by_plan(coming, plan, self._model, self._device)
                self._since_check += 1
            else:
                windows = Windows(check, self._model) if check is not None else None
                names = by_loader(coming, self._weights, self._load, windows, self._device)
                if check is not None and windows is not None:
                    self._settle(check, windows.different())
                plan = None
        del staging
        _finish(self._device)
        if set(names) != self._weights.table.keys():
            raise OmnifleetError(Reason.ENGINE_ERROR, f"{len(names)} tensors came, not those of the model")
        size = sum(tensor["bytes"] for tensor in body["tensors"])
        return Received({}, [], frozenset(names), size, placed=True, by_plan=plan is not None)

    def _check(self, plan: Plan) -> bool:
        """Load by plan and by the loader, compare; the loader's result stays."""
        self._settle(plan, agrees(self._model, plan, self._weights.shadow, self._load))
        return False

    def _settle(self, plan: Plan, different: Sequence[str]) -> None:
        """Believe a plan from now on, or, if what it makes is different, drop it for good."""
        self._checked, self._since_check = not different, 0
        self._reception.memory.derived = (None, None)  # the loader may have moved parameters
        if different:
            self._plan = None
            if self._kept is not None:
                self._kept.forget(plan.key)
            log.warning("the refit plan is dropped: the loader makes others of %s", ", ".join(different[:5]))
        else:
            log.info(
                "refit plan %s: %d copies of %.0f%% of the elements, equal to the loader's result",
                plan.key[:12],
                len(plan.moves),
                100 * plan.share,
            )
            if self._kept is not None:
                self._kept.keep(plan)


def _report(result: Received | Exception, tell: Callable[[int | OmnifleetError], None] | None) -> None:
    if tell is None:
        return
    if isinstance(result, OmnifleetError):
        tell(result)
    elif isinstance(result, Exception):
        tell(OmnifleetError(Reason.ENGINE_ERROR, f"the stage failed: {result!r}"))
    else:
        tell(result.bytes)


def _as_sent(name: str, tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    if tensor is None or tensor.dtype != dtype:
        raise OmnifleetError(Reason.UNSUPPORTED, f"{name} is not here as it was sent")
    return tensor


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, it is the thread's own device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _finish(device: torch.device) -> None:
    """Wait for all that the device was given, and give it back what it only keeps in store: it has none to spare."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
