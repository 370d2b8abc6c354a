"""vLLM's own way to send weights, for comparison."""

from __future__ import annotations

import socket
import statistics
import threading
import time

from child import Child, Row, change


def stock(child: Child, times: int, tp: int) -> Row:
    """vLLM's own packed engine: paused with `keep`, from the first bucket to `finish_weight_update`."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Stock

    port = _free_port()
    init = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 1 + tp}
    child.order("stock_init", init=init)
    group = Stock.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 1 + tp})
    child.read()
    names = list(child.shapes)
    update = {
        "names": names,
        "dtype_names": ["bfloat16"] * len(names),
        "shapes": [list(child.shapes[name]) for name in names],
        "packed": True,
    }
    taken = []
    for step in range(times + 1):
        change(child, 1000 + step)
        time.sleep(0.3)
        child.gap()
        child.order("stock", update=update)
        child.read()
        began = time.monotonic()
        sender = threading.Thread(
            target=lambda: Stock.trainer_send_weights(
                iter(child.weights.items()), {"group": group, "packed": True}
            )
        )
        sender.start()
        child.read()
        seconds = time.monotonic() - began
        sender.join()
        child.read()
        time.sleep(0.2)
        gap = child.gap()
        size = sum(w.nbytes for w in child.weights.values()) / 1e9
        print(
            f"{child.size} stock {step}: {seconds * 1e3:.1f} ms, gap {gap * 1e3:.1f} ms, {size / seconds:.1f} GB/s",
            flush=True,
        )
        taken.append((seconds, gap))
    seconds, gap = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    return Row(child.size, "stock vLLM, packed", size, seconds, gap * 1e3)


def _free_port() -> int:
    """For the stock engine, which wants to be told one."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
