"""How an engine's process begins: forked only where no other thread could be missing from the fork."""

from __future__ import annotations

import threading

from omnifleet_rollout.engine.vllm_launch import start_method


def test_beside_other_threads_an_engine_is_spawned() -> None:
    """A fork that inherited a gloo group without its threads waited for ever when the cycle collector met the group."""
    assert start_method(1) == "fork"
    done = threading.Event()
    other = threading.Thread(target=done.wait, args=(10,))
    other.start()
    assert start_method(threading.active_count()) == "spawn"
    done.set()
    other.join()
