"""The tiny world: a small vision-language checkpoint, the pictures it looks at, and its warm start.

The room makes everything the CPU demo learns from, on the spot and repeatably. It must not know the other
services, the training loop or any recipe: what leaves it is a checkpoint folder and rows of pictures and questions.
"""
