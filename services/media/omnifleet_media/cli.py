"""`omnifleet media`: run the service, or talk to a running one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from omnifleet_media.console import bar, parse_size, show_size, spinner, talk

if TYPE_CHECKING:
    from omnifleet.client.media import MediaClient

app = typer.Typer(
    help="""The media service: pictures, clips, tracks and model-ready tensors by the digest of their content.

`serve` runs it; the other commands talk to one that runs:
--run-dir RUN         the service of a run folder
--address HOST:PORT   any other, with its tokens file in OMNIFLEET_TOKENS""",
    no_args_is_help=True,
)

RunDir = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of a run; its record says where the service listens.")
]
Address = Annotated[
    str, typer.Option("--address", help="HOST:PORT of the service's gRPC, instead of a run folder.")
]
Patience = Annotated[float, typer.Option("--timeout", help="Longest wait for the service, seconds.")]


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


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
    """Serve until SIGTERM or Ctrl-C.

    Content is kept in RUN/media unless media.store says otherwise.
    Where it listens is written to RUN/services/media.json once it can serve.
    Settings are section `media` of the run's recipe: see `omnifleet config show`.
    """
    import uvloop

    from omnifleet.service import run_to_exit

    overrides = list(settings or [])
    overrides += [f"media.listen={listen}"] if listen else []
    overrides += [f"media.http_listen={http_listen}"] if http_listen else []
    run_to_exit(_serve(run_dir, overrides, log_json), loop_factory=uvloop.new_event_loop)


@app.command()
def put(
    sources: Annotated[
        list[str],
        typer.Argument(help="Files, folders (with all below them) and URLs that the service may fetch."),
    ],
    run_dir: RunDir = None,
    address: Address = "",
    kind: Annotated[str, typer.Option(help="What they are taken for: image, video or audio.")] = "image",
    sampling: Annotated[
        str, typer.Option(help="Sampling contract of clips, e.g. uniform@1 or nemotron_vl@1.")
    ] = "",
    num_frames: Annotated[int, typer.Option(min=0, help="Frames to take of a clip; 0 = all.")] = 0,
    fps: Annotated[float, typer.Option(min=0, help="Frames a second to take of a clip; 0 = not given.")] = 0,
    background: Annotated[str, typer.Option(help="RRGGBB under transparent pixels; default white.")] = "",
    run: Annotated[str, typer.Option("--run", help="Run that quotas and leases are counted for.")] = "cli",
    lease: Annotated[str, typer.Option("--lease", help="Owner of a lease to take on each object.")] = "",
    lease_s: Annotated[
        float, typer.Option("--lease-s", min=0.001, help="Length of the lease, seconds.")
    ] = 3600,
    durable: Annotated[
        bool, typer.Option("--durable", help="Answer only once a power cut could not lose it.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=64, help="Sources at once.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    timeout: Patience = 120,
) -> None:
    """Store pictures, clips or tracks; prints DIGEST, size and name, a line each.

    What is no media is told on stderr and left out; the exit status is 1 then.
    Content that is there already keeps its digest and is not stored again.
    """
    from omnifleet.types import MediaKind
    from omnifleet.wire import media_pb2
    from omnifleet_media.uploading import PutAs, put_all

    if kind not in MediaKind.__members__.values():
        raise typer.BadParameter(f"{kind!r} is not image, video or audio", param_hint="--kind")
    contract = media_pb2.DecodeContract(
        sampling=sampling, num_frames=num_frames, fps=fps, background=background
    )
    how = PutAs(MediaKind(kind), contract, run, durable, lease, lease_s, jobs, as_json)

    async def work(client: MediaClient) -> None:
        await put_all(client, sources, how)

    talk(run_dir, address, work, deadline_s=timeout)


@app.command()
def get(
    digest: Annotated[str, typer.Argument(help="Digest of a media object, or its media:// form.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="PNG file to write; a folder with --all; - for stdout.")
    ],
    frame: Annotated[int, typer.Option(min=0, help="Which frame, from 0.")] = 0,
    whole: Annotated[bool, typer.Option("--all", help="Every frame, as OUTPUT/00000.png and so on.")] = False,
    source: Annotated[
        bool, typer.Option("--source", help="DIGEST is a source digest: write the file as it was uploaded.")
    ] = False,
    run_dir: RunDir = None,
    address: Address = "",
    timeout: Patience = 120,
) -> None:
    """Write canonical frames as lossless PNGs, or a source as it was uploaded."""
    from omnifleet.types import Digest, MediaKind, MediaRef
    from omnifleet_media.server.preview import frame_png

    name = digest.removeprefix("media://")

    async def work(client: MediaClient) -> None:
        ref = MediaRef(MediaKind.IMAGE, Digest(name))
        if source:
            _write(output, await client.source(name))
        elif not whole:
            _write(output, frame_png(await client.frame(ref, frame)))
        else:
            output.mkdir(parents=True, exist_ok=True)
            count = len((await client.info(ref)).frame_digests)
            with bar("frames", count) as step:
                for i in range(count):
                    _write(output / f"{i:05}.png", frame_png(await client.frame(ref, i)))
                    step()

    talk(run_dir, address, work, deadline_s=timeout)


@app.command()
def stat(
    digest: Annotated[
        str, typer.Argument(help="Digest of a media object; none: the service's counters.")
    ] = "",
    run_dir: RunDir = None,
    address: Address = "",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show an object, or what the service holds and has done.

    For the service: hit rates, dedup ratio, and the payload of each boundary
    (logical: all that was referred to; physical: what had to move for it;
    serialized: bytes of messages).
    """
    import dataclasses
    import json

    from omnifleet.client.media import Stat
    from omnifleet.client.status import ServiceStatus
    from omnifleet_media.telling import tell_object, tell_service

    async def work(client: MediaClient) -> None:
        found: Stat | ServiceStatus
        found = await client.stat(digest.removeprefix("media://")) if digest else await client.status()
        if as_json:
            typer.echo(json.dumps(dataclasses.asdict(found)))
            return
        for line in tell_object(found) if isinstance(found, Stat) else tell_service(found):
            typer.echo(line)

    talk(run_dir, address, work)


