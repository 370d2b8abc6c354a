"""Corrections for the policy that sampled: weights on tokens (weights.py) and rules that keep samples out."""
