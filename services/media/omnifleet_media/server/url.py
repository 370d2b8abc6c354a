"""http(s) URLs, read once and strictly: what is checked here is, part by part, what is connected to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from omnifleet.errors import OmnifleetError, invalid

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

HOSTS_KNOB = "media.sources.hosts"
NETWORKS_KNOB = "media.sources.networks"
_LONGEST = 2048
_DEFAULT_PORTS = {"http": 80, "https": 443}
_URL = re.compile(r"(https?)://([^/?#]*)([^#]*)(?:#.*)?", re.IGNORECASE)
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?", re.IGNORECASE)
_LABEL = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(
    r"[0-9]+|0x[0-9a-f]*"
)  # a last label that some parsers take for (a part of) an IPv4 address
_ENTRY = re.compile(r"(\*|(?:\*\.)?[^*:\[\]]+|\[[0-9a-fA-F:.]+\])(?::([0-9]+))?")
_NAT64 = ip_network("64:ff9b::/96")
_COMPATIBLE = ip_network("::/96")


@dataclass(frozen=True, slots=True)
class Url:
    """scheme: http or https. host: a lower-case name or an address, without brackets. target: path and query."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def authority(self) -> str:
        """What a Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def address(self) -> Address | None:
        """The address, if the host is one."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.target}"


def parse_url(text: str) -> Url:
    """Take a URL apart. Raises OmnifleetError(INVALID_REQUEST) for every form that another parser might read differently.

    Refused: user names, backslashes, spaces and non-ASCII characters, percent signs in a host, addresses in octal,
    hexadecimal or with fewer than four parts, empty ports.
    """
    if len(text) > _LONGEST or not all("!" <= c <= "~" and c != "\\" for c in text):
        raise _malformed(text, f"has a character that URLs do not have, or more than {_LONGEST}")
    whole = _URL.fullmatch(text)
    if whole is None:
        raise _malformed(text, "is not http:// or https://")
    scheme, authority, target = whole[1].lower(), whole[2], whole[3]
    parts = _AUTHORITY.fullmatch(authority)
    if parts is None:
        raise _malformed(text, "does not name a plain HOST or HOST:PORT")
    port = int(parts[3]) if parts[3] else _DEFAULT_PORTS[scheme]
    if not 0 < port < 1 << 16:
        raise _malformed(text, f"has the port {port}")
    host = _checked_address(parts[1], text) if parts[1] else _checked_name(parts[2], text)
    return Url(scheme, host, port, target if target.startswith("/") else f"/{target}")


class HostRules:
    """The allow list `media.sources.hosts`."""

    def __init__(self, entries: Iterable[str]) -> None:
        """Raises OmnifleetError(INVALID_CONFIG) for an entry that is not HOST, *.HOST or *, with or without :PORT."""
        self._rules = [_rule(entry) for entry in entries]

    def check(self, url: Url) -> None:
        """Raises OmnifleetError(INVALID_REQUEST) for a host or port that is not named."""
        if not self._rules:
            raise invalid("URLs are not fetched by this service", knob=HOSTS_KNOB)
        if not any(_matches(host, url.host) and _fits(port, url) for host, port in self._rules):
            raise invalid(f"{url.authority} is not an allowed host", knob=HOSTS_KNOB)


def check_addresses(host: str, addresses: Sequence[Address], networks: Sequence[Network]) -> None:
    """Every address of a host is public, or in one of `networks`. Raises OmnifleetError(INVALID_REQUEST)."""
    for address in addresses:
        if not all(_is_public(a) or _is_in(a, networks) for a in _meanings(address)):
            raise invalid(f"{host} is at an address that is not public", knob=NETWORKS_KNOB)


def _meanings(address: Address) -> list[Address]:
    """The address, and IPv4 addresses that gateways would send it on to."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    inner: list[Address] = [address]
    if address.sixtofour is not None:
        inner.append(address.sixtofour)
    if address.teredo is not None:
        inner.append(address.teredo[1])
    if address in _NAT64:
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    if address in _COMPATIBLE and int(address) > 1:
        inner.append(IPv4Address(int(address)))
    return inner


def _is_public(address: Address) -> bool:
    special = address.is_multicast or address.is_reserved or address.is_unspecified or address.is_loopback
    return address.is_global and not special and not address.is_link_local


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)


def _checked_address(text: str, url: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        raise _malformed(url, "has brackets around what is no IPv6 address") from None


def _checked_name(text: str, url: str) -> str:
    host = text.lower().removesuffix(".")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return str(IPv4Address(host))
        except ValueError:
            raise _malformed(url, "writes an address in an unusual form") from None
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise _malformed(url, "does not name a host")
    return host


def _rule(entry: str) -> tuple[str, int | None]:
    parts = _ENTRY.fullmatch(entry.lower())
    if parts is None:
        raise invalid(
            f"{HOSTS_KNOB}: {entry!r} is not HOST, *.HOST or *, with or without :PORT", knob=HOSTS_KNOB
        )
    return parts[1].strip("[]"), int(parts[2]) if parts[2] else None


def _matches(rule: str, host: str) -> bool:
    return rule in ("*", host) or (rule.startswith("*.") and host.endswith(rule[1:]))


def _fits(port: int | None, url: Url) -> bool:
    return url.port == port if port is not None else url.port in _DEFAULT_PORTS.values()


def _malformed(text: str, what: str) -> OmnifleetError:
    return invalid(f"the URL {text[:80]!r} {what}")
