"""Logs: one calm line for people, or one JSON object a line under --log-json."""

from __future__ import annotations

import json
import logging
import sys
import time


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


def set_up_logs(service: str, *, as_json: bool = False, level: str = "INFO") -> None:
    """Send the root logger to stderr. Other libraries speak only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json(service) if as_json else _Lines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("omnifleet").setLevel(level)
