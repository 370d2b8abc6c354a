"""What the media service reads by itself, over gRPC and HTTP: only what its config allows, and nothing before the check."""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import ssl
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

import omnifleet_media.server.fetch
import omnifleet_media.server.roots
from omnifleet.config.services import MediaLimits, MediaSources
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.server.fetch import Fetcher
from omnifleet_media.server.url import Address
from tests.contract.media_routes import routes
from tests.contract.media_world import png
from tests.contract.picture_server import PictureServer, moved, ok, picture_server, status


def allowing(server: PictureServer, **more: Any) -> dict[str, Any]:
    """Sources that allow a server on loopback."""
    return {"hosts": [f"127.0.0.1:{server.port}"], "networks": ["127.0.0.0/8"], **more}


async def fetched(fetcher: Fetcher, url: str) -> bytes:
    got: list[bytes] = []

    class Sink:
        def add(self, piece: bytes) -> None:
            got.append(piece)

    await fetcher.fetch(url, Sink())
    return b"".join(got)


# ---------------------------------------------------------------------- paths


async def test_SEC_01_with_local_media_off_no_path_is_opened(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret text")
    absent = tmp_path / "absent.txt"
    async with routes(tmp_path / "service") as route:
        told = set()
        for text in (
            "/etc/passwd",
            "file:///etc/passwd",
            "../../etc/passwd",
            str(secret),
            f"file://{secret}",
            str(absent),
        ):
            error = await route.refused(text)
            assert (error.reason, error.knob) == (Reason.INVALID_REQUEST, "media.sources.roots")
            assert "secret text" not in error.message
            told.add(error.message)
        assert len(told) == 1  # whether or not the file is there
        for raw in (b"/etc/passwd", b"file:///etc/passwd", b"../../etc/passwd"):  # as the picture itself
            answer = await route.http.post("/v1/media", content=raw)
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_media")


async def test_SEC_01_outside_the_roots_the_answer_tells_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.png").write_bytes(png())
    (root / "link.png").symlink_to(tmp_path / "outside.png")
    (root / "up").symlink_to(tmp_path)
    async with routes(tmp_path / "service", sources={"roots": [str(root)]}) as route:
        there = f"{root}/../outside.png"
        for path in (
            there,
            f"{root}/../absent.png",
            f"{root}/link.png",
            f"{root}/up/outside.png",
            "root/a.png",
            "/etc/passwd",
        ):
            error = await route.refused(path)
            assert (error.reason, error.knob) == (Reason.INVALID_REQUEST, "media.sources.roots"), path
            assert error.message == f"{path!r} is not under an allowed folder"


async def test_files_under_a_root_are_read_links_inside_included(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "a b.png").write_bytes(png(1))
    (root / "link.png").symlink_to(root / "deep" / "a b.png")
    (tmp_path / "alias").symlink_to(root)
    (root / "empty.png").write_bytes(b"")
    (root / "large.png").write_bytes(bytes(2 << 20))
    os.mkfifo(root / "pipe.png")
    settings = {"sources": {"roots": [str(tmp_path / "alias")]}, "limits": {"source_bytes": 1 << 20}}
    async with routes(tmp_path / "service", **settings) as route:
        expected = (await route.client.put_image(png(1), "run")).digest
        for text in (
            f"{root}/deep/a b.png",
            f"file://{root}/deep/a%20b.png",
            f"{root}/link.png",
            f"{tmp_path}/alias/link.png",
        ):
            assert await route.by_grpc(text) == await route.by_http(text) == expected
        for name in ("absent.png", "pipe.png", "deep", "empty.png"):
            assert (await route.refused(f"{root}/{name}")).reason is Reason.INVALID_MEDIA, name
        assert (await route.refused(f"{root}/large.png")).knob == "media.limits.source_bytes"


async def test_a_folder_that_becomes_a_link_after_the_check_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "deep", outside):
        folder.mkdir(parents=True)
        (folder / "a.png").write_bytes(png())
    checked = os.path.realpath

    def check_then_swap(path: Any) -> str:
        real = checked(path)
        if str(path).endswith("a.png"):
            (root / "deep").rename(root / "was-deep")
            (root / "deep").symlink_to(outside)
        return real

    monkeypatch.setattr(omnifleet_media.server.roots.os.path, "realpath", check_then_swap)
    with pytest.raises(OmnifleetError) as caught:
        omnifleet_media.server.roots.open_under([root], str(root / "deep" / "a.png"))
    assert caught.value.knob == "media.sources.roots"


