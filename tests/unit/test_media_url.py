"""URLs and addresses of the media service's downloads, without a network."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.server.url import HostRules, check_addresses, parse_url


def refused(text: str, *, hosts: tuple[str, ...] = ("*",)) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        url = parse_url(text)
        HostRules(hosts).check(url)
        if url.address is not None:
            check_addresses(url.host, [url.address], [])
    assert caught.value.reason is Reason.INVALID_REQUEST
    return caught.value


def test_a_url_is_taken_apart_once() -> None:
    url = parse_url("HTTPS://Images.Example.org.:8443/a%20b?c=d#e")
    assert (url.scheme, url.host, url.port, url.target) == ("https", "images.example.org", 8443, "/a%20b?c=d")
    assert url.authority == "images.example.org:8443"
    assert parse_url("http://[2001:DB8::1]").authority == "[2001:db8::1]"
    assert parse_url("http://8.8.8.8?x").target == "/?x"


@pytest.mark.parametrize(
    "text",
    [
        "http://127.0.0.1\\@example.com/",
        "http://2130706433/",
        "http://0x7f.1/",
        "http://127.0.%30.1/",
        "http://[::ffff:127.0.0.1]/",
        "http://example.com@127.0.0.1/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://0x7f000001/",
        "http://1.2.3.4.5/",
        "http://[::1%25lo]/",
        "http://exa mple.org/",
        "http://example.org\t/",
        "http://ⓔxample.org/",
        "http://example.org:/",
        "http://example.org:0/",
        "http://example.org:99999/",
        "http:///etc/passwd",
        "http://user:pass@example.org/",
        "http://-example.org/",
        "http://a..b/",
        "gopher://example.org/",
        "http://" + "a" * 3000,
    ],
)
def test_SEC_05_forms_that_parsers_read_differently_are_refused(text: str) -> None:
    refused(text)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.255.0.3", "0.0.0.0", "10.0.0.1", "172.16.5.4", "192.168.1.1", "169.254.169.254", "100.64.0.1",
        "224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1", "::", "::1", "fe80::1", "fc00::1",
        "ff02::1", "2001:db8::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::",
        "::127.0.0.1", "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    ],
)  # fmt: skip
def test_SEC_03_addresses_that_are_not_public_are_refused(address: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        check_addresses("host", [ip_address(address)], [])
    assert caught.value.knob == "media.sources.networks"
    with pytest.raises(OmnifleetError):  # one bad address among good ones is enough
        check_addresses("host", [ip_address("8.8.8.8"), ip_address(address)], [])


def test_public_addresses_and_named_networks_pass() -> None:
    check_addresses("host", [ip_address("8.8.8.8"), ip_address("2001:4860:4860::8888")], [])
    check_addresses("host", [ip_address("64:ff9b::808:808")], [])
    inside = [ip_network("10.1.0.0/16"), ip_network("fd00::/8")]
    check_addresses(
        "host", [ip_address("10.1.2.3"), ip_address("::ffff:10.1.2.3"), ip_address("fd00::1")], inside
    )
    with pytest.raises(OmnifleetError):
        check_addresses("host", [ip_address("10.2.0.1")], inside)


@pytest.mark.parametrize(
    ("hosts", "url", "allowed"),
    [
        ((), "http://example.org/", False),
        (("example.org",), "http://example.org/", True),
        (("example.org",), "http://EXAMPLE.org./", True),
        (("example.org",), "https://example.org/", True),
        (("example.org",), "http://a.example.org/", False),
        (("example.org",), "http://example.org:8080/", False),
        (("example.org:8080",), "http://example.org:8080/", True),
        (("example.org:8080",), "http://example.org/", False),
        (("*.example.org",), "http://a.b.example.org/", True),
        (("*.example.org",), "http://example.org/", False),
        (("*.example.org",), "http://notexample.org/", False),
        (("*",), "http://example.org/", True),
        (("*",), "http://example.org:22/", False),
        (("[2001:db8::1]:81",), "http://[2001:db8::1]:81/", True),
    ],
)
def test_hosts_are_allowed_by_name_and_port(hosts: tuple[str, ...], url: str, allowed: bool) -> None:
    if allowed:
        HostRules(hosts).check(parse_url(url))
    else:
        assert refused(url, hosts=hosts).knob == "media.sources.hosts"


@pytest.mark.parametrize("entry", ["http://example.org", "*.*.org", "a:b", ""])
def test_a_malformed_rule_is_refused_at_start(entry: str) -> None:
    with pytest.raises(OmnifleetError, match=r"media\.sources\.hosts"):
        HostRules((entry,))


@given(st.text(max_size=60))
def test_any_text_is_a_url_with_plain_parts_or_refused(text: str) -> None:
    try:
        url = parse_url("http://" + text)
    except OmnifleetError:
        return
    assert url.target.startswith("/")
    assert not set(url.host) & set("@/\\%[] ")
    assert parse_url(str(url)) == url
