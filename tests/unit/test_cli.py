"""What a command says before it starts anything."""

from __future__ import annotations

import errno
import importlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from omnifleet.cli.main import app
from omnifleet.cli.run import check_ports
from omnifleet.cli.where import find_run
from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import run_to_exit

entry = importlib.import_module("omnifleet.cli.main")  # the package names its function alike


@pytest.mark.parametrize("field", ["media.listen", "gateway.http_listen", "trainer.listen"])
def test_a_taken_port_is_said_at_once(field: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OmnifleetError) as caught:
            check_ports(load_recipe("cpu-tiny", [f"{field}=127.0.0.1:{port}"]))
    assert (caught.value.reason, caught.value.knob) == (Reason.PORT_TAKEN, field)
    check_ports(load_recipe("cpu-tiny", [f"{field}=127.0.0.1:{port}"]))


def test_a_report_is_asked_for_by_name_or_by_the_option_that_the_other_commands_take() -> None:
    for arguments in (["no-such"], ["--run", "no-such"]):
        with pytest.raises(OmnifleetError, match="no run 'no-such'"):
            CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    with pytest.raises(OmnifleetError, match="not both 'a' and 'b'"):
        CliRunner().invoke(app, ["report", "a", "--run", "b"], catch_exceptions=False)


def test_a_run_that_is_not_there_is_answered_with_those_that_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("", "x"):
        with pytest.raises(
            OmnifleetError, match=r"there is none in \./runs; `omnifleet train RECIPE` starts one"
        ):
            find_run(name)
    for age, name in enumerate(["newest-control", "newest", *"abcd", "oldest"]):
        recipe = tmp_path / "runs" / name / "recipe.yaml"
        recipe.parent.mkdir(parents=True)
        recipe.touch()
        os.utime(recipe, (1e9 - age, 1e9 - age))
    with pytest.raises(
        OmnifleetError, match=r"in \./runs are newest, a, b, c, d and 2 more; `omnifleet train"
    ):
        find_run("x")
    assert find_run("") == tmp_path / "runs" / "newest" and find_run("a").name == "a"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_line_whoever_meets_it(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write() -> None:
        raise OSError(number, os.strerror(number), "runs/x/recipe.yaml")

    async def serve() -> None:
        write()

    monkeypatch.setattr(entry, "whole_app", lambda: write)
    for command in (entry.main, lambda: run_to_exit(serve())):
        with pytest.raises(SystemExit) as caught:
            command()
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "disk_full" in line and "runs/x/recipe.yaml" in line and "run.root" in line


def test_other_faults_of_a_file_are_not_called_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(entry, "whole_app", lambda: read)
    with pytest.raises(PermissionError):
        entry.main()


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every visible command under `command`, with its path."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        if not child.hidden:
            yield from commands(child, (*path, name))


def test_every_command_and_option_says_what_it_is_for() -> None:
    found = list(commands(typer.main.get_command(entry.whole_app())))
    assert len(found) > 30
    silent = [" ".join(path) for path, command in found if not command.help]
    silent += [
        " ".join((*path, parameter.opts[0]))
        for path, command in found
        for parameter in command.params
        if not getattr(parameter, "hidden", False) and not getattr(parameter, "help", None)
    ]
    assert silent == []
