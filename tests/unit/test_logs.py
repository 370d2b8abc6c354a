"""Logs: people are spared what they cannot use, machines get all of it; errors reach both."""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest

from omnifleet.telemetry.logs import set_up_logs


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


class ExecuteBatchError(Exception):
    """Named as gRPC's."""


def talk() -> None:
    library, own = logging.getLogger("somebody.else"), logging.getLogger("omnifleet.test")
    for _ in range(3):
        library.warning("the %s is old", "kernel")
        own.warning("no place left")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("this array is not writable", UserWarning, stacklevel=1)
            warnings.warn("say it otherwise in the next version", FutureWarning, stacklevel=1)
    try:
        raise ValueError("it broke")
    except ValueError:
        library.exception("no good")
    try:
        raise ExecuteBatchError('Failed "execute_batch"')
    except ExecuteBatchError:
        text = "ExecuteBatchError raised in core by servicer method [/omnifleet.v1alpha.Rollout/Generate]"
        logging.getLogger("grpc._cython.cygrpc").error(text, exc_info=sys.exc_info())


def test_people_read_a_library_s_warning_once_and_every_error(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("worker-0")
    talk()
    said = capsys.readouterr().err
    assert said.count("the kernel is old") == 1
    assert said.count("no place left") == 3, "what we say ourselves is said as often as it happens"
    assert said.count("UserWarning: this array is not writable") == 1
    assert "stacklevel" not in said and "next version" not in said
    assert "E worker-0 no good" in said and "ValueError: it broke" in said
    assert "I worker-0 a caller of /omnifleet.v1alpha.Rollout/Generate hung up before its answer" in said
    assert "execute_batch" not in said


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logs("worker-0", as_json=True)
    talk()
    rows = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [row["message"] for row in rows]
    assert sum("the kernel is old" in text for text in told) == 3
    assert sum("next version" in text for text in told) == 3
    errors = [row for row in rows if row["level"] == "error"]
    assert ["ValueError" in errors[0]["exception"], "execute_batch" in errors[1]["exception"]] == [True, True]
