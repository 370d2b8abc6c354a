"""The asynchronous loop: credits, rollouts, ready groups, steps. `controller` reads like the algorithm.

The room knows the ledger, the policy's port and the clients of the other services. It must not know a backend, how a
refit travels, or how gRPC serves the trainer.
"""
