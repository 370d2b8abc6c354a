"""A verifiers taskset and its play, by the Python of `scripts/setup_gyms.sh verifiers`. Prints the outcomes as JSON."""

import json
import sys

import verifiers.v1 as vf

from omnifleet.environments import rehearse
from omnifleet.environments.adapters.verifiers import Verifiers


class Sum(vf.Task[vf.TaskData]):
    """1 for the sum, and a little for being short."""

    @vf.reward
    async def right(self, trace) -> float:
        return float(trace.last_reply == self.data.name)

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 3)


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    """n + 2."""

    def load(self):
        for n in range(3):
            yield Sum(vf.TaskData(prompt=f"{n}+2=?", name=str(n + 2)), self.config.task)


__all__ = ["Sums"]

if __name__ == "__main__":
    gym = Verifiers("verifiers_sums")
    tasks = gym.tasks("train", 2, 0)
    for reply in sys.argv[1:]:
        outcome, messages = rehearse(gym, tasks[1], [reply])
        print(json.dumps([outcome.reward, dict(outcome.components), messages]))
