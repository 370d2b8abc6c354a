"""verifiers (0.4): tasksets played by one of its harnesses, whose program asks the address of the episode for replies.

Needs the `verifiers` package, and `uv` for the harness's program, where environments run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import verifiers.v1 as vf  # type: ignore[import-not-found]
from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found]
    load_taskset,
    taskset_config_type,
)

from omnifleet.environments.endpoint import Endpoint
from omnifleet.environments.environment import Environment
from omnifleet.environments.outcome import Outcome, Scored
from omnifleet.environments.session import Session
from omnifleet.environments.task import Task


class Verifiers(Environment):
    """The reward is the trace's: the weighted sum of the task's rewards, which are kept apart as components."""

    def __init__(
        self,
        taskset: str,
        config: Mapping[str, Any] | None = None,
        harness: str = "null",
        max_turns: int | None = None,
        limit: int = 100_000,
    ) -> None:
        """taskset: its id, as verifiers finds it. config: the taskset's own. harness: `null` asks once and follows tool calls.

        limit: most tasks that are read of the set. Raises ValueError for what verifiers refuses.
        """
        body = {**(config or {}), "id": taskset}
        rows = load_taskset(taskset_config_type(taskset).model_validate(body))
        self._tasks = list(rows.take(limit))
        self._harness, self._max_turns = harness, max_turns
        self._endpoint = Endpoint()

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """The taskset's, in its order."""
        return [
            Task(str(at), _text(task.data.prompt), extra={"at": at})
            for at, task in enumerate(self._tasks[: size or None])
        ]

    async def run(self, session: Session) -> Outcome:
        """One run of the harness. Its errors are crashes, unless the gateway refused."""
        async with self._endpoint.seat(session) as base_url:
            config = vf.AgentConfig(
                model="policy",
                client=vf.EvalClientConfig(base_url=base_url, api_key_var="OMNIFLEET_NO_KEY"),
                harness={"id": self._harness},
                runtime=vf.SubprocessConfig(),
                max_turns=self._max_turns,
            )
            async with vf.Agent(config) as agent:
                trace = await agent.run(self._tasks[session.task.extra["at"]])
            if not trace.ok:
                raise RuntimeError("; ".join(f"{error.type}: {error.message}" for error in trace.errors))
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        return Scored(float(trace.reward), parts)


def _text(prompt: Any) -> str:
    """The last thing that is said before the model."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    content = prompt[-1].content
    return content if isinstance(content, str) else ""
