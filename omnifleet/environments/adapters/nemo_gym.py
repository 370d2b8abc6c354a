"""NeMo Gym: its agents ask the gateway themselves, through its model server; an episode is one `/run` of an agent server.

Its model server must be `openai_model` with the gateway's address and an `env` token. What identifies an episode to the gateway
travels in `metadata.extra_body` of the row. The reply has NeMo Gym's training fields on the last item of every turn, and the
gateway's own block beside them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from omnifleet.address import token_digest
from omnifleet.environments.environment import Environment
from omnifleet.environments.episode import Turn
from omnifleet.environments.gateway import extras_of, media_of, refusal_in, span_of, version_of
from omnifleet.environments.outcome import Outcome, PromptError, Scored
from omnifleet.environments.session import Session
from omnifleet.environments.task import Task
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import FinishReason, LogprobsMode

_SHARED = ("temperature", "top_p")
_POLL_S = 0.5
_ENDS = {None: FinishReason.STOP, "max_output_tokens": FinishReason.LENGTH, "aborted": FinishReason.ABORT}


class NemoGym(Environment):
    """Rows of a NeMo Gym data file, played by a running agent server."""

    def __init__(self, rows: str, head: str, agent: str = "") -> None:
        """rows: JSONL as NeMo Gym's resources servers bring it. head: http address of its head server (`gym env start`).

        agent: who plays the rows that name no agent in `agent_ref`.
        """
        self._rows, self._head, self._agent = Path(rows), head.rstrip("/"), agent
        self._known: dict[str, str] = {}
        self._http: httpx.AsyncClient | None = None

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """One a row, in the file's order."""
        return [row_task(at, row) for at, row in enumerate(read_rows(self._rows)[: size or None])]

    async def run(self, session: Session) -> Outcome:
        """The reward is the resources server's."""
        row = dict(session.task.extra["row"])
        row["responses_create_params"] = params(row.get("responses_create_params") or {}, session.terms())
        said = await self._post(row)
        turns, reward = turns_of(said)
        session.hear(*turns)
        return Scored(reward)

    async def _post(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if (
            self._http is None
        ):  # made here, since a process that plays has one event loop; the episode has the deadline
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
            self._http = httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)
        try:
            address = await self._address(self._http, (row.get("agent_ref") or {}).get("name") or self._agent)
            response = await self._http.post(f"{address}/run", json=row)
        except httpx.TransportError as error:
            kind = type(error).__name__
            raise retryable(Reason.UNAVAILABLE, f"NeMo Gym does not answer: {kind}: {error}") from error
        if response.is_success:
            found: dict[str, Any] = response.json()
            return found
        refusal = refusal_in(response.text)
        if refusal is not None:
            raise refusal
        raise RuntimeError(f"NeMo Gym: HTTP {response.status_code}: {response.text[:500]}")

    async def _address(self, http: httpx.AsyncClient, agent: str) -> str:
        if agent not in self._known:
            reply = (await http.get(f"{self._head}/global_config_dict_yaml")).raise_for_status()
            self._known |= agents_of(yaml.safe_load(reply.json()))
        if agent not in self._known:
            raise ValueError(f"NeMo Gym runs no agent {agent!r}, only {', '.join(self._known)}")
        return self._known[agent]


