"""A MODEL of a refit to many receivers, from link speeds. Nothing here is measured beyond the numbers it is given.

All receivers take the same `size` bytes in buckets of `bucket` bytes. A ring or chain of broadcasts moves buckets through
all of N receivers in a pipeline: (size + (N - 1) * bucket) / link. A binary tree sends each bucket twice from each inner
node: 2 * size / link + log2(N) * bucket / link. Where the sender is sharded over S processes and each receiver rank needs 1/R
of the bytes, the links carry size / R each and the senders N * size / S in all, not through one another.
"""

from __future__ import annotations

from math import log2


def chain_s(size: float, bucket: float, link: float, receivers: int) -> float:
    """Seconds of a pipelined chain (NCCL's ring broadcast)."""
    return (size + (receivers - 1) * bucket) / link


def tree_s(size: float, bucket: float, link: float, receivers: int) -> float:
    """Seconds of a binary tree."""
    return (2 * size + log2(receivers) * bucket) / link


def sharded_s(size: float, link: float, receivers: int, senders: int, ranks: int) -> float:
    """Seconds if each of `ranks` ranks of a receiver fetches its share from `senders` sharded senders."""
    return max(size / ranks, receivers * size / senders) / link
