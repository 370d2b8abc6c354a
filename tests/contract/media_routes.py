"""One media service, asked by HTTP and by gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire.errors import HTTP_STATUS
from tests.contract.media_world import running

Put = Callable[[str], Awaitable[dict[str, Any]]]


@dataclass
class Routes:
    """The same put by URL over gRPC and over HTTP, and what the service counts."""

    client: MediaClient
    http: httpx.AsyncClient

    async def by_grpc(self, url: str) -> str:
        return (await self.client.put_url(url, "run")).ref.digest

    async def by_http(self, url: str) -> str:
        answer = await self.http.post("/v1/media", json={"url": url, "run": "run"})
        body = answer.json()
        if answer.status_code == 200:
            return str(body["digest"])
        error = body["error"]
        reason = Reason(error["code"])
        assert answer.status_code == HTTP_STATUS.get(reason, 503)
        raise OmnifleetError(reason, error["message"], error["retryable"], error["knob"])

    async def refused(self, url: str) -> OmnifleetError:
        """How the URL is refused: in the same words on both routes."""
        errors = []
        for put in (self.by_grpc, self.by_http):
            with pytest.raises(OmnifleetError) as caught:
                await put(url)
            errors.append(caught.value)
        assert str(errors[0]) == str(errors[1])
        return errors[0]


@asynccontextmanager
async def routes(folder: Path, **settings: Any) -> AsyncIterator[Routes]:
    async with (
        running(folder, **settings) as service,
        MediaClient.open(service.grpc, deadline_s=3) as client,
        httpx.AsyncClient(base_url=f"http://{service.http}", timeout=30) as http,
    ):
        yield Routes(client, http)
