"""Starts, watches and stops the processes of a run: locally, or through Ray. Knows commands and records, not services."""
