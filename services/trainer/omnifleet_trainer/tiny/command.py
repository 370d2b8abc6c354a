"""The tiny model on disk: made once for each version of its making, then taken from the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from filelock import FileLock, Timeout

from omnifleet.errors import OmnifleetError, Reason

LOCK_SECONDS = 600.0
SOURCES = ("checkpoint.py", "families.py", "scenes.py", "warmstart.py")
OWN_SOURCES = {
    "nemotron_omni": ("hybrid.py",),
    "nemotron_omni_moe": ("hybrid.py",),
    "nemotron_omni_sound": ("hybrid.py",),
    "qwen3_vl_moe": ("mixture.py",),
}


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/omnifleet``, else ``~/.cache/omnifleet``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "omnifleet"


def recipe_digest(*, seed: int, warm: bool = True, family: str = "qwen2_vl") -> str:
    """16 hex digits over the arguments and the source code that makes the model."""
    digest = hashlib.sha256(json.dumps({"seed": seed, "warm": warm, "family": family}).encode())
    for name in (*SOURCES, *OWN_SOURCES.get(family, ())):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def ensure_tiny_model(cache: Path | None = None, *, seed: int = 0, family: str = "qwen2_vl") -> Path:
    """The folder of the warm-started tiny checkpoint, made under ``cache`` (default: the user's) if not there yet.

    Several processes may ask at once: one makes it, the others wait up to LOCK_SECONDS. Raises OmnifleetError:
    ``deadline`` (retryable) when that wait runs out, ``disk_full`` where the folder cannot be written.
    """
    cache = cache or cache_folder()
    folder = cache / f"tiny-{recipe_digest(seed=seed, family=family)}"
    if (folder / "warmstart.json").exists():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock", timeout=LOCK_SECONDS):
            if not (folder / "warmstart.json").exists():
                make_tiny_model(folder, seed=seed, family=family)
    except Timeout as error:
        message = f"another process has been making {folder} for {LOCK_SECONDS:.0f} s"
        raise OmnifleetError(Reason.DEADLINE, message, retryable=True) from error
    except OSError as error:
        raise OmnifleetError(
            Reason.DISK_FULL, f"cannot write {folder}: {error}", knob="XDG_CACHE_HOME"
        ) from error
    return folder


def make_tiny_model(out: Path, *, seed: int = 0, warm: bool = True, family: str = "qwen2_vl") -> None:
    """Write the checkpoint (warm-started unless told otherwise) and ``warmstart.json`` beside ``out``, then rename.

    ``out`` appears whole or not at all; an older folder of that name is replaced. Raises OSError, and OmnifleetError
    (INVALID_CONFIG) for a family that has no tiny model, or no warm start.
    """
    from transformers.utils import logging

    from omnifleet_trainer.compat.quiet import quiet_libraries

    quiet_libraries()
    from omnifleet_trainer.tiny.warmstart import warm_start

    logging.disable_progress_bar()  # "loading weights", thrice, for three megabytes
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        made = Path(scratch) / "model"
        _write_random(made, seed=seed, family=family, warm=warm)
        if warm:
            report = warm_start(made, seed=seed)
            (made / "warmstart.json").write_text(json.dumps(report.as_dict(), indent=1) + "\n")
        if out.exists():
            shutil.rmtree(out)
        made.rename(out)


def _write_random(out: Path, *, seed: int, family: str, warm: bool) -> None:
    """A random checkpoint of the family. Those that no lesson exists for have modules of their own."""
    from omnifleet_trainer.tiny.checkpoint import write_checkpoint
    from omnifleet_trainer.tiny.families import known_family
    from omnifleet_trainer.tiny.hybrid import MIXED, write_hybrid
    from omnifleet_trainer.tiny.mixture import write_mixture

    match family:
        case "nemotron_omni" if not warm:
            write_hybrid(out, seed=seed)
        case "nemotron_omni_moe" if not warm:
            write_hybrid(out, seed=seed, pattern=MIXED)
        case "nemotron_omni_sound" if not warm:
            write_hybrid(out, seed=seed, sound=True)
        case "qwen3_vl_moe" if not warm:
            write_mixture(out, seed=seed)
        case _:
            write_checkpoint(out, seed=seed, family=known_family(family, warm=warm))


def tiny_model(
    out: Annotated[Path | None, typer.Option(help="Folder to write; default: the user's cache.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the scenes and the warm start.")] = 0,
    warm_start: Annotated[
        bool, typer.Option(help="Run the supervised phase; without it the weights are random.")
    ] = True,
    family: Annotated[
        str,
        typer.Option(
            help="qwen2_vl or qwen2_5_vl; without a warm start qwen3_vl, qwen3_vl_moe, nemotron_omni, nemotron_omni_moe, "
            "nemotron_omni_sound too."
        ),
    ] = "qwen2_vl",
) -> None:
    """Make the tiny vision-language model of the CPU demo (3 MB) and print its folder.

    It is warm-started on synthetic scenes until it answers in format with middling accuracy.
    That takes two to three minutes of CPU time; in the user's cache it is made once, and found there from then on.
    """
    if out is None and warm_start:
        folder = ensure_tiny_model(seed=seed, family=family)
    else:
        folder = out or cache_folder() / f"tiny-{recipe_digest(seed=seed, warm=False, family=family)}"
        if (folder / "config.json").exists() and out is None:
            typer.echo(folder)
            return
        if folder.exists() and not (folder / "config.json").exists() and any(folder.iterdir()):
            raise OmnifleetError(
                Reason.CONFLICT, f"{folder} is there and holds no checkpoint; not replaced", knob="--out"
            )
        make_tiny_model(folder, seed=seed, warm=warm_start, family=family)
    typer.echo(folder)
