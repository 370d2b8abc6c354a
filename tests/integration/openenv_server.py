"""An OpenEnv server for tests, run by the Python of scripts/setup_gyms.sh: guess a number of one digit; `python FILE PORT`."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    """message: what was said."""

    message: str


class Hint(Observation):
    """hint: whether the number is higher or lower."""

    hint: str


class Guessing(Environment):
    """1 for the number, less 0.25 for every wrong guess before."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._number = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._number = random.Random(seed).randrange(10)
        self._state = State(episode_id=episode_id, step_count=0)
        return Hint(hint="a number of one digit", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s=None, **kwargs):
        if "crash" in action.message:
            raise RuntimeError("a wall")
        self._state.step_count += 1
        guess = int(action.message) if action.message.isdecimal() else -1
        if guess == self._number:
            return Hint(hint="yes", done=True, reward=1.0)
        return Hint(hint="higher" if guess < self._number else "lower", done=False, reward=-0.25)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=2)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
