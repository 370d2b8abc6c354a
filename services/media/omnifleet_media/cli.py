"""`omnifleet media`: run the service, or talk to a running one."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from omnifleet.client.media import MediaClient

app = typer.Typer(
    help="The media service: pictures and model-ready tensors by the digest of their content.",
    no_args_is_help=True,
)

RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of a run; its record says where the service listens.")
]
Address = Annotated[
    str, typer.Option("--address", help="HOST:PORT of the service's gRPC, instead of a run folder.")
]


@app.command()
def serve(
    run_dir: Annotated[
        Path, typer.Option("--run-dir", help="Folder of the run: recipe.yaml, tokens.json, services/.")
    ],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT for gRPC; port 0 = any.")] = "",
    http_listen: Annotated[str, typer.Option("--http-listen", help="HOST:PORT for HTTP; port 0 = any.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="section.field=value, e.g. media.disk_bytes=1000000000.")
    ] = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="One JSON object a log line.")] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    from omnifleet.service import run_to_exit

    overrides = list(settings or [])
    overrides += [f"media.listen={listen}"] if listen else []
    overrides += [f"media.http_listen={http_listen}"] if http_listen else []
    run_to_exit(_serve(run_dir, overrides, log_json))


@app.command()
def put(
    files: Annotated[list[Path], typer.Argument(help="Picture files.")],
    run_dir: RunDir = None,
    address: Address = "",
    durable: Annotated[bool, typer.Option(help="Answer only once a power cut could not lose it.")] = False,
) -> None:
    """Store pictures; prints DIGEST, size and file name a line."""

    async def work(client: MediaClient) -> None:
        for file in files:
            reply = await client.put(_read(file), "cli", durable=durable)
            typer.echo(f"{reply.ref.digest}  {reply.info.width}x{reply.info.height}  {file}")

    _talk(run_dir, address, work)


@app.command()
def get(
    digest: Annotated[str, typer.Argument(help="Digest of a media object, or its media:// form.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="PNG file to write.")],
    frame: Annotated[int, typer.Option(help="Which frame, from 0.")] = 0,
    run_dir: RunDir = None,
    address: Address = "",
) -> None:
    """Write one canonical frame as a lossless PNG."""
    from omnifleet.types import Digest, MediaKind, MediaRef

    async def work(client: MediaClient) -> None:
        from PIL import Image

        ref = MediaRef(MediaKind.IMAGE, Digest(digest.removeprefix("media://")))
        Image.fromarray(await client.frame(ref, frame)).save(output, "PNG")

    _talk(run_dir, address, work)


@app.command()
def stat(
    digest: Annotated[
        str, typer.Argument(help="Digest of a media object; none: the service's counters.")
    ] = "",
    run_dir: RunDir = None,
    address: Address = "",
) -> None:
    """Show an object, or what the service has done so far."""

    async def work(client: MediaClient) -> None:
        if not digest:
            status = await client.status()
            lines = {
                **status.facts,
                **{name: f"{value:.0f}" for name, value in sorted(status.counters.items())},
            }
        else:
            found = await client.stat(digest.removeprefix("media://"))
            lines = {
                "kind": str(found.info.ref.kind),
                "size": f"{found.info.width}x{found.info.height}",
                "frames": str(len(found.info.frame_digests)),
                "bytes": str(found.info.bytes),
                "leases": str(found.leases),
                "tiers": ", ".join(found.tiers),
                **found.info.facts,
            }
        for name, value in lines.items():
            typer.echo(f"{name:26} {value}")

    _talk(run_dir, address, work)


@app.command()
def gc(
    target_bytes: Annotated[
        int, typer.Option(help="Shrink the disk tier to this size; 0 keeps only what is leased.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    run_dir: RunDir = None,
    address: Address = "",
) -> None:
    """Remove orphans and evict unleased content, least recently used first."""

    async def work(client: MediaClient) -> None:
        done = await client.collect(target_bytes, dry_run)
        verb = "would free" if dry_run else "freed"
        typer.echo(f"{verb} {done.freed_bytes} bytes: {done.removed} entries, {done.orphans} orphans")

    _talk(run_dir, address, work, operator=True)


@app.command()
def verify(
    digests: Annotated[list[str] | None, typer.Argument(help="Digests to check; none: everything.")] = None,
    run_dir: RunDir = None,
    address: Address = "",
) -> None:
    """Read blobs back from disk and compare with their digests; exits with 1 if any was wrong."""

    async def work(client: MediaClient) -> None:
        done = await client.verify(digests or ())
        typer.echo(f"checked {done.checked} blobs, {len(done.corrupt)} corrupt")
        for digest in done.corrupt:
            typer.echo(digest)
        if done.corrupt:
            raise typer.Exit(1)

    _talk(run_dir, address, work, operator=True)


async def _serve(run_dir: Path, overrides: list[str], log_json: bool) -> None:
    import logging

    from omnifleet.config.services import MediaConfig
    from omnifleet.service import load_section, load_tokens, until_stopped, write_record
    from omnifleet.telemetry.logs import set_up_logs
    from omnifleet_media.server.run import media_service

    set_up_logs("media", as_json=log_json)
    log = logging.getLogger("omnifleet.media")
    config = load_section(run_dir, "media", MediaConfig, overrides)
    async with media_service(config, run_dir, load_tokens(run_dir)) as running:
        write_record(run_dir, "media", grpc=running.grpc, http=running.http)
        log.info("gRPC on %s, HTTP on %s", running.grpc, running.http)
        await until_stopped()
        log.info("stopping")


def _talk(
    run_dir: Path | None,
    address: str,
    work: Callable[[MediaClient], Awaitable[None]],
    *,
    operator: bool = False,
) -> None:
    from omnifleet.service import run_to_exit

    run_to_exit(_talking(run_dir, address, work, operator))


async def _talking(
    run_dir: Path | None, address: str, work: Callable[[MediaClient], Awaitable[None]], operator: bool
) -> None:
    from omnifleet.auth import OPEN, Scope, Tokens
    from omnifleet.client.media import MediaClient
    from omnifleet.errors import invalid
    from omnifleet.service import peer

    if run_dir is None and not address:
        raise invalid("say where the service is: --run-dir FOLDER or --address HOST:PORT")
    tokens_file = os.environ.get("OMNIFLEET_TOKENS") or (run_dir / "tokens.json" if run_dir else None)
    tokens = Tokens.load(Path(tokens_file)) if tokens_file else OPEN
    if not address:
        assert run_dir is not None
        address = await peer(run_dir, "media", deadline_s=5)
    secret = tokens.secret(Scope.OPERATOR if operator else Scope.ENV)
    async with MediaClient.open(address, secret, name="cli") as client:
        await work(client)


def _read(file: Path) -> bytes:
    from omnifleet.errors import Reason, invalid

    try:
        return file.read_bytes()
    except OSError as error:
        raise invalid(f"{file}: {error.strerror}", reason=Reason.INVALID_MEDIA) from error


if __name__ == "__main__":
    app()
