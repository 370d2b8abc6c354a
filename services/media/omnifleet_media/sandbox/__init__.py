"""Processes that do risky or heavy work under limits, over a framed socket. Knows nothing of media."""
