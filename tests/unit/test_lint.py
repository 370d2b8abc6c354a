"""Commit hooks and `make lint` ask the same of a change: the same tools, of the same versions, with the same options."""

import re
import shlex
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HOOKS: dict[str, dict[str, Any]] = {
    hook["id"]: hook
    for repo in yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    for hook in repo["hooks"]
}
OF_A_HOOK = {"--force-exclude"}
"""A hook names files, among them such as ruff would leave out of a folder."""
OF_MAKE = {".", "--check"}
"""Make looks at everything, and only looks; a hook formats, and that stops the commit."""
TOOLS = ("ruff", "mypy")


def made(target: str) -> list[list[str]]:
    """The commands of a target that start one of the tools, without running any."""
    command = ["make", "--dry-run", "--no-print-directory", target]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    parts = (shlex.split(part) for line in said.splitlines() for part in re.split(r"\|\||&&|;", line) if part)
    return [words for words in parts if words and Path(words[0]).name in TOOLS]


def hooked(hook: dict[str, Any]) -> list[list[str]]:
    """The commands of a hook; those of a target of make are that target's."""
    words = shlex.split(hook["entry"]) + hook.get("args", [])
    return made(words[1]) if words[0] == "make" else [words]


def bare(commands: list[list[str]], without: set[str]) -> list[list[str]]:
    return sorted([word for word in words if word not in without] for words in commands)


def test_hooks_are_what_make_lint_runs() -> None:
    hooks = [words for hook in HOOKS.values() for words in hooked(hook)]
    lint = made("lint")
    assert [Path(words[0]).name for words in lint] == ["ruff", "ruff", "mypy"]
    assert bare(hooks, OF_A_HOOK) == bare(lint, OF_MAKE)
    assert {words[0] for words in (*hooks, *lint, *made("format"))} == {f".venv/bin/{tool}" for tool in TOOLS}


def test_the_formatter_of_make_formats_as_the_hook_does() -> None:
    (formatting,) = (words for words in made("format") if words[1] == "format")
    assert bare([formatting], OF_MAKE) == bare(hooked(HOOKS["ruff-format"]), OF_A_HOOK)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_brings_no_tool_of_its_own(name: str) -> None:
    assert HOOKS[name]["language"] == "system" and "additional_dependencies" not in HOOKS[name]


@pytest.mark.parametrize("tool", TOOLS)
def test_the_environment_has_the_locked_tool(tool: str) -> None:
    lock = (ROOT / "requirements" / "cpu.lock").read_text()
    (pin,) = re.findall(rf"^{tool}==(\S+)", lock, re.MULTILINE)
    assert version(tool) == pin
