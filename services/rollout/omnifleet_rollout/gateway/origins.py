"""Which weights made the earlier replies of a session, for agents that hand back the block of their last reply only.

Held in memory: after a restart of the gateway an agent's episode lacks them, and is played again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from omnifleet.types import Identity

_SESSIONS = 8192
_REPLIES = 256  # of one session; longer ones lose their first


class Origins:
    """By (run, session), those unused for longest go first. Without a session nothing is kept."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str], list[dict[str, Any]]] = OrderedDict()

    def earlier(self, who: Identity) -> list[dict[str, Any]]:
        """What was kept of the session, in order."""
        return list(self._known.get((who.run, who.session), ()))

    def keep(self, who: Identity, prompt_tokens: int, tokens: int, versions: list[dict[str, Any]]) -> None:
        """Remember one reply. versions: its spans, as blocks tell them."""
        if not who.session:
            return
        key = (who.run, who.session)
        replies = self._known.setdefault(key, [])
        replies.append({"prompt_tokens": prompt_tokens, "tokens": tokens, "weight_versions": versions})
        del replies[:-_REPLIES]
        self._known.move_to_end(key)
        while len(self._known) > _SESSIONS:
            self._known.popitem(last=False)
