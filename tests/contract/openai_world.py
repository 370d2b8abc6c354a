"""A gateway with one scripted worker, and the official `openai` client at it."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai

from omnifleet.auth import OPEN, Scope, Tokens
from omnifleet_rollout.gateway.renderer import RendererLoader
from tests.contract.gateway_world import (
    PICTURE_BYTES,
    ScriptedWorker,
    World,
    token,
    world,
)

PNG = "data:image/png;base64," + base64.b64encode(PICTURE_BYTES).decode()
CLIP = "data:video/mp4;base64," + base64.b64encode(b"a clip").decode()


@asynccontextmanager
async def served(
    path: Path, checkpoint: Path, *, tokens: Tokens = OPEN, secret: str = "", **settings: Any
) -> AsyncIterator[tuple[World, openai.AsyncOpenAI, ScriptedWorker]]:
    async with world(path, tokens=tokens, renderer=RendererLoader(checkpoint), **settings) as here:
        worker = await here.worker("w-1", 5, max_running=16)
        key = secret or tokens.secret(Scope.ENV) or "none"
        async with openai.AsyncOpenAI(
            base_url=f"{here.http}/v1", api_key=key, timeout=120, max_retries=0
        ) as client:
            yield here, client, worker


def text_of(seed: int, count: int) -> str:
    """Letters that the byte tokenizer gives the scripted tokens."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return "".join(letters[token(seed, i)] for i in range(count))
