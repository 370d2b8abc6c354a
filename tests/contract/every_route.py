"""The ways in: a data URL, an HTTP upload (raw and form), a URL that the service fetches, a path under an allowed folder,
gRPC, and gRPC with several sources a message. A module that imports `service` and `route` runs its tests on each."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from google.protobuf.json_format import MessageToDict
from PIL import Image

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.errors import HTTP_STATUS
from omnifleet_media.server.library import Library
from tests.contract.media_world import running
from tests.contract.picture_server import PictureServer, ok, picture_server

Contract = media_pb2.DecodeContract


@dataclass
class Service:
    """A running service with every route open."""

    client: MediaClient
    http: httpx.AsyncClient
    web: PictureServer
    folder: Path
    library: Library
    grpc: str
    numbers: itertools.count[int] = field(default_factory=itertools.count)


@dataclass(frozen=True)
class Put:
    """A source, the slot it goes into and its contract."""

    data: bytes
    kind: MediaKind = MediaKind.IMAGE
    contract: Contract = field(default_factory=Contract)

    @property
    def query(self) -> list[tuple[str, str]]:
        fields = MessageToDict(self.contract, preserving_proto_field_name=True)
        pairs = [("run", "run"), ("kind", str(self.kind))]
        for name, value in fields.items():
            pairs += [(name, str(v)) for v in (value if isinstance(value, list) else [value])]
        return pairs


Route = Callable[[Service, Put], Awaitable[MediaRef]]


async def by_grpc(service: Service, put: Put) -> MediaRef:
    reply = await service.client.put(put.data, "run", kind=put.kind, contract=put.contract)
    return MediaRef(put.kind, Digest(reply.ref.digest))


async def by_many(service: Service, put: Put) -> MediaRef:
    """Between two others, so that it is a message of several."""
    before, behind = beside()
    outcomes = await service.client.put_many(
        [before, put.data, behind], "run", kind=put.kind, contract=put.contract
    )
    outcome = outcomes[1]
    if isinstance(outcome, OmnifleetError):
        raise outcome
    return MediaRef(put.kind, Digest(outcome.ref.digest))


async def by_data_url(service: Service, put: Put) -> MediaRef:
    url = b"data:application/octet-stream;base64," + base64.b64encode(put.data)
    return await by_grpc(service, Put(url, put.kind, put.contract))


async def by_path(service: Service, put: Put) -> MediaRef:
    file = service.folder / str(next(service.numbers))
    file.write_bytes(put.data)
    return await named(service, put, str(file))


async def by_url(service: Service, put: Put) -> MediaRef:
    path = f"/{next(service.numbers)}"
    service.web.answers[path] = ok(put.data)
    return await named(service, put, service.web.url(path))


async def named(service: Service, put: Put, url: str) -> MediaRef:
    reply = await service.client.put_url(url, "run", kind=put.kind, contract=put.contract)
    return MediaRef(put.kind, Digest(reply.ref.digest))


async def by_upload(service: Service, put: Put) -> MediaRef:
    return answered(await service.http.post("/v1/media", params=put.query, content=put.data), put)


async def by_form(service: Service, put: Put) -> MediaRef:
    return answered(
        await service.http.post("/v1/media", params=put.query, files={"file": ("x", put.data)}), put
    )


def answered(answer: httpx.Response, put: Put) -> MediaRef:
    body = answer.json()
    if answer.status_code == 200:
        return MediaRef(put.kind, Digest(body["digest"]))
    reason = Reason(body["error"]["code"])
    assert answer.status_code == HTTP_STATUS.get(reason, 503)
    retry_after_ms = 1000 * int(answer.headers.get("Retry-After", 0))
    error = body["error"]
    raise OmnifleetError(
        reason, error["message"], error["retryable"], error["knob"], retry_after_ms=retry_after_ms
    )


ROUTES: dict[str, Route] = {
    "data URL": by_data_url,
    "upload": by_upload,
    "form": by_form,
    "URL": by_url,
    "path": by_path,
    "gRPC": by_grpc,
    "gRPC, many": by_many,
}


@asynccontextmanager
async def opened(folder: Path, **settings: Any) -> AsyncIterator[Service]:
    """A service with every route open."""
    (folder / "files").mkdir()
    async with picture_server() as web:
        sources = {
            "roots": [folder / "files"],
            "hosts": [f"127.0.0.1:{web.port}"],
            "networks": ["127.0.0.0/8"],
        }
        async with (
            running(folder, sources=sources, limits={"decode_seconds": 120.0}, **settings) as made,
            MediaClient.open(made.grpc, deadline_s=120) as client,
            httpx.AsyncClient(base_url=f"http://{made.http}", timeout=120) as http,
        ):
            await client.put_many(beside(), "run")
            yield Service(client, http, web, folder / "files", made.library, made.grpc)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    async with opened(tmp_path_factory.mktemp("routes")) as made:
        yield made


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> Route:
    return ROUTES[request.param]


def beside() -> list[bytes]:
    return [png(of([(0, 0, 1)])), png(of([(0, 0, 2)]))]


def encoded(picture: Image.Image, codec: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, codec, **options)
    return out.getvalue()


def of(*rows: Sequence[tuple[int, int, int]]) -> np.ndarray:
    return np.array(rows, np.uint8)


def png(pixels: np.ndarray, **options: Any) -> bytes:
    return encoded(Image.fromarray(pixels), **options)
