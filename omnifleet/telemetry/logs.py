"""Logs: one calm line for people, or one JSON object a line under --log-json."""

from __future__ import annotations

import json
import logging
import sys
import time

_REMEMBERED = 1000
_FOR_THEIR_AUTHORS = ("FutureWarning", "DeprecationWarning", "PendingDeprecationWarning")


class _Lines(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__("%(asctime)s %(levelname).1s " + service + " %(message)s", datefmt="%H:%M:%S")


class _Json(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        body = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return json.dumps(body, ensure_ascii=False)


class _Calm(logging.Filter):
    """What people are spared: a library's warning for the second time, and what only its authors can mend.

    Errors pass, but for one that is none: gRPC's traceback where a caller hung up before its answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            _tell_hang_up(record)
            return True
        if record.name.startswith("omnifleet"):
            return True
        if record.name == "py.warnings":  # "path:line: Category: text", then the line of source
            record.msg, record.args = record.getMessage().partition("\n")[0], ()
            if any(f": {category}: " in record.msg for category in _FOR_THEIR_AUTHORS):
                return False
        return self._first_time((record.name, record.getMessage()))

    def _first_time(self, said: tuple[str, str]) -> bool:
        if said in self._seen:
            return False
        if len(self._seen) < _REMEMBERED:
            self._seen.add(said)
        return True


def _tell_hang_up(record: logging.LogRecord) -> None:
    """One line in place of gRPC's traceback; the call itself was ended by whoever made it."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and kind.__name__ == "ExecuteBatchError":
        method = record.getMessage().rpartition("[")[2].rstrip("]")
        record.msg, record.args = f"a caller of {method} hung up before its answer", ()
        record.levelno, record.levelname = logging.INFO, "INFO"
        record.exc_info = record.exc_text = None


def set_up_logs(service: str, *, as_json: bool = False, level: str = "INFO") -> None:
    """Send the root logger, and Python's warnings, to stderr. Other libraries speak only from WARNING on.

    Lines for people leave out what they cannot use (`_Calm`); JSON has everything.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if as_json else _Lines(service))
    if not as_json:
        handler.addFilter(_Calm())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("omnifleet").setLevel(level)
