"""The trainer service: loop, GRPO maths, policy backends, batches, refit and checkpoints."""
