"""The reward service: versioned scorers in isolated processes.

Knows replies and reference answers. Must not know engines, weights or the trainer's loop.
"""
