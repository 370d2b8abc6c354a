"""Vision-language families: one small adapter each, between a model's own seams and `policy/vision.py`.

An adapter knows how one family embeds tokens, runs its tower, counts positions and takes features. It must not know
batches, losses or which media repeat.
"""