# ---------------------------------------------------------------------- addresses


async def test_SEC_03_internal_addresses_are_refused_before_any_connection(tmp_path: Path) -> None:
    async with picture_server() as server:
        server.answers["/a.png"] = ok(png())
        names = ("127.0.0.1", "169.254.169.254", "10.0.0.1", "[::1]", "0.0.0.0", "localhost", "127.0.0.1.")
        for hosts in ([], ["*", f"*:{server.port}"]):
            async with routes(tmp_path / f"service-{len(hosts)}", sources={"hosts": hosts}) as route:
                for name in names:
                    error = await route.refused(server.url("/a.png", name))
                    assert error.reason is Reason.INVALID_REQUEST
                    assert not error.retryable
                    assert error.knob == ("media.sources.networks" if hosts else "media.sources.hosts")
        assert server.connections == 0


async def test_SEC_05_ambiguous_urls_are_refused_on_every_route(tmp_path: Path) -> None:
    async with picture_server() as server:
        port = server.port
        odd = (
            f"http://127.0.0.1:{port}\\@example.com/",
            f"http://2130706433:{port}/",
            f"http://0x7f.1:{port}/",
            f"http://127.0.%30.1:{port}/",
            f"http://example.com@127.0.0.1:{port}/",
        )
        mapped = (
            f"http://[::ffff:127.0.0.1]:{port}/",
            f"http://[::ffff:7f00:1]:{port}/",
            f"http://[64:ff9b::7f00:1]:{port}/",
        )
        everywhere = ["*", f"*:{port}"]
        async with routes(tmp_path / "local", sources=allowing(server, hosts=everywhere)) as route:
            for text in odd:  # though the address itself may be connected to
                assert (await route.refused(text)).reason is Reason.INVALID_REQUEST, text
        async with routes(tmp_path / "public", sources={"hosts": everywhere}) as route:
            for text in (*odd, *mapped):
                assert (await route.refused(text)).reason is Reason.INVALID_REQUEST, text
            assert (await route.refused(mapped[0])).knob == "media.sources.networks"
        assert server.connections == 0


async def test_SEC_06_redirects_are_checked_like_the_first_url(tmp_path: Path) -> None:
    async with picture_server() as inner, picture_server() as server:
        inner.answers["/a.png"] = ok(png())
        server.answers["/host"] = moved(inner.url("/a.png"))
        server.answers["/metadata"] = moved("http://169.254.169.254/latest")
        server.answers["/file"] = moved("file:///etc/passwd")
        server.answers["/number"] = moved(f"http://2130706433:{inner.port}/a.png")
        server.answers["/loop"] = moved("/loop")
        server.answers["/nowhere"] = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\n\r\n"
        server.answers["/fine"] = moved("./pictures/a.png", 307)
        server.answers["/pictures/a.png"] = ok(png())
        async with routes(tmp_path, sources=allowing(server)) as route:
            for path in ("/host", "/metadata", "/file", "/number", "/loop"):
                assert (await route.refused(server.url(path))).reason is Reason.INVALID_REQUEST, path
            assert (await route.refused(server.url("/nowhere"))).reason is Reason.INVALID_MEDIA
            assert await route.by_http(server.url("/fine")) == await route.by_grpc(server.url("/fine"))
        assert inner.connections == 0
        assert server.asked.count("/loop") == 2 * 4  # the first and three redirects, on two routes


