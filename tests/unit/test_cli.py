"""What a command says before it starts anything."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from omnifleet.cli.main import app
from omnifleet.cli.run import check_ports
from omnifleet.cli.where import find_run
from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError, Reason


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
