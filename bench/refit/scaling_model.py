"""A MODEL of a refit to many receivers, from link speeds: `python bench/refit/scaling_model.py`. Nothing here is measured.

Symbols: S bytes of weights; B bytes of a bucket; N receivers of G ranks each, so R = N * G ranks; L bytes a second of one
rank's link to others, in each direction at once; a seconds before a bucket's first byte goes on (a hop). Buckets are passed
on whole (store and forward), so a path of h hops is a pipeline of h stages.

chain    sender -> rank 1 -> ... -> rank R, each rank sends what it got (NCCL's ring broadcast without its finer slices):
             t = S / L + (R - 1) * (B / L + a) + a
         Every link carries S once. The last rank waits for R - 1 buckets: the term that grows with the fleet.
tree     a binary tree, the sender its root: who has two below sends every bucket twice over the same link (F = 2; 1 if R = 1):
             t = F * S / L + (floor(log2(R + 1)) - 1) * (F * B / L + a) + a
nodes    a chain over the N hosts (link L), and within a host from its first rank to the others over a link of I:
             t = S / L + (N - 1) * (B / L + a) + B / I * ceil(log2(G)) + a
shards   shard-aware: rank g of a receiver needs S * f / G bytes and no others (f >= 1: what is replicated, as norms and an
         embedding that is not split). G chains side by side, one for each g, over N ranks each, every one with a link of its
         own and fed by one of P sender processes, each with a link L:
             t = max(S * f / G, S * f / P) / L + (N - 1) * (B / L + a) + a
Not in it: contention between chains in switches, sender's own packing, verification (it overlaps if it is faster than the
link, as measured for the checksum), the engine's gate, stragglers.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from math import ceil, floor, log2


@dataclass(frozen=True, slots=True)
class Fleet:
    """size, bucket: bytes; link, inner: bytes/s between hosts and within one; hop: s; replicated: f of the formulas."""

    size: float
    bucket: float
    link: float
    inner: float
    hop: float
    ranks: int
    senders: int
    replicated: float = 1.0

    def __post_init__(self) -> None:
        if min(self.size, self.bucket, self.link, self.inner, self.ranks, self.senders) <= 0 or self.hop < 0:
            raise ValueError("sizes, speeds and counts are positive")
        if not 1.0 <= self.replicated <= self.ranks:
            raise ValueError("replicated lies between 1 and the ranks of a receiver")

    def chain_s(self, receivers: int) -> float:
        """Seconds of one pipelined chain through all ranks."""
        stages = receivers * self.ranks - 1
        return self.size / self.link + stages * (self.bucket / self.link + self.hop) + self.hop

    def tree_s(self, receivers: int) -> float:
        """Seconds of a binary tree of all ranks."""
        ranks = receivers * self.ranks
        fan, depth = min(2, ranks), floor(log2(ranks + 1))
        return (
            fan * self.size / self.link + (depth - 1) * (fan * self.bucket / self.link + self.hop) + self.hop
        )

    def nodes_s(self, receivers: int) -> float:
        """Seconds of a chain of hosts that each pass on within themselves."""
        inside = self.bucket / self.inner * ceil(log2(self.ranks)) if self.ranks > 1 else 0.0
        stages = (receivers - 1) * (self.bucket / self.link + self.hop)
        return self.size / self.link + stages + inside + self.hop

    def shards_s(self, receivers: int) -> float:
        """Seconds of chains side by side, one for each rank of a receiver, with only what that rank needs."""
        share = self.size * self.replicated
        sent = max(share / self.ranks, share / self.senders) / self.link
        return sent + (receivers - 1) * (self.bucket / self.link + self.hop) + self.hop


def table(fleet: Fleet, receivers: tuple[int, ...]) -> str:
    """Seconds by number of receivers, as Markdown."""
    rows = ["| receivers | chain, s | tree, s | hosts, s | shards, s |", "|---|---|---|---|---|"]
    for n in receivers:
        times = (fleet.chain_s(n), fleet.tree_s(n), fleet.nodes_s(n), fleet.shards_s(n))
        rows.append(f"| {n} | " + " | ".join(f"{t:.2f}" for t in times) + " |")
    return "\n".join(rows)


def main() -> None:
    """Print the table for the speeds that are given."""
    parser = argparse.ArgumentParser(description="A model of refits to many receivers; not a measurement.")
    parser.add_argument("--gigabytes", type=float, default=16.6)
    parser.add_argument("--bucket-mib", type=float, default=64.0)
    parser.add_argument("--link", type=float, default=50.0, help="GB/s of one rank's link between hosts")
    parser.add_argument("--inner", type=float, default=358.0, help="GB/s of one rank's link within a host")
    parser.add_argument("--hop-us", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of one receiver")
    parser.add_argument(
        "--senders", type=int, default=8, help="sender processes, each with a link of its own"
    )
    parser.add_argument(
        "--replicated", type=float, default=1.0, help="bytes that all ranks need, as a factor"
    )
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 8, 64, 512])
    o = parser.parse_args()
    fleet = Fleet(
        o.gigabytes * 1e9,
        o.bucket_mib * (1 << 20),
        o.link * 1e9,
        o.inner * 1e9,
        o.hop_us * 1e-6,
        o.ranks,
        o.senders,
        o.replicated,
    )
    print(
        f"A model, not a measurement: {o.gigabytes:g} GB, buckets of {o.bucket_mib:g} MiB, links of {o.link:g} GB/s "
        f"({o.inner:g} within a host), {o.ranks} ranks a receiver, {o.senders} senders"
    )
    print(table(fleet, tuple(o.receivers)))


if __name__ == "__main__":
    main()
