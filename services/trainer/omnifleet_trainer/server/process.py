"""One trainer process: start where the run stands, train beside two servers, leave a summary."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from omnifleet.auth import Tokens
from omnifleet.config.load import apply_overrides, recipe_from_mapping
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.http import http_serving, make_app
from omnifleet.service import load_tokens, peer, until_stopped, write_record
from omnifleet.telemetry.counters import Counters
from omnifleet.wire.server import INSTANCE, serving
from omnifleet.wire.trainer_pb2_grpc import add_TrainerServicer_to_server
from omnifleet_trainer.loop.controller import Controller
from omnifleet_trainer.loop.start import LEDGER, Mode, Start, find_start
from omnifleet_trainer.server.assembly import Addresses, assembled
from omnifleet_trainer.server.servicer import TrainerServicer
from omnifleet_trainer.server.settings import check_recipe

log = logging.getLogger("omnifleet.trainer")

STOPPED = 143
"""Exit status after SIGTERM or SIGINT: the run is not done, a supervisor may start it again."""
_PEERS_S = 300.0
_STOP_S = 12.0  # a supervisor kills after 15


async def serve(
    run_dir: Path,
    *,
    mode: Mode = "auto",
    listen: str = "",
    http_listen: str = "",
    media: str = "",
    gateway: str = "",
    reward: str = "",
    overrides: Sequence[str] = (),
) -> int:
    """Train the run in `run_dir` to its end. Returns the exit status: 0 if it is done or was stopped by `Stop`.

    media, gateway, reward: gRPC addresses, "" = found through the run folder. Raises OmnifleetError.
    """
    recipe = load_run_recipe(run_dir, overrides)
    if mode == "auto" and _is_done(run_dir, recipe):
        log.info(
            "the run is done: %d steps; --fresh starts it again, trainer.steps extends it",
            recipe.trainer.steps,
        )
        return 0
    check_recipe(recipe)
    tokens = load_tokens(run_dir, recipe.auth.tokens_file)
    start = find_start(run_dir, mode, recipe)
    counters = Counters("trainer")
    try:
        addresses = Addresses(
            media=await peer(run_dir, "media", given=media, deadline_s=_PEERS_S),
            gateway=await peer(run_dir, "gateway", given=gateway, deadline_s=_PEERS_S),
            reward=await peer(run_dir, "reward", given=reward, deadline_s=_PEERS_S),
        )
        async with assembled(recipe, run_dir, start, addresses, tokens, counters) as run:
            servicer = TrainerServicer(run.controller, run.journal, run_dir / LEDGER, counters, run.facts)
            app = make_app("omnifleet trainer", counters, lambda: run.controller.state != "starting")
            async with (
                _grpc(listen or recipe.trainer.listen, servicer, tokens) as grpc_address,
                http_serving(
                    app, http_listen or recipe.trainer.http_listen, knob="trainer.http_listen"
                ) as http_address,
            ):
                write_record(run_dir, "trainer", grpc=grpc_address, http=http_address)
                log.info("training %s from step %d; gRPC %s", recipe.run.name, start.step, grpc_address)
                return await _train(run.controller, run_dir, start)
    finally:
        start.ledger.close()


async def _train(controller: Controller, run_dir: Path, start: Start) -> int:
    """Run the loop until it ends or a signal comes; a signal means: finish the step in hand, checkpoint, go."""
    training = asyncio.create_task(controller.run(), name="training")
    signalled = asyncio.create_task(until_stopped(), name="signals")
    try:
        await asyncio.wait((training, signalled), return_when=asyncio.FIRST_COMPLETED)
        if not training.done():
            controller.stop(checkpoint=True)
            await asyncio.wait((training,), timeout=_STOP_S)
        if not training.done():
            log.warning("the step in hand took longer than %g s to end; a resume repeats it", _STOP_S)
            return STOPPED
        done = training.result()
        if done:
            summary = await controller.summary()
            spent = time.time() - start.began_unix
            _write_summary(run_dir, summary | {"seconds": spent, "instance": INSTANCE})
        return STOPPED if signalled.done() and not done else 0
    finally:
        training.cancel()
        signalled.cancel()
        await asyncio.gather(training, signalled, return_exceptions=True)


def _grpc(listen: str, servicer: TrainerServicer, tokens: Tokens) -> Any:
    def register(server: Any) -> None:
        add_TrainerServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]

    return serving(listen, register, tokens=tokens, knob="trainer.listen")


def load_run_recipe(run_dir: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The resolved recipe in the run folder. Raises INVALID_CONFIG."""
    path = run_dir / "recipe.yaml"
    try:
        body = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise OmnifleetError(
            Reason.INVALID_CONFIG,
            f"{path} cannot be read: {error}; `omnifleet train RECIPE` writes it",
            knob="--run-dir",
        ) from error
    return recipe_from_mapping(apply_overrides(body, overrides), str(path))


def _is_done(run_dir: Path, recipe: Recipe) -> bool:
    path = run_dir / "summary.json"
    if not path.exists():
        return False
    summary = json.loads(path.read_text())
    settled = bool(summary.get("settled")) and recipe.evaluation.patience is not None
    return settled or int(summary["steps"]) >= recipe.trainer.steps


def _write_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    scratch = run_dir / f".summary.{os.getpid()}.tmp"
    scratch.write_text(json.dumps(summary, indent=1))
    scratch.replace(run_dir / "summary.json")