@app.command()
def gc(
    target_bytes: Annotated[
        int,
        typer.Option(
            parser=_size,
            metavar="SIZE",
            help="Shrink the disk tier to this, e.g. 500MB or 20GiB; 0 keeps only what is leased.",
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    run_dir: RunDir = None,
    address: Address = "",
    timeout: Patience = 3600,
) -> None:
    """Remove orphans and evict unleased content, least recently used first."""

    async def work(client: MediaClient) -> None:
        with spinner("collecting"):
            done = await client.collect(target_bytes, dry_run)
        verb = "would free" if dry_run else "freed"
        typer.echo(
            f"{verb} {done.freed_bytes} bytes ({show_size(done.freed_bytes)}): "
            f"{done.removed} entries, {done.orphans} orphans"
        )

    talk(run_dir, address, work, operator=True, deadline_s=timeout)


@app.command()
def verify(
    digests: Annotated[list[str] | None, typer.Argument(help="Digests to check; none: everything.")] = None,
    run_dir: RunDir = None,
    address: Address = "",
    timeout: Patience = 3600,
) -> None:
    """Read blobs back from disk and compare with their digests; exits with 1 if any was wrong.

    Wrong blobs are removed: reads answer media_lost until they are uploaded again.
    """

    async def work(client: MediaClient) -> None:
        with spinner("reading back"):
            done = await client.verify(d.removeprefix("media://") for d in digests or ())
        typer.echo(f"checked {done.checked} blobs, {len(done.corrupt)} corrupt")
        for digest in done.corrupt:
            typer.echo(digest)
        if done.corrupt:
            raise typer.Exit(1)

    talk(run_dir, address, work, operator=True, deadline_s=timeout)


@app.command()
def browse(
    run_dir: RunDir = None,
    http: Annotated[
        str, typer.Option("--http", help="HOST:PORT of the service's HTTP, instead of a run folder.")
    ] = "",
) -> None:
    """Print a link that opens the service's page in a browser.

    The link is good once, for ten minutes, and carries no token.
    It logs the browser in to look, not to store.
    """
    from omnifleet.service import run_to_exit

    run_to_exit(_browse(run_dir, http))


async def _browse(run_dir: Path | None, http: str) -> None:
    from omnifleet.auth import Scope
    from omnifleet.errors import Reason, invalid
    from omnifleet.login import LINK, LINK_S, make_ticket
    from omnifleet.service import read_records
    from omnifleet_media.console import tokens_of

    if run_dir is None and not http:
        raise invalid("say where the service is: --run-dir FOLDER or --http HOST:PORT")
    if not http:
        assert run_dir is not None
        record = read_records(run_dir).get("media")
        if record is None:
            raise invalid(f"no media service is up in {run_dir}", reason=Reason.UNAVAILABLE)
        http = record.http
    tokens = tokens_of(run_dir)
    ticket = make_ticket(tokens, Scope.ENV, LINK, LINK_S) if tokens.by_scope else ""
    typer.echo(f"http://{http}/login?ticket={ticket}" if ticket else f"http://{http}/")


async def _serve(run_dir: Path, overrides: list[str], log_json: bool) -> None:
    import logging

    from omnifleet.config.services import MediaConfig
    from omnifleet.service import freeze_heap, load_section, load_tokens, until_stopped, write_record
    from omnifleet.telemetry.logs import set_up_logs
    from omnifleet_media.server.run import media_service

    set_up_logs("media", as_json=log_json)
    log = logging.getLogger("omnifleet.media")
    config = load_section(run_dir, "media", MediaConfig, overrides)
    async with media_service(config, run_dir, load_tokens(run_dir)) as running:
        write_record(run_dir, "media", grpc=running.grpc, http=running.http)
        log.info("gRPC on %s, HTTP on %s", running.grpc, running.http)
        freeze_heap()
        await until_stopped()
        log.info("stopping")


def _write(path: Path, data: bytes) -> None:
    import sys

    if str(path) == "-":
        sys.stdout.buffer.write(data)
    else:
        path.write_bytes(data)


if __name__ == "__main__":
    app()