async def test_what_was_checked_is_what_is_connected_to() -> None:
    """DNS rebinding: the name is resolved once a connection, and its answer is used for nothing but that connection."""
    asked: list[str] = []
    async with picture_server() as server:
        server.answers["/a.png"] = ok(png())
        server.answers["/again"] = moved(f"http://pictures.test:{server.port}/a.png")

        async def resolve(host: str, port: int) -> list[Address]:
            asked.append(host)
            # A rebinding name: inside the allowed network the first time, elsewhere inside the machine from then on.
            return [ip_address("127.0.0.1" if len(asked) == 1 else "::1")]

        sources = MediaSources(hosts=(f"pictures.test:{server.port}",), networks=("127.0.0.0/8",))
        fetcher = Fetcher(sources, MediaLimits(), resolve)
        assert await fetched(fetcher, f"http://pictures.test:{server.port}/a.png") == png()
        assert (asked, server.hosts) == (["pictures.test"], [f"pictures.test:{server.port}"])
        asked.clear()
        with pytest.raises(OmnifleetError) as caught:
            await fetched(fetcher, f"http://pictures.test:{server.port}/again")
        assert caught.value.knob == "media.sources.networks"
        assert asked == ["pictures.test", "pictures.test"]
        assert server.connections == 2


async def test_https_checks_the_name_that_was_asked_for(tmp_path: Path) -> None:
    """The connection goes to an address, the certificate is still that of the name; and https never becomes http."""
    server_side, client_side = certified(tmp_path, "pictures.test")

    async def resolve(host: str, port: int) -> list[Address]:
        return [ip_address("127.0.0.1")]

    async with picture_server(server_side) as server, picture_server() as plain:
        names = ("pictures.test", "other.test")
        hosts = (*(f"{name}:{server.port}" for name in names), f"pictures.test:{plain.port}")
        sources = MediaSources(hosts=hosts, networks=("127.0.0.0/8",))
        trusting = Fetcher(sources, MediaLimits(), resolve, client_side)
        server.answers["/a.png"] = ok(png())
        server.answers["/down"] = moved(f"http://pictures.test:{plain.port}/a.png")
        url = f"https://pictures.test:{server.port}"
        assert await fetched(trusting, f"{url}/a.png") == png()
        for fetcher, text, reason in (
            (trusting, f"https://other.test:{server.port}/a.png", Reason.UNAVAILABLE),
            (Fetcher(sources, MediaLimits(), resolve), f"{url}/a.png", Reason.UNAVAILABLE),
            (trusting, f"{url}/down", Reason.INVALID_REQUEST),
        ):
            with pytest.raises(OmnifleetError) as caught:
                await fetched(fetcher, text)
            assert caught.value.reason is reason, text
        assert server.asked == ["/a.png", "/down"]
        assert plain.connections == 0


