"""Batches: from scored samples to padded tensors in micro-batches.

The room knows token ids, masks, media segments and padding. It must not know the loop, the ledger, rewards' meaning or
any model class.
"""
