"""Engines behind one port: vLLM, and a fake for tests. Knows tokens, media, sampling and weights.

Must not know gRPC, the gateway, the registry, or who asked.
"""
