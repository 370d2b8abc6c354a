"""Plain question-and-clip tables to rows of NeMo Gym's video GRPO, by the rules of NeMo RL's prepare_video_dataset."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.data.gym_rows import LETTERS, MATH_AGENT, MCQA_AGENT, check_row, local_path

_AGENTS = {
    "mcqa": MCQA_AGENT,
    "multiple-choice": MCQA_AGENT,
    "multiple_choice": MCQA_AGENT,
    "mathruler": MATH_AGENT,
    "math-with-judge": MATH_AGENT,
    "math_with_judge": MATH_AGENT,
}
_MARKS = re.compile(r"<image>|<video>|<so_embedding>")
_OPTION = re.compile(r"(?<![A-Za-z0-9])(?:\(([A-Ja-j])\)\s|([A-Ja-j])[.):：](?:\s|(?<=：)))")
_OLD_ENDING = "Final answer: .."
_BOX = r"Final answer: \boxed{...}"
_ASK = r"Put your final answer within \boxed{...}."


@dataclass(frozen=True, slots=True)
class Rules:
    """How rows are read. max_rows: 0 = all."""

    prompt_key: str = "prompt"
    video_key: str = "video"
    audio_key: str = "audio"
    agent_name: str = ""
    system_prompt: str = ""
    skip_without_video: bool = False
    skip_missing: bool = False
    max_rows: int = 0
    deduplicate: bool = True
    several: bool = False


@dataclass(slots=True)
class Counts:
    """What became of the rows."""

    written: int = 0
    without_video: int = 0
    missing: int = 0
    duplicates: int = 0


def numbered(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and objects; blank lines are no rows. Raises INVALID_REQUEST "line N: …"."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise invalid(f"line {number}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise invalid(f"line {number}: not an object")
        yield number, row


def convert(lines: Iterable[str], rules: Rules, counts: Counts) -> Iterator[dict[str, Any]]:
    """Rows of the gym's schema, each checked; `counts` is kept up to date. Raises OmnifleetError "line N: …"."""
    seen: set[str] = set()
    for number, row in numbered(lines):
        if rules.max_rows and counts.written >= rules.max_rows:
            return
        try:
            made = _converted(row, rules, counts)
            if made is None:
                continue
            key = json.dumps(made["responses_create_params"]["input"], sort_keys=True)
            if rules.deduplicate and key in seen:
                counts.duplicates += 1
                continue
            seen.add(key)
            check_row(made, several=rules.several)
        except OmnifleetError as error:
            raise OmnifleetError(error.reason, f"line {number}: {error.message}", knob=error.knob) from error
        counts.written += 1
        yield made


def _converted(row: Mapping[str, Any], rules: Rules, counts: Counts) -> dict[str, Any] | None:
    videos = _sources(row, rules.video_key)
    if not videos and rules.skip_without_video:
        counts.without_video += 1
        return None
    if not videos or (len(videos) > 1 and not rules.several):
        raise invalid(f"{rules.video_key} names {len(videos)} clips, it must be exactly one")
    try:
        clips = [str(local_path(video)) for video in videos]
    except OmnifleetError as error:
        if error.reason is not Reason.NOT_FOUND or not rules.skip_missing:
            raise
        counts.missing += 1
        return None
    text = cleaned(_prompt(row, rules.prompt_key))
    agent = _agent(row, rules.agent_name)
    sounds = [str(local_path(sound)) for sound in _sources(row, rules.audio_key)]
    content = [
        *({"type": "input_video", "video_url": clip} for clip in clips),
        *({"type": "input_audio", "audio_url": sound} for sound in sounds),
        {"type": "input_text", "text": text},
    ]
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    if rules.system_prompt:
        messages.insert(0, {"role": "system", "content": rules.system_prompt})
    kept = {
        name: value for name, value in row.items() if name not in (rules.video_key, rules.audio_key, "videos")
    }
    made = {
        **kept,
        "responses_create_params": {
            "input": messages,
            "metadata": {"chat_template_kwargs": {"enable_thinking": True}},
        },
        "agent_ref": agent,
        "expected_answer": _answer(row),
    }
    if agent["name"] == MCQA_AGENT:
        made["options"] = options_of(text)
        made["grading_mode"] = "strict_single_letter_boxed"
    return made


def _sources(row: Mapping[str, Any], key: str) -> list[str]:
    value = row.get(key)
    if value is None and key == "video":
        value = row.get("videos")
    sources = value if isinstance(value, list) else [] if value is None or value == "" else [value]
    if not all(isinstance(source, str) and source for source in sources):
        raise invalid(f"{key} is a path or a list of paths")
    return sources


def _prompt(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key, row.get("question"))
    if not isinstance(value, str):
        raise invalid(f"{key} is no text, nor is question")
    return value


def cleaned(text: str) -> str:
    r"""The prompt without media marks, and with a request for a \boxed answer if it has none."""
    text = _MARKS.sub("", text.strip()).strip()
    if r"\boxed{" in text:
        return text
    return text.replace(_OLD_ENDING, _BOX) if _OLD_ENDING in text else f"{text}\n{_ASK}"


def options_of(text: str) -> list[dict[str, str]]:
    """Options written "(A) ", "A. ", "A) ", "A: " or with a full-width colon; the first of a letter wins.

    Raises INVALID_REQUEST if there is none.
    """
    marks = list(_OPTION.finditer(text))
    found: dict[str, str] = {}
    for at, mark in enumerate(marks):
        end = marks[at + 1].start() if at + 1 < len(marks) else len(text)
        said = text[mark.end() : end].partition(f"\n{_ASK}")[0].partition(_BOX)[0]
        if said := " ".join(said.split()):
            found.setdefault((mark[1] or mark[2]).upper(), said)
    if not found:
        raise invalid(f"no options {LETTERS[0]} to {LETTERS[-1]} in the prompt")
    return [{letter: said} for letter, said in found.items()]


def _agent(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    given = row.get("agent_ref")
    if isinstance(given, dict) and given.get("name"):
        return given
    if not name:
        verifier = row.get("verifier", "multiple-choice")
        if verifier not in _AGENTS:
            raise invalid(f"verifier {verifier!r} is unknown: allowed are {', '.join(_AGENTS)}")
        name = _AGENTS[verifier]
    return {"type": "responses_api_agents", "name": name}


def _answer(row: Mapping[str, Any]) -> str:
    value = row.get("answer", row.get("expected_answer"))
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise invalid("answer is no text, nor is expected_answer")
    text = str(value).strip()
    return text.upper() if len(text) == 1 and text.isalpha() else text


def write_rows(rows: Iterable[dict[str, Any]], out: Path) -> None:
    """JSON lines, in place of the old file only once all are written."""
    scratch = out.with_name(f".{out.name}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as lines:
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        scratch.replace(out)
    finally:
        scratch.unlink(missing_ok=True)
