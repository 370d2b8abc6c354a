"""A stage beside the engine: on a thread of its own, so that the engine goes on stepping meanwhile."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Result = TypeVar("Result")
_TURN_S = 0.00005
_lock, _inside, _usual = threading.Lock(), 0, 0.0


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """Inside, Python's threads take short turns; the usual ones come back when the last of all threads has left."""
    global _inside, _usual  # the interval is the process's
    with _lock:
        if not _inside:
            _usual = sys.getswitchinterval()
            sys.setswitchinterval(_TURN_S)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_usual)


class Background(Generic[Result]):
    """One piece of work that has begun."""

    def __init__(
        self,
        work: Callable[[], Result],
        cancel: Callable[[], None],
        done: Callable[[Result | Exception], None] = lambda result: None,
    ) -> None:
        """done: called on the thread, as the last thing, with the result or the error."""
        self._work, self._cancel, self._done = work, cancel, done
        self._over = threading.Event()
        self._result: Result | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="refit stage", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """False once there is a result, or an error."""
        return not self._over.is_set()

    def result(self) -> Result:
        """What the work made; raises what it raised. Only when it no longer runs."""
        self._over.wait()
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
        # The engine's thread is busy with Python between its kernels: at the usual 5 ms a turn, each of our calls waits so
        # long, and so does the answer.
        with short_turns():
            try:
                self._result = self._work()
            except Exception as error:  # noqa: BLE001  handed to whoever asks for the result
                self._error = error
            self._over.set()
            self._done(self._error or self._result)  # type: ignore[arg-type]
