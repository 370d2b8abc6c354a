"""The rollout service: gateway and fleet registry in front, workers around stock vLLM engines behind.

Knows the contract (`omnifleet`), nothing of the trainer, the media store or the scorers but their wire.
"""
