"""Stage and commit in the process that holds the model, whatever the engine: transports, shadow, plan or loader path."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.wire.manifest import UNVERIFIED, json_digest
from omnifleet.wire.needs import NeedsBody, rank_digest
from omnifleet_refit.windows import Needs
from omnifleet_rollout.refit import ipc
from omnifleet_rollout.refit.background import Background
from omnifleet_rollout.refit.buckets import DTYPES, Memory
from omnifleet_rollout.refit.collective import Collective
from omnifleet_rollout.refit.filling import fill
from omnifleet_rollout.refit.kept import KeptPlans
from omnifleet_rollout.refit.pieces import Leg, Pieces, as_pieces, legs_of
from omnifleet_rollout.refit.plan import Plan, agrees, replay
from omnifleet_rollout.refit.restoring import Restoring
from omnifleet_rollout.refit.shadow import ShadowTensor, check_table, each_tensor, rejected
from omnifleet_rollout.refit.source import CUDA_IPC, GROUP
from omnifleet_rollout.refit.weights import Sources, Weights

log = logging.getLogger("omnifleet.rollout.refit")
UNVERIFIED_ENV = "OMNIFLEET_REFIT_UNVERIFIED"
CHECK_EVERY = 100
"""Every so many refits by plan, a complete one is compared with the loader's result again."""
_SLICED = 0.9
"""Of the elements: a rank whose plan reads less keeps slices of whole tensors."""
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a commit did. tensors: how many changed; by_plan: copied straight into parameter memory.

    needs: see `Stager.needs_digest`, as of after it.
    """

    tensors: int
    by_plan: bool
    seconds: float
    needs: str


@dataclass(frozen=True, slots=True)
class Received:
    """What a stage brought.

    sources: whole tensors, none where slices came. names: tensors that change. pairs: the plan's copies.
    """

    sources: Sources
    pairs: Pairs
    names: frozenset[str]
    bytes: int


_NOTHING = Received({}, [], frozenset(), 0)


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
        self._memory = Memory(device)
        self._collective = Collective(self._memory, rank)
        self._stage: Background[Received] | None = None
        self._digest, self._received = "", _NOTHING
        self._rank = rank
        self._reads = {} if plan is None else plan.needs()
        self._reads_digest = "" if plan is None else rank_digest(_needs_body(self._reads))
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
        """Names `needs`; "" where the next refit must bring tensors whole: no plan, one to be checked, or one due for it."""
        due = not self._checked or self._since_check >= CHECK_EVERY
        return "" if self._plan is None or due else self._reads_digest

    @property
    def needs(self) -> NeedsBody:
        """What this rank reads of each source tensor."""
        return _needs_body(self._reads) if self.needs_digest else {}

    def begin(
        self, manifest_json: str, source: str, tell: Callable[[int | OmnifleetError], None] | None = None
    ) -> None:
        """Check the manifest and start to receive; `poll` tells when it is done. Raises REFIT_REJECTED, CONFLICT.

        tell: called in the end, by the thread that receives, with the bytes staged or why not.

        source: path of a file in shared memory, "group://..." or "cuda-ipc:...". The weights that serve are not touched.
        """
        self.drop()
        body = json.loads(manifest_json)
        check_table(body, self._weights.table)
        if body["checksum_algorithm"] == UNVERIFIED and UNVERIFIED_ENV not in os.environ:
            raise rejected("this worker takes nothing without checksums")
        legs = self._legs(body, source) if body.get("parts") else []
        self._digest = json_digest(manifest_json.encode())
        self._stage = Background(
            lambda: self._receive(body, source, legs),
            self._collective.cancel,
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
        with torch.no_grad():
            by_plan = self._apply()
        self.refits_by_plan += by_plan
        weights.commit(names, by_plan=self._plan is not None and self._checked)
        self.drop()
        self.last_load_s = time.monotonic() - began
        return Loaded(len(names), by_plan, self.last_load_s, self.needs_digest)

    def export(self, path: str, tensors: Sequence[tuple[str, str]]) -> int:
        """Write source tensors of the committed weights (name, dtype) one after another into the file at `path`; bytes.

        For a thread of its own: nothing waits for the engine's steps. Raises UNSUPPORTED where a tensor is here no more as
        it was sent (cut, cast, or packed).
        """
        written, held = 0, self._holder()
        with open(path, "r+b", buffering=0) as file:
            for name, dtype in tensors:
                data = _bytes(_as_sent(name, held(name), DTYPES[dtype]))
                while data.nbytes:
                    done = file.write(data)
                    data, written = data[done:], written + done
        return written

    def drop(self) -> None:
        """Forget the shadow, and end a stage that runs. Raises CONFLICT if it does not end."""
        stage, self._stage = self._stage, None
        self._digest, self._received, self._weights.shadow = "", _NOTHING, {}
        if stage is not None and not stage.stop():
            self._stage = stage
            raise OmnifleetError(Reason.CONFLICT, "the last stage does not end", retryable=True)

    def _legs(self, body: Mapping[str, Any], source: str) -> list[Leg]:
        if self._plan is None or not self._checked:
            raise rejected("slices came, but this engine's plan is not checked: it takes tensors whole")
        if not source.startswith(GROUP):
            raise rejected("slices come over groups only")
        return legs_of(body, self._rank, self._reads)

    def _receive(self, body: Mapping[str, Any], source: str, legs: Sequence[Leg]) -> Received:
        if legs or body.get("parts"):
            return self._receive_pieces(body, source, legs)
        restored = self._holder()

        def held(name: str) -> torch.Tensor:
            tensor = restored(name)
            if tensor is None:
                raise rejected(f"the bytes of {name} are not kept here")
            return tensor

        if source.startswith(GROUP):
            tensors = fill(body, self._collective.receive(body, source), held, self._memory)
        elif source.startswith(CUDA_IPC):
            tensors = fill(body, ipc.receive(body, source, self._memory), held, self._memory)
        else:
            read = each_tensor(body, Path(source), lambda name: _bytes(held(name)))
            if self._takes_slices(body):
                return self._sliced(read)
            tensors = {tensor.name: _tensor(tensor) for tensor in read}
        size = sum(tensor.nbytes for tensor in tensors.values())
        return Received(tensors, self._bound(tensors), frozenset(tensors), size)

    def _receive_pieces(self, body: Mapping[str, Any], source: str, legs: Sequence[Leg]) -> Received:
        assert self._plan is not None
        plan, tensors = self._plan, self._collective.receive_legs(body, source, legs)
        names = frozenset(tensor["name"] for tensor in body["tensors"] if tensor["changed"])
        pairs = self._ready(tensors, lambda: plan.bind_pieces(self._model, as_pieces(legs, tensors)))
        return Received({}, pairs, names, sum(tensor.nbytes for tensor in tensors.values()))

    def _takes_slices(self, body: Mapping[str, Any]) -> bool:
        """True if of whole tensors too this rank keeps only its slices: by plan, unless that is to be checked now."""
        checks = self._since_check >= CHECK_EVERY and all(tensor["changed"] for tensor in body["tensors"])
        return self._plan is not None and self._checked and not checks and self._plan.share < _SLICED

    def _sliced(self, read: Iterable[ShadowTensor]) -> Received:
        """Of each tensor as it comes, what this rank reads."""
        assert self._plan is not None
        pieces: Pieces = {}
        names = set()
        for shadow in read:
            names.add(shadow.name)
            whole = _tensor(shadow)
            for view in self._reads.get(shadow.name, ()):
                pieces[shadow.name, view] = view.on(whole).clone(memory_format=torch.contiguous_format)
        size = sum(piece.nbytes for piece in pieces.values())
        return Received({}, self._plan.bind_pieces(self._model, pieces), frozenset(names), size)

    def _holder(self) -> Callable[[str], torch.Tensor | None]:
        """Finds source tensors of the committed version: on the host, in the checkpoint, or in parameter memory."""
        restoring: list[Restoring] = []

        def find(name: str) -> torch.Tensor | None:
            tensor = self._weights.kept(name)
            if tensor is not None or self._plan is None:
                return tensor
            if not restoring:
                restoring.append(Restoring(self._plan, self._model))
            return restoring[0].gather(name)

        return find

    def _bound(self, tensors: Sources) -> Pairs:
        if self._plan is None or not self._checked:
            return []
        plan = self._plan
        return self._ready(tensors, lambda: plan.bind(self._model, tensors))

    def _ready(self, tensors: Sources, bind: Callable[[], Pairs]) -> Pairs:
        """The plan's copies, made ready before the gate; kept while the tensors lie where they lay."""
        of, pairs = self._memory.derived
        if of is not tensors:
            pairs = bind()
            self._memory.derived = (tensors, pairs)
        return pairs  # type: ignore[no-any-return]

    def _apply(self) -> bool:
        if self._plan is None:
            self._weights.check_loadable()
            self._load()
            return False
        due = not self._checked or self._since_check >= CHECK_EVERY
        if due and self._weights.complete:
            return self._check(self._plan)
        if not self._checked:
            self._weights.check_loadable()
            self._load()
            return False
        self._since_check += 1
        replay(self._received.pairs)
        _wait(self._memory.device)
        return True

    def _check(self, plan: Plan) -> bool:
        """Load by plan and by the loader, compare; the loader's result stays. A plan that disagrees is dropped for good."""
        different = agrees(self._model, plan, self._weights.shadow, self._load)
        self._checked, self._since_check = not different, 0
        self._memory.derived = (None, None)  # the loader may have moved parameters
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
        return False


def _needs_body(needs: Needs) -> NeedsBody:
    return {name: [view.body for view in views] for name, views in sorted(needs.items())}


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


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _tensor(source: ShadowTensor) -> torch.Tensor:
    return torch.frombuffer(source.data, dtype=DTYPES[source.dtype]).view(source.shape)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
