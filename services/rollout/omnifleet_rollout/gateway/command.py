"""`omnifleet gateway serve`: puts the gateway's process together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop
import yaml

from omnifleet.auth import Scope, Tokens
from omnifleet.config.recipe import AuthConfig, SamplingConfig
from omnifleet.config.services import GatewayConfig, RolloutConfig
from omnifleet.http import http_serving
from omnifleet.service import (
    freeze_heap,
    load_section,
    load_tokens,
    run_to_exit,
    until_stopped,
    write_record,
)
from omnifleet.telemetry.logs import set_up_logs
from omnifleet.wire.server import serving
from omnifleet_rollout.fleet.registry import Registry
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.fleet.store import FleetStore
from omnifleet_rollout.gateway.gateway import Gateway
from omnifleet_rollout.gateway.http import make_gateway_app
from omnifleet_rollout.gateway.media_in import MediaIn, clip_contract, sound_contract
from omnifleet_rollout.gateway.renderer import RendererLoader
from omnifleet_rollout.gateway.server import register
from omnifleet_rollout.gateway.sessions import Sessions

log = logging.getLogger("omnifleet.gateway")
_LOOK_S = 0.25


def serve_gateway(
    run_dir: Path,
    listen: str,
    http_listen: str,
    media: str,
    overrides: Sequence[str],
    log_json: bool,
    *,
    new_life: bool = False,
) -> None:
    """Serve until SIGTERM or SIGINT. "" for an address: the setting, or the run folder's record, decides.

    new_life: the whole run starts again, so weights that were announced before are nobody's to bring.
    """
    set_up_logs("gateway", as_json=log_json)
    serving = _serve(run_dir, listen, http_listen, media, overrides, new_life)
    run_to_exit(serving, loop_factory=uvloop.new_event_loop)


async def _serve(
    run_dir: Path, listen: str, http_listen: str, media: str, overrides: Sequence[str], new_life: bool
) -> None:
    config = load_section(run_dir, "gateway", GatewayConfig, overrides)
    rollout = load_section(run_dir, "rollout", RolloutConfig, overrides)
    sampling = load_section(run_dir, "sampling", SamplingConfig, overrides)
    tokens = load_tokens(run_dir, load_section(run_dir, "auth", AuthConfig, overrides).tokens_file)
    model_path = _model_path(run_dir, overrides)
    store = FleetStore(run_dir / "fleet.sqlite")
    media_in = MediaIn(run_dir, media, tokens, clip_contract(config, model_path), sound_contract(model_path))
    sessions = Sessions(run_dir / "sessions.sqlite", keep=config.sessions)
    renderer = RendererLoader(model_path)
    try:
        fleet = _fleet(config, rollout, store, new_life)
        gateway = Gateway(
            config,
            fleet,
            worker_secret=tokens.secret(Scope.SERVICE),
            renderer=renderer,
            put_media=media_in.put,
            sessions=sessions,
            model_path=model_path,
            defaults=sampling,
        )
        renderer.start()
        gateway.parsers.start()
        async with _running(gateway, tokens, listen or config.listen, http_listen or config.http_listen) as (
            grpc,
            http,
        ):
            write_record(run_dir, "gateway", grpc=grpc, http=http)
            log.info("gateway serves gRPC on %s and HTTP on %s", grpc, http)
            await _until_stopped_or_broken(gateway)
            fleet.close()
            gateway.dispatcher.stop()
    finally:
        store.close()
        sessions.close()
        await media_in.close()


def _fleet(config: GatewayConfig, rollout: RolloutConfig, store: FleetStore, new_life: bool) -> Fleet:
    registry = Registry(
        time.monotonic,
        heartbeat_s=config.heartbeat_s,
        suspect_after_s=config.suspect_after_s,
        dead_after_s=config.dead_after_s,
        hung_after_s=config.hung_after_s,
        max_workers=rollout.max_workers,
    )
    store.load(registry)
    if new_life:
        registry.forget_targets()
    registry.want(rollout.pool, rollout.workers)
    return Fleet(registry, store, look_every_s=config.heartbeat_s / 2)


@asynccontextmanager
async def _running(
    gateway: Gateway, tokens: Tokens, listen: str, http_listen: str
) -> AsyncIterator[tuple[str, str]]:
    try:
        async with serving(
            listen, lambda server: register(gateway, server), tokens=tokens, knob="gateway.listen"
        ) as grpc:
            async with http_serving(
                make_gateway_app(gateway, tokens), http_listen, knob="gateway.http_listen"
            ) as http:
                yield grpc, http
    finally:
        await gateway.close()


async def _until_stopped_or_broken(gateway: Gateway) -> None:
    """Serve until a signal; an error of the background work ends the process with its message."""
    work = asyncio.create_task(gateway.run())
    stop = asyncio.create_task(until_stopped())
    loaded = asyncio.create_task(_freeze_when_loaded(gateway))
    try:
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        for task in (work, stop, loaded):
            task.cancel()
        await asyncio.gather(work, stop, loaded, return_exceptions=True)


async def _freeze_when_loaded(gateway: Gateway) -> None:
    while not (gateway.renderer.settled and gateway.parsers.settled):  # noqa: ASYNC110 - they tell by a flag only
        await asyncio.sleep(_LOOK_S)
    freeze_heap()


def _model_path(run_dir: Path, overrides: Sequence[str]) -> Path | None:
    """The recipe's checkpoint folder; None without a recipe: then only token prompts are served."""
    from omnifleet.config.load import apply_overrides

    recipe = run_dir / "recipe.yaml"
    body = yaml.safe_load(recipe.read_text()) if recipe.exists() else {}
    path = (apply_overrides(body or {}, overrides).get("model") or {}).get("path")
    return Path(path) if path else None
