"""Processes that ask a gateway or its worker in one way each, over connections that they keep: what a caller of ours sees.

    python bench/rollout/clients.py http RUN_DIR < loads    # a load a line, as JSON; a round a line comes back

A client's own work is in its times, so each is about the least that its protocol takes: aiohttp's parser in C, the gRPC client of
this repository. `httpx` is what the `openai` package sends with; the ways called "... empty" ask nothing of the gateway:
client, loopback and framework alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import httpx
import uvloop
from stack import WHO, Ask, Load, Round, drive

import omnifleet
from omnifleet.auth import Scope
from omnifleet.client.rollout import RolloutClient
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Sampling
from omnifleet.wire import common_pb2, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel

PROMPT_TOKENS = 32
WAYS = ("worker", "grpc", "grpc empty", "http", "http empty", "httpx")


def prompt(number: int) -> list[int]:
    """Bytes and merges of the tiny tokenizer; no two requests share one."""
    return [40 + (number * 7919 + i * i) % 200 for i in range(PROMPT_TOKENS)]


def sampling(number: int, tokens: int, n: int = 1) -> Sampling:
    return Sampling(max_tokens=tokens, seed=number, ignore_eos=True, n=n)


# ---------------------------------------------------------------- here


class Client:
    """One of these processes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @staticmethod
    @asynccontextmanager
    async def open(way: str, run_dir: Path) -> AsyncIterator[Client]:
        """Start it, and let it have connected."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, way, str(run_dir), stdin=pipe, stdout=pipe, limit=1 << 24
        )
        try:
            client = Client(process)
            await client.round(Load(1, 3, 2))
            yield client
        finally:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()

    async def round(self, load: Load) -> Round:
        """Run a load there."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(load)).encode() + b"\n")
        return Round(**json.loads(await self._process.stdout.readline()))


@asynccontextmanager
async def all_clients(ways: tuple[str, ...], run_dir: Path) -> AsyncIterator[dict[str, Client]]:
    """One of each way."""
    async with AsyncExitStack() as stack:
        yield {way: await stack.enter_async_context(Client.open(way, run_dir)) for way in ways}


# ---------------------------------------------------------------- there


@asynccontextmanager
async def asking(way: str, run_dir: Path) -> AsyncIterator[Ask]:
    record = read_records(run_dir)["worker-0" if way == "worker" else "gateway"]
    secret = load_tokens(run_dir).secret(Scope.SERVICE if way == "worker" else Scope.TRAINER)
    headers = {"authorization": f"Bearer {secret}"}
    url = f"http://{record.http}"
    if way == "grpc empty":
        async with open_channel(record.grpc, secret) as channel:
            yield _empty_grpc(channel)
    elif way in ("worker", "grpc"):
        async with RolloutClient.open(record.grpc, secret) as client:
            yield _grpc(client)
    elif way == "httpx":
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as slow:
            yield _httpx(slow)
    else:
        limits = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(120)
        async with aiohttp.ClientSession(
            url, headers=headers, connector=limits[0], timeout=limits[1]
        ) as http:
            yield _empty_http(http) if way == "http empty" else _http(http)


def _grpc(client: RolloutClient) -> Ask:
    async def ask(number: int, tokens: int) -> int:
        reply = await client.generate(
            prompt_token_ids=prompt(number),
            sampling=sampling(number, tokens),
            identity=WHO,
            deadline_s=120,
            return_prompt_token_ids=False,
        )
        return sum(len(sample.token_ids) for sample in reply.samples.values())

    return ask


def _http(http: aiohttp.ClientSession) -> Ask:
    async def ask(number: int, tokens: int) -> int:
        async with http.post("/v1/completions", json=_body(number, tokens)) as reply:
            return int((await reply.json())["usage"]["completion_tokens"])

    return ask


def _httpx(http: httpx.AsyncClient) -> Ask:
    async def ask(number: int, tokens: int) -> int:
        reply = (await http.post("/v1/completions", json=_body(number, tokens))).json()
        return int(reply["usage"]["completion_tokens"])

    return ask


def _empty_grpc(channel: grpc.aio.Channel) -> Ask:
    stub = rollout_pb2_grpc.RolloutStub(channel)  # type: ignore[no-untyped-call]

    async def ask(_: int, tokens: int) -> int:
        await stub.Handshake(common_pb2.HandshakeRequest(contract=omnifleet.CONTRACT, client="bench"))
        return tokens

    return ask


def _empty_http(http: aiohttp.ClientSession) -> Ask:
    async def ask(_: int, tokens: int) -> int:
        async with http.get("/healthz") as reply:
            await reply.json()
        return tokens

    return ask


def _body(number: int, tokens: int) -> dict[str, Any]:
    return {"prompt": prompt(number), "max_tokens": tokens, "seed": number, "ignore_eos": True}


async def main(way: str, run_dir: Path) -> None:
    loop = asyncio.get_running_loop()
    async with asking(way, run_dir) as ask:
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            found = await drive(Load(**json.loads(line)), ask)
            print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], Path(sys.argv[2])))
