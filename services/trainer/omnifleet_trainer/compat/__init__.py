"""Seams that are not public: one file a library, with the versions it was checked against and a start-up check.

Each is a no-op where the real thing is present. The room must not know policies or recipes.
"""
