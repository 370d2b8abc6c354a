"""Gyms that others wrote, played as environments. One file a gym.

An adapter knows the other gym's protocol or package, which is installed by who uses it; it must not know the loop.
"""