class Collected(Environment):
    """Rollouts that NeMo Gym's own tool (`gym eval run --no-serve`) collected from the gateway into a file.

    Episodes wait for theirs, so a run may start before the tool. Each rollout of a task is one sample of its group.
    """

    def __init__(self, rollouts: str, rows: str) -> None:
        """rollouts: the tool's output_jsonl_fpath. rows: its input_jsonl_fpath."""
        self._rollouts, self._rows = Path(rollouts), Path(rows)
        self._found: dict[tuple[int, int], dict[str, Any]] = {}
        self._read = 0

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """One a row of the tool's input, in its order."""
        return [row_task(at, row) for at, row in enumerate(read_rows(self._rows)[: size or None])]

    async def run(self, session: Session) -> Outcome:
        """The rollout of this task with the number of this sample."""
        terms = session.terms()
        key = (int(session.task.extra["at"]), int(terms["identity"]["sample"]))
        while key not in self._found:
            self._refresh()
            if key not in self._found:
                await asyncio.sleep(_POLL_S)
        turns, reward = turns_of(self._found[key])
        oldest = min(
            (span.version for turn in turns for span in turn.spans), key=lambda version: version.number
        )
        least = version_of((terms.get("weight_version") or {}).get("min") or str(oldest))
        if not oldest.same_lineage(least) or oldest.number < least.number:
            return PromptError(
                f"rollout {key} was collected from {oldest}, the run trains on {least} or newer: collect again"
            )
        session.hear(*turns)
        return Scored(reward)

    def _refresh(self) -> None:
        """Read the lines that were added since; an unfinished one is left for the next time."""
        if not self._rollouts.exists():
            return
        with self._rollouts.open("rb") as file:
            file.seek(self._read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                said = json.loads(line)
                self._found[said["_ng_task_index"], said["_ng_rollout_index"]] = said


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Raises ValueError that names the line."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line) if line.strip() else None
            if not isinstance(row, dict) or "responses_create_params" not in row:
                raise ValueError(f"{path}, line {number}: not a row with responses_create_params")
            rows.append(row)
    return rows


def row_task(at: int, row: Mapping[str, Any]) -> Task:
    """A row as a task; its text is the last thing that the user says."""
    said = row["responses_create_params"].get("input", "")
    text = (
        said if isinstance(said, str) else next((_text(item) for item in reversed(said) if _text(item)), "")
    )
    return Task(str(at), text, str(row.get("expected_answer", "")), extra={"row": dict(row), "at": at})


def params(row: Mapping[str, Any], terms: Mapping[str, Any]) -> dict[str, Any]:
    """The row's responses_create_params under an episode's terms: a row may shorten replies, not bend their distribution."""
    limit = min(terms["max_tokens"], row.get("max_output_tokens") or terms["max_tokens"])
    metadata = dict(row.get("metadata") or {})
    extra = json.loads(metadata.get("extra_body") or "{}")
    extra |= {name: value for name, value in terms.items() if name not in ("max_tokens", *_SHARED)}
    metadata["extra_body"] = json.dumps(extra)
    shared = {name: terms[name] for name in _SHARED}
    return {**row, **shared, "max_output_tokens": limit, "metadata": metadata}


def turns_of(said: Mapping[str, Any]) -> tuple[list[Turn], float]:
    """What an agent's `/run` (and a line of the tool's rollouts) tells. Raises CORRUPT where it lacks what training needs."""
    try:
        response, reward = said["response"], float(said["reward"])
        origin = response["omnifleet"]
        items = [item for item in response["output"] if item.get("generation_token_ids")]
        known = [*_versions(items[:-1], origin.get("earlier", ())), origin["weight_versions"]]
        cut = (response.get("incomplete_details") or {}).get("reason")
        turns = [
            Turn(
                prompt_token_ids=list(item["prompt_token_ids"]),
                prompt_hash=token_digest(item["prompt_token_ids"]),
                media=(),
                token_ids=list(item["generation_token_ids"]),
                logprobs=[float(value) for value in item["generation_log_probs"]],
                spans=[span_of(span) for span in spans],
                finish_reason=FinishReason.STOP,
                logprobs_mode=LogprobsMode(origin["logprobs_mode"]),
                text=_text(item),
                **extras_of(item),
            )
            for item, spans in zip(items, known, strict=True)
        ]
        # The engine's digest is of the last prompt, which must begin with all that was before.
        turns[-1] = replace(
            turns[-1],
            prompt_hash=origin["prompt_hash"],
            media=media_of(origin),
            finish_reason=_ENDS[cut],
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise OmnifleetError(
            Reason.CORRUPT,
            f"NeMo Gym's rollout lacks what training needs: {type(error).__name__}: {error}",
            knob="openai_model.extra_body.return_provenance",
        ) from error
    return turns, reward


def _versions(
    items: Sequence[Mapping[str, Any]], earlier: Sequence[Mapping[str, Any]]
) -> list[list[dict[str, Any]]]:
    """Of each item but the last, in order; the session may have had other replies between. Raises ValueError."""
    found, replies = [], iter(earlier)
    for item in items:
        size = len(item["prompt_token_ids"]), len(item["generation_token_ids"])
        told = next((r for r in replies if (r["prompt_tokens"], r["tokens"]) == size), None)
        if told is None:
            raise ValueError("no weight version is known of an earlier turn: was it of this session?")
        found.append(told["weight_versions"])
    return found


def agents_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Addresses of the agent servers by name, of NeMo Gym's global config."""
    found = {}
    for name, body in config.items():
        servers = body.get("responses_api_agents") if isinstance(body, dict) else None
        for server in (servers or {}).values():
            found[name] = f"http://{server['host']}:{server['port']}"
    return found


def _text(item: Mapping[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())
