"""Reads the sources that callers name instead of sending: URLs and paths. Nothing else here opens either."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import ip_address, ip_network
from typing import Any, Protocol

import httpcore

import omnifleet
from omnifleet.config.services import MediaLimits, MediaSources
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet_media.server.roots import open_under
from omnifleet_media.server.url import Address, HostRules, Network, Url, check_addresses, parse_url


class Sink(Protocol):
    """Takes a source piece by piece and refuses what is too much."""

    def add(self, piece: bytes) -> None:
        """The next piece."""


Resolve = Callable[[str, int], Awaitable[list[Address]]]

_PIECE = 1 << 20
_ADDRESSES = 4
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429})
_TIME_KNOB = "media.sources.fetch_seconds"
_SIZE_KNOB = "media.limits.source_bytes"


class Fetcher:
    """`media.sources` in action: at most `fetches` at once, and four times as many that wait."""

    def __init__(
        self,
        sources: MediaSources,
        limits: MediaLimits,
        resolve: Resolve | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """resolve: of names to addresses; tls: whom https trusts; default: the system's, and certifi's authorities.

        Raises OmnifleetError(INVALID_REQUEST) for bad hosts.
        """
        self._sources, self._limits = sources, limits
        self._hosts = HostRules(sources.hosts)
        self._networks = [ip_network(network) for network in sources.networks]
        self._resolve = resolve or resolve_host
        self._room = asyncio.Semaphore(sources.fetches)
        self._waiting = 0
        self._tls = tls

    async def fetch(self, text: str, into: Sink) -> None:
        """Receive what `text` names: http(s)://, file:// or an absolute path; a data URL is taken as it is.

        Raises OmnifleetError: INVALID_REQUEST for what may not be read, INVALID_MEDIA for what cannot be,
        LIMIT_EXCEEDED before too much is received, UNAVAILABLE or DEADLINE for what may pass, OVERLOADED.
        """
        scheme = text[:8].lower()
        if scheme.startswith(("http://", "https://")):
            await self._in_turn(text, into)
        elif scheme.startswith("data:"):
            into.add(text.encode(errors="replace"))
        else:
            await self._read_file(_path_of(text), into)

    async def _read_file(self, path: str, into: Sink) -> None:
        fd = await asyncio.to_thread(open_under, self._sources.roots, path)
        try:
            check_declared(os.fstat(fd).st_size, self._limits)
            while piece := await asyncio.to_thread(os.read, fd, _PIECE):
                into.add(piece)
        except OSError as error:
            raise invalid(
                f"{path[:200]!r} cannot be read: {error.strerror}", reason=Reason.INVALID_MEDIA
            ) from error
        finally:
            os.close(fd)

    # ------------------------------------------------------------------ http

    async def _in_turn(self, text: str, into: Sink) -> None:
        url = self._checked(text)
        if self._waiting >= 4 * self._sources.fetches:
            raise retryable(
                Reason.OVERLOADED,
                f"{self._waiting} downloads wait already",
                knob="media.sources.fetches",
                retry_after_ms=500,
            )
        self._waiting += 1
        try:
            await self._room.acquire()
        finally:
            self._waiting -= 1
        try:
            async with asyncio.timeout(self._sources.fetch_seconds):
                await self._follow(url, into)
        except TimeoutError:
            raise OmnifleetError(
                Reason.DEADLINE,
                f"{url.authority} took longer than {self._sources.fetch_seconds:g} s",
                retryable=True,
                knob=_TIME_KNOB,
            ) from None
        finally:
            self._room.release()

    async def _follow(self, url: Url, into: Sink) -> None:
        for _ in range(self._sources.redirects + 1):
            following = await self._get(url, into)
            if following is None:
                return
            if url.scheme == "https" and following.scheme == "http":
                raise invalid(f"{url.authority} redirects from https to http")
            url = following
        raise invalid(
            f"{url.authority} is after more than {self._sources.redirects} redirects",
            knob="media.sources.redirects",
        )

    async def _get(self, url: Url, into: Sink) -> Url | None:
        """Receive the body, or answer where to go instead. One connection a URL: no check is older than its connection."""
        tls = self._tls = self._tls or httpcore.default_ssl_context()
        guard = _CheckedConnections(self._resolve, self._networks)
        headers: dict[str | bytes, str | bytes] = {
            "Host": url.authority,
            "User-Agent": f"omnifleet-media/{omnifleet.__version__}",
            "Accept": "image/*, video/*, audio/*;q=0.9, */*;q=0.1",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        whole = httpcore.URL(scheme=url.scheme, host=url.host, port=url.port, target=url.target)
        try:
            async with httpcore.AsyncConnectionPool(ssl_context=tls, network_backend=guard) as pool:
                async with pool.stream("GET", whole, headers=headers) as response:
                    if response.status in _REDIRECTS:
                        return self._redirected(url, _header(response, b"location"))
                    await self._receive(url, response, into)
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            message = f"{url.authority} could not be read: {error or type(error).__name__}"
            raise retryable(Reason.UNAVAILABLE, message, retry_after_ms=1000) from error
        return None

    async def _receive(self, url: Url, response: httpcore.Response, into: Sink) -> None:
        status = response.status
        if status >= 500 or status in _PASSING:
            raise retryable(Reason.UNAVAILABLE, f"{url.authority} answered {status}", retry_after_ms=1000)
        if status != 200:
            raise invalid(f"{url.authority} answered {status}", reason=Reason.INVALID_MEDIA)
        if _header(response, b"content-encoding").lower() not in ("", "identity"):
            raise invalid(
                f"{url.authority} sent a compressed body, which was not asked for",
                reason=Reason.INVALID_MEDIA,
            )
        declared = _header(response, b"content-length")
        check_declared(int(declared) if declared.isdecimal() else 0, self._limits)
        async for piece in response.aiter_stream():
            into.add(piece)

    def _redirected(self, url: Url, location: str) -> Url:
        if not location:
            raise invalid(f"{url.authority} redirects to nowhere", reason=Reason.INVALID_MEDIA)
        return self._checked(urllib.parse.urljoin(str(url), location))

    def _checked(self, text: str) -> Url:
        url = parse_url(text)
        self._hosts.check(url)
        if url.address is not None:
            check_addresses(url.host, [url.address], self._networks)
        return url


class _CheckedConnections(httpcore.AsyncNetworkBackend):
    """Resolves a host once, checks what came back, and connects to that and nothing else (no second look-up)."""

    def __init__(self, resolve: Resolve, networks: list[Network]) -> None:
        self._resolve, self._networks = resolve, networks
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        check_addresses(host, addresses, self._networks)
        failed: Exception | None = None
        for address in addresses[:_ADDRESSES]:
            try:
                return await self._backend.connect_tcp(str(address), port, timeout=timeout)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failed = error
        raise failed or httpcore.ConnectError(f"{host} has no address")


async def resolve_host(host: str, port: int) -> list[Address]:
    """The addresses of a host, as the system resolves it. Raises OmnifleetError(UNAVAILABLE)."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise retryable(
            Reason.UNAVAILABLE, f"{host} cannot be resolved: {error.strerror}", retry_after_ms=1000
        ) from error
    return [ip_address(str(sockaddr[0]).partition("%")[0]) for *_, sockaddr in found]


def check_declared(size: int, limits: MediaLimits) -> None:
    """A source that says it is too large is refused before it is received. Raises OmnifleetError(LIMIT_EXCEEDED)."""
    if size > limits.source_bytes:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"the source has {size} bytes, at most {limits.source_bytes} are allowed",
            knob=_SIZE_KNOB,
        )


def _path_of(text: str) -> str:
    """The path of a file URL, or the text itself."""
    if text[:7].lower() != "file://":
        return text
    host, slash, path = text[7:].partition("/")
    return urllib.parse.unquote(slash + path) if host.lower() in ("", "localhost") else ""


def _header(response: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in response.headers if key.lower() == name), "")
