"""GRPO as pure mathematics: rewards to advantages, logprobs to losses and metrics.

The room imports torch and nothing of ours but the objective's settings. It must not know models, batches of media,
services or files.
"""
