"""Policies: the weights, and the library that computes with them and updates them.

`port` is what the loop sees; each backend is one file. The room must not know prompts, rewards, versions or workers.
"""
