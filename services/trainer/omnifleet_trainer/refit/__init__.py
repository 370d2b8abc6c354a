"""Refit, sender side: from the policy's tensors to a verified version on every worker.

The room knows manifests, shared memory and the Refit and Fleet services. It must not know how weights are trained or
how an engine loads them.
"""
