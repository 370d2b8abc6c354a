"""A stage beside the engine: on a thread of its own, so that the engine goes on stepping meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Background(Generic[Result]):
    """One piece of work that has begun."""

    def __init__(self, work: Callable[[], Result], cancel: Callable[[], None]) -> None:
        self._work, self._cancel = work, cancel
        self._result: Result | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="refit stage", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """False once there is a result, or an error."""
        return self._thread.is_alive()

    def result(self) -> Result:
        """What the work made; raises what it raised. Only when it no longer runs."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def stop(self, patience_s: float = 5.0) -> bool:
        """Ask the work to end and wait for it; True if it did."""
        if self._thread.is_alive():
            self._cancel()
            self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except Exception as error:  # noqa: BLE001  handed to whoever asks for the result
            self._error = error
