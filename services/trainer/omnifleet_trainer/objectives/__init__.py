"""Objectives as pure mathematics. Read in this order:

rewards.py (scaling, shaping) → advantages.py (groups) → whitening.py → assign.py (all of it, for a step);
surrogates/ (one file per form of the policy gradient) × corrections/ (one file per correction for the policy that
sampled) + kl.py → reductions.py → loss.py (all of it, for a micro-batch); masks.py, messages.py: what trains;
logprobs.py, routing.py: from a model's outputs; metrics.py: what a step says about itself.

The room imports torch and nothing of ours but the objective's settings. It must not know models, batches of media,
services or files.
"""
