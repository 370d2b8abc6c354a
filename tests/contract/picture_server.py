"""An HTTP server on loopback that answers what a test says, byte for byte, and remembers who asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = bytes | Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class PictureServer:
    """answers: path -> a whole response, or what writes one."""

    port: int
    answers: dict[str, Answer] = field(default_factory=dict)
    connections: int = 0
    asked: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client went away before it had everything."""

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            self.asked.append(path)
            self.hosts.append(head.lower().partition("host: ")[2].split()[0])
            found = self.answers.get(path, b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            if isinstance(found, bytes):
                writer.write(found)
                await writer.drain()
            else:
                await found(writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            writer.close()


def ok(body: bytes, **headers: str) -> bytes:
    """A 200 with a body."""
    lines = {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 200 OK\r\n{head}\r\n".encode() + body


def moved(to: str, status: int = 302) -> bytes:
    """A redirect."""
    return f"HTTP/1.1 {status} Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode()


def status(code: int) -> bytes:
    """An empty answer."""
    return f"HTTP/1.1 {code} Answer\r\nContent-Length: 0\r\n\r\n".encode()


@asynccontextmanager
async def picture_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[PictureServer]:
    """Listens on a free port of 127.0.0.1; https with `tls`."""
    made = PictureServer(0)
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0, ssl=tls)
    made.port = server.sockets[0].getsockname()[1]
    async with server:
        yield made
