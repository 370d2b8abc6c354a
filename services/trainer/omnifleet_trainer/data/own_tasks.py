"""Tasks that an environment brings itself, as prompt rows."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet.config.recipe import SplitConfig
from omnifleet.environments.environment import load_environment
from omnifleet.environments.task import Task
from omnifleet.errors import Reason, invalid
from omnifleet_trainer.data.lazy import LazyRows
from omnifleet_trainer.data.rows import PromptRow


class TaskRows(LazyRows):
    """Tasks turned into rows one at a time when asked for. Ids are the tasks' own, below `prefix`."""

    def __init__(self, tasks: Sequence[Task], *, prefix: str, task: str) -> None:
        self._tasks, self._prefix, self._task = tasks, prefix, task

    def __len__(self) -> int:
        return len(self._tasks)

    def _id(self, at: int) -> str:
        return f"{self._prefix}/{self._tasks[at].id}"

    def _row(self, at: int) -> PromptRow:
        task = self._tasks[at]
        return PromptRow(
            prompt_id=self._id(at),
            text=task.text,
            images=task.pictures,
            answer=task.answer,
            task=self._task,
            extra=dict(task.extra),
        )


def load_own_tasks(split: SplitConfig, size: int | None, seed: int) -> Sequence[PromptRow]:
    """Rows of the set's environment. Raises INVALID_CONFIG for one that cannot be loaded or has no tasks."""
    environment = load_environment(split.environment, split.params)
    tasks = environment.tasks(split.split, size, seed)
    if not tasks:
        raise invalid(
            f"{split.environment} has no tasks of split {split.split!r}",
            knob="data.train.split",
            reason=Reason.INVALID_CONFIG,
        )
    rows = TaskRows(tasks, prefix=f"{split.task_name}/{split.split}", task=split.task_name)
    return rows if size is None else rows[:size]
