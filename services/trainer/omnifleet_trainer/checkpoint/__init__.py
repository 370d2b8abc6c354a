"""Checkpoints: complete or absent, never half.

The room knows folders, renames and fsync. It must not know what a policy writes into its folder.
"""
