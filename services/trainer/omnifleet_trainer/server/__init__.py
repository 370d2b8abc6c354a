"""The trainer as a process: builds the loop from a run folder, serves gRPC and HTTP beside it, writes the summary.

The room knows everything of the trainer and decides nothing about training.
"""
