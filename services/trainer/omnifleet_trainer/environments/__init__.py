"""How the loop uses environments: a row becomes a group of episodes, each a trajectory with a mask.

The room knows `omnifleet.environments` and the loop's prompter. It must not know what an environment does.
"""

from omnifleet_trainer.environments.open import open_player
from omnifleet_trainer.environments.player import Player

__all__ = ["Player", "open_player"]
