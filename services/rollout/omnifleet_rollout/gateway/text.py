"""Tokens -> text as they come: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_HALF = "\ufffd"


class TextStream:
    """Text of one reply. `push` and `flush` together give the text before the first stop string.

    Decodes a window from the last whole character on, so that the cost a token does not grow with the reply.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._window, self._read = 0, 0
        self._held = ""
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; the text that is certain now."""
        self._ids += token_ids
        before, after = self._around()
        if len(after) <= len(before) or after.endswith(_HALF):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return self._release(after[len(before) :], last=False)

    def flush(self) -> str:
        """The reply has ended; what was held back."""
        before, after = self._around()
        self._window = self._read = len(self._ids)
        return self._release(after[len(before) :], last=True)

    def _around(self) -> tuple[str, str]:
        """Text of the window without and with what is not read yet."""
        if self._read == len(self._ids):
            return "", ""
        read = self._ids[self._window : self._read]
        return self._decode(read) if read else "", self._decode(self._ids[self._window :])

    def _release(self, piece: str, *, last: bool) -> str:
        if self._stopped:
            return ""
        text = self._held + piece
        found = [at for at in (text.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if last else self._doubtful(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _doubtful(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for size in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stop):
                return size
        return 0
