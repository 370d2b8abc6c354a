"""The docs against what they speak of: commands parse, make targets and recipes exist, links and files are there."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from omnifleet.cli.main import whole_app
from omnifleet.config import load_recipe

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "bench",
    "deploy",
    "docs",
    "examples",
    "omnifleet",
    "proto",
    "recipes",
    "requirements",
    "scripts",
    "services",
    "tests",
)
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "deploy/**/*.md", "recipes/**/*.md", "bench/**/*.md")
    for page in ROOT.glob(pattern)
)
PLACEHOLDERS = {"N": "1", "RECIPE": "cpu-tiny", "SECTION.FIELD=VALUE": "trainer.steps=20", "SERVICE": "media"}
"""Words of a synopsis that stand for something that is checked when it is parsed."""

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# ---------------------------------------------------------------- reading pages


def block_lines(text: str) -> Iterator[str]:
    """Lines of fenced and of indented code blocks; a line that ends in a backslash or goes on in brackets is joined."""
    fenced, whole = False, ""
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            fenced, line = not fenced, ""
        code = line if fenced else line.removeprefix("    ") if line.startswith("    ") else ""
        if code.lstrip().startswith("[") and whole.startswith("omnifleet"):
            whole += " " + code.strip()
            continue
        if whole:
            yield whole
        whole = code.strip()


def spans(text: str) -> list[str]:
    """Inline code of a page, without its blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def words(line: str) -> list[str]:
    """The arguments of a documented command: comment, redirection and the marks of a synopsis left out."""
    plain = re.sub(r"\s(>|\|)\s+[\w.]+$", "", re.sub(r"\s#\s.*", "", line))
    plain = re.sub(r"\.\.\.(?=\s|\]|$)|…", "", plain)
    synopsis = plain if '"' in plain else re.sub(r"[\[\]]|\s\|\s", " ", plain)
    return [PLACEHOLDERS.get(word, word) for word in shlex.split(synopsis)]


# ---------------------------------------------------------------- the command line


ROOT_COMMAND: Any = typer.main.get_command(whole_app())
UsageError: Any = typer.BadParameter.__base__


def parsed(args: list[str]) -> dict[str, Any]:
    """Parameters of the command that these words would run. Raises the usage error that a user would see."""
    command, name, parent = ROOT_COMMAND, "omnifleet", None
    while True:
        context = command.make_context(name, list(args), parent=parent)
        if not hasattr(command, "commands"):
            return dict(context.params)
        rest = [*context._protected_args, *context.args]
        name, command, args = command.resolve_command(context, rest)
        parent = context


def check_words(args: list[str]) -> None:
    """The command exists, and so does each option: for commands named in a sentence, where arguments are left out."""
    command, rest = ROOT_COMMAND, list(args)
    while rest and hasattr(command, "commands"):
        name = rest.pop(0)
        if name.startswith("-"):
            break
        assert name in command.commands, f"no command {name!r}"
        command = command.commands[name]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "--version"}
    unknown = {word for word in rest if word.startswith("-")} - options
    assert not unknown, f"no option {unknown}"


@each_page
def test_commands_in_blocks_parse(page: Path) -> None:
    for line in block_lines(page.read_text()):
        if not line.startswith("omnifleet "):
            continue
        try:
            chosen = parsed(words(line)[1:])
        except UsageError as error:
            pytest.fail(f"`{line}`: {error.format_message()}")
        if "recipe" in chosen and "overrides" in chosen:
            plan = words(line)[1:3] in (["config", "show"], ["config", "placement"])
            load_recipe(chosen["recipe"], list(chosen["overrides"] or []), plan=plan)


@each_page
def test_commands_in_sentences_exist(page: Path) -> None:
    for span in spans(page.read_text()):
        if span.startswith("omnifleet "):
            for one in alternatives(words(span)[1:]):
                check_words(one)


def alternatives(args: list[str]) -> Iterator[list[str]]:
    """`fleet list|scale` names two commands."""
    for at, word in enumerate(args):
        if "|" in word:
            for choice in word.split("|"):
                yield from alternatives([*args[:at], choice, *args[at + 1 :]])
            return
    yield args


@each_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = page.read_text()
    for line in [*block_lines(text), *spans(text)]:
        if line == "make" or line.startswith("make "):
            named = [word for word in words(line)[1:] if "=" not in word]
            assert set(named) <= targets, line


# ---------------------------------------------------------------- links and files


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    broken = [
        link
        for link in links
        if "://" not in link
        and not link.startswith("#")
        and not (page.parent / link.split("#")[0]).resolve().exists()
    ]
    assert not broken


@each_page
def test_files_that_are_named_exist(page: Path) -> None:
    text = re.sub(r"omnifleet/[\w-]+/v1\b", "", page.read_text())  # domain lines of addresses, no files
    named = re.findall(rf"(?<![\w/.:-])(?:{'|'.join(ROOMS)})/[\w./*-]*[\w/*]", text)
    missing = {path for path in named if "NAME" not in path and not list(ROOT.glob(path.rstrip("/")))}
    assert not missing
    kinds = r"[\w.-]+\.(?:md|yml|proto|py|toml|txt|lock|in|sh|sbatch|Dockerfile)"
    bare = {span for span in spans(text) if re.fullmatch(kinds, span)}
    assert bare <= all_names()


@cache
def all_names() -> set[str]:
    """Names of the repository's files."""
    inside = (path.name for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file())
    return {*inside, *(path.name for path in ROOT.iterdir())}


# ---------------------------------------------------------------- the reading itself


def test_a_wrong_option_argument_or_command_is_found() -> None:
    for wrong in (
        "status --colour",
        "fleet scale many",
        "fleet scale",
        "config check cpu-tiny --set trainer.steps=1",
        "fly",
    ):
        with pytest.raises(UsageError):
            parsed(wrong.split())
    with pytest.raises(AssertionError):
        check_words(["fleet", "fly"])
    with pytest.raises(AssertionError):
        check_words(["status", "--colour"])


def test_blocks_and_synopses_are_read() -> None:
    page = "\n".join(
        [
            "```",
            "omnifleet status   # a comment",
            "```",
            "",
            "    omnifleet trainer serve --run-dir RUN [--resume | --fresh]",
            "                            [--set SECTION.FIELD=VALUE ...]",
            "    omnifleet media gc --target-bytes N > out.txt",
            "",
            "omnifleet is a sentence here",
        ]
    )
    assert [" ".join(words(line)) for line in block_lines(page)] == [
        "omnifleet status",
        "omnifleet trainer serve --run-dir RUN --resume --fresh --set trainer.steps=20",
        "omnifleet media gc --target-bytes 1",
    ]
    assert list(alternatives(["fleet", "list|scale"])) == [["fleet", "list"], ["fleet", "scale"]]
