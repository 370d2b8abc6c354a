"""Blobs by digest in tiers: open maps, shared memory, disk. Knows bytes and budgets, not what the bytes mean."""
