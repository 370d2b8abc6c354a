"""The receiving side of a refit: check a manifest, hold a shadow, gate, commit, or fence.

Must not know how the sender made the weights.
"""