def certified(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Contexts of a server called `name` and of a client that trusts its certificate."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (folder / "server.pem").write_bytes(private + pem)
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_side.load_cert_chain(folder / "server.pem")
    return server_side, ssl.create_default_context(cadata=pem.decode())


def test_SEC_06_one_fetcher_opens_the_network() -> None:
    """No other module of the services that take pictures from callers opens a URL or a connection of its own."""
    opens = re.compile(
        r"^\s*(?:import|from)\s+(?:httpx|httpcore|requests|aiohttp|urllib3|urllib\.request|http\.client|ftplib)\b"
        r"|urlopen\(|create_connection\(|open_connection\(",
        re.MULTILINE,
    )
    services = Path(omnifleet_media.server.fetch.__file__).parents[3]
    found = {
        str(path.relative_to(services))
        for room in ("media/omnifleet_media", "rollout/omnifleet_rollout/gateway")
        for path in (services / room).rglob("*.py")
        if opens.search(path.read_text())
    }
    assert found == {"media/omnifleet_media/server/fetch.py"}


# ---------------------------------------------------------------------- what a server may answer


async def test_IMG_20_what_is_no_picture_is_refused_and_not_remembered(tmp_path: Path) -> None:
    junk = png(2) + b"\0" * (1 << 20)
    answers = {
        "/empty": b"",
        "/html": b"<html>not found</html>",
        "/svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    }
    async with picture_server() as server:
        for path, body in answers.items():
            server.answers[path] = ok(body, Content_Type="image/png")
        server.answers["/junk"] = ok(junk)
        async with routes(tmp_path, sources=allowing(server)) as route:
            for path in answers:
                assert (await route.refused(server.url(path))).reason is Reason.INVALID_MEDIA, path
            assert (await route.client.status()).counters["objects"] == 0
            for path in answers:
                server.answers[path] = ok(png(1))
                assert (
                    await route.by_http(server.url(path))
                    == (await route.client.put_image(png(1), "r")).digest
                )
            assert (
                await route.by_grpc(server.url("/junk")) == (await route.client.put_image(png(2), "r")).digest
            )


async def test_errors_of_a_server_say_whether_trying_again_helps(tmp_path: Path) -> None:
    async with picture_server() as server:
        server.answers |= {
            "/gone": status(404),
            "/private": status(403),
            "/busy": status(503),
            "/slow down": b"",
        }
        server.answers["/gzip"] = ok(png(), Content_Encoding="gzip")
        server.answers["/cut"] = b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nabc"
        server.answers["/none"] = b""
        async with routes(tmp_path, sources=allowing(server)) as route:
            for path in ("/gone", "/private", "/gzip"):
                error = await route.refused(server.url(path))
                assert (error.reason, error.retryable) == (Reason.INVALID_MEDIA, False), path
            for path in ("/busy", "/cut", "/none"):
                with pytest.raises(OmnifleetError) as caught:
                    await route.by_http(server.url(path))
                assert (caught.value.reason, caught.value.retryable) == (Reason.UNAVAILABLE, True), path


async def test_a_body_is_refused_by_its_declared_and_by_its_real_length(tmp_path: Path) -> None:
    async def endless(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            await writer.drain()

    async def declared(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        await writer.drain()
        await asyncio.Event().wait()  # sends nothing: the refusal must not wait for a byte

    async with picture_server() as server:
        server.answers |= {"/endless": endless, "/declared": declared}
        async with routes(tmp_path, sources=allowing(server), limits={"source_bytes": 1 << 20}) as route:
            for path in ("/endless", "/declared"):
                error = await route.refused(server.url(path))
                assert (error.reason, error.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.source_bytes"), (
                    path
                )
            await asyncio.wait_for(server.gone.wait(), 30)


async def test_a_server_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async def silent(writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with picture_server() as server:
        server.answers["/silent"] = silent
        async with routes(tmp_path, sources=allowing(server, fetch_seconds=0.2)) as route:
            with pytest.raises(OmnifleetError) as caught:
                await route.by_http(server.url("/silent"))
    assert (caught.value.reason, caught.value.knob) == (Reason.DEADLINE, "media.sources.fetch_seconds")


async def test_downloads_that_wait_are_bounded() -> None:
    held = asyncio.Event()

    async def resolve(host: str, port: int) -> list[Address]:
        await held.wait()
        return [ip_address("10.0.0.1")]

    fetcher = Fetcher(MediaSources(hosts=("*",), fetches=1), MediaLimits(), resolve)
    tasks = [asyncio.create_task(fetched(fetcher, "http://example.org/")) for _ in range(6)]
    done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    [refusal] = [task.exception() for task in done]
    assert isinstance(refusal, OmnifleetError)
    assert (refusal.reason, refusal.knob) == (Reason.OVERLOADED, "media.sources.fetches")
    held.set()
    await asyncio.wait(waiting)
    assert all(isinstance(task.exception(), OmnifleetError) for task in waiting)


# ---------------------------------------------------------------------- declared sizes of uploads
